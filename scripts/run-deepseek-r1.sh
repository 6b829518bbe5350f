#!/usr/bin/env bash
# GRPO on long answers: DeepSeek-R1 on 16 nodes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=16
checkpoint_paths DeepSeek-R1
source "$SCRIPTS_DIR/models/deepseek-r1.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --num-steps-per-rollout 4
  --rollout-max-response-len 32768
  --rollout-temperature 1
  --over-sampling-batch-size 256
  "${NONZERO_STD_FILTER_ARGS[@]}"
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 8
  --sequence-parallel
  --pipeline-model-parallel-size 4
  --decoder-last-pipeline-num-layers 13
  --context-parallel-size 4
  --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=("${CLIPPED_GRPO_ARGS[@]}")

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

# 64 ranks cannot share dense layers and shared experts of FP8 in whole blocks. Each has them whole, which for the experts needs
# DeepEP.
SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 64
  --sglang-mem-fraction-static 0.7
  --sglang-enable-dp-attention
  --sglang-dp-size 8
  --sglang-enable-dp-lm-head
  --sglang-ep-size 64
  --sglang-moe-dense-tp-size 1
  --sglang-moe-a2a-backend deepep
  "${EAGLE_ARGS[@]}"
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
