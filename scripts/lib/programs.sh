#!/usr/bin/env bash
# Programs of a script that end with it, and nothing else does. A signal to the script alone reaches no program of its own accord;
# of Ctrl-C in a terminal, or of its end, all processes there hear.

source "$(dirname "${BASH_SOURCE[0]}")/ray_node.sh"

# Runs a program. It is waited for in the background, since a shell that waits in the foreground hears no signal; without the
# words in brackets the shell would have it ignore Ctrl-C and read nothing there.
run() {
  (trap - INT QUIT && exec "$@") <&0 &
  wait $!
}

# Prints the processes below process $1 as `number:start time`, by which another that gets the number later is told apart.
processes_below() {
  local child started children
  # A line of numbers for each thread, without an end.
  read -r -d '' -a children < <(cat "/proc/$1/task/"*/children 2>/dev/null) || true
  for child in ${children[@]+"${children[@]}"}; do
    started="$(start_time "$child")"
    if [[ -n "$started" ]]; then printf '%s:%s\n' "$child" "$started"; fi
    processes_below "$child"
  done
}

# Prints the numbers of those of the processes $1, $2, ... that are still there.
still_there() {
  local process
  for process in "$@"; do
    if [[ "$(start_time "${process%:*}")" == "${process#*:}" ]]; then echo "${process%:*}"; fi
  done
}

# Waits until none of the processes $2, $3, ... is there, for at most $1 seconds.
await_end_of() {
  local deadline=$((SECONDS + $1))
  shift
  while [[ -n "$(still_there "$@")" ]] && ((SECONDS < deadline)); do sleep 0.1; done
}

# Ends by the signal $1, and before that the program that `run` waits for: it is sent the signals $2, $3, ... and waited for
# after each. train.py ends what it has started; what others leave, and what does not end in time, is killed.
stop() {
  local name="$1" number program deadline below=()
  shift
  trap '' INT TERM HUP
  program="$(jobs -rp)"
  for number in "$@" KILL; do
    if [[ -z "$(jobs -rp)" ]]; then break; fi
    mapfile -t -O "${#below[@]}" below < <(processes_below "$program")
    if [[ "$number" != none ]]; then kill -s "$number" "$program" || true; fi
    deadline=$((SECONDS + ${STOP_SECONDS:-60}))
    while [[ -n "$(jobs -rp)" ]] && ((SECONDS < deadline)); do sleep 0.1; done
  done
  await_end_of "${LEFT_SECONDS:-5}" ${below[@]+"${below[@]}"}
  for number in $(still_there ${below[@]+"${below[@]}"}); do kill -s KILL "$number" 2>/dev/null || true; done
  await_end_of 5 ${below[@]+"${below[@]}"} # a killed process may hold its files and memory for a while
  # Whoever waits for the script, a loop in a terminal say, learns what ended it.
  trap - "$name"
  kill -s "$name" $$
  exit 1
}
trap 'stop HUP TERM' HUP
trap 'stop INT none TERM' INT
trap 'stop TERM TERM' TERM
