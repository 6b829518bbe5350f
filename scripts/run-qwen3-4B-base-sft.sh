#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B-Base on conversations, one node of 8 GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths Qwen3-4B-Base
source "$SCRIPTS_DIR/models/qwen3-4B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${SFT_DATA_ARGS[@]}"
  --loss-mask-type qwen3
)

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --tensor-model-parallel-size 1
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 1
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=("${SFT_LOSS_ARGS[@]}")

OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}")

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
