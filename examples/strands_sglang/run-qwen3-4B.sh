#!/usr/bin/env bash
# Qwen3-4B as the model of an agent of strands-agents, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/strands_sglang/run-qwen3-4B.sh --dry-run
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-strands_sglang-qwen3-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --rm-type math \
  --custom-generate-function-path "$HERE/strands_model.py:generate" \
  --custom-config-path "$HERE/agent.yaml" \
  --max-turns 8 \
  "$@"
