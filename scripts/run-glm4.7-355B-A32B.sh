#!/usr/bin/env bash
# GSPO on long answers: GLM-4.7 (355B-A32B). ACTOR_NUM_NODES chooses the nodes, a multiple of 8.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES="${ACTOR_NUM_NODES:-8}"
checkpoint_paths GLM-4.7
source "$SCRIPTS_DIR/models/glm4.7-355B-A32B.sh"

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
  --context-parallel-size 2
  --expert-model-parallel-size 16
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
  --advantage-estimator gspo
  --eps-clip 1e-4
  --eps-clip-high 2e-4
  "${NO_KL_ARGS[@]}"
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 32
  --sglang-mem-fraction-static 0.7
  --sglang-enable-dp-attention
  --sglang-dp-size 4
  --sglang-enable-dp-lm-head
  --sglang-ep-size 32
  "${EAGLE_ARGS[@]}"
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
