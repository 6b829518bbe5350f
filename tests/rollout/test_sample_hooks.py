"""What hooks may leave behind."""

import asyncio
import threading

import pytest

from slime.rollout.rm_hub import async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.rollout_args import make_args

HOOKS = """
def breaks(args, sample):
    sample.loss_mask = [1, 1, 1]

def repairs(args, sample):
    sample.loss_mask = None

async def replaces(args, sample):
    sample.response_length = 5
    return sample
"""


@pytest.mark.parametrize(("name", "field"), [("breaks", "loss_mask has 3 entries"), ("replaces", "response_length 5")])
def test_a_hook_that_breaks_lengths_is_named_at_once(tmp_path, name, field):
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS)
    hooks = [f"{file}:{name}", f"{file}:repairs"]
    args = make_args("", rollout_sample_hook_path=hooks)
    sample = Sample(index=3, tokens=[1, 2, 3], response_length=2)
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path .*:{name} left a sample .*sample 3: {field}"):
        asyncio.run(apply_rollout_sample_hooks(args, sample))


def test_as_many_hooks_run_at_once_as_generations_and_rewards_pass_them(tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(
        "def hook(args, sample):\n"
        "    args.running.append(sample.index)\n    args.most.append(len(args.running))\n"
        "    args.waiting.release()\n"
        "    assert args.graded.wait(60)\n    args.running.remove(sample.index)\n"
        "def reward(args, sample):\n    args.graded.set()\n    return 1.0\n"
    )
    args = make_args(
        "",
        rollout_sample_hook_path=[f"{file}:hook"],
        custom_rm_path=f"{file}:reward",
        sglang_server_concurrency=3,
        rollout_num_engines=2,
    )
    args.running, args.most, args.graded, args.waiting = [], [], threading.Event(), threading.Semaphore(0)

    async def main():
        async with asyncio.timeout(60):
            hooks = [asyncio.ensure_future(apply_rollout_sample_hooks(args, Sample(index=i))) for i in range(20)]
            for _ in range(6):
                await asyncio.to_thread(args.waiting.acquire, timeout=60)
            # Every hook waits for this reward.
            await async_rm(args, Sample())
            await asyncio.gather(*hooks)

    asyncio.run(main())
    assert max(args.most) == 6
