import pytest

from slime.utils.errors import UserError
from slime_plugins.rollout_buffer.generators import find_generators, load_generator
from slime_plugins.rollout_buffer.store import Group
from tests.support.processes.buffer_service import group_of

PLAIN = "TASK_TYPE = 'plain'\ndef run_rollout(data): pass\n"


def made(tmp_path, more="", name="own_generator.py"):
    file = tmp_path / name
    file.write_text(PLAIN + more)
    return load_generator(str(file))


def test_generators_are_found_by_their_task(tmp_path):
    (tmp_path / "one_generator.py").write_text(PLAIN)
    (tmp_path / "two_generator.py").write_text(PLAIN.replace("plain", "other"))
    (tmp_path / "helper.py").write_text("raise RuntimeError")
    assert sorted(find_generators([str(tmp_path)])) == ["math", "other", "plain"]
    assert sorted(find_generators([])) == ["math"]


def test_one_of_a_users_takes_the_place_of_a_shipped_one(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(PLAIN.replace("plain", "math"))
    assert find_generators([str(file)])["math"].source == str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def run_rollout(data): pass\n", "TASK_TYPE is None; give the module a name"),
        ("TASK_TYPE = 'plain'\n", r"there is no function run_rollout\(data\)"),
        (PLAIN + "async def is_valid_group(group): return True\n", "is_valid_group is async, and nobody awaits it"),
        ("import no_such_module\n", "the import failed(.|\n)*no_such_module"),
    ],
)
def test_what_is_no_generator_is_told(tmp_path, text, message):
    file = tmp_path / "own.py"
    file.write_text(text)
    with pytest.raises(UserError, match=f"--generator {file}: {message}"):
        find_generators([str(file)])


def test_two_generators_of_one_task_and_an_empty_directory(tmp_path):
    for name in ("one_generator.py", "two_generator.py"):
        (tmp_path / name).write_text(PLAIN)
    with pytest.raises(UserError, match="two_generator.py: TASK_TYPE 'plain' is that of .*one_generator.py, too"):
        find_generators([str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty: the directory has no \*_generator.py"):
        find_generators([str(tmp_path / "empty")])


def test_without_functions_a_group_needs_answers_and_rewards_and_stays_as_it_is(tmp_path):
    generator = made(tmp_path)
    items = group_of("a")
    assert generator.settle("a", items) == items
    assert generator.settle("a", [items[0], {**items[1], "reward": None}]) is None
    assert generator.meta_info([Group("a", items)]) == {}


def test_functions_are_called_with_as_many_arguments_as_they_take(tmp_path):
    generator = made(
        tmp_path,
        "def is_valid_group(group, min_valid_group_size, task_type):\n"
        "    return len(group[1]) == min_valid_group_size and task_type == 'plain' and group[0] != 'b'\n"
        "def transform_group(group):\n"
        "    return group[0], [{**one, 'reward': one['reward'] / 2} for one in group[1]]\n"
        "def get_group_data_meta_info(groups):\n"
        "    return {'items': sum(map(len, groups.values())), 'first': list(groups)[0]}\n",
    )
    assert [one["reward"] for one in generator.settle("a", group_of("a"))] == [0.5, 0.5]
    assert generator.settle("b", group_of("b")) is None
    # Two epochs of one prompt.
    assert generator.meta_info([Group("a", group_of("a")), Group("a", group_of("a"))]) == {"items": 4, "first": "a"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("def is_valid_group(group): return 'yes'", "is_valid_group returned 'yes'; expected True or False"),
        ("def is_valid_group(group): raise KeyError('score')", "raised KeyError for is_valid_group: 'score'"),
        ("def transform_group(group): return group[1]", r"expected \(instance_id, list of 2 items\)"),
        ("def transform_group(group): return group[0], group[1][:1]", r"expected \(instance_id, list of 2 items\)"),
        ("def transform_group(group): return group[0], [1, 2]", "transform_group for instance a: an item is an object"),
    ],
)
def test_functions_that_go_wrong_are_named(tmp_path, more, message):
    generator = made(tmp_path, more + "\n")
    with pytest.raises(UserError, match=f"--generator {tmp_path}/own_generator.py.*{message}"):
        generator.settle("a", group_of("a"))


def test_numbers_about_groups_are_a_dict(tmp_path):
    generator = made(tmp_path, "def get_group_data_meta_info(groups): return [1]\n")
    with pytest.raises(UserError, match=r"get_group_data_meta_info returned \[1\]; expected a dict"):
        generator.meta_info([Group("a", group_of("a"))])
