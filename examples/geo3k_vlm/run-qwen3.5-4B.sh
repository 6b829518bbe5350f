#!/usr/bin/env bash
# GRPO on geometry problems with figures: Qwen3.5-4B on one node of 8 GPUs, which training and engines share.
#
#   bash examples/geo3k_vlm/run-qwen3.5-4B.sh --dry-run
#   PROMPT_DATA=train.jsonl EVAL_DATA=test.jsonl bash examples/geo3k_vlm/run-qwen3.5-4B.sh
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# What the library gives another default.
DATA_DIR="${DATA_DIR:-${BASE_DIR:-$HOME/slime}/data}"
PROMPT_DATA="${PROMPT_DATA:-$DATA_DIR/geometry3k/train.jsonl}" EVAL_DATA="${EVAL_DATA:-$DATA_DIR/geometry3k/test.jsonl}"
RUN_NAME="${RUN_NAME:-geo3k_vlm-qwen3.5-4B}"
source "$HERE/../../scripts/lib/launch.sh"

checkpoint_paths Qwen3.5-4B
source "$SCRIPTS_DIR/models/qwen3.5-4B.sh"
MODEL_ARGS+=(--custom-model-provider-path slime_plugins.models.qwen3_5_vl.get_qwen3_5_vl_model_provider)

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --multimodal-keys '{"image": "images"}'
  --rm-type math
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 4096
  --rollout-temperature 1
)

EVAL_ARGS=(
  --eval-interval 20
  --eval-prompt-data geometry3k "$EVAL_DATA"
  --n-samples-per-eval-prompt 1
  --eval-max-response-len 4096
)

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
  --transformer-impl local
  --tensor-model-parallel-size 2
  --sequence-parallel
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
)

GRPO_ARGS=("${CLIPPED_GRPO_ARGS[@]}")

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.7
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
