"""Answers of a real engine by stream, through the router and past it."""

import pytest

from slime.rollout.rollout_dump import load_rollout
from tests.support.models.tiny_task import PLUG_INS
from tests.support.processes.train_process import TrainProcess


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--rollout-top-p", "0.9")])
def test_a_stream_gives_the_tokens_of_one_answer(task, tmp_path, words):
    dumps = str(tmp_path / "{rollout_id}.pt")
    flags = [
        *task.rollout_flags, *words, "--debug-rollout-only", "--rollout-num-gpus", "1", "--num-rollout", "1",
        "--custom-generate-function-path", f"{PLUG_INS}:streamed_generate", "--save-debug-rollout-data", dumps,
        # Beside other requests, or behind a cached prompt, the numbers of both would differ in their last bits, and so might
        # what is kept at the cut.
        "--sglang-max-running-requests", "1", "--sglang-disable-radix-cache",
    ]  # fmt: skip
    TrainProcess(flags, tmp_path / "run").finish(400)
    # A random model may end an answer at once, but not most of them.
    lengths = [sample.response_length for sample in load_rollout(dumps, 0)]
    assert sum(length > 1 for length in lengths) > len(lengths) / 2
