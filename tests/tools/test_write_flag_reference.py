from pathlib import Path

import pytest

from slime.arguments.flag import Caller, PathKind, below_one, flag, plug_in, weight
from slime.arguments.parser import ArgumentParser
from tools import write_flag_reference
from tools.write_flag_reference import (
    COMMAND,
    COMMAND_LINE,
    REFERENCE,
    command_line,
    difference,
    generated_files,
    main,
    reference,
)


@pytest.fixture(scope="module")
def generated() -> dict[Path, str]:
    return generated_files()


def test_the_command_line_is_the_frozen_one(generated):
    changes = difference(COMMAND_LINE, generated[COMMAND_LINE])
    assert not changes, f"the flags changed; if that is meant, run `{COMMAND}`:\n{changes}"


@pytest.mark.parametrize("name", ["flags.md", "flags-megatron.md", "flags-sglang.md"])
def test_the_reference_is_fresh(generated, name):
    changes = difference(REFERENCE / name, generated[REFERENCE / name])
    assert not changes, f"run `{COMMAND}`:\n{changes}"


# What of the example is not built, whatever the product has.
PLANNED = (
    write_flag_reference.NotYet("record_mem*", "recording"),
    write_flag_reference.NotYet("train_backend", "x", ("megatron",)),
)


def example() -> ArgumentParser:
    parser = ArgumentParser(add_help=False)
    group = parser.add_argument_group("rollout")
    group.add_argument("--size", "--sz", type=int, default=3, choices=[1, 3], help="a*b | c < 100 %%")
    group.add_argument("--record-memory-history", action="store_true", help="share")
    group.add_argument("--train-backend", default="megatron", help="engine")
    parser.add_argument_group("Megatron: other").add_argument("--lr-x", nargs="+", type=float, help="rate")
    return parser


def test_a_line_holds_what_makes_a_flag(monkeypatch):
    declared = {
        "size": flag("--size --sz", int, 3, "text", bounds=below_one(0)),
        "save": flag("--save", str, None, "text", path=PathKind.WRITTEN, placeholders="rank role"),
        "hook": plug_in("--hook", Caller.RANKS, "text"),
    }
    monkeypatch.setattr(write_flag_reference, "OWN_FLAGS", declared)
    monkeypatch.setattr(write_flag_reference, "rows", lambda: PLANNED)
    monkeypatch.setattr(write_flag_reference, "BOUNDS", {"size": below_one(0), "lr_x": weight()})
    parser = example()
    for own in ("save", "hook"):
        declared[own].add_to(parser)
    header, *lines = command_line(parser).splitlines()
    assert header.startswith("# megatron-core ") and lines == [
        "--hook  Store(str) dest='hook' default=None plug_in=ranks",
        "--lr-x  Store(float) dest='lr_x' nargs='+' default=None bounds=[0,inf)finite",
        "--record-memory-history  StoreTrue dest='record_memory_history' nargs=0 default=False not_built",
        "--save  Store(str) dest='save' default=None path=written placeholders=rank,role",
        "--size --sz  Store(int) dest='size' choices=[1, 3] default=3 bounds=[0,1)",
        "--train-backend  Store(str) dest='train_backend' default='megatron' not_built_beside=megatron",
    ]


def test_rows_of_the_reference():
    pages = reference(example())
    own, megatron = pages[REFERENCE / "flags.md"], pages[REFERENCE / "flags-megatron.md"]
    assert "## Rollout\n" in own and "--lr-x" not in own
    assert "| `--size` `--sz` | `{1,3}` | `3` | a\\*b \\| c \\< 100 % |" in own
    assert "| `--lr-x` | `FLOAT [FLOAT ...]` |  | rate |" in megatron


def test_planned_features_are_marked(monkeypatch):
    monkeypatch.setattr(write_flag_reference, "rows", lambda: PLANNED)
    own = reference(example())[REFERENCE / "flags.md"]
    assert "| share *Planned, refused by a run.* |" in own
    assert "| engine *Other values than `megatron` are planned, refused by a run.* |" in own


def test_a_flag_with_one_value_says_why(monkeypatch):
    fixed = {
        "record_memory_history": (False, "it is slow"),
        "train_backend": ("megatron", "a|b"),
        "size": (3, "it fits"),
    }
    monkeypatch.setattr(write_flag_reference, "FIXED", fixed)
    own = reference(example())[REFERENCE / "flags.md"]
    assert "| share *Always off: it is slow.* |" in own and "| engine *Always `megatron`: a\\|b.* |" in own
    assert "*Always `3`: it fits.* |" in own


def test_check_writes_nothing_and_names_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(write_flag_reference, "ROOT", tmp_path)
    monkeypatch.setattr(write_flag_reference, "build_parser", example)
    assert main(["--check"]) == 1
    assert list(tmp_path.iterdir()) == [] and COMMAND in capsys.readouterr().out
    assert main([]) == 0 and main(["--check"]) == 0
    assert "+--size" in difference(COMMAND_LINE, "--size")
    assert difference(COMMAND_LINE, command_line(example())) == ""
