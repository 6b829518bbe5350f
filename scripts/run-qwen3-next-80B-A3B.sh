#!/usr/bin/env bash
# GSPO on long answers: Qwen3-Next-80B-A3B. ACTOR_NUM_NODES and CONTEXT_PARALLEL_SIZE choose nodes and context parallelism.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES="${ACTOR_NUM_NODES:-4}"
CONTEXT_PARALLEL_SIZE="${CONTEXT_PARALLEL_SIZE:-2}"
checkpoint_paths Qwen3-Next-80B-A3B-Thinking
source "$SCRIPTS_DIR/models/qwen3-next-80B-A3B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --global-batch-size 64
  --rollout-max-response-len 32768
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 4
  --context-parallel-size "$CONTEXT_PARALLEL_SIZE"
  --expert-model-parallel-size 8
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 8192
)

GRPO_ARGS=(
  --advantage-estimator gspo
  --eps-clip 4e-4
  "${NO_KL_ARGS[@]}"
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 8
  --sglang-mem-fraction-static 0.8
  --sglang-ep-size 8
  "${EAGLE_ARGS[@]}"
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
