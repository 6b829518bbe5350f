#!/usr/bin/env bash
# What cluster.sh and the launch scripts know about Ray on this machine: its program, its token, ports, GPUs, and the
# node that cluster.sh started. That node is described by a file of `key=value` lines in $CLUSTER_DIR; its process is
# recognised by number and start time together, so a number that was given to another process later is never mistaken.

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
CLUSTER_DIR="${CLUSTER_DIR:-${TMPDIR:-/tmp}/slime-cluster-$UID}"
NODE_FILE="$CLUSTER_DIR/node"
# Ray kills a stopped job after 3 seconds unless told otherwise. A run ends engines, a checkpoint that is being written, and trackers.
export RAY_JOB_STOP_WAIT_TIME_S="${RAY_JOB_STOP_WAIT_TIME_S:-180}"

say() { printf '%s: %s\n' "${SAY_AS:-$(basename "$0" .sh)}" "$*"; }

# Several lines on stderr, exit status 2: the user can mend it.
refuse() {
  printf "${SAY_AS:-$(basename "$0" .sh)}: %s\n" "$@" >&2
  exit 2
}

# Prints words as any shell, and Python's shlex, take them again: printf's %q has forms that bash alone knows.
quoted() {
  local word quote="'\\''"
  for word in "$@"; do printf " '%s'" "${word//\'/"$quote"}"; done
}

# Prints the program $1 of this repository's environment, else the one on PATH; nothing when there is none.
find_program() {
  if [[ -x "$REPOSITORY/.venv/bin/$1" ]]; then
    printf '%s' "$REPOSITORY/.venv/bin/$1"
  else
    command -v "$1" || true
  fi
}

require_ray() {
  RAY="${RAY:-$(find_program ray)}"
  if [[ -n "$RAY" ]] && command -v "$RAY" >/dev/null; then return; fi
  refuse "Ray is not installed: there is no '${RAY:-ray}' on PATH and none in $REPOSITORY/.venv." \
    "Install it with the pins of requirements/gpu.txt (without a GPU: bash scripts/install.sh), or set RAY=/path/to/ray."
}

# Prints the start time of process $1 in clock ticks; nothing when it does not exist, or has ended and nobody has asked how:
# in a container without an init it is never asked for.
start_time() {
  local stat
  stat="$(cat "/proc/$1/stat" 2>/dev/null)" || return 0
  stat="${stat##*) }" # the name before it may contain anything
  awk '$1 != "Z" { print $20 }' <<<"$stat"
}

# Prints the value of key $1 of the node that was started here.
node_value() { sed -n "s/^$1=//p" "$NODE_FILE" 2>/dev/null | head -n 1; }

node_is_alive() {
  [[ -f "$NODE_FILE" ]] && [[ -n "$(start_time "$(node_value pid)")" ]] &&
    [[ "$(start_time "$(node_value pid)")" == "$(node_value started)" ]]
}

# Whether somebody accepts connections at host $1, port $2, within $3 seconds.
# shellcheck disable=SC2016 # the inner shell expands
listens() { timeout "${3:-3}" bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }

# Prints the first port from $1 on that nobody listens at.
free_port() {
  local port="$1"
  while listens 127.0.0.1 "$port" 1; do port=$((port + 1)); done
  printf '%s' "$port"
}

# Prints the number of GPUs that this machine shows, with respect to CUDA_VISIBLE_DEVICES.
detect_gpus() {
  local count=0 visible
  if command -v nvidia-smi >/dev/null; then
    count="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)"
  elif command -v rocm-smi >/dev/null; then
    count="$(rocm-smi --showid --csv 2>/dev/null | grep -c '^card' || true)"
  fi
  if ((count > 0)) && [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
    visible="${CUDA_VISIBLE_DEVICES//[^,]/}"
    if [[ -z "$CUDA_VISIBLE_DEVICES" ]]; then count=0; else count=$((${#visible} + 1)); fi
  fi
  printf '%s' "$count"
}

has_token() { [[ -n "${RAY_AUTH_TOKEN:-}" || -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]]; }

# Programs of Ray send the token only when they are told to.
use_token_if_there() {
  if [[ -z "${RAY_AUTH_MODE:-}" ]] && has_token; then export RAY_AUTH_MODE=token; fi
}
