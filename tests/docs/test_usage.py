"""The page on usage: its blocks in order. On every change with the parser in the place of runs, and, slow, as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.utils.reward_types import REWARD_TYPES
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.tables.page import blocks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/en/get_started/usage.md"
BLOCKS = blocks(PAGE)


def run_block(kind: str, text: str, directory: Path, timeout: float) -> str:
    """Run a block in `directory`, as if that were the root of the repository; returns what it printed."""
    text = text.replace(".venv/bin/python", sys.executable)
    text = re.sub(r"(?<![\w/])(train\.py|tools/)", rf"{ROOT}/\1", text)
    command = ["bash", "-euo", "pipefail", "-c", text] if kind == "bash" else [sys.executable, "-c", text]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLIME_ACCELERATOR": "cpu"}
    environment.pop("TENSORBOARD_DIR", None)
    done = subprocess.run(
        command, cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-6000:]}"
    return done.stdout


def leave_what_a_run_leaves(directory: Path) -> None:
    """A dump and an export, made by the functions that runs make them with, or like theirs."""
    from slime.rollout.rollout_dump import save_rollout
    from slime.utils.types import Sample

    sample = Sample(index=0, group_index=0, prompt="What is 47+38?", label="85", tokens=[70, 71], reward=1.0)
    sample.append_response_tokens(tokens=[72, 73], log_probs=[-0.5, -0.25], text="85")
    save_rollout(str(directory / "outputs/mine/details/rollout_data/{rollout_id}.pt"), 0, [sample])
    make_tiny_checkpoint(directory / "outputs/mine/hf/3")


def test_the_blocks_of_the_page_with_the_parser_in_the_place_of_runs(tmp_path, monkeypatch, capsys, caplog):
    leave_what_a_run_leaves(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    commands = []
    for kind, text in BLOCKS:
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            continue
        written = run_block(kind, text.replace("exec .venv/bin/python train.py", "exec printf '%s\\0'"), tmp_path, 120)
        if re.search(r"^bash outputs/mine/run\.sh", text, re.MULTILINE):
            commands.append(parse_args(argv=written.rstrip("\0").split("\0")))
    assert "rollout 0 with 1 samples\n0 0 pending 1.0 '85'" in capsys.readouterr().out
    assert [args.num_rollout for args in commands] == [4, 4, 4, 6, 0]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and re.match(r"--eval-config \S+ replaces --eval-prompt-data held_out", warnings[0])
    assert [(args.dry_run, args.check) for args in commands] == [(True, False), (False, True), *[(False, False)] * 3]
    assert [dataset.name for dataset in commands[-1].eval_datasets] == ["held_out", "greedy"]


def test_every_reward_type_is_in_the_table():
    section = PAGE.read_text().partition("\n## Built-in rewards\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == sorted(REWARD_TYPES)


@pytest.mark.slow
def test_the_page_as_it_stands(tmp_path):
    """Train, read the dump, go on, load the export, evaluate: the log has the lines that the page shows."""
    printed = [run_block(kind, text, tmp_path, 600) for kind, text in BLOCKS]
    runs = [output for output in printed if "starting Ray" in output]
    first, longer, evaluation = runs
    shown = re.findall(r"^(evaluation \w+ rollout \d|rollout \d \(\d/\d\)|kept: .*|to train on, raise --num-rollout):?",
                       PAGE.read_text(), re.MULTILINE)  # fmt: skip
    assert len(shown) == 6
    for line in shown:
        assert re.search(
            rf"^\d\d:\d\d:\d\d {re.escape(line.replace('outputs', f'{tmp_path}/outputs'))}", first, re.MULTILINE
        ), line
    assert "rollout 3 (" not in longer and "rollout 4 (5/6) | " in longer and "rollout 5 (6/6) | " in longer
    assert "evaluation before rollout 6: held_out" in evaluation and "greedy" in evaluation
    assert not any("\x1b" in output or "WARNING" in output for output in (first, longer))
