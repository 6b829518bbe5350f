#!/usr/bin/env bash
# Qwen3-4B behind a command-line agent, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/coding_agent_rl/run-qwen3-4B.sh --dry-run
#   PROMPT_DATA=issues.jsonl EVAL_DATA=held_out.jsonl bash examples/coding_agent_rl/run-qwen3-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-coding_agent_rl-qwen3-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --custom-generate-function-path "$HERE/coding_agent.py:generate" \
  --custom-config-path "$HERE/coding_agent.yaml" \
  --metadata-key metadata \
  --max-turns 50 \
  --rollout-max-context-len 32768 \
  "$@"
