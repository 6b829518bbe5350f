#!/usr/bin/env bash
# GRPO with everything deterministic: two runs of this script give the same numbers, bit for bit. Qwen2.5-0.5B-Instruct on
# one node of 8 GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

# Libraries that may choose among algorithms are told to choose a deterministic one.
RUNTIME_ENV[NCCL_ALGO]=Ring
RUNTIME_ENV[NVTE_ALLOW_NONDETERMINISTIC_ALGO]=0
RUNTIME_ENV[CUBLAS_WORKSPACE_CONFIG]=:4096:8
checkpoint_paths Qwen2.5-0.5B-Instruct
source "$SCRIPTS_DIR/models/qwen2.5-0.5B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type math
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 1024
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 1
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
  --sglang-enable-deterministic-inference
  --sglang-attention-backend flashinfer
)

MISC_ARGS=(
  "${PRECISION_ARGS[@]}"
  --deterministic-mode
  --seed 1234
  --rollout-seed 42
)

launch "$@"
