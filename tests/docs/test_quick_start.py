"""The page on the toy run: the commands of its tables are taken."""

import re
import shlex
from pathlib import Path

import pytest

from slime.arguments import parse_args
from tests.support.models.args import command_line

PAGE = Path(__file__).parents[2] / "docs/en/get_started/quick_start.md"
COMMANDS = sorted(set(re.findall(r"\| `bash scripts/quickstart\.sh([^`]*)` \|", PAGE.read_text())))


def test_every_mode_has_its_command():
    assert len(COMMANDS) >= 11


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_break_no_rule(tmp_path, words):
    of_script, _, flags = words.partition(" -- ")
    assert of_script.split() in ([], ["--async"])
    # The others of the script's flags that rules of these speak of.
    script = ["--rollout-num-gpus", "2", "--save", str(tmp_path / "save"), "--save-interval", "10"]
    parse_args(argv=[*command_line(tmp_path), *script, *shlex.split(flags)], asynchronous="--async" in of_script)
