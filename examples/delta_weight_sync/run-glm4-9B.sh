#!/usr/bin/env bash
# GLM-4-9B whose engines get what changed, as files, on one node, 4 GPUs for training and 4 for engines: scripts/run-glm4-9B.sh and
# a few more flags.
#
#   bash examples/delta_weight_sync/run-glm4-9B.sh --dry-run
#   PUSHES_DIR=/shared/pushes LOCAL_DIR=/nvme/weights bash examples/delta_weight_sync/run-glm4-9B.sh
#
# PUSHES_DIR is seen by all nodes, and by other clusters that follow; LOCAL_DIR is a directory on the fastest disk of each host
# of engines, with room for the weights.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

export RUN_NAME="${RUN_NAME:-delta_weight_sync-glm4-9B}"
PUSHES_DIR="${PUSHES_DIR:-${CHECKPOINTS_DIR:-${BASE_DIR:-$HOME/slime}/checkpoints}/$RUN_NAME/pushes}"
# This model closes no thoughts, behind which the script's own reward looks.
exec bash "$ROOT/scripts/run-glm4-9B.sh" \
  --rm-type math \
  --update-weight-transport disk \
  --update-weight-mode delta \
  --update-weight-disk-dir "$PUSHES_DIR" \
  --update-weight-local-checkpoint-dir "${LOCAL_DIR:-${TMPDIR:-/tmp}/$RUN_NAME-weights}" \
  "$@"
