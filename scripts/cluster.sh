#!/usr/bin/env bash
# Starts and ends the Ray node of this machine: the head of a cluster, or a worker that joins one.
#
#   bash scripts/cluster.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib/ray_node.sh"
SAY_AS=cluster

RAY_PORT="${RAY_PORT:-6379}"
DASHBOARD_PORT="${DASHBOARD_PORT:-8265}"
DASHBOARD_HOST="${DASHBOARD_HOST:-127.0.0.1}"
CONNECT_SECONDS="${CONNECT_SECONDS:-10}"
START_SECONDS="${START_SECONDS:-120}"
STATUS_SECONDS="${STATUS_SECONDS:-15}"
LOG="$CLUSTER_DIR/ray.log"
# Launch scripts set this one for a head of theirs: the address of the node alone, and nothing that its processes inherit.
NODE_ADDRESS="${OWN_HEAD_ADDRESS:-${SLIME_HOST_IP:-}}"

usage() {
  cat <<HELP
usage: bash scripts/cluster.sh head
       bash scripts/cluster.sh worker HEAD_ADDRESS[:PORT]
       bash scripts/cluster.sh status [GPUS]
       bash scripts/cluster.sh stop

With --dry-run behind it a command only looks at this machine and says what it would run or end.

  head    starts the head of a Ray cluster on this machine and prints what the other nodes have to call
  worker  joins the cluster of that head (port $RAY_PORT unless given)
  status  the node that was started here and the cluster; exit status 1 when there is none, or when it still has fewer
          than GPUS after $STATUS_SECONDS seconds (STATUS_SECONDS)
  stop    ends the node that was started here, and nothing else

Environment variables:
  NUM_GPUS                    GPUs that the node must have; default: all that are found. On a machine without any: the
                              number of logical ones, 0 for a node that only computes on the CPU
  RAY_PORT, DASHBOARD_PORT    ports of the head ($RAY_PORT, $DASHBOARD_PORT)
  DASHBOARD_HOST              where the head takes job submissions (127.0.0.1: from this machine only)
  SLIME_HOST_IP               address that this node announces; default: the one that Ray finds. With 127.0.0.1 the head
                              serves this machine alone: everything of it listens on loopback
  RAY_AUTH_MODE               token (default) or disabled; the same on all nodes
  RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH   the token, or the file that holds it; default ~/.ray/auth_token
  CLUSTER_DIR                 log and description of the node ($CLUSTER_DIR)
  RAY_TEMP_DIR                sessions of Ray; default Ray's own, /tmp/ray
  CONNECT_SECONDS, START_SECONDS        patience with the head's port ($CONNECT_SECONDS) and with the start ($START_SECONDS)
HELP
}

# --- what may be missing ------------------------------------------------------------------------------------------------

require_no_node() {
  if node_is_alive; then
    refuse "a Ray $(node_value role) runs here already (process $(node_value pid), cluster $(node_value address))." \
      "End it with: bash scripts/cluster.sh stop"
  fi
}

# Sets NUM_GPUS.
settle_gpus() {
  local found
  found="$(detect_gpus)"
  if [[ -z "${NUM_GPUS:-}" ]]; then
    if ((found == 0)); then
      refuse "no GPU was found on this machine (nvidia-smi and rocm-smi show none)." \
        "NUM_GPUS=0 makes a node without GPUs, NUM_GPUS=8 one with 8 logical GPUs for runs on the CPU."
    fi
    NUM_GPUS="$found"
  elif ! [[ "$NUM_GPUS" =~ ^[0-9]+$ ]]; then
    refuse "NUM_GPUS='$NUM_GPUS': must be a whole number, for example NUM_GPUS=8"
  elif ((found > 0 && NUM_GPUS > found)); then
    refuse "NUM_GPUS=$NUM_GPUS, but this machine shows $found GPUs: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or set NUM_GPUS=$found"
  elif ((found == 0 && NUM_GPUS > 0)); then
    say "no GPU was found: the $NUM_GPUS GPUs are logical ones, for runs on the CPU"
  fi
}

require_free_port() {
  local variable="$1" port="$2"
  if ! [[ "$port" =~ ^[1-9][0-9]{0,4}$ ]] || ((port > 65535)); then refuse "$variable='$port': must be a port, 1 to 65535"; fi
  if listens "${NODE_ADDRESS:-127.0.0.1}" "$port" 2 || listens 127.0.0.1 "$port" 2; then
    refuse "port $port is taken: perhaps another Ray cluster runs here (ray status)." \
      "Use another port: $variable=$(free_port "$((port + 1))") bash scripts/cluster.sh head"
  fi
}

