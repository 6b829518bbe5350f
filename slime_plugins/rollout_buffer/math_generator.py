"""The generator of `--rollout-task-type math`, the default: one answer to each prompt, right or wrong by its box."""

from __future__ import annotations

import asyncio
from typing import Any

from slime.rollout.rm_hub import grade_answer_verl
from slime.utils.reward_types import checked_label
from slime_plugins.rollout_buffer.base_generator import BaseGenerator

TASK_TYPE = "math"


class MathGenerator(BaseGenerator):
    """Asks once; the reward is 1.0 if the last box of the answer equals the row's label, else 0.0."""

    async def trajectory(self, row: dict[str, Any]) -> dict[str, Any]:
        label = checked_label(row["label"])
        turn = await self.chat(row["prompt"])
        right = await asyncio.to_thread(grade_answer_verl, turn.text, label)
        return self.item(turn, reward=float(right), label=row["label"])


def run_rollout(data: dict[str, Any]) -> None:
    """Make trajectories until the process is ended."""
    MathGenerator(data).run()


def get_group_data_meta_info(groups: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """The share of right answers."""
    rewards = [item["reward"] for items in groups.values() for item in items]
    return {"right_answers": sum(rewards) / len(rewards)} if rewards else {}
