#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example search-r1` has of its own: a retriever beside the run, over the corpus of the task.
TASK_ARGS=(--data examples/search-r1/toy_task.py:write_data)
SERVER_PORT=8000 # as in search.yaml
SERVER=("$PYTHON_BIN" examples/search-r1/retriever.py --corpus "$TASK_DIR/corpus.jsonl" --port "$SERVER_PORT")
ENOUGH_ROLLOUTS=15
STEPS_PER_ROLLOUT=4

EXAMPLE_ARGS=(
  --custom-generate-function-path examples/search-r1/generate_with_search.py:generate
  --custom-rm-path examples/search-r1/generate_with_search.py:reward_func
  --custom-config-path examples/search-r1/search.yaml
  --max-turns 2
  --rollout-max-response-len 128
)
