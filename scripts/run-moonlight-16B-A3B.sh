#!/usr/bin/env bash
# GRPO on math problems: Moonlight-16B-A3B on one node of 8 GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths Moonlight-16B-A3B-Instruct
source "$SCRIPTS_DIR/models/moonlight-16B-A3B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --num-steps-per-rollout 4
  --rollout-max-response-len 4096
  --rollout-temperature 1
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
  --max-tokens-per-gpu 8192
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-kl-loss
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 8
  --sglang-mem-fraction-static 0.7
  --sglang-ep-size 8
)

# The tokenizer of this model is code that lies beside the checkpoint.
MISC_ARGS=("${PRECISION_ARGS[@]}" --trust-remote-code)

launch "$@"
