#!/usr/bin/env bash
# One step of GRPO on a board with one small GPU: does the installation work?
# It neither evaluates nor saves: there is nothing to keep.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths Qwen2.5-0.5B-Instruct
source "$SCRIPTS_DIR/models/qwen2.5-0.5B.sh"

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-batch-size 2
  --n-samples-per-prompt 2
  --global-batch-size 4
  --rollout-max-response-len 256
  --rollout-temperature 1
  --num-rollout 1
)

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --colocate
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 2048
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-kl-loss
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.4
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
