#!/usr/bin/env bash
# GSPO on math problems: Qwen3-235B-A22B on 16 nodes, 8 for training and 8 for engines.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=16
checkpoint_paths Qwen3-235B-A22B
source "$SCRIPTS_DIR/models/qwen3-235B-A22B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --global-batch-size 64
  --rollout-max-response-len 8192
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes 8
  --actor-num-gpus-per-node 8
  --rollout-num-gpus 64
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 4
  --decoder-last-pipeline-num-layers 22
  --context-parallel-size 2
  --expert-model-parallel-size 16
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
  --advantage-estimator gspo
  --eps-clip 4e-4
  "${NO_KL_ARGS[@]}"
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 32
  --sglang-mem-fraction-static 0.7
  --sglang-enable-dp-attention
  --sglang-dp-size 4
  --sglang-enable-dp-lm-head
  --sglang-ep-size 32
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
