#!/usr/bin/env bash
# GRPO on math problems: MiMo-7B-RL on one node of 8 GPUs. Its layer that drafts tokens for the engines is trained too.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

checkpoint_paths MiMo-7B-RL
source "$SCRIPTS_DIR/models/mimo-7B-rl.sh"

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
  --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.7
  "${EAGLE_ARGS[@]}"
)

# The config of this model is code that lies beside the checkpoint.
MISC_ARGS=(
  "${PRECISION_ARGS[@]}"
  "${MTP_TRAINING_ARGS[@]}"
  --trust-remote-code
)

launch "$@"
