#!/usr/bin/env bash
# Qwen3-235B-A22B on 8 nodes, shared by training and engines, with experts in INT4 (W4A16) on the engines and training that
# knows it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/launch.sh"

NUM_NODES=8
# Training rounds the weights of experts as the engines' INT4 format does, in groups of so many. The page
# docs/en/advanced/low-precision.md has the command that makes such a checkpoint.
RUNTIME_ENV[OPEN_TRAINING_INT4_FAKE_QAT_FLAG]=1
RUNTIME_ENV[OPEN_TRAINING_INT4_GROUP_SIZE]=128
checkpoint_paths Qwen3-235B-A22B-INT4 Qwen3-235B-A22B
source "$SCRIPTS_DIR/models/qwen3-235B-A22B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --global-batch-size 64
  --rollout-max-response-len 8192
  --rollout-temperature 0.8
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 4
  --decoder-last-pipeline-num-layers 22
  --context-parallel-size 2
  --expert-model-parallel-size 16
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 8
  --sglang-mem-fraction-static 0.7
  --sglang-ep-size 8
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
