"""Dynamic sampling filters that are shipped: drop groups whose rewards carry no signal (arXiv 2503.14476)."""

from typing import Any

import numpy as np

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

# Rewards such as 0.1, summed and averaged in floating point, have a standard deviation near 1e-17 instead of 0.
ZERO_STD_THRESHOLD = 1e-6


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group iff the unbiased standard deviation of its rewards exceeds 1e-6; one sample alone has none."""
    rewards = np.asarray([sample.get_reward_value(args) for sample in samples], dtype=np.float64)
    if rewards.size > 1 and rewards.std(ddof=1) > ZERO_STD_THRESHOLD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(float(rewards[0]), 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """As `check_reward_nonzero_std`, but a rejected group stays when there would be too few groups without it."""
    output = check_reward_nonzero_std(args, samples, **kwargs)
    output.keep_when_insufficient = True
    return output
