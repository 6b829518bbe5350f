#!/usr/bin/env bash
# Qwen3-4B with a search tool, on one node of 8 GPUs: scripts/run-qwen3-4B.sh and a few more flags, and a retriever beside it.
#
#   bash examples/search-r1/run-qwen3-4B.sh --dry-run
#   CORPUS=wiki.jsonl PROMPT_DATA=questions.jsonl EVAL_DATA=held_out.jsonl bash examples/search-r1/run-qwen3-4B.sh
#
# Without CORPUS the retriever of search.yaml is there already.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$HERE/../../scripts/lib/ray_node.sh"

export RUN_NAME="${RUN_NAME:-search-r1-qwen3-4B}"
RUN=(
  bash "$REPOSITORY/scripts/run-qwen3-4B.sh"
  --custom-generate-function-path "$HERE/generate_with_search.py:generate"
  --custom-rm-path "$HERE/generate_with_search.py:reward_func"
  --custom-config-path "$HERE/search.yaml"
  --max-turns 2
  --use-tis
)
if [[ -z "${CORPUS:-}" ]]; then exec "${RUN[@]}" "$@"; fi

# The run names this command in its last lines, not that of the script below, which has no retriever.
SLIME_START_COMMAND="$(quoted env "CORPUS=$CORPUS" bash "$HERE/run-qwen3-4B.sh" "$@")"
export SLIME_START_COMMAND
PYTHON="${PYTHON:-$(find_program python3)}"
exec "$PYTHON" "$REPOSITORY/tools/with_server.py" --port 8000 --log "$REPOSITORY/outputs/search-r1/retriever.log" --timeout 600 \
  "$PYTHON" "$HERE/retriever.py" --corpus "$CORPUS" --port 8000 -- "${RUN[@]}" "$@"
