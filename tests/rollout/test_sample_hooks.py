"""What hooks may leave behind."""

import asyncio
from types import SimpleNamespace

import pytest

from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.utils.errors import UserError
from slime.utils.types import Sample

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
    args = SimpleNamespace(rollout_sample_hook_path=hooks, http_request_timeout=30.0)
    sample = Sample(index=3, tokens=[1, 2, 3], response_length=2)
    with pytest.raises(UserError, match=f"^--rollout-sample-hook-path .*:{name} left a sample .*sample 3: {field}"):
        asyncio.run(apply_rollout_sample_hooks(args, sample))
