"""Graded answers, and for distillation the log-probs of a teacher that the run serves itself.

    bash scripts/quickstart.sh -- --sglang-config examples/served_teacher/serving.yaml --rollout-num-gpus 2 \
      --use-opd --opd-type sglang --opd-kl-coef 0.01 --custom-rm-path examples/served_teacher/reward.py:reward
"""

import asyncio
from typing import Any

from slime.rollout.on_policy_distillation import reward_func
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.reward_types import checked_label
from slime.utils.types import Sample


async def reward(args: Any, sample: Sample, evaluation: bool = False, **kwargs: Any) -> float:
    """1 for a right answer, else 0. In training the model `teacher` of `--sglang-config` sets `sample.teacher_log_probs`."""
    label = checked_label(sample.label)
    if not evaluation:
        await reward_func(args, sample)
    # Grading may take seconds, in which the event loop would serve nobody.
    return float(await asyncio.to_thread(grade_answer_verl, sample.response, label))
