"""The messages of a run about broken rules."""

from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.arguments.violations import Refusal, Violation
from slime.utils.errors import UserError
from tests.support.models.args import command_line


def violations(directory: Path, words: str | list[str], *, asynchronous: bool = False) -> list[str]:
    """The lines of the message that refuses a run with the flags `words`; `{tmp}` in the flags stands for `directory`."""
    if isinstance(words, str):
        words = words.format(tmp=directory).split()
    with pytest.raises(UserError) as error:
        parse_args(argv=[*command_line(directory), *words], asynchronous=asynchronous)
    return str(error.value).splitlines()


def refusal(directory: Path, words: str, *, asynchronous: bool = False) -> tuple[Violation, ...]:
    """The violations of a run with the flags `words`. `{tmp}` stands for `directory`, in the flags and in the messages."""
    with pytest.raises(Refusal) as error:
        given = words.format(tmp=directory).split()
        parse_args(argv=[*command_line(directory), *given], asynchronous=asynchronous)
    return tuple(
        Violation(found.flags, found.message.replace(str(directory), "{tmp}"), found.kind)
        for found in error.value.violations
    )


def assert_violation(directory: Path, words: str | list[str], message: str, *, asynchronous: bool = False) -> None:
    """A run with the flags `words` is refused, and exactly the line `message` is among the reasons; `{tmp}` as above."""
    lines = violations(directory, words, asynchronous=asynchronous)
    assert message.format(tmp=directory) in lines, "\n".join(lines)
