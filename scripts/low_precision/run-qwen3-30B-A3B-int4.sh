#!/usr/bin/env bash
# run-qwen3-30B-A3B.sh with experts in INT4 (W4A16) on the engines, and training that knows it.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/launch.sh"

# Training rounds the weights of experts as the engines' INT4 format does, in groups of so many. The page
# docs/en/advanced/low-precision.md has the command that makes such a checkpoint.
RUNTIME_ENV[OPEN_TRAINING_INT4_FAKE_QAT_FLAG]=1
RUNTIME_ENV[OPEN_TRAINING_INT4_GROUP_SIZE]=128
checkpoint_paths Qwen3-30B-A3B-INT4 Qwen3-30B-A3B
source "$SCRIPTS_DIR/models/qwen3-30B-A3B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 8192
  --rollout-temperature 0.8
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

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