# A head makes a token where there is none, so that nobody else on the network can run code in the cluster.
settle_head_token() {
  export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
  if [[ "$RAY_AUTH_MODE" == token ]] && ! has_token; then
    if [[ -n "${RAY_AUTH_TOKEN_PATH:-}" ]]; then refuse "RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH: there is no token in that file"; fi
    if [[ -n "$DRY_RUN" ]]; then
      printf '%q get-auth-token --generate\n' "$RAY"
      return
    fi
    (umask 077 && "$RAY" get-auth-token --generate >/dev/null 2>&1) || refuse "no token could be written to $HOME/.ray/auth_token"
    say "made a token for the cluster: $HOME/.ray/auth_token"
  fi
  # Ray leaves the file readable by everybody.
  if [[ -z "$DRY_RUN" && "$RAY_AUTH_MODE" == token && -O "$HOME/.ray/auth_token" ]]; then chmod 600 "$HOME/.ray/auth_token"; fi
}

settle_worker_token() {
  export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
  if [[ "$RAY_AUTH_MODE" == token ]] && ! has_token; then
    refuse "this node has no token (${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token} does not exist), and the head asks for one." \
      "Copy that file from the head's home, or set RAY_AUTH_TOKEN. A head started with RAY_AUTH_MODE=disabled needs the same here."
  fi
}

require_head() {
  local host="$1" port="$2"
  if ! listens "$host" "$port" "$CONNECT_SECONDS"; then
    refuse "nobody answers at $host:$port within $CONNECT_SECONDS seconds." \
      "Is the head started (bash scripts/cluster.sh head), is its port $port, and does no firewall stand between?"
  fi
}

# --- start --------------------------------------------------------------------------------------------------------------

# What a failed start means, from what Ray wrote.
explain_failure() {
  if grep -q "Version mismatch" "$LOG"; then
    printf 'cluster: %s\n' "this node has another version of Ray or Python than the head: install the same on both." \
      "this node: $("$RAY" --version), $("$(dirname "$RAY")/python" --version 2>/dev/null || python3 --version)" >&2
  elif grep -qiE "unauthenticated|authentication token|AuthenticationError" "$LOG"; then
    printf 'cluster: %s\n' "the head does not accept this node's token." \
      "Copy ~/.ray/auth_token from the head, or use the same RAY_AUTH_TOKEN and RAY_AUTH_MODE on both." >&2
  elif grep -q "AF_UNIX path length" "$LOG"; then
    printf 'cluster: %s\n' "the directory of Ray's sessions has a path that is too long for the sockets in it." \
      "set TMPDIR (or RAY_TEMP_DIR, the sessions' own) to a directory with a shorter one, such as /tmp" >&2
  fi
  printf 'cluster: %s\n' "Ray's output is in $LOG; its end:" >&2
  tail -n 12 "$LOG" >&2
}

# Prints the CPUs that Ray is told of: this machine's, or what a run takes, one for each device and one for its manager.
cpus_for_ray() {
  local cores
  # The program would count the threads that these variables give a process.
  cores="$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)"
  printf '%s' "$((cores > NUM_GPUS ? cores : NUM_GPUS + 1))"
}

# Runs `ray` with the arguments behind the role in a session of its own, and describes the node.
run_node() {
  local role="$1" pid
  shift
  # RAY_ADDRESS of another cluster must not lead the new node there.
  RAY_ADDRESS='' RAY_USAGE_STATS_ENABLED=0 setsid nohup "$RAY" "$@" </dev/null >"$LOG" 2>&1 &
  pid=$!
  # Written at once: whatever happens next, `stop` finds the process.
  printf '%s\n' "role=$role" "pid=$pid" "started=$(start_time "$pid")" "auth=$RAY_AUTH_MODE" >"$NODE_FILE"
}

