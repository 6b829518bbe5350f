#!/usr/bin/env bash
# Qwen3-8B learns on one node of 8 GPUs: from Qwen3-32B, an SGLang server that is there already, or from a checkpoint of its own
# architecture, which the training ranks hold beside its weights:
#
#   python -m sglang.launch_server --model-path MODELS/Qwen3-32B --tp 8 --host 10.0.0.5 --port 30000    on another node
#   TEACHER_URL=http://10.0.0.5:30000 bash examples/on_policy_distillation/run-qwen3-8B.sh
#   TEACHER_LOAD=MODELS/my-Qwen3-8B bash examples/on_policy_distillation/run-qwen3-8B.sh
#   bash examples/on_policy_distillation/run-qwen3-8B.sh --dry-run
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# What the library gives another default.
RUN_NAME="${RUN_NAME:-on_policy_distillation-qwen3-8B}"
source "$HERE/../../scripts/lib/launch.sh"

checkpoint_paths Qwen3-8B
source "$SCRIPTS_DIR/models/qwen3-8B.sh"

CKPT_ARGS+=("${SAVE_ARGS[@]}")

ROLLOUT_ARGS=(
  "${MATH_DATA_ARGS[@]}"
  --rollout-batch-size 16
  --n-samples-per-prompt 4
  --global-batch-size 64
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
  "${RECOMPUTE_ARGS[@]}"
  --use-dynamic-batch-size
  --max-tokens-per-gpu 9216
)

if [[ -n "${TEACHER_LOAD:-}" ]]; then
  # Nobody has to be asked in the rollout, so answers are graded there as usual.
  ROLLOUT_ARGS+=(--rm-type deepscaler)
  TEACHER_ARGS=(--opd-type megatron --opd-teacher-load "$TEACHER_LOAD")
else
  # The address counts when the run starts; a plan needs none.
  TEACHER_ARGS=(
    --opd-type sglang
    --rm-url "${TEACHER_URL:-http://127.0.0.1:30000}"
    --custom-rm-path "$HERE/distill.py:reward"
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
  )
fi
GRPO_ARGS=(
  "${CLIPPED_GRPO_ARGS[@]}"
  --use-opd
  --opd-kl-coef 1.0
  "${TEACHER_ARGS[@]}"
)

OPTIMIZER_ARGS=("${ADAM_ARGS[@]}")

SGLANG_ARGS=(
  --rollout-num-gpus-per-engine 2
  --sglang-mem-fraction-static 0.7
)

MISC_ARGS=("${PRECISION_ARGS[@]}")

launch "$@"
