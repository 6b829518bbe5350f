#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example coding_agent_rl` has of its own: agents are on this machine, and so is the adapter.
TASK_ARGS=(--data examples/coding_agent_rl/toy_task.py:write_data --eval-size 64)
KEEP_MESSAGES=1
ENOUGH_ROLLOUTS=10
STEPS_PER_ROLLOUT=4
export ADAPTER_BIND_HOST=127.0.0.1 ADAPTER_PORT="${ADAPTER_PORT:-0}"
export SWE_AGENT_TIME_BUDGET_SEC="${SWE_AGENT_TIME_BUDGET_SEC:-300}" SWE_EVAL_TIMEOUT_SEC="${SWE_EVAL_TIMEOUT_SEC:-60}"

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/coding_agent_rl/coding_agent.py:generate
  --custom-config-path examples/coding_agent_rl/toy.yaml
  --metadata-key metadata
  --max-turns 2
  --rollout-batch-size 8
  --rollout-max-response-len 32
  # An agent, its sandbox and its tests are a dozen processes.
  --sglang-server-concurrency 8
)
