#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-235B-A22B on conversations, 4 nodes of 8 GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=4
checkpoint_paths Qwen3-235B-A22B
source "$SCRIPTS_DIR/models/qwen3-235B-A22B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${SFT_DATA_ARGS[@]}"
  --loss-mask-type qwen3
)

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

GRPO_ARGS=("${SFT_LOSS_ARGS[@]}")

OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
