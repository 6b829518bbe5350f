"""An engine that dies while rollouts are generated beside the training: another comes, and no prompt and no bound is lost."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_task import PLUG_INS, SAMPLES_PER_PROMPT
from tests.support.oracles.drawn_groups import assert_in_turn, assert_none_is_lost
from tests.support.processes.train_process import TrainProcess
from tests.support.processes.waiting import wait_until

ROLLOUTS = range(7)
HELD = 2
PROMPTS = 14
REPLACED_SECONDS = 900

pytestmark = pytest.mark.slow

# The flags of a loop, and the bound: the smallest one that its buffer can keep, and one more where groups wait in a queue.
LOOPS = {
    "rollouts in turn": ([], 1),
    "generation that never stops": (
        [
            "--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
            "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout", "--sglang-server-concurrency", "12",
        ],
        2,
    ),
}  # fmt: skip


def kill_one_that_has_requests(process: TrainProcess) -> None:
    """It answers nobody from the moment at which it is stopped."""
    process.wait_for_line(f"holding rollout {HELD}", 300)
    scheduler = min(process.schedulers())
    os.kill(scheduler, signal.SIGSTOP)
    (process.directory / "go").touch()
    process.wait_for_line(f"going on with rollout {HELD}", 300)
    os.kill(scheduler, signal.SIGKILL)


@pytest.fixture(scope="module", params=LOOPS)
def survived(request, task, tmp_path_factory) -> tuple[TrainProcess, int, list[list[dict]]]:
    """The run, its bound, and the samples that each rollout was trained on."""
    directory: Path = tmp_path_factory.mktemp("fault")
    flags, bound = LOOPS[request.param]
    flags = [
        *task.loop_flags, "--num-rollout", len(ROLLOUTS), "--async-buffer-size", 1, "--update-weights-interval", 1,
        "--max-weight-staleness", bound, "--use-fault-tolerance", "--sglang-log-level", "info",
        # Its death is the news, and not its silence before that.
        "--rollout-health-check-interval", 1, "--rollout-health-check-timeout", REPLACED_SECONDS,
        "--rollout-max-response-len", 60, "--max-tokens-per-gpu", 512,
        "--custom-generate-function-path", f"{PLUG_INS}:marked_generate",
        "--save-debug-rollout-data", directory / "{rollout_id}.pt", "--save", directory / "checkpoints",
        "--save-interval", len(ROLLOUTS), *flags,
    ]  # fmt: skip
    with TrainProcess(flags, directory, {"E2E_HOLD_ROLLOUT": str(HELD)}, "train_async.py") as process:
        process.wait_for_line(f"holding rollout {HELD}", 300)
        before = process.schedulers().keys()
        kill_one_that_has_requests(process)
        process.wait_for_line(r"engine \d has a new server", REPLACED_SECONDS)
        now = wait_until(lambda: found if len(found := process.schedulers().keys()) == len(before) else None)
        assert len(now - before) == 1, "one server is new, and the other one has never stopped"
        process.wait_for_success(REPLACED_SECONDS)
        process.assert_no_process_left()
    return process, bound, [torch.load(directory / f"{r}.pt", weights_only=True)["samples"] for r in ROLLOUTS]


def test_the_death_is_named_and_the_new_server_generates_too(survived):
    process, _, _ = survived
    output = process.output()
    (engine,) = re.findall(r"engine (\d) has a new server", output)
    # Where generation never stops, a push may be under way, and be the first to miss it.
    assert re.search(
        rf"engine {engine} died( \(/update_weights_from_distributed\))?: its scheduler_0 .* SIGKILL", output
    )
    assert "ERROR" not in output and "Traceback" not in output
    log = (process.event_directory / f"logs/engine_{engine}.log").read_text(errors="replace")
    *_, of_the_new_server = log.split("server_args=")
    assert "Prefill batch" in of_the_new_server
    for tag in ("rollout/raw_reward", "train/loss", "rollout/staleness/max"):
        assert sorted(process.scalars(tag)) == list(ROLLOUTS), tag


def test_no_prompt_is_lost_and_none_comes_twice(survived):
    process, _, rollouts = survived
    assert_none_is_lost(rollouts, process.directory / "checkpoints")
    if "--rollout-function-path" not in process.flags:
        assert_in_turn(rollouts)
    firsts = [samples[first] for samples in rollouts for first in range(0, len(samples), SAMPLES_PER_PROMPT)]
    seen = Counter(sample["metadata"]["number"] for sample in firsts)
    assert set(seen) == set(range(PROMPTS)) and max(seen.values()) - min(seen.values()) <= 2
    assert all(sample["status"] in ("completed", "truncated") for samples in rollouts for sample in samples)


def test_no_token_is_older_than_the_bound_when_it_is_trained(survived):
    process, bound, rollouts = survived
    for rollout_id, samples in enumerate(rollouts):
        # A push before the first rollout and one behind each, whoever died meanwhile.
        ages = [rollout_id + 1 - int(version) for s in samples for version, _, _ in s["weight_version_spans"]]
        assert min(ages) >= 0 and max(ages) <= bound
        assert process.scalars("rollout/staleness/max")[rollout_id] == max(ages)
