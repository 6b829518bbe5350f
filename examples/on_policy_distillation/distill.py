"""Distillation alone: the teacher's log-probs teach, and rewards are only measured, in evaluations."""

import asyncio
from typing import Any

from slime.rollout.on_policy_distillation import reward_func
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.utils.reward_types import checked_label
from slime.utils.types import Sample


async def reward(args: Any, sample: Sample, evaluation: bool = False, **kwargs: Any) -> float:
    """0, with `teacher_log_probs` set; in an evaluation 1 for a right answer, else 0, and the teacher is not asked."""
    if evaluation:
        # Grading may take seconds, in which the event loop would serve nobody.
        return float(await asyncio.to_thread(grade_answer_verl, sample.response, checked_label(sample.label)))
    return await reward_func(args, sample)
