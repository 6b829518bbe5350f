"""Where `megatron.training` can be imported, the flags of its parser are accepted too."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys

from slime.arguments import groups as megatron
from slime.arguments.surface import FlagSpec, add_flag
from slime.backends.megatron_utils import flag_surface
from tests.support.processes.distributed import REPOSITORY, run_distributed

PARSER = """
import enum

class Kind(enum.Enum):
    small = 1
    large = 2

def add_megatron_arguments(parser):
    parser.add_argument("--hidden-size", type=int, default=None)
    parser.add_argument("--swiglu", action="store_true")
    parser.add_argument("--data-path", nargs="*", default=None)
    parser.add_argument("--no-warp-gate", action="store_false", dest="warp_gate", help="close it")
    parser.add_argument("--kind", type=lambda name: Kind[name], choices=list(Kind), default=Kind.small)
    parser.add_argument("--decks", type=int, nargs="+", default=[3])
    parser.add_argument("--either", action=__import__("argparse").BooleanOptionalAction, default=False)
    return parser
"""


def beside_megatron(tmp_path, source) -> None:
    """Write a `megatron.training` that comes beside the installed Megatron-Core where `tmp_path` is searched for modules."""
    (tmp_path / "megatron/training").mkdir(parents=True)
    (tmp_path / "megatron/training/arguments.py").write_text(source)


def specs_of(printed: str) -> list[FlagSpec]:
    """What the describer prints on its last line."""
    rows = json.loads(printed.splitlines()[-1])
    return [FlagSpec(**{**row, "flags": tuple(row["flags"])}) for row in rows]


def test_flags_of_the_parser_come_on_top(tmp_path):
    beside_megatron(tmp_path, PARSER)
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    answer = subprocess.run(
        [sys.executable, "-m", "slime.backends.megatron_utils.flag_surface"],
        stdout=subprocess.PIPE, text=True, timeout=120, check=True, env=environment,
    )  # fmt: skip
    specs = specs_of(answer.stdout)
    extra = {spec.dest: spec for spec in specs if spec.metadata.get("megatron_lm")}
    # --hidden-size is a field, and of --data-path it is said where prompts come from.
    assert set(extra) == {"swiglu", "warp_gate", "kind", "decks", "either"}
    assert extra["kind"].choices == ["small", "large"] and extra["kind"].default == "small"
    parser = argparse.ArgumentParser()
    for name in ("warp_gate", "kind", "decks", "either"):
        add_flag(parser.add_argument_group("extra"), extra[name])
    args = parser.parse_args(["--no-warp-gate", "--kind", "large", "--decks", "4", "5", "--either"])
    assert vars(args) == {"warp_gate": False, "kind": "large", "decks": [4, 5], "either": True}
    merged = {spec.dest: spec for spec in megatron.merge(specs)}
    assert merged["swiglu"].help == "gated SiLU in the MLP" and "warp_gate" in merged


def describe(directory: str) -> tuple[str, str]:
    """What the describer prints in this process, and says beside it, with modules of `directory`."""
    sys.path.insert(0, directory)
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        flag_surface.main()
    return printed.getvalue(), said.getvalue()


def test_a_parser_that_cannot_be_imported_is_left_out_with_a_word(tmp_path):
    beside_megatron(tmp_path, "import a_package_that_is_not_there\n")
    ((printed, said),) = run_distributed(describe, 1, (str(tmp_path),))
    specs = specs_of(printed)
    assert len(specs) > 300 and not [spec for spec in specs if spec.metadata.get("megatron_lm")]
    assert "megatron.training" in said and "a_package_that_is_not_there" in said
