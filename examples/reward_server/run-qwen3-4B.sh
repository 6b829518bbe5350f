#!/usr/bin/env bash
# Qwen3-4B with rewards of a server, on one node of 8 GPUs: scripts/run-qwen3-4B.sh, with the server beside it.
#
#   bash examples/reward_server/run-qwen3-4B.sh --dry-run
#   RM_URL=http://10.0.0.5:8181/grade bash examples/reward_server/run-qwen3-4B.sh    a server that is there already
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/lib/ray_node.sh"

export RUN_NAME="${RUN_NAME:-reward_server-qwen3-4B}"
RUN=(bash "$REPOSITORY/scripts/run-qwen3-4B.sh" --rm-type remote_rm --rm-url)
if [[ -n "${RM_URL:-}" ]]; then exec "${RUN[@]}" "$RM_URL" "$@"; fi

# The run names this command in its last lines, not that of the script below, which has no server.
SLIME_START_COMMAND="$(quoted bash "$HERE/run-qwen3-4B.sh" "$@")"
export SLIME_START_COMMAND
PYTHON="${PYTHON:-$(find_program python3)}"
PORT="$(free_port "${PORT:-8181}")"
exec "$PYTHON" "$REPOSITORY/tools/with_server.py" --port "$PORT" --log "${SERVER_LOG:-$REPOSITORY/outputs/reward_server/server.log}" \
  "$PYTHON" "$HERE/server.py" --port "$PORT" -- "${RUN[@]}" "http://127.0.0.1:$PORT/grade" "$@"
