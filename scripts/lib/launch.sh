#!/usr/bin/env bash
# Launches the run that the calling script's arrays describe. A script sources this file first, then a model script, sets
#
#   CKPT_ARGS ROLLOUT_ARGS EVAL_ARGS PERF_ARGS GRPO_ARGS OPTIMIZER_ARGS WANDB_ARGS SGLANG_ARGS MISC_ARGS
#
# and ends with `launch "$@"`: the arguments of the user come last, and win. What would be refused is refused before Ray is
# touched. What is submitted runs on the Ray cluster that is there; where there is none, a head is started for the run on this
# machine and ended with it, and nothing else is. A script that is a job of a cluster itself becomes the run.

SCRIPTS_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SAY_AS="$(basename "${BASH_SOURCE[-1]}" .sh)"
source "$SCRIPTS_DIR/lib/ray_node.sh"
# What the user has to type: from the root of the repository, or the whole path of a script elsewhere.
SCRIPT="$(cd "$(dirname "${BASH_SOURCE[-1]}")" && pwd)/$(basename "${BASH_SOURCE[-1]}")"
SCRIPT="${SCRIPT#"$REPOSITORY/"}"
# What the user set, before defaults are put beside it: it belongs to the command that starts the run again.
GIVEN_SETTINGS=()
for name in MODEL NUM_GPUS RUN_NAME BASE_DIR MODELS_DIR DATA_DIR CHECKPOINTS_DIR TOY_DIR HF_CHECKPOINT REF_LOAD LOAD SAVE PROMPT_DATA \
  EVAL_DATA SFT_DATA ACTOR_NUM_NODES CONTEXT_PARALLEL_SIZE EXPERT_PARALLEL_SIZE MODEL_ARGS_NUM_LAYERS MODEL_ARGS_ROTARY_BASE \
  TRAIN_SCRIPT KEEP_MESSAGES EVAL_CONFIG TEACHER_URL TEACHER_LOAD NCCL_NVLS_ENABLE WANDB_PROJECT WANDB_GROUP RAY_ADDRESS SLIME_HOST_IP; do
  if [[ -n "${!name:-}" ]]; then GIVEN_SETTINGS+=("$name=${!name}"); fi
done
unset name
RUN_NAME="${RUN_NAME:-${SAY_AS#run-}}"
source "$SCRIPTS_DIR/lib/toy.sh"
source "$SCRIPTS_DIR/lib/settings.sh"

PYTHON="${PYTHON:-$(find_program python3)}"
TRAIN_SCRIPT="${TRAIN_SCRIPT:-$REPOSITORY/train.py}"
NUM_NODES=1 # that the run needs; scripts of larger runs say so

MODEL_ARGS=() CKPT_ARGS=() ROLLOUT_ARGS=() EVAL_ARGS=() PERF_ARGS=() GRPO_ARGS=() OPTIMIZER_ARGS=() SGLANG_ARGS=() MISC_ARGS=()

# Environment of every process of the run; scripts add to it.
declare -A RUNTIME_ENV=([CUDA_DEVICE_MAX_CONNECTIONS]=1 [PYTHONPATH]="$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}")

