#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example fan_out` has of its own.
TASK_ARGS=(--data examples/fan_out/toy_task.py:write_data)
KEEP_MESSAGES=1
ENOUGH_ROLLOUTS=15
STEPS_PER_ROLLOUT=4

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/fan_out/fan_out.py:generate
  --disable-grpo-std-normalization
)
