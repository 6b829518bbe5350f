#!/usr/bin/env bash
# GLM-4-9B with generation that never stops, on one node, 4 GPUs for training and 4 for engines: scripts/run-glm4-9B.sh by
# train_async.py.
#
#   bash examples/fully_async/run-glm4-9B.sh --dry-run
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

export RUN_NAME="${RUN_NAME:-fully_async-glm4-9B}" TRAIN_SCRIPT="${TRAIN_SCRIPT:-$ROOT/train_async.py}"
# This model closes no thoughts, behind which the script's own reward looks.
exec bash "$ROOT/scripts/run-glm4-9B.sh" \
  --rm-type math \
  --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async \
  --eval-function-path slime.rollout.sglang_rollout.generate_rollout \
  --max-weight-staleness 2 \
  --use-tis \
  "$@"
