#!/usr/bin/env bash
# GRPO on math problems: Qwen3-4B on one node of 8 GPUs, which training and engines share. The script to start from.
#
#   bash scripts/run-qwen3-4B.sh --dry-run     what it would do
#   bash scripts/run-qwen3-4B.sh               the run; further flags are added, and win
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths Qwen3-4B
source "$SCRIPTS_DIR/models/qwen3-4B.sh"

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
  --tensor-model-parallel-size 2
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-kl-loss
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
