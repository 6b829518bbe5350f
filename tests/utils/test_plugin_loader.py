import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime.utils import plugin_loader
from slime.utils.errors import UserError
from slime.utils.plugin_loader import calling_user_code, containing_endings, load_function


@pytest.fixture
def write_plugin(tmp_path):
    def write(text: str, name: str = "plugin.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_dotted_and_colon_paths():
    assert load_function("os.path.join") is os.path.join
    assert load_function("collections:OrderedDict.fromkeys").__name__ == "fromkeys"


def test_file_with_attribute_is_loaded_once_and_may_import_its_neighbours(write_plugin, monkeypatch):
    write_plugin("VALUE = 7", "neighbour_of_plugin.py")
    path = write_plugin("import neighbour_of_plugin\nclass A:\n    def f(): return neighbour_of_plugin.VALUE\n")
    search_path = list(sys.path)
    function = load_function(f"{path}:A.f")
    assert function() == 7 and sys.path == search_path
    monkeypatch.chdir(os.path.dirname(path))
    assert load_function("plugin.py:A.f") is function
    assert sys.modules[function.__module__].A.f is function


@pytest.mark.parametrize("place", ["helper_of_plugins.py", "helper_of_plugins/__init__.py"])
@pytest.mark.parametrize("statement", ["from helper_of_plugins import WHO", "import os, helper_of_plugins"])
def test_a_file_is_not_given_the_neighbour_of_another(tmp_path, monkeypatch, place, statement):
    """Python has imported that under its plain name, and would hand it out again, whatever is in it."""
    monkeypatch.delitem(sys.modules, "helper_of_plugins", raising=False)
    for name, text in (("one", "WHO = 1"), ("same", "WHO = 1"), ("two", "WHO = 2")):
        (tmp_path / name / place).parent.mkdir(parents=True)
        (tmp_path / name / place).write_text(text)
        (tmp_path / name / "plugin.py").write_text(f"{statement}\ndef f(): ...")
    load_function(f"{tmp_path}/one/plugin.py:f", "--custom-rm-path")
    load_function(f"{tmp_path}/same/plugin.py:f", "--custom-rm-path")
    path = f"{tmp_path}/two/plugin.py:f"
    with pytest.raises(UserError) as caught:
        load_function(path, "--custom-rm-path")
    own, other = (tmp_path / name / place for name in ("two", "one"))
    assert str(caught.value).startswith(f"--custom-rm-path {path}: it imports {own}, and another plug-in")
    assert f"has imported {other} under that name" in str(caught.value)
    monkeypatch.delitem(sys.modules, "helper_of_plugins")
    assert load_function(path, "--custom-rm-path")() is None


def test_a_neighbour_is_not_given_the_neighbour_of_another_file(tmp_path, monkeypatch):
    """What a file imports through a module of its own beside it; modules may import each other."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plugin.py").write_text(f"import between_of_{name}\ndef f(): ...")
        (tmp_path / name / f"between_of_{name}.py").write_text("import end_of_plugins")
        (tmp_path / name / "end_of_plugins.py").write_text(f"WHO = '{name}'\nimport between_of_{name}")
    for module in ("between_of_one", "between_of_two", "end_of_plugins"):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delitem(sys.modules, module)
    load_function(f"{tmp_path}/one/plugin.py:f", "--custom-rm-path")
    with pytest.raises(UserError, match=f"it imports {tmp_path}/two/end_of_plugins.py, and another plug-in"):
        load_function(f"{tmp_path}/two/plugin.py:f", "--custom-rm-path")


PACKAGES = {
    "of a package": ("from pack_of_plugins.reward import WHO", {"__init__.py": "", "reward.py": "WHO = {!r}"}),
    "asked of a package": ("from pack_of_plugins import reward", {"__init__.py": "", "reward.py": "WHO = {!r}"}),
    "of a package without a file": ("import pack_of_plugins.reward as r", {"reward.py": "WHO = {!r}"}),
    "by the package itself": (
        "import pack_of_plugins",
        {"__init__.py": "from .reward import WHO", "reward.py": "WHO = {!r}"},
    ),
    "by a module of a package": (
        "import pack_of_plugins.near.by",
        {"near/by.py": "from ..reward import WHO\nfrom . import by", "reward.py": "WHO = {!r}"},
    ),
}


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_module_in_a_package_is_not_that_of_a_package_beside_another_file(tmp_path, monkeypatch, kind):
    """Whose own file is the same, empty say, or which has none."""
    statement, files = PACKAGES[kind]
    for name in list(sys.modules):
        if name.partition(".")[0] == "pack_of_plugins":
            monkeypatch.delitem(sys.modules, name)
    for name, who in (("one", 1), ("same", 1), ("two", 2)):
        for file, text in {**files, "unused.py": name}.items():
            path = tmp_path / name / "pack_of_plugins" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.format(who))
        (tmp_path / name / "plugin.py").write_text(f"{statement}\ndef f(): ...")
    try:
        load_function(f"{tmp_path}/one/plugin.py:f", "--custom-rm-path")
        load_function(f"{tmp_path}/same/plugin.py:f", "--custom-rm-path")
        with pytest.raises(UserError) as caught:
            load_function(f"{tmp_path}/two/plugin.py:f", "--custom-rm-path")
        own, other = (tmp_path / name / "pack_of_plugins/reward.py" for name in ("two", "one"))
        assert f"it imports {own}, and another plug-in has imported {other} under that name" in str(caught.value)
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "pack_of_plugins"]:
            del sys.modules[name]


def test_a_module_that_nobody_imported_yet_is_looked_for_in_the_package_that_is_there(tmp_path, monkeypatch):
    for name in ("one", "two", "three"):
        (tmp_path / name / "begun_of_plugins").mkdir(parents=True)
        (tmp_path / name / "begun_of_plugins/__init__.py").write_text("")
        imported = "" if name == "one" else ".score"
        (tmp_path / name / "plugin.py").write_text(f"import begun_of_plugins{imported}\ndef f(): ...")
    for name in ("one", "two"):
        (tmp_path / name / "begun_of_plugins/score.py").write_text(f"WHO = {name!r}")
    monkeypatch.setitem(sys.modules, "begun_of_plugins", None)
    monkeypatch.delitem(sys.modules, "begun_of_plugins")
    load_function(f"{tmp_path}/one/plugin.py:f", "--custom-rm-path")
    own, other = (tmp_path / name / "begun_of_plugins/score.py" for name in ("two", "one"))
    with pytest.raises(UserError, match=f"it imports {own}, and another plug-in has imported {other} under that name"):
        load_function(f"{tmp_path}/two/plugin.py:f", "--custom-rm-path")
    # What it has not itself is no matter of names.
    load_function(f"{tmp_path}/three/plugin.py:f", "--custom-rm-path")
    del sys.modules["begun_of_plugins.score"]


def test_a_module_is_not_the_package_of_its_name_beside_another_file(tmp_path, monkeypatch):
    for name, place in (("one", "either_of_plugins/__init__.py"), ("two", "either_of_plugins.py")):
        (tmp_path / name / place).parent.mkdir(parents=True)
        (tmp_path / name / place).write_text(f"WHO = {name!r}")
        (tmp_path / name / "plugin.py").write_text("from either_of_plugins import WHO\ndef f(): return WHO")
    assert load_function(f"{tmp_path}/one/plugin.py:f", "--custom-rm-path")() == "one"
    with pytest.raises(UserError, match=f"it imports {tmp_path}/two/either_of_plugins.py, and another plug-in"):
        load_function(f"{tmp_path}/two/plugin.py:f", "--custom-rm-path")
    monkeypatch.delitem(sys.modules, "either_of_plugins")
    assert load_function(f"{tmp_path}/two/plugin.py:f", "--custom-rm-path")() == "two"


@pytest.mark.parametrize("file_first", [False, True])
def test_a_module_of_the_working_directory_and_one_beside_a_file_are_not_taken_for_each_other(
    tmp_path, monkeypatch, file_first
):
    """Of a path that names a module, such as `scores_of_plugins.f`."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "scores_of_plugins.py").write_text(f"def f(): return {name!r}")
    file = tmp_path / "there" / "plugin.py"
    file.write_text("import scores_of_plugins\ndef g(): return scores_of_plugins.f()")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.setattr(plugin_loader, "_directories", set())
    monkeypatch.setitem(sys.modules, "scores_of_plugins", None)
    monkeypatch.delitem(sys.modules, "scores_of_plugins")
    paths = [f"{file}:g", "scores_of_plugins.f"]
    first, second = paths if file_first else reversed(paths)
    assert load_function(first, "--custom-rm-path")() == ("there" if file_first else "here")
    plugin_loader._load_cached.cache_clear()
    assert load_function(first, "--custom-rm-path")() == ("there" if file_first else "here"), "it is itself"
    with pytest.raises(
        UserError, match=f"^--buffer-filter-path {second}: .*, and another plug-in has imported"
    ) as caught:
        load_function(second, "--buffer-filter-path")
    assert all(f"{tmp_path}/{name}/scores_of_plugins.py" in str(caught.value) for name in ("here", "there"))


@pytest.mark.parametrize("imported", ["", ".scores"])
def test_a_path_that_names_a_module_of_a_package_is_not_given_that_of_a_package_beside_a_file(
    tmp_path, monkeypatch, imported
):
    """The files of both packages are the same, empty ones."""
    for name in ("here", "there"):
        (tmp_path / name / "deep_of_plugins").mkdir(parents=True)
        (tmp_path / name / "deep_of_plugins/__init__.py").write_text("")
        (tmp_path / name / "deep_of_plugins/scores.py").write_text(f"def f(): return {name!r}")
        (tmp_path / name / "deep_of_plugins/alike.py").write_text("def f(): return 'both'")
    (tmp_path / "there/plugin.py").write_text(f"import deep_of_plugins{imported}\ndef g(): ...")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    monkeypatch.setattr(plugin_loader, "_directories", set())
    load_function(f"{tmp_path}/there/plugin.py:g", "--custom-rm-path")
    try:
        assert load_function("deep_of_plugins.alike.f", "--buffer-filter-path")() == "both"
        own, other = (tmp_path / name / "deep_of_plugins/scores.py" for name in ("here", "there"))
        with pytest.raises(UserError, match=f"names {own}, and another plug-in has imported {other} under that name"):
            load_function("deep_of_plugins.scores.f", "--buffer-filter-path")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "deep_of_plugins"]:
            del sys.modules[name]


