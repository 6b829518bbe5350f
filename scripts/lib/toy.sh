#!/usr/bin/env bash
# MODEL=toy: a launch script's data, rollout and objective on a tiny model with random weights, so that the script can be
# tried on any machine, without GPUs too. What belongs to the large model is replaced: shape, layout, precision, engines; and
# rewards are random.

# The model and its task: where a path was not set, it is the toy's.
toy_paths() {
  TOY_DIR="${TOY_DIR:-$BASE_DIR/toy}"
  HF_CHECKPOINT="${HF_CHECKPOINT:-$TOY_DIR/model}"
  REF_LOAD="${REF_LOAD:-$HF_CHECKPOINT}"
  PROMPT_DATA="${PROMPT_DATA:-$TOY_DIR/train.jsonl}"
  EVAL_DATA="${EVAL_DATA:-$TOY_DIR/eval.jsonl@[0:32]}"
  SFT_DATA="${SFT_DATA:-$TOY_DIR/sft.jsonl}"
  # Never among the checkpoints of the script's own model.
  RUN_NAME="$RUN_NAME-toy"
}

# The task is made beside its place and appears there whole: scripts that start together find it or make one each.
make_toy_task() {
  if [[ -f "$TOY_DIR/task.json" ]]; then return; fi
  mkdir -p "$(dirname "$TOY_DIR")"
  # What killed starts left: a task takes seconds.
  find "$(dirname "$TOY_DIR")" -maxdepth 1 -name "$(basename "$TOY_DIR").draft-*" -mmin +60 -exec rm -rf {} + || true
  TOY_DRAFT="$(mktemp -d "$TOY_DIR.draft-XXXXXX")"
  trap 'rm -rf "$TOY_DRAFT"' EXIT
  chmod 755 "$TOY_DRAFT"
  "$PYTHON" "$REPOSITORY/tools/make_toy_task.py" "$TOY_DRAFT" --sft-size 512 >&2
  if ! mv -T "$TOY_DRAFT" "$TOY_DIR" 2>/dev/null; then
    rm -rf "$TOY_DRAFT"
    [[ -f "$TOY_DIR/task.json" ]] || refuse "$TOY_DIR holds no whole toy task: remove it, or set TOY_DIR to another directory"
  fi
  trap - EXIT
}

# Sets array $1 to its words without the flags $2, $3, ... and their values.
drop_flags() {
  local -n words_of_array="$1"
  local kept=() word dropped=" ${*:2} " dropping=""
  for word in ${words_of_array[@]+"${words_of_array[@]}"}; do
    if [[ "$word" == --* ]]; then
      if [[ "$dropped" == *" $word "* ]]; then dropping=1; else dropping=""; fi
    fi
    if [[ -z "$dropping" ]]; then kept+=("$word"); fi
  done
  words_of_array=(${kept[@]+"${kept[@]}"})
}

# Replaces what the script's arrays say about its own model. $NUM_GPUS devices (2): half of them train, the others generate.
use_toy_model() {
  local training backend=()
  NUM_GPUS="${NUM_GPUS:-2}"
  NUM_NODES=1
  if ! [[ "$NUM_GPUS" =~ ^[1-9][0-9]*$ ]]; then refuse "NUM_GPUS='$NUM_GPUS': must be a whole number above 0, for example NUM_GPUS=2"; fi
  if [[ " ${PERF_ARGS[*]} " == *" --train-backend fsdp "* ]]; then backend=(--train-backend fsdp); fi
  MODEL_ARGS=(--model-args-from-hf)
  MISC_ARGS=()
  unset 'RUNTIME_ENV[OPEN_TRAINING_INT4_FAKE_QAT_FLAG]' 'RUNTIME_ENV[OPEN_TRAINING_INT4_GROUP_SIZE]'
  drop_flags OPTIMIZER_ARGS --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
  # Weights that were never trained earn no reward: nothing would be learned, and a filter would wait for one forever.
  drop_flags ROLLOUT_ARGS --rm-type --dynamic-sampling-filter-path --over-sampling-batch-size --rollout-batch-size --n-samples-per-prompt \
    --global-batch-size --num-steps-per-rollout --rollout-max-response-len --num-rollout --num-epoch --loss-mask-type
  if [[ " ${GRPO_ARGS[*]} " == *" --debug-train-only "* ]]; then
    training="$NUM_GPUS"
    SGLANG_ARGS=()
    ROLLOUT_ARGS+=(--rollout-batch-size "$((8 * NUM_GPUS))" --num-rollout 4)
  elif ((NUM_GPUS < 2)); then
    refuse "MODEL=toy trains on one device and generates on another: give NUM_GPUS=2 (without GPUs, they are logical ones)"
  else
    training="$((NUM_GPUS / 2))"
    SGLANG_ARGS=(--rollout-num-gpus "$((NUM_GPUS - training))" --rollout-num-gpus-per-engine 1)
    ROLLOUT_ARGS+=(--rm-type random)
    ROLLOUT_ARGS+=(--rollout-batch-size "$((4 * training))" --n-samples-per-prompt 4 --rollout-max-response-len 32 --num-rollout 4)
  fi
  PERF_ARGS=(
    ${backend[@]+"${backend[@]}"}
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$training"
    --use-dynamic-batch-size
    --max-tokens-per-gpu 2048
  )
  if ((${#EVAL_ARGS[@]})); then
    drop_flags EVAL_ARGS --n-samples-per-eval-prompt --eval-max-response-len
    EVAL_ARGS+=(--n-samples-per-eval-prompt 1 --eval-max-response-len 32)
  fi
}
