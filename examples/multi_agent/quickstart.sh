#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example multi_agent` has of its own: two solvers, two rewriters and a selector.
TASK_ARGS=(--data examples/multi_agent/toy_task.py:write_data --eval-size 128 --sft-size 24576)
# Three roles take longer to imitate. A model that was saved earlier would be taken for the taught one.
EXAMPLE_SFT_ARGS=(--num-rollout 45 --save-interval 45)
KEEP_MESSAGES=1
ENOUGH_ROLLOUTS=15
STEPS_PER_ROLLOUT=4

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/multi_agent/multi_agent.py:generate
  --custom-rollout-log-function-path examples/multi_agent/multi_agent.py:log_roles
  --custom-config-path examples/multi_agent/toy.yaml
  --disable-grpo-std-normalization
  # Five answers come from each execution.
  --rollout-batch-size 16
  --n-samples-per-prompt 4
)
