"""The page on the toy run: the commands of its tables are taken."""

import shlex

import pytest

from slime.arguments import parse_args
from tests.support.models.toy_task import ToyTask
from tests.support.processes.quickstart import COMMANDS


@pytest.fixture(scope="module")
def toy_task(tmp_path_factory) -> ToyTask:
    return ToyTask(tmp_path_factory.mktemp("toy"))


def test_every_mode_has_its_command():
    assert len(COMMANDS) >= 13


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_break_no_rule(toy_task, words):
    program, flags = toy_task.command(*shlex.split(words))
    assert program == ("train_async.py" if "--async" in words else "train.py")
    # Nobody has taught the model that the script would begin with.
    untaught = flags[flags.index("--hf-checkpoint") + 1]
    parse_args(argv=[*flags, "--ref-load", untaught], asynchronous="--async" in words)
