#!/usr/bin/env bash
# Qwen3-4B as five solvers, five rewriters and a selector, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/multi_agent/run-qwen3-4B.sh --dry-run
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-multi_agent-qwen3-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --custom-generate-function-path "$HERE/multi_agent.py:generate" \
  --custom-rollout-log-function-path "$HERE/multi_agent.py:log_roles" \
  --custom-config-path "$HERE/agents.yaml" \
  --disable-grpo-std-normalization \
  "$@"
