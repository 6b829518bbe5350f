#!/usr/bin/env bash
# GRPO on math problems: Kimi-K2-Thinking on 32 nodes. The published weights are INT4 and stay so on the engines.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=32
checkpoint_paths Kimi-K2-Thinking
source "$SCRIPTS_DIR/models/kimi-k2-thinking.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-batch-size 128
  --n-samples-per-prompt 8
  --num-steps-per-rollout 4
  --rollout-max-response-len 16384
  --rollout-temperature 1
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
