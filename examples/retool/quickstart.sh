#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example retool` has of its own.
TASK_ARGS=(--data examples/retool/toy_task.py:write_data)
ENOUGH_ROLLOUTS=15
STEPS_PER_ROLLOUT=4

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/retool/retool.py:generate
  --max-turns 2
  --rollout-max-response-len 96
)
