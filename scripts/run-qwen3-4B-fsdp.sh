#!/usr/bin/env bash
# run-qwen3-4B.sh with FSDP2 in place of Megatron: the model comes from transformers, and its layout needs no flags.
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
  --train-backend fsdp
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
  --context-parallel-size 1
  --gradient-checkpointing
  --attn-implementation flash_attention_2
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
