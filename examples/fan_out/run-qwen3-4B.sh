#!/usr/bin/env bash
# Qwen3-4B whose answers are checked in a second context, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/fan_out/run-qwen3-4B.sh --dry-run
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-fan_out-qwen3-4B}" KEEP_MESSAGES=1
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --rm-type math \
  --custom-generate-function-path "$HERE/fan_out.py:generate" \
  --disable-grpo-std-normalization \
  "$@"
