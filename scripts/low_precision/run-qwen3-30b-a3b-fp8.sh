#!/usr/bin/env bash
# run-qwen3-30B-A3B.sh in FP8: engines hold 128 x 128 blocks, and training multiplies in the same format.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/launch.sh"

checkpoint_paths Qwen3-30B-A3B-FP8 Qwen3-30B-A3B
source "$SCRIPTS_DIR/models/qwen3-30B-A3B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 8192
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-kl-loss
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 8
  --sglang-mem-fraction-static 0.7
  --sglang-ep-size 8
)

MISC_ARGS=(
  "${PRECISION_ARGS[@]}"
  --transformer-impl transformer_engine
  --fp8-format e4m3
  --fp8-recipe blockwise
)

launch "$@"
