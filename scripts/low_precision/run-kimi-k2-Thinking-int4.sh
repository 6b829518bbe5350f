#!/usr/bin/env bash
# run-kimi-k2-Thinking.sh from the published INT4 weights: engines serve them as they are, training starts from their BF16
# form (tools/convert_k2_thinking_int4_to_bf16.py) and rounds as they do.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib/launch.sh"

NUM_NODES=32
# Training rounds the weights of experts as the engines' INT4 format does, in groups of so many.
RUNTIME_ENV[OPEN_TRAINING_INT4_FAKE_QAT_FLAG]=1
RUNTIME_ENV[OPEN_TRAINING_INT4_GROUP_SIZE]=32
checkpoint_paths Kimi-K2-Thinking Kimi-K2-Thinking-bf16
source "$SCRIPTS_DIR/models/kimi-k2-thinking.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --num-steps-per-rollout 4
  --rollout-max-response-len 16384
  --rollout-temperature 0.8
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 8
  --sequence-parallel
  --pipeline-model-parallel-size 8
  --decoder-last-pipeline-num-layers 5
  --context-parallel-size 4
  --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}" "${CPU_OPTIMIZER_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 16
  --sglang-mem-fraction-static 0.7
  --sglang-enable-dp-attention
  --sglang-dp-size 2
  --sglang-enable-dp-lm-head
  --sglang-ep-size 16
)

# The tokenizer of this model is code that lies beside the checkpoint.
MISC_ARGS=("${PRECISION_ARGS[@]}" --trust-remote-code)

launch "$@"
