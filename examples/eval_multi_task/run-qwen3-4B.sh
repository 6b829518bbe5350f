#!/usr/bin/env bash
# Qwen3-4B, evaluated on AIME, GPQA and IFBench, on one node of 8 GPUs: scripts/run-qwen3-4B.sh with eval.yaml in place of its set.
#
#   bash examples/eval_multi_task/run-qwen3-4B.sh --dry-run
#   EVAL_CONFIG=my_sets.yaml bash examples/eval_multi_task/run-qwen3-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
ROOT="$(cd "$HERE/../.." && pwd)"

export RUN_NAME="${RUN_NAME:-eval_multi_task-qwen3-4B}"
if [[ -z "${EVAL_CONFIG:-}" ]]; then
  DATA_DIR="${DATA_DIR:-${BASE_DIR:-$HOME/slime}/data}"
  EVAL_CONFIG="$ROOT/outputs/eval_multi_task/eval.yaml"
  mkdir -p "$(dirname "$EVAL_CONFIG")"
  sed "s|DATA_DIR/|$DATA_DIR/|" "$HERE/eval.yaml" >"$EVAL_CONFIG"
fi
export EVAL_CONFIG
exec bash "$ROOT/scripts/run-qwen3-4B.sh" "$@"
