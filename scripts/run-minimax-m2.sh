#!/usr/bin/env bash
# GRPO on long answers: MiniMax-M2 on 16 nodes. Four expert-parallel ranks need GPUs of more than 192 GB;
# EXPERT_PARALLEL_SIZE=32 fits those of 80 GB.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=16
EXPERT_PARALLEL_SIZE="${EXPERT_PARALLEL_SIZE:-4}"
checkpoint_paths MiniMax-M2
source "$SCRIPTS_DIR/models/minimax-m2.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --num-steps-per-rollout 4
  --rollout-max-response-len 32768
  --rollout-temperature 1
  "${NONZERO_STD_FILTER_ARGS[@]}"
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 2
  --context-parallel-size 1
  --expert-model-parallel-size "$EXPERT_PARALLEL_SIZE"
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 8192
)

GRPO_ARGS=("${CLIPPED_GRPO_ARGS[@]}")

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 16
  --sglang-mem-fraction-static 0.7
  --sglang-ep-size 16
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
