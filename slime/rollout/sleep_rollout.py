"""Public import path of the rollout that never ends; its home is `slime.rollout.sglang_rollout`."""

from slime.rollout.sglang_rollout import sleep as sleep
