"""Files as mappings whose keys know their lines."""

import pytest

from slime.utils.errors import UserError
from slime.utils.yaml_file import YamlMapping, load_yaml, plain
from tests.support.tables.config_files import written


def load(tmp_path, text, name="run.yaml"):
    return load_yaml(written(tmp_path, text, name), "--flag")


def test_every_key_knows_its_line(tmp_path):
    mapping = load(tmp_path, "a: 1\n\nb:\n  c: 2\n  d:\n    - {e: 3}\n")
    assert mapping.where("b") == f"{tmp_path}/run.yaml:3"
    assert mapping["b"].where("c").endswith(":4")
    assert mapping["b"]["d"][0].where("e").endswith(":6")
    assert plain(mapping) == {"a": 1, "b": {"c": 2, "d": [{"e": 3}]}}
    assert type(plain(mapping)["b"]) is dict


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("-2E3", -2000.0), (".5", 0.5), ("5.", 5.0), (".inf", float("inf")), ("1_000", 1000),
        ("0x1f", 31), ("-3", -3), ("010", "010"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1.2.3", "1.2.3"),
        ("off", False), ("yes", True), ("~", None), ("'7'", "7"), ("a1", "a1"),
        ("1_", "1_"), ("7__0", "7__0"), ("1_0_0", 100),
    ],
)  # fmt: skip
def test_scalars_read_as_people_mean_them(tmp_path, text, value):
    read = load(tmp_path, f"x: {text}\n")["x"]
    assert read == value and type(read) is type(value)


def test_the_text_of_the_file_stays_known(tmp_path):
    mapping = load(tmp_path, "a: 0012\nb: [1.10, no]\nc: [{d: 1}]\n")
    assert (mapping.text("a"), mapping.text("b"), mapping.text("c")) == ("0012", ["1.10", "no"], None)


def test_merged_keys_may_be_overruled_but_own_ones_not_repeated(tmp_path):
    mapping = load(tmp_path, "base: &base {x: 1, y: 2}\nmine:\n  <<: *base\n  x: 3\n")
    assert plain(mapping["mine"]) == {"x": 3, "y": 2}
    with pytest.raises(UserError, match=r"--flag: .*run.yaml:3: lr stands twice, first in line 1"):
        load(tmp_path, "lr: 1\nb: 2\nlr: 3\n")


def test_json_with_tabs(tmp_path):
    mapping = load(tmp_path, '{\n\t"a": {\n\t\t"b": [1e-3, true, null]\n\t}\n}\n', "run.json")
    assert plain(mapping) == {"a": {"b": [1e-3, True, None]}}
    assert mapping["a"].where("b").endswith("run.json:3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", r"run.yaml:3: expected ',' or '\]'"),
        ("a: 1\n b: 2\n", r"run.yaml:2: mapping values are not allowed"),
        ("- 1\n", "holds a list"),
        ("a: 1\nb: !!python/object/apply:os.system [x]\n", r"run.yaml:2: could not determine a constructor"),
        ("[1, 2]: 3\n", "a key must be a name"),
        ("a: 1\n---\nb: 2\n", "run.yaml:2: but found another document"),
        ("b: 1\na: \x07\n", "run.yaml:2: the character U\\+0007 is not allowed"),
    ],
)
def test_broken_files_name_the_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="--flag .*none.yaml: the file cannot be read: No such file"):
        load_yaml(tmp_path / "none.yaml", "--flag")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    with pytest.raises(UserError, match="no UTF-8"):
        load_yaml(tmp_path / "latin.yaml", "--flag")


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    assert load(tmp_path, "# nothing\n") == {} and isinstance(load(tmp_path, ""), YamlMapping)