launch_usage() {
  cat <<HELP
usage: bash $SCRIPT [--dry-run | --rehearse | --check | --help-grep WORD] [FLAGS OF train.py...]

Further flags come after those of the script, and win. All flags: python train.py --help
--model-args-from-hf among them takes the model's shape from the config of HF_CHECKPOINT, not from the script.

On a small machine, without GPUs too: MODEL=toy NUM_GPUS=2 bash $SCRIPT

  --dry-run         print what the run would do (placement, memory, batch arithmetic), without Ray and without GPUs;
                    DRY_RUN=1 before the command does the same
  --rehearse        do one step of a training rank on fake GPU tensors, print what it takes; without Ray and without GPUs
  --check           say whether something stands in the run's way, and start nothing
  --help-grep WORD  show the flags whose name or text has a word that begins so
  PRINT_COMMAND=1   before the command: print that of the run, one word per line as the shell would read it, and end

Environment variables, with the values that hold now:
  MODEL             ${MODEL:-not set} (toy: the script's algorithm on a tiny model and task, made in $BASE_DIR/toy)
  NUM_GPUS          ${NUM_GPUS:-not set: all that are found} (devices of the Ray that is started here; without GPUs, logical ones)
  HF_CHECKPOINT     ${HF_CHECKPOINT:-}
  REF_LOAD          ${REF_LOAD:-}
  LOAD, SAVE        ${LOAD:-}, ${SAVE:-}
  RUN_NAME          $RUN_NAME (of the job, and of the directory where SAVE is not set)
  PROMPT_DATA       $PROMPT_DATA
  EVAL_DATA         $EVAL_DATA
  EVAL_CONFIG       ${EVAL_CONFIG:-not set} (a file of evaluation sets, in place of EVAL_DATA)
  SFT_DATA          $SFT_DATA
  KEEP_MESSAGES     ${KEEP_MESSAGES:-0} (1: functions of yours get prompts as messages, without --apply-chat-template)
  BASE_DIR          $BASE_DIR (models/, data/ and checkpoints/ are below it)
  ACTOR_NUM_NODES   nodes that train, in scripts that leave it open (this run: $NUM_NODES nodes in all)
  RAY_ADDRESS       ${RAY_ADDRESS:-not set: the cluster that runs on this machine, else a new one for this run}
  WANDB_API_KEY     $([[ -n "${WANDB_API_KEY:-}" ]] && echo set || echo "not set: no Weights & Biases")
HELP
}

# Sets COMMAND, the run's words in the order of the arrays.
build_command() {
  COMMAND=("$PYTHON" "$TRAIN_SCRIPT")
  local name
  # The user asks for the shape of another model than the script's.
  if [[ " $* " == *" --model-args-from-hf "* ]]; then MODEL_ARGS=(); fi
  for name in MODEL CKPT ROLLOUT EVAL PERF GRPO OPTIMIZER WANDB SGLANG MISC; do
    local -n words="${name}_ARGS"
    COMMAND+=(${words[@]+"${words[@]}"})
  done
  COMMAND+=("$@")
}

# Exports RUNTIME_ENV for a check, but for what this shell has: that is handed on to the run, and wins there.
export_for_check() {
  local name
  for name in "${!RUNTIME_ENV[@]}"; do export "$name=${!name:-${RUNTIME_ENV[$name]}}"; done
}

# Asks the run itself, without Ray, whether something stands in its way. Sets NEEDED_GPUS; ends the script with status 2
# where something does, and with 0 where nothing is left to do.
check_run() {
  local result status=0
  CHECK_MESSAGES="$(mktemp "${TMPDIR:-/tmp}/slime-check-XXXXXX")" # `end_run` removes it
  # On a cluster that is there, this machine's own GPUs and memory do not matter.
  result="$(export_for_check && RAY_ADDRESS="$CLUSTER_ADDRESS" "${COMMAND[@]}" --check 2>"$CHECK_MESSAGES")" || status=$?
  # What it told beside a success, the run tells again.
  if ((status)); then
    cat "$CHECK_MESSAGES" >&2
    if [[ "${MODEL:-}" != toy ]] && (($(detect_gpus) == 0)); then
      say "to try this script on a machine without GPUs: MODEL=toy NUM_GPUS=2 bash $SCRIPT" >&2
    fi
  fi
  if ((status)); then exit "$status"; fi
  if [[ "$result" == "nothing left"* ]]; then
    say "$result"
    exit 0
  fi
  NEEDED_GPUS="$(sed -n 's/.* needs \([0-9]*\) GPUs.*/\1/p' <<<"$result")"
}

# Whether the files that the run will read are those of this machine: RAY_ADDRESS may lead to another one.
runs_here() { [[ -z "${RAY_ADDRESS:-}" || "$RAY_ADDRESS" == auto ]] || cluster_is_here; }

# Whether the head at CLUSTER_ADDRESS, where jobs run, is on this machine.
cluster_is_here() {
  local host="$CLUSTER_ADDRESS" own
  if [[ "$host" == auto ]]; then host="$(started_by_hand)"; fi
  host="${host#*://}"
  host="${host%%/*}"
  host="${host%:*}"
  own=" localhost 0.0.0.0 [::1] $(hostname 2>/dev/null) $(hostname -I 2>/dev/null) "
  [[ -n "$host" ]] && [[ "$host" == 127.* || "$own" == *" $host "* ]]
}

# Prints 1 where GPUs are joined by NVLink, whose switches NCCL may then use, else 0; nothing on a machine without NVIDIA GPUs,
# which says nothing about the nodes of the run.
nvlink_present() {
  if (($(detect_gpus) == 0)) || ! command -v nvidia-smi >/dev/null; then return; fi
  if nvidia-smi topo -m 2>/dev/null | grep -q '\bNV[0-9]'; then echo 1; else echo 0; fi
}

# Sets HANDED_ON, the variables of this shell that the run reads, as NAME=VALUE, and KEPT_BACK, the names of those that may hold
# secrets. A cluster that runs already has the environment in which it was started, and not this one.
settle_environment() {
  local variable given=" ${GIVEN_SETTINGS[*]%%=*} "
  HANDED_ON=() KEPT_BACK=()
  while IFS= read -r -d '' variable; do
    if [[ "$variable" != *=* ]]; then
      KEPT_BACK+=("$variable")
      continue
    fi
    HANDED_ON+=("$variable")
    if [[ "$given" != *" ${variable%%=*} "* ]]; then GIVEN_SETTINGS+=("$variable"); fi
  done < <(PYTHONPATH="$REPOSITORY" "$PYTHON" -c 'from slime.utils.env import write_environment_of_call as write; write()')
  wait "$!" || refuse "the run's environment could not be settled: $PYTHON (PYTHON) failed"
}

json_string() {
  local text="${1//\\/\\\\}"
  text="${text//\"/\\\"}"
  printf '"%s"' "${text//$'\n'/\\n}"
}

# Prints the command that starts the run again, with the user's settings and flags ($@), or with the command of a script that
# starts this one beside a server.
start_command() {
  if ((${#GIVEN_SETTINGS[@]})); then quoted env "${GIVEN_SETTINGS[@]}"; fi
  if [[ -n "${SLIME_START_COMMAND:-}" ]]; then printf ' %s' "$SLIME_START_COMMAND"; else quoted bash "${BASH_SOURCE[-1]}" "$@"; fi
}

# Prints RUNTIME_ENV as the JSON that Ray reads. Secrets do not belong there: it is shown by ps and by the dashboard.
runtime_env_json() {
  local name separator=""
  printf '{"env_vars": {'
  for name in $(printf '%s\n' "${!RUNTIME_ENV[@]}" | sort); do
    printf '%s%s: %s' "$separator" "$(json_string "$name")" "$(json_string "${RUNTIME_ENV[$name]}")"
    separator=", "
  done
  printf '}}'
}

# Prints the address that the latest `ray start` on this machine wrote down, if somebody still answers there.
started_by_hand() {
  local address
  address="$(cat "${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray/ray_current_cluster" 2>/dev/null)" || return 0
  if listens "${address%:*}" "${address##*:}"; then printf '%s' "$address"; fi
}

# Sets CLUSTER_ADDRESS to the running cluster's: RAY_ADDRESS, or that of a node started on this machine. Empty: none runs.
find_cluster() {
  CLUSTER_ADDRESS="${RAY_ADDRESS:-}"
  if [[ -z "$CLUSTER_ADDRESS" ]] && node_is_alive; then
    CLUSTER_ADDRESS="$(node_value dashboard)"
    CLUSTER_ADDRESS="${CLUSTER_ADDRESS:-$(node_value address)}"
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-$(node_value auth)}"
  fi
  if [[ -z "$CLUSTER_ADDRESS" ]]; then CLUSTER_ADDRESS="$(started_by_hand)"; fi
  use_token_if_there
}

# No head is started for a run of several nodes.
require_nodes() {
  if [[ -n "$CLUSTER_ADDRESS" ]] || ((NUM_NODES == 1)); then return; fi
  refuse "this run needs $NUM_NODES nodes, and no Ray cluster runs here." \
    "Start one: bash scripts/cluster.sh head, then what it prints on the other nodes; or set RAY_ADDRESS to a running one."
}

# Starts a head for this run alone, in directories and at ports of its own. `end_run` ends it.
start_own_head() {
  local found
  found="$(detect_gpus)"
  # Without GPUs the devices are logical ones: there are as many as the run needs.
  export NUM_GPUS="${NUM_GPUS:-$((found > 0 ? found : NEEDED_GPUS))}"
  if ((NUM_GPUS < NEEDED_GPUS)); then
    refuse "the run needs $NEEDED_GPUS GPUs, and there are $NUM_GPUS (NUM_GPUS; found on this machine: $found)." \
      "Lower --actor-num-gpus-per-node or --rollout-num-gpus, or try the script on a toy model: MODEL=toy"
  fi
  OWN_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-run-XXXXXX")"
  export CLUSTER_DIR="$OWN_DIR" RAY_TEMP_DIR="$OWN_DIR/ray"
  NODE_FILE="$CLUSTER_DIR/node"
  RAY_PORT="$(free_port "${RAY_PORT:-6379}")" DASHBOARD_PORT="$(free_port "${DASHBOARD_PORT:-8265}")" \
    OWN_HEAD_ADDRESS="${SLIME_HOST_IP:-127.0.0.1}" bash "$SCRIPTS_DIR/cluster.sh" head >"$OWN_DIR/head.log" ||
    { cat "$OWN_DIR/head.log" >&2 && exit 2; }
  # A script that is killed ends nothing itself.
  # shellcheck disable=SC2016 # the inner shell expands
  setsid bash -c 'tail --pid="$0" --follow /dev/null; exec bash "$1" stop' $$ "$SCRIPTS_DIR/cluster.sh" </dev/null >/dev/null 2>&1 &
  HEAD_WATCH=$!
  CLUSTER_ADDRESS="$(node_value dashboard)"
  RAY_AUTH_MODE="$(node_value auth)"
  export RAY_AUTH_MODE
  say "started Ray for this run: $(node_value address), dashboard $CLUSTER_ADDRESS, logs in $OWN_DIR"
}

# However the script ends: the job, if it was interrupted before its end, and the head, if it was started here.
end_run() {
  local status=$?
  trap '' INT TERM
  rm -f ${CHECK_MESSAGES:+"$CHECK_MESSAGES"} ${SUBMIT_MESSAGES:+"$SUBMIT_MESSAGES"} ${JOB_FILE:+"$JOB_FILE"}
  if [[ -n "${SUBMISSION_ID:-}" ]]; then
    say "stopping job $SUBMISSION_ID"
    if stop_job; then
      timeout 10 tail --pid="$SUBMIT_PID" --follow /dev/null || true # it still prints the last lines of the run
    fi
    if kill "$SUBMIT_PID" 2>/dev/null; then
      # It may have been about to submit.
      wait "$SUBMIT_PID" 2>/dev/null || true
      stop_job || true
    fi
  fi
  if [[ -n "${OWN_DIR:-}" ]]; then
    if [[ -n "${HEAD_WATCH:-}" ]]; then kill -- "-$HEAD_WATCH" 2>/dev/null || true; fi
    if [[ -f "$NODE_FILE" ]]; then bash "$SCRIPTS_DIR/cluster.sh" stop; fi
    if ((status)); then say "Ray's logs of this run: $OWN_DIR"; else rm -rf "$OWN_DIR"; fi
  fi
  exit "$status"
}

# Fails where there is no such job.
stop_job() {
  timeout $((RAY_JOB_STOP_WAIT_TIME_S + 30)) "$RAY" job stop --address "$CLUSTER_ADDRESS" "$SUBMISSION_ID" >/dev/null 2>&1
}

# Arguments: those of the user.
submit() {
  # `env -C`: paths relative to the directory of the call stay what the caller meant.
  # Ray sets OMP_NUM_THREADS to 1 for a job; the run looks there for what the user wants, and believes a 1 that stands in the
  # environment that the job was submitted with.
  if [[ -n "${OMP_NUM_THREADS:-}" ]]; then RUNTIME_ENV[OMP_NUM_THREADS]="$OMP_NUM_THREADS"; fi
  # The supervisor of the job reads this one.
  RUNTIME_ENV[RAY_JOB_STOP_WAIT_TIME_S]="$RAY_JOB_STOP_WAIT_TIME_S"
  local job=(env -C "$PWD" -u OMP_NUM_THREADS ${OMP_NUM_THREADS:+"OMP_NUM_THREADS=$OMP_NUM_THREADS"}
    ${HANDED_ON[@]+"${HANDED_ON[@]}"} "SLIME_START_COMMAND=$(start_command "$@")" "${COMMAND[@]}")
  if cluster_is_here; then
    # Ray writes the words of a job into its logs, and they may hold secrets: here it gets the name of a file that only its
    # owner reads, and that the job removes. Where the job does not come to that, `end_run` does.
    JOB_FILE="$(mktemp "${TMPDIR:-/tmp}/slime-job-XXXXXX")"
    # shellcheck disable=SC2016 # the job expands
    printf 'rm -f -- "$0"\nexec%s\n' "$(quoted "${job[@]}")" >"$JOB_FILE"
    job=(bash "$JOB_FILE")
  fi
  SUBMISSION_ID="$RUN_NAME-$(date +%Y%m%d-%H%M%S)-$$"
  say "submitting job $SUBMISSION_ID to $CLUSTER_ADDRESS"
  SUBMIT_MESSAGES="$(mktemp "${TMPDIR:-/tmp}/slime-submit-XXXXXX")" # `end_run` removes it
  local status deadline=$((SECONDS + ${START_SECONDS:-120}))
  while true; do
    "$RAY" job submit --address "$CLUSTER_ADDRESS" --submission-id "$SUBMISSION_ID" \
      --runtime-env-json "$(runtime_env_json)" -- "${job[@]}" 2>"$SUBMIT_MESSAGES" &
    SUBMIT_PID=$!
    tail --follow --sleep-interval=0.1 --lines=+1 --pid="$SUBMIT_PID" "$SUBMIT_MESSAGES" >&2 &
    status=0
    wait "$SUBMIT_PID" || status=$?
    wait $!
    if ((status == 0 || SECONDS >= deadline)); then break; fi
    # Ray gives the agent that takes jobs 10 seconds to come up, which on a busy machine may be too short.
    if ! grep -q "No available agent" "$SUBMIT_MESSAGES"; then break; fi
    say "the head takes no jobs yet; submitting again"
  done
  SUBMISSION_ID="" # it ended by itself
  return "$status"
}

# Runs in place of this script, which is a job of a Ray cluster already: whoever stops that job stops the run with it. All
# processes of the run get RUNTIME_ENV beside what the job was given, which wins as what a shell hands on does elsewhere.
# Arguments: those of the user.
become_run() {
  local name given names='
import json, os
job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
print(*(job.get("runtime_env") or {}).get("env_vars", {}))'
  # shellcheck disable=SC2016 # Python reads it
  local merge='
import json, os, sys
job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
env = job.setdefault("runtime_env", {})
env["env_vars"] = {**env.get("env_vars", {}), **json.loads(sys.argv[1])["env_vars"]}
print(json.dumps(job))'
  settle_environment # the command that starts the run again has it
  given="$("$PYTHON" -c "$names")"
  for name in $given ${HANDED_ON[@]+"${HANDED_ON[@]%%=*}"}; do
    # PYTHONPATH has both.
    if [[ "$name" != PYTHONPATH && -n "${RUNTIME_ENV[$name]:-}" ]]; then RUNTIME_ENV[$name]="${!name}"; fi
  done
  RAY_JOB_CONFIG_JSON_ENV_VAR="$("$PYTHON" -c "$merge" "$(runtime_env_json)")"
  export RAY_JOB_CONFIG_JSON_ENV_VAR
  for name in "${!RUNTIME_ENV[@]}"; do export "$name=${RUNTIME_ENV[$name]}"; done
  SLIME_START_COMMAND="$(start_command "$@")" exec "${COMMAND[@]}"
}

# Plans, prints or submits the run. Arguments: those of the user.
launch() {
  local argument dry_run="${DRY_RUN:-0}" ask=0 check=0
  for argument in "$@"; do
    case "$argument" in
      -h | --help)
        launch_usage
        exit 0
        ;;
      --dry-run | --dry-run-json | --dry-run-json=* | --rehearse) dry_run=1 ;;
      --check) check=1 ;;
      --help-grep | --help-grep=*) ask=1 ;;
    esac
  done
  case "${MODEL:-}" in
    "") ;;
    toy) use_toy_model ;;
    *) refuse "MODEL='$MODEL': a launch script has its own model, or toy; for another one take its own script" ;;
  esac
  build_command "$@"
  if [[ "${MODEL:-}" == toy && "${PRINT_COMMAND:-0}" != 1 ]]; then make_toy_task; fi
  if [[ "${PRINT_COMMAND:-0}" == 1 ]]; then
    printf '%q\n' "${COMMAND[@]}"
  elif [[ "$dry_run" == 1 ]]; then
    exec "${COMMAND[@]}" --dry-run
  elif ((ask)); then
    exec "${COMMAND[@]}"
  elif ((check)); then
    find_cluster
    require_nodes
    if [[ -n "$CLUSTER_ADDRESS" ]]; then export RAY_ADDRESS="$CLUSTER_ADDRESS"; fi
    export_for_check
    exec "${COMMAND[@]}"
  else
    local nvlink="${NCCL_NVLS_ENABLE:-$(nvlink_present)}"
    if [[ -n "$nvlink" ]]; then RUNTIME_ENV[NCCL_NVLS_ENABLE]="$nvlink"; fi
    # Ray tells every job what it was submitted with.
    if [[ -n "${RAY_JOB_CONFIG_JSON_ENV_VAR:-}" ]]; then become_run "$@"; fi
    require_ray
    trap end_run EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    find_cluster
    require_nodes
    if runs_here; then check_run; fi
    settle_environment
    if [[ -z "$CLUSTER_ADDRESS" ]]; then
      start_own_head
    elif ((${#KEPT_BACK[@]})); then
      say "not handed to the cluster, since they may hold secrets: ${KEPT_BACK[*]}; the run has those with which it was started"
    fi
    submit "$@"
  fi
}
