#!/usr/bin/env bash
# Qwen3-4B serves the customers of τ-bench, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/tau-bench/run-qwen3-4B.sh --dry-run
#   PROMPT_DATA=tasks.jsonl EVAL_DATA=test.jsonl bash examples/tau-bench/run-qwen3-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-tau-bench-qwen3-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --custom-generate-function-path "$HERE/generate_with_tau.py:generate" \
  --custom-config-path "$HERE/tau.yaml" \
  --metadata-key metadata \
  --max-turns 30 \
  --rollout-max-response-len 12288 \
  --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std \
  "$@"
