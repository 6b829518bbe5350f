"""The page on the toy run: the commands of its tables are taken, and those of the same script on other pages."""

import shlex
from pathlib import Path

import pytest

from slime.arguments import parse_args
from tests.support.models.toy_task import ToyTask
from tests.support.processes.quickstart import COMMANDS, WEIGHT_COMMANDS
from tests.support.tables.page import blocks

_SCRIPT = "bash scripts/quickstart.sh"


def commands_of_blocks() -> list[str]:
    """What stands behind the script's name in the blocks of all pages, without words for an example of its own."""
    pages = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
    texts = [text.replace("\\\n", " ") for page in pages for kind, text in blocks(page) if kind == "bash"]
    lines = [line for text in texts for line in text.splitlines() if line.startswith(_SCRIPT)]
    return sorted({" ".join(line.removeprefix(_SCRIPT).split()) for line in lines if "--example" not in line})


OTHERS = [words for words in commands_of_blocks() if words not in {" ".join(command.split()) for command in COMMANDS}]


@pytest.fixture(scope="module")
def toy_task(tmp_path_factory) -> ToyTask:
    return ToyTask(tmp_path_factory.mktemp("toy"))


def test_every_mode_has_its_command():
    assert len(COMMANDS) >= 13


def test_every_way_of_files_has_its_command():
    flags = [
        set(words.split()) & {"disk", "delta", "overwrite", "--update-weight-local-checkpoint-dir"}
        for words in WEIGHT_COMMANDS.values()
    ]
    copied = {"disk", "--update-weight-local-checkpoint-dir"}
    assert sorted(flags, key=len) == [{"disk"}, copied, {*copied, "delta"}, {*copied, "delta", "overwrite"}]


def test_the_blocks_of_other_pages_are_found():
    assert len(OTHERS) >= 7 and any("rollout_buffer" in words for words in OTHERS)


@pytest.mark.parametrize("words", [*COMMANDS, *OTHERS])
def test_commands_break_no_rule(toy_task, words):
    program, flags = toy_task.command(*shlex.split(words))
    assert program == ("train_async.py" if "--async" in words else "train.py")
    # Nobody has taught the model that the script would begin with.
    untaught = flags[flags.index("--hf-checkpoint") + 1]
    parse_args(argv=[*flags, "--ref-load", untaught], asynchronous="--async" in words)
