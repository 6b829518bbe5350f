#!/usr/bin/env bash
# Qwen3.5-4B in dialogues about figures, on one node of 8 GPUs: examples/geo3k_vlm/run-qwen3.5-4B.sh and a few more flags.
#
#   bash examples/geo3k_vlm_multi_turn/run-qwen3.5-4B.sh --dry-run
#   PROMPT_DATA=train.jsonl EVAL_DATA=test.jsonl bash examples/geo3k_vlm_multi_turn/run-qwen3.5-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-geo3k_vlm_multi_turn-qwen3.5-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../geo3k_vlm/run-qwen3.5-4B.sh" \
  --custom-generate-function-path "$HERE/geo3k_multi_turn.py:generate" \
  --custom-config-path "$HERE/geo3k.yaml" \
  "$@"
