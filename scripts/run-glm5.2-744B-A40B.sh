#!/usr/bin/env bash
# GRPO on very long answers: GLM-5.2 (744B-A40B) on 32 nodes. Which engines read prompts and which write answers stands in
# run-glm5.2-744B-A40B.serving.yaml.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh"

NUM_NODES=32
checkpoint_paths GLM-5.2
source "$SCRIPTS_DIR/models/glm5.2-744B-A40B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rm-type deepscaler
  --rollout-batch-size 8
  --n-samples-per-prompt 8
  --global-batch-size 64
  --rollout-max-response-len 65536
  --rollout-temperature 1
)

EVAL_ARGS=("${MATH_EVAL_ARGS[@]}")

PERF_ARGS=(
  --actor-num-nodes "$NUM_NODES"
  --actor-num-gpus-per-node 8
  --colocate
  --tensor-model-parallel-size 4
  --sequence-parallel
  --pipeline-model-parallel-size 8
  --decoder-last-pipeline-num-layers 8
  --context-parallel-size 8
  --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 8192
)

GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-tis
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 64
  --sglang-mem-fraction-static 0.7
  --sglang-config "$SCRIPTS_DIR/run-glm5.2-744B-A40B.serving.yaml"
  --sglang-enable-dp-attention
  --sglang-dp-size 8
  --sglang-enable-dp-lm-head
  --sglang-ep-size 64
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
