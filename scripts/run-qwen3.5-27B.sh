#!/usr/bin/env bash
# GRPO on long answers: Qwen3.5-27B. ACTOR_NUM_NODES and CONTEXT_PARALLEL_SIZE choose nodes and context parallelism.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES="${ACTOR_NUM_NODES:-4}"
CONTEXT_PARALLEL_SIZE="${CONTEXT_PARALLEL_SIZE:-2}"
checkpoint_paths Qwen3.5-27B
source "$SCRIPTS_DIR/models/qwen3.5-27B.sh"

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
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 2
  --context-parallel-size "$CONTEXT_PARALLEL_SIZE"
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 8192
)

GRPO_ARGS=("${CLIPPED_GRPO_ARGS[@]}")

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.75
  "${EAGLE_ARGS[@]}"
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
