"""A whole run that takes its samples from the rollout buffer: a generator in a process of its own asks the run's engines."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
import torch

from slime.utils.ports import reserve_port
from tests.support.models.tiny_task import SAMPLES_PER_PROMPT, without
from tests.support.processes.train_process import REPOSITORY, TrainProcess
from tests.support.processes.waiting import wait_until

# As many groups again wait at most: the third rollout after a restart needs a generator.
ROLLOUT_BATCH_SIZE = 2

GENERATOR = """
from slime_plugins.rollout_buffer.base_generator import BaseGenerator

TASK_TYPE = "even_tokens"


class EvenTokens(BaseGenerator):
    async def trajectory(self, row):
        turn = await self.chat(row["prompt"])
        return self.item(turn, reward=sum(token % 2 for token in turn.output_ids) / len(turn.output_ids))


def run_rollout(data):
    EvenTokens(data).run()
"""


class Service:
    """`python -m slime_plugins.rollout_buffer` on a free port."""

    def __init__(self, directory, port):
        self.directory, self.url = directory, f"http://127.0.0.1:{port}"
        self._command = [
            sys.executable, "-m", "slime_plugins.rollout_buffer", "--port", str(port), "--generator", str(directory),
            "--state", str(directory / "buffer.sqlite"), "--log-dir", str(directory / "logs"),
        ]  # fmt: skip
        self._process = None

    def start(self):
        with (self.directory / "service.txt").open("ab") as output:
            self._process = subprocess.Popen(
                self._command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        wait_until(self.status, 60)

    def status(self):
        try:
            return json.loads(urllib.request.urlopen(f"{self.url}/status", timeout=10).read())
        except OSError:
            assert self._process.poll() is None, (self.directory / "service.txt").read_text()
            return None

    def kill(self):
        self._process.kill()
        self._process.wait(30)


@pytest.fixture
def service(tmp_path):
    (tmp_path / "even_generator.py").write_text(GENERATOR)
    with reserve_port("127.0.0.1", 22000) as reserved:
        port = reserved.port
    running = Service(tmp_path, port)
    running.start()
    yield running
    running.kill()


@pytest.mark.slow
def test_a_run_trains_on_what_generators_send_also_when_the_service_is_killed(task, service, tmp_path):
    """And one that resumes is given the rest of the epoch."""
    checkpoints, dumps = tmp_path / "checkpoints", tmp_path / "dumps"

    def flags(num_rollout):
        return [
            *without(task.loop_flags, "--custom-rm-path"),
            "--rollout-function-path", "slime_plugins.rollout_buffer.rollout.generate_rollout",
            "--rollout-buffer-url", service.url, "--rollout-task-type", "even_tokens", "--num-rollout", num_rollout,
            "--save", checkpoints, "--load", checkpoints, "--save-interval", "1", "--use-tis",
            "--save-debug-rollout-data", dumps / "{rollout_id}.pt", "--rollout-batch-size", ROLLOUT_BATCH_SIZE,
        ]  # fmt: skip

    with TrainProcess(flags(4), tmp_path / "first") as process:
        process.wait_for_line(r"rollout 0 \(1/4\)", 300)
        service.kill()
        service.start()
        process.wait_for_success(300)
        process.assert_no_process_left()
    difference = process.scalars("train/train_rollout_logprob_abs_diff")
    # The generator had asked for these answers before the weights were pushed that train them.
    assert sorted(difference) == [0, 1, 2, 3] and difference[0] <= 1e-5
    assert "the service was started again; so is its generator" in process.output()
    assert service.status()["generator"] == "ended"
    with TrainProcess(flags(5), tmp_path / "second") as resumed:
        resumed.wait_for_success(300)
    assert list(resumed.scalars("train/loss")) == [4]
    taken = []
    for rollout_id in range(5):
        samples = torch.load(dumps / f"{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == ROLLOUT_BATCH_SIZE * SAMPLES_PER_PROMPT
        for sample in samples:
            response = sample["tokens"][-sample["response_length"] :]
            assert sample["reward"] == pytest.approx((response % 2).float().mean().item())
            assert len(sample["rollout_log_probs"]) == sample["response_length"] and sample["weight_versions"]
        taken += [sample["metadata"]["instance_id"] for sample in samples[::SAMPLES_PER_PROMPT]]
    # No prompt twice in an epoch of fourteen, over both starts.
    assert len(set(taken)) == len(taken) == 5 * ROLLOUT_BATCH_SIZE
    assert {name.partition("-")[0] for name in taken} == {"0"}