def test_the_same_relative_path_in_another_directory_is_another_file(tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(f"def f(): return {name!r}")
        monkeypatch.chdir(tmp_path / name)
        assert load_function("same.py:f")() == name


@pytest.mark.parametrize(
    "flag, text, expected",
    [
        ("--custom-rm-path", "def custom_rm(): ...\ndef reward_func(): ...", "reward_func"),
        ("--custom-rm-path", "def helper(): ...\nclass Grader:\n    def compute_reward(self): ...", "Grader"),
        ("custom_generate_function_path", "def generate(): ...\ndef helper(): ...", "generate"),
        ("--rollout-function-path", "def helper(): ...\ndef generate_rollout(): ...", "generate_rollout"),
        ("--eval-function-path", "def helper(): ...\ndef generate_rollout(): ...", "generate_rollout"),
        ("--eval-function-path", "def generate_rollout(): ...\ndef eval_function(): ...", "eval_function"),
        ("--dynamic-sampling-filter-path", "def filter_fn(): ...\ndef helper(): ...", "filter_fn"),
        ("--custom-loss-function-path", "def loss_function(): ...\ndef helper(): ...", "loss_function"),
        ("--buffer-filter-path", "def buffer_filter(): ...\ndef helper(): ...", "buffer_filter"),
        ("--custom-rm-path", "from os.path import join\ndef _private(): ...\ndef only(): ...", "only"),
        (None, "def only(): ...", "only"),
    ],
)
def test_conventional_names(write_plugin, flag, text, expected):
    assert load_function(write_plugin(text), flag=flag).__name__ == expected


def test_batched_reward_comes_first_only_for_batches(write_plugin):
    path = write_plugin("def batched_custom_rm(): ...\ndef custom_rm(): ...")
    assert load_function(path, flag="--custom-rm-path", batched=True).__name__ == "batched_custom_rm"
    assert load_function(path, flag="--custom-rm-path").__name__ == "custom_rm"


def test_ambiguous_file_lists_candidates(write_plugin):
    with pytest.raises(UserError, match=r"--custom-rm-path .*plugin.py: the file defines a, b; name one after a colon"):
        load_function(write_plugin("def a(): ...\ndef b(): ..."), flag="--custom-rm-path")


def test_failing_import_shows_flag_traceback_and_search_path(write_plugin):
    path = write_plugin("def f(): ...\nraise KeyError('inside the plug-in')")
    with pytest.raises(UserError) as caught:
        load_function(f"{path}:f", flag="--custom-rm-path")
    message = str(caught.value)
    assert message.startswith(f"--custom-rm-path {path}:f: the import failed")
    assert 'plugin.py", line 2' in message and "KeyError: 'inside the plug-in'" in message
    assert "module search path:" in message and sys.path[-1] in message


@pytest.mark.parametrize(
    ("module", "told"),
    [("slime.utils.timer", ": there is no slime.utils.timer; did you mean slime.observability.timer?\n"),
     ("slime.utils.no_such_utils", ": there is no slime.utils.no_such_utils\n"), ("slime_or_not", "\n")],
)  # fmt: skip
def test_a_module_of_ours_that_lies_elsewhere_is_told(write_plugin, module, told):
    path = write_plugin(f"import {module}\ndef f(): ...")
    with pytest.raises(UserError) as caught:
        load_function(path, flag="--custom-rm-path")
    assert str(caught.value).startswith(f"--custom-rm-path {path}: the import failed{told}")


def test_a_file_can_be_mended_and_loaded_again(write_plugin):
    path = write_plugin("syntax error")
    with pytest.raises(UserError, match="SyntaxError"):
        load_function(f"{path}:f")
    write_plugin("def f(): return 1  # longer")
    assert load_function(f"{path}:f")() == 1


@pytest.mark.parametrize("as_module", [False, True])
def test_an_import_that_wants_to_end_the_process_is_a_failing_one_every_time(write_plugin, monkeypatch, as_module):
    path = write_plugin("import sys\nsys.exit('no license')\ndef f(): ...\n", "leaves_at_import.py")
    monkeypatch.syspath_prepend(os.path.dirname(path))
    named = "leaves_at_import.f" if as_module else f"{path}:f"
    for _ in range(2):
        with pytest.raises(UserError) as caught:
            load_function(named, flag="--custom-rm-path")
        message = str(caught.value)
        assert message.startswith(f"--custom-rm-path {named}: the import failed")
        assert 'leaves_at_import.py", line 2' in message and "SystemExit: no license" in message


def test_ctrl_c_ends_what_the_main_thread_does():
    for raised in (KeyboardInterrupt, SystemExit):
        try:
            with calling_user_code("--custom-rm-path", "f.py:f", "sample 1"):
                raise raised("x")
        except BaseException as error:
            found = error
        assert isinstance(found, KeyboardInterrupt if raised is KeyboardInterrupt else UserError), raised


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_package.mod.fn", "No module named 'no_such_package'"),
        ("os.path.jion", "did you mean 'join'"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
        ("word", "expected module.attribute"),
        ("", "a plug-in path is a string"),
        (None, "a plug-in path is a string"),
        ("os.sep", "is a str, expected a function or class"),
    ],
)
def test_wrong_paths_are_user_errors_that_name_the_flag(path, message):
    with pytest.raises(UserError, match=message) as caught:
        load_function(path, flag="--data-source-path")
    assert "--data-source-path" in str(caught.value)


