"""The page on the rollout buffer: its generator is run by the service, and its commands are read by the real parsers."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slime.plugins import check
from tests.support.models.args import parse
from tests.support.tables.page import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/en/advanced/rollout-buffer.md"
(GENERATOR,) = [text for kind, text in blocks(PAGE) if kind == "python"]
COMMANDS = [text for kind, text in blocks(PAGE) if kind == "bash"]


def test_the_command_of_the_run(tmp_path):
    (command,) = [text for text in COMMANDS if "scripts/quickstart.sh" in text]
    (line,) = [line for line in command.replace("\\\n", " ").splitlines() if "scripts/quickstart.sh" in line]
    # As the quick start does, the run evaluates.
    evaluation = ["--eval-interval", "2", "--eval-prompt-data", "held_out", str(tmp_path / "prompts.jsonl")]
    args = parse(tmp_path, *evaluation, *shlex.split(line.partition(" -- ")[2]))
    assert args.rollout_task_type == "math" and args.rollout_buffer_url == "http://127.0.0.1:8889"


def test_the_words_of_the_service():
    done = subprocess.run(
        [sys.executable, "-m", "slime_plugins.rollout_buffer", "--help"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (table,) = [part for part in PAGE.read_text().split("\n\n") if part.startswith("| Word of the service")]
    named = set(re.findall(r"`(--[a-z-]+)`", table))
    assert named == set(re.findall(r"--[a-z-]+", done.stdout)) - {"--help"}


@pytest.mark.slow
def test_the_generator_of_the_page(tmp_path, monkeypatch):
    (command,) = [text for text in COMMANDS if "check --buffer-generator" in text]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_generator.py").write_text(GENERATOR)
    words = shlex.split(command)[4:]
    answers = [words[place + 1] for place, word in enumerate(words) if word == "--answer"]
    (finding,) = check(words[:2], answers=answers, time_limit=60.0)
    assert finding.problems == ()
    # Both answers are trained, and what stands between them is not.
    assert re.search(r"of them trained.*completed, reward 1.0", finding.record.returned), finding.record.returned