# Starts `ray start --block` with the given arguments in a session of its own, waits until it is up, and describes it.
start_node() {
  local role="$1" deadline
  shift
  if [[ -n "$NODE_ADDRESS" ]]; then set -- "$@" --node-ip-address "$NODE_ADDRESS"; fi
  if [[ -n "${RAY_TEMP_DIR:-}" ]]; then set -- "$@" --temp-dir "$RAY_TEMP_DIR"; fi
  # The agent that takes jobs has one port on every machine unless another is asked for, and beside another Ray goes without.
  set -- start "$@" --dashboard-agent-listen-port 0 --num-gpus "$NUM_GPUS" --num-cpus "$(cpus_for_ray)" \
    --disable-usage-stats --block
  if [[ -n "$DRY_RUN" ]]; then
    printf 'RAY_AUTH_MODE=%q' "$RAY_AUTH_MODE"
    printf ' %q' "$RAY" "$@"
    echo
    exit 0
  fi
  (umask 077 && mkdir -p "$CLUSTER_DIR")
  [[ -O "$CLUSTER_DIR" ]] || refuse "$CLUSTER_DIR belongs to somebody else; set CLUSTER_DIR to a directory of your own"
  if [[ "$NODE_ADDRESS" == 127.0.0.1 ]]; then stay_on_loopback; fi
  run_node "$role" "$@"
  deadline=$((SECONDS + START_SECONDS))
  until grep -q "Ray runtime started" "$LOG"; do
    if ! node_is_alive; then
      # Ray gives its own parts 30 seconds, which a machine that is busy with other things may well exceed.
      if ((SECONDS < deadline)) && grep -q "timed out during startup" "$LOG"; then
        say "Ray gave up waiting for its own parts; trying again"
        # shellcheck disable=SC2046 # one word per process number
        kill -KILL $(session_of "$(node_value pid)") 2>/dev/null || true
        run_node "$role" "$@"
        continue
      fi
      rm -f "$NODE_FILE"
      explain_failure
      exit 1
    elif ((SECONDS >= deadline)); then
      printf 'cluster: %s\n' "Ray did not start within $START_SECONDS seconds (START_SECONDS)" >&2
      explain_failure
      stop_node
      exit 1
    fi
    sleep 0.3
  done
}

# Ray puts the machine's own address in place of a loopback address, and then listens on all interfaces, unless clusters of
# several nodes are switched off: by this variable on any system.
stay_on_loopback() { export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0; }

is_loopback() { [[ "$1" == 127.* || "$1" == localhost || "$1" == ::1 ]]; }

# The address that Ray tells other nodes to join.
announced_address() { sed -n "s/.*ray start --address='\([^']*\)'.*/\1/p" "$LOG" | head -n 1; }

start_head() {
  require_ray
  require_no_node
  settle_gpus
  require_free_port RAY_PORT "$RAY_PORT"
  require_free_port DASHBOARD_PORT "$DASHBOARD_PORT"
  settle_head_token
  start_node head --head --port "$RAY_PORT" --dashboard-host "$DASHBOARD_HOST" --dashboard-port "$DASHBOARD_PORT"
  local address
  address="$(announced_address)"
  address="${address:-127.0.0.1:$RAY_PORT}" # a head of this machine alone announces none
  printf '%s\n' "address=$address" "dashboard=http://$DASHBOARD_HOST:$DASHBOARD_PORT" >>"$NODE_FILE"
  say "head at $address with $NUM_GPUS GPUs; jobs and dashboard: http://$DASHBOARD_HOST:$DASHBOARD_PORT"
  if [[ "$NODE_ADDRESS" == 127.0.0.1 ]]; then
    say "SLIME_HOST_IP=127.0.0.1: it serves this machine alone"
    return
  fi
  say "on every other node:   bash scripts/cluster.sh worker $address"
  if [[ "$RAY_AUTH_MODE" == token ]]; then
    say "  which needs the head's token: copy ${RAY_AUTH_TOKEN_PATH:-~/.ray/auth_token} there, or set RAY_AUTH_TOKEN"
  fi
  say "then, on this machine: bash scripts/cluster.sh status GPUS, and a launch script"
}

start_worker() {
  local host="${1%:*}" port="$RAY_PORT"
  if [[ "$1" == *:* ]]; then port="${1##*:}"; fi
  [[ -n "$host" && "$port" =~ ^[0-9]+$ ]] || refuse "'$1' is no address of a head: give HOST or HOST:PORT, for example 10.0.0.1:6379"
  if is_loopback "$NODE_ADDRESS" && ! is_loopback "$host"; then
    refuse "SLIME_HOST_IP=$SLIME_HOST_IP: the head at $host would look for this node on its own machine." \
      "Set SLIME_HOST_IP to the address of this machine that the head can reach, or leave it out."
  fi
  require_ray
  require_no_node
  settle_gpus
  require_head "$host" "$port"
  settle_worker_token
  start_node worker --address "$host:$port"
  printf '%s\n' "address=$host:$port" >>"$NODE_FILE"
  say "joined $host:$port with $NUM_GPUS GPUs; it ends with: bash scripts/cluster.sh stop"
}

