#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example calculator` has of its own.
TASK_ARGS=(--data examples/calculator/toy_task.py:write_data)

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/calculator/calculator.py:generate
  --max-turns 4
  --rollout-max-response-len 128
)
