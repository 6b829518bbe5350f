#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example multi_agent` has of its own.
TASK_ARGS=(--data examples/multi_agent/toy_task.py:write_data)
KEEP_MESSAGES=1
ENOUGH_ROLLOUTS=15
STEPS_PER_ROLLOUT=4

# Five samples per answer: a quarter of the usual answers.
EXAMPLE_ARGS=(
  --custom-generate-function-path examples/multi_agent/multi_agent.py:generate
  --custom-rollout-log-function-path examples/multi_agent/multi_agent.py:log_roles
  --custom-config-path examples/multi_agent/toy_agents.yaml
  --disable-grpo-std-normalization
  --rollout-batch-size 16
  --n-samples-per-prompt 4
)
