"""The tool that writes down Megatron-LM's command line, on a made-up package with such a parser."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "make_megatron_flags_fixture.py"

PARSER = """
import enum

class Kind(enum.Enum):
    small = 1
    large = 2

def add_megatron_arguments(parser):
    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", "--layers", type=int, default=None, help="not written")
    group.add_argument("--no-bias", action="store_false", dest="add_bias")
    group.add_argument("--kind", type=lambda name: Kind[name], choices=list(Kind), default=Kind.small)
    group.add_argument("--ranks", type=int, nargs="+", default=[0])
    return parser
"""


def run(*words) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, timeout=120)


def make_package(directory: Path) -> None:
    for name in ("megatron/core", "megatron/training"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("")
    (directory / "megatron/__init__.py").write_text("")
    (directory / "megatron/core/package_info.py").write_text('__version__ = "9.9.9"\n')
    (directory / "megatron/training/arguments.py").write_text(PARSER)


def test_flags_are_written_without_their_texts(tmp_path):
    make_package(tmp_path / "unpacked")
    output = tmp_path / "data" / "flags.json"
    done = run(tmp_path / "unpacked", "--output", output)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 flags of megatron-core 9.9.9")
    written = json.loads(output.read_text())
    assert written["version"] == "9.9.9"
    rows = {row["flags"][0]: {key: value for key, value in row.items() if key != "flags"} for row in written["flags"]}
    assert rows == {
        "--num-layers": {"dest": "num_layers", "action": "store", "type": "int", "nargs": None, "choices": None,
                         "default": None},
        "--no-bias": {"dest": "add_bias", "action": "store_false", "type": None, "nargs": None, "choices": None,
                      "default": True},
        "--kind": {"dest": "kind", "action": "store", "type": "<lambda>", "nargs": None, "choices": ["small", "large"],
                   "default": "small"},
        "--ranks": {"dest": "ranks", "action": "store", "type": "int", "nargs": "+", "choices": None, "default": [0]},
    }  # fmt: skip
    assert written["flags"][0]["flags"] == ["--kind"], "sorted"
    again = tmp_path / "again.json"
    run(tmp_path / "unpacked", "--output", again)
    assert again.read_bytes() == output.read_bytes()


def test_a_package_without_the_parser_is_an_error_that_says_where_it_is(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 2
    assert "megatron-core brings it from 0.17.1 on" in done.stderr and str(tmp_path) in done.stderr


def test_help_says_how_to_get_the_package():
    done = run("--help")
    assert done.returncode == 0 and "megatron-core==0.17.1" in done.stdout
