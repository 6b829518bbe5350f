#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3.5-4B on chats about figures, one node of 8 GPUs.
#
#   bash examples/geo3k_vlm/run-qwen3.5-4B-sft.sh --dry-run
#   SFT_DATA=train_sft.jsonl SAVE=checkpoints/geo3k-sft bash examples/geo3k_vlm/run-qwen3.5-4B-sft.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# What the library gives another default.
SFT_DATA="${SFT_DATA:-${DATA_DIR:-${BASE_DIR:-$HOME/slime}/data}/geometry3k/train_sft.jsonl}"
RUN_NAME="${RUN_NAME:-geo3k_vlm-sft-qwen3.5-4B}"
source "$HERE/../../scripts/lib/launch.sh"

checkpoint_paths Qwen3.5-4B
source "$SCRIPTS_DIR/models/qwen3.5-4B.sh"
MODEL_ARGS+=(--custom-model-provider-path slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider)

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${SFT_DATA_ARGS[@]}"
  --multimodal-keys '{"image": "images"}'
  --loss-mask-type qwen3_5
)

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --transformer-impl local
  --tensor-model-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
)

GRPO_ARGS=("${SFT_LOSS_ARGS[@]}")

OPTIMIZER_ARGS=("${SFT_OPTIMIZER_ARGS[@]}")

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