def test_a_coroutine_function_is_loaded_only_where_it_is_awaited(write_plugin):
    path = write_plugin(
        "async def late(*given): ...\nclass Late:\n    async def __call__(self, *given): ...\nlate_object = Late()\n"
    )
    for name in ("late", "late_object"):
        assert load_function(f"{path}:{name}", flag="--custom-rm-path") is load_function(f"{path}:{name}")
        with pytest.raises(UserError, match=f"--buffer-filter-path {path}:{name} is async, and nobody awaits it here"):
            load_function(f"{path}:{name}", flag="--buffer-filter-path")
    assert load_function(f"{path}:Late", flag="--data-source-path").__name__ == "Late"


def test_threads_that_ask_for_a_file_while_it_runs_wait_for_it(write_plugin):
    path = write_plugin("import time\ntime.sleep(0.3)\ndef f(): return 1\n")
    with ThreadPoolExecutor(4) as threads:
        assert [function() for function in threads.map(load_function, [f"{path}:f"] * 4)] == [1] * 4


def test_the_end_of_a_call_that_nobody_goes_on_with_is_no_ending_of_its_function():
    async def call():
        with containing_endings():
            await asyncio.get_running_loop().create_future()

    async def main():
        waiting = call()
        waiting.send(None)
        # Raises what else the coroutine raises.
        waiting.close()

    asyncio.run(main())
