#!/usr/bin/env bash
# From nothing to a model that learned: installs, makes a toy task, trains, reports. No GPU needed.
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh --dry-run
#   bash scripts/quickstart.sh -- --advantage-estimator gspo
#   bash scripts/quickstart.sh --example calculator
#   bash scripts/quickstart.sh --help
set -euo pipefail
CALLER_DIR="$PWD"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib/programs.sh
unset PYTHONDONTWRITEBYTECODE # without .pyc files every process of a run starts three times slower
export SLIME_ACCELERATOR=cpu   # also where a GPU is present: the pinned set has CPU builds

SEED=0
BASE_DIR=""
EXAMPLE=""
NUM_ROLLOUT=""
RUN_NAME=""
DRY_RUN=""
PROGRAM=train.py
MORE_ARGS=()

usage() {
  cat <<HELP
usage: bash scripts/quickstart.sh [--seed N] [--dir DIR] [--num-rollout N] [--run NAME] [--example NAME]
                                  [--async] [--dry-run] [-- FLAG...]

Does everything, one step after the other, on a Linux x86-64 machine with Python 3.11 and no GPU:

  1  install    .venv with the pinned packages (scripts/install.sh)
  2  toy task   a tiny model with random weights and arithmetic problems (tools/make_toy_task.py)
  3  teach      supervised fine-tuning through train.py, from demonstrations that forget most carries
  4  reinforce  GRPO through $PROGRAM: two SGLang engines behind the router, one Megatron rank, a math reward
  5  report     held-out accuracy before and after, the reward curve, where everything lies, what to try next

A second run reuses 1 to 3 and trains into a new run directory.

  --seed N         seed of the task, of training and of sampling (default $SEED)
  --dir DIR        where everything goes (default outputs/quickstart, or outputs/NAME of an example, in the repository)
  --num-rollout N  rollouts of GRPO (default 30; 15 in some examples)
  --run NAME       directory of the run below DIR/seed-N/runs (default: the time); one that is there is resumed
  --example NAME   the task and the functions of examples/NAME, one of
                   $(printf '%s ' examples/*/quickstart.sh | sed 's|examples/||g; s|/quickstart.sh||g')
  --async          step 4 through train_async.py, which generates the next rollout while it trains
  --dry-run        print the plans of steps 3 and 4 (placement, memory, batch arithmetic) and end; needs step 1
  -- FLAG...       more flags of step 4; they win over its own, and name files from the repository's root
HELP
}

while (($#)); do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --seed | --dir | --num-rollout | --run | --example)
      (($# >= 2)) || refuse "$1 needs a value"
      case "$1" in
        --seed) SEED="$2" ;;
        --dir) [[ "$2" == /* ]] && BASE_DIR="${2%/}" || BASE_DIR="$CALLER_DIR/${2%/}" ;;
        --num-rollout) NUM_ROLLOUT="$2" ;;
        --run) RUN_NAME="$2" ;;
        --example) EXAMPLE="$2" ;;
      esac
      shift 2
      ;;
    --async)
      PROGRAM=train_async.py
      shift
      ;;
    --dry-run)
      DRY_RUN=1
      shift
      ;;
    --)
      shift
      MORE_ARGS=("$@")
      break
      ;;
    --*) refuse "unknown argument '$1'; see bash scripts/quickstart.sh --help. Flags of train.py come behind --, such as -- --lr 1e-4" ;;
    *) refuse "unknown argument '$1'; see bash scripts/quickstart.sh --help" ;;
  esac
done
[[ "$SEED" =~ ^(0|[1-9][0-9]*)$ ]] || refuse "--seed '$SEED': must be a whole number, 0 or more, such as 8"
[[ "$NUM_ROLLOUT" =~ ^([1-9][0-9]*)?$ ]] || refuse "--num-rollout '$NUM_ROLLOUT': must be a whole number above 0"
[[ "$RUN_NAME" =~ ^[A-Za-z0-9._-]*$ ]] || refuse "--run '$RUN_NAME': must be made of letters, digits, '.', '_' and '-'"

# What an example has of its own: arguments of tools/make_toy_task.py, flags of steps 3 and 4, whether its functions get the
# messages of prompts (KEEP_MESSAGES=1), how many rollouts of how many optimizer steps it takes, its evaluation sets, a
# server beside step 4 and its port, and what is made once before step 4 (`prepare`).
TASK_ARGS=()
EXAMPLE_SFT_ARGS=()
EXAMPLE_ARGS=()
KEEP_MESSAGES=""
ENOUGH_ROLLOUTS=30
STEPS_PER_ROLLOUT=1
SERVER=()
SERVER_PORT=""
prepare() { :; }
if [[ -n "$EXAMPLE" ]]; then
  [[ -f "examples/$EXAMPLE/quickstart.sh" ]] || refuse "--example '$EXAMPLE': there is no examples/$EXAMPLE/quickstart.sh" \
    "bash scripts/quickstart.sh --help lists those that there are."
fi

PYTHON_BIN=.venv/bin/python
BASE_DIR="${BASE_DIR:-outputs/${EXAMPLE:-quickstart}}"
SEED_DIR="$BASE_DIR/seed-$SEED"
TASK_DIR="$SEED_DIR/task"
SFT_DIR="$SEED_DIR/sft"
# The taught model as a Hugging Face directory, from which either trainer starts.
TAUGHT_DIR="$SEED_DIR/taught"
RUN_DIR="$SEED_DIR/runs/${RUN_NAME:-$(date +%Y%m%d-%H%M%S)}"
EVAL_SETS=(--eval-prompt-data held_out "$TASK_DIR/eval.jsonl" --n-samples-per-eval-prompt 1)
if [[ -n "$EXAMPLE" ]]; then
  # shellcheck source=/dev/null
  source "examples/$EXAMPLE/quickstart.sh"
fi
NUM_ROLLOUT="${NUM_ROLLOUT:-$ENOUGH_ROLLOUTS}"

step() { printf '\n== %s\n' "$*"; }

# The training rank works while the engines sleep, so it may use every core; more than four do not pay for so small a model.
CORES="$(nproc)"
THREADS=$((CORES < 4 ? CORES : 4))

MODEL_ARGS=(
  --hf-checkpoint "$TASK_DIR/model"
  --model-args-from-hf
)

PERF_ARGS=(
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
  --train-env-vars "{\"OMP_NUM_THREADS\": \"$THREADS\"}"
)

OPTIMIZER_ARGS=(
  --weight-decay 0.0
  --adam-beta1 0.9
  --adam-beta2 0.98
)

SFT_ARGS=(
  --load "$SFT_DIR"
  --save "$SFT_DIR"
  --save-hf "$TAUGHT_DIR"
  --save-interval 30
  --loss-type sft_loss
  --debug-train-only
  --disable-compute-advantages-and-returns
  --calculate-per-token-loss
  --rollout-function-path slime.rollout.sft_rollout.generate_rollout
  --prompt-data "$TASK_DIR/sft.jsonl"
  --input-key messages
  --rollout-shuffle
  --num-rollout 30
  --rollout-batch-size 512
  --num-steps-per-rollout 8
  --lr 1e-3
  --lr-decay-style constant
)

CKPT_ARGS=(
  --ref-load "$TAUGHT_DIR"
  --load "$RUN_DIR/checkpoints"
  --save "$RUN_DIR/checkpoints"
  --save-interval 10
  --keep-last 2
)

ROLLOUT_ARGS=(
  --prompt-data "$TASK_DIR/train.jsonl"
  --input-key prompt
  --label-key label
  --rollout-shuffle
  --rm-type math
  --num-rollout "$NUM_ROLLOUT"
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --num-steps-per-rollout "$STEPS_PER_ROLLOUT"
  --rollout-max-response-len 32
  --rollout-temperature 1.0
)
[[ -n "$KEEP_MESSAGES" ]] || ROLLOUT_ARGS+=(--apply-chat-template)

EVAL_ARGS=(
  --eval-interval "$NUM_ROLLOUT"
  "${EVAL_SETS[@]}"
)

GRPO_ARGS=(
  --advantage-estimator grpo
  --eps-clip 0.2
  --eps-clip-high 0.28
  --use-kl-loss
  --kl-loss-coef 0.01
  --kl-loss-type low_var_kl
  --lr 3e-4
  --lr-decay-style linear
  --min-lr 3e-5
  # Fixed, so that a resumed run with more rollouts keeps the schedule.
  --lr-decay-iters "$((ENOUGH_ROLLOUTS * STEPS_PER_ROLLOUT))"
)

SGLANG_ARGS=(
  --rollout-num-gpus 2
  --rollout-num-gpus-per-engine 1
)

MISC_ARGS=(
  --seed "$((1234 + SEED))"
  --rollout-seed "$((42 + SEED))"
  --check-weight-update-equal
)

# The same command with paths that hold everywhere, so that the run can be resumed or varied with more arguments.
write_train_script() {
  {
    printf '#!/usr/bin/env bash\n# Resumes this run; arguments are added, and win: bash %s --num-rollout 50\n' "$RUN_DIR/train.sh"
    printf 'set -euo pipefail\ncd %q\nunset PYTHONDONTWRITEBYTECODE\nexport SLIME_ACCELERATOR=cpu TENSORBOARD_DIR=%q\n' "$PWD" "$RUN_DIR/tensorboard"
    # shellcheck disable=SC2016 # the script that is written expands
    printf 'source scripts/lib/ray_node.sh\nSLIME_START_COMMAND="$(quoted bash %q "$@")"\nexport SLIME_START_COMMAND\n' "$RUN_DIR/train.sh"
    printf 'exec'
    if ((${#SERVER[@]})); then
      printf ' %q' "$PYTHON_BIN" tools/with_server.py --port "$SERVER_PORT" --log "$RUN_DIR/server.log" --timeout 600 \
        "${SERVER[@]}" --
    fi
    printf ' %q' "$PYTHON_BIN" "$PROGRAM" "$@"
    printf ' "$@"\n'
  } >"$RUN_DIR/train.sh"
}

# The plans of both runs. Where the toy task is not there yet, it is made in a directory that is removed again.
plan() {
  [[ -x "$PYTHON_BIN" ]] || refuse "--dry-run needs $PYTHON_BIN: first bash scripts/install.sh"
  TASK_COPY="$TASK_DIR"
  if [[ ! -f "$TASK_DIR/task.json" ]]; then
    TASK_COPY="$(mktemp -d "${TMPDIR:-/tmp}/slime-toy-task-XXXXXX")"
    trap 'rm -rf "$TASK_COPY"' EXIT
    run "$PYTHON_BIN" tools/make_toy_task.py "$TASK_COPY" --seed "$SEED" ${TASK_ARGS[@]+"${TASK_ARGS[@]}"}
  fi
  step "3/5 teach by demonstrations: plan"
  run "$PYTHON_BIN" train.py "${SFT_RUN_ARGS[@]//"$TASK_DIR/"/"$TASK_COPY/"}" --dry-run
  step "4/5 reinforce with GRPO: plan"
  run "$PYTHON_BIN" "$PROGRAM" "${GRPO_RUN_ARGS[@]//"$TASK_DIR/"/"$TASK_COPY/"}" --dry-run
}

# Tells what is wrong with flags and files of step 4 before step 3, which takes minutes. The model that nobody has taught stands
# for the one that step 4 starts from.
check_step_4() {
  local told words=("${GRPO_RUN_ARGS[@]//"$TAUGHT_DIR"/"$TASK_DIR/model"}")
  if ! told="$("$PYTHON_BIN" "$PROGRAM" "${words[@]//"$SFT_DIR"/"$TASK_DIR/model"}" --check 2>&1 >/dev/null)"; then
    printf '%s\n' "$told" >&2
    exit 2
  fi
}

SFT_RUN_ARGS=(
  "${MODEL_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${SFT_ARGS[@]}"
  --seed "$((1234 + SEED))" --rollout-seed "$((42 + SEED))" ${EXAMPLE_SFT_ARGS[@]+"${EXAMPLE_SFT_ARGS[@]}"}
)
GRPO_RUN_ARGS=(
  "${MODEL_ARGS[@]}" "${PERF_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}"
  "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" ${EXAMPLE_ARGS[@]+"${EXAMPLE_ARGS[@]}"}
  ${MORE_ARGS[@]+"${MORE_ARGS[@]}"}
)

if [[ -n "$DRY_RUN" ]]; then
  plan
  exit 0
fi

# Both appear when teaching ends, the model first. Who taught before there was such a model would be refused in step 4.
if [[ -f "$SFT_DIR/latest_checkpointed_iteration.txt" && ! -d "$TAUGHT_DIR" ]]; then
  refuse "$SFT_DIR holds a checkpoint of step 3, and the model that belongs to it, $TAUGHT_DIR, is not there: another version" \
    "of this script made it, or it was removed. Remove $SFT_DIR to teach again, which takes minutes, or give another --dir."
fi

step "1/5 install"
run bash scripts/install.sh

step "2/5 toy task: $TASK_DIR"
run "$PYTHON_BIN" tools/make_toy_task.py "$TASK_DIR" --reuse --seed "$SEED" ${TASK_ARGS[@]+"${TASK_ARGS[@]}"}

step "3/5 teach by demonstrations: $SFT_DIR"
if [[ -d "$TAUGHT_DIR" ]]; then
  echo "reused"
else
  check_step_4
  TENSORBOARD_DIR="$SFT_DIR/tensorboard" run "$PYTHON_BIN" train.py "${SFT_RUN_ARGS[@]}"
fi

prepare

step "4/5 reinforce with GRPO: $RUN_DIR"
mkdir -p "$RUN_DIR"
write_train_script "${GRPO_RUN_ARGS[@]}"
run bash "$RUN_DIR/train.sh"

step "5/5 report"
run "$PYTHON_BIN" tools/report.py "$RUN_DIR"
echo "  bash scripts/quickstart.sh --seed $((SEED + 1))    # the same with another seed"
