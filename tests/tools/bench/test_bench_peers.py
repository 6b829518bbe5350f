"""Both sides of the comparison with a peer have answers of the same lengths."""

import asyncio
from types import SimpleNamespace

import pytest
from tensorboard.summary import Writer

from tools.bench import long_answers
from tools.bench.bench_loop import read_scalars
from tools.bench.bench_peers import LENGTHS, PROMPTS, SAMPLES, lengths_of_steps


@pytest.mark.parametrize("kind", LENGTHS)
def test_the_peer_gets_the_lengths_that_ours_draw(kind, monkeypatch):
    longest, function = LENGTHS[kind]
    asked = []

    async def generate(args, sample, sampling_params):
        asked.append(sampling_params)
        return sample

    monkeypatch.setattr(long_answers, "generate", generate)
    args = SimpleNamespace(rollout_max_response_len=longest)
    count = 2 * PROMPTS * SAMPLES
    for index in range(count):
        sample = SimpleNamespace(index=index)
        asyncio.run(getattr(long_answers, function)(args, sample, {"max_new_tokens": longest}))
    assert all(params["ignore_eos"] for params in asked)
    assert [params["max_new_tokens"] for params in asked] == sum(lengths_of_steps(kind, 2), [])


def test_every_step_of_a_long_run_counts(tmp_path):
    """Of more than ten a reader of event files would draw ten by chance."""
    writer = Writer(str(tmp_path))
    for step in range(30):
        writer.add_scalar("perf/step_time", float(step), step)
    writer.close()
    assert read_scalars(tmp_path)["perf/step_time"] == {step: float(step) for step in range(30)}
