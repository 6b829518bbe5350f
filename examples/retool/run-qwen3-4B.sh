#!/usr/bin/env bash
# Qwen3-4B that writes programs, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags.
#
#   bash examples/retool/run-qwen3-4B.sh --dry-run
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

export RUN_NAME="${RUN_NAME:-retool-qwen3-4B}"
exec bash "$HERE/../../scripts/run-qwen3-4B.sh" \
  --rm-type math \
  --custom-generate-function-path "$HERE/retool.py:generate" \
  --max-turns 8 \
  "$@"