# --- state and end ------------------------------------------------------------------------------------------------------

show_status() {
  local wanted="${1:-0}" output have deadline=$((SECONDS + STATUS_SECONDS))
  [[ "$wanted" =~ ^[0-9]+$ ]] || refuse "'$wanted' is no number of GPUs"
  if ! node_is_alive; then
    say "no Ray node was started here by cluster.sh (or it ended; its log: $LOG)"
    exit 1
  fi
  say "$(node_value role), process $(node_value pid), cluster $(node_value address), log $LOG"
  require_ray
  RAY_AUTH_MODE="$(node_value auth)"
  export RAY_AUTH_MODE
  if [[ "$(node_value address)" == 127.0.0.1:* ]]; then stay_on_loopback; fi
  while true; do
    if ! output="$(timeout 60 "$RAY" status --address "$(node_value address)" 2>&1)"; then
      say "the cluster at $(node_value address) does not answer:"
      tail -n 3 <<<"$output"
      exit 1
    fi
    have="$(sed -n 's|^ *[0-9.]*/\([0-9]*\)[0-9.]* GPU.*|\1|p' <<<"$output" | head -n 1)"
    # Ray counts a node some seconds after it joined.
    if ((wanted <= ${have:-0} || SECONDS >= deadline)); then break; fi
    sleep 1
  done
  printf '%s\n' "$output"
  if ((wanted > ${have:-0})); then
    say "${have:-0} of $wanted GPUs: $((wanted - ${have:-0})) are missing. On the nodes that are not listed: bash scripts/cluster.sh worker $(node_value address)"
    exit 1
  elif ((wanted > 0)); then
    say "${have:-0} GPUs, $wanted wanted: complete"
  fi
}

# Ends the node's own session, in which all of its processes are: politely first, then whatever is left of them.
stop_node() {
  if ! node_is_alive; then
    say "nothing to stop: no Ray node was started here by cluster.sh"
    if [[ -z "$DRY_RUN" ]]; then rm -f "$NODE_FILE"; fi
    return
  fi
  local pid deadline
  pid="$(node_value pid)"
  if [[ -n "$DRY_RUN" ]]; then
    say "would end the $(node_value role) (process $pid)"
    return
  fi
  kill -TERM "$pid"
  deadline=$((SECONDS + 45)) # Ray lets running work finish for up to 30
  while node_is_alive && ((SECONDS < deadline)); do sleep 0.2; done
  # shellcheck disable=SC2046 # one word per process number
  kill -KILL $(session_of "$pid") 2>/dev/null || true
  deadline=$((SECONDS + 5)) # a killed process may hold its ports and memory for a while
  while [[ -n "$(session_of "$pid")" ]] && ((SECONDS < deadline)); do sleep 0.1; done
  say "ended the $(node_value role) (process $pid)"
  rm -f "$NODE_FILE"
}

# Prints the processes of session $1 that have not ended.
session_of() { ps -e -o pid=,sess=,stat= | awk -v session="$1" '$2 == session && $3 !~ /^Z/ { print $1 }'; }

main() {
  DRY_RUN=""
  if [[ "${*: -1}" == --dry-run ]]; then
    DRY_RUN=1
    set -- "${@:1:$#-1}"
  fi
  case "${1:-}" in
    -h | --help) usage ;;
    head)
      (($# == 1)) || refuse "head takes no argument; see bash scripts/cluster.sh --help"
      start_head
      ;;
    worker)
      (($# == 2)) || refuse "worker needs the head's address: bash scripts/cluster.sh worker 10.0.0.1:$RAY_PORT"
      start_worker "$2"
      ;;
    status) show_status "${2:-0}" ;;
    stop) stop_node ;;
    "") refuse "say what to do: head, worker HEAD_ADDRESS, status or stop; see bash scripts/cluster.sh --help" ;;
    *) refuse "unknown command '$1': head, worker HEAD_ADDRESS, status or stop" ;;
  esac
}

main "$@"
