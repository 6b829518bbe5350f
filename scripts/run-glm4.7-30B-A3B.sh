#!/usr/bin/env bash
# GRPO on long answers: GLM-4.7-Flash (30B-A3B) on one node of 8 GPUs. The layer that drafts tokens is trained too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths GLM-4.7-Flash
source "$SCRIPTS_DIR/models/glm4.7-30B-A3B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --global-batch-size 1024
  --rollout-max-response-len 32768
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 2
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 32768
)

GRPO_ARGS=("${CLIPPED_GRPO_ARGS[@]}")

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 8
  --sglang-mem-fraction-static 0.8
  # 20 heads: 4 ranks share them evenly, and 8 do not.
  --sglang-enable-dp-attention
  --sglang-dp-size 2
  --sglang-enable-dp-lm-head
  --sglang-ep-size 8
  "${EAGLE_ARGS[@]}"
)

MISC_ARGS=(
  "${PRECISION_ARGS[@]}"
  "${MTP_TRAINING_ARGS[@]}"
)

launch "$@"
