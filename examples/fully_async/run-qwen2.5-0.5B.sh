#!/usr/bin/env bash
# Qwen2.5-0.5B with generation that never stops, on one node: one GPU trains, three generate.
#
#   bash examples/fully_async/run-qwen2.5-0.5B.sh --dry-run
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

# What the library gives another default.
RUN_NAME="${RUN_NAME:-fully_async-qwen2.5-0.5B}" TRAIN_SCRIPT="${TRAIN_SCRIPT:-$ROOT/train_async.py}"
source "$ROOT/scripts/lib/launch.sh"

checkpoint_paths Qwen2.5-0.5B-Instruct
source "$SCRIPTS_DIR/models/qwen2.5-0.5B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
  --eval-function-path slime.rollout.sglang_rollout.generate_rollout
  --max-weight-staleness 2
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 1024
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --rollout-num-gpus 3
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(--rollout-num-gpus-per-engine 1)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
