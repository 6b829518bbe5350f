#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example reward_server` has of its own: a server of another process gives the rewards.
SERVER_PORT="$(source scripts/lib/ray_node.sh && free_port 8181)"
SERVER=("$PYTHON_BIN" examples/reward_server/server.py --port "$SERVER_PORT")

EXAMPLE_ARGS=(
  --rm-type remote_rm
  --rm-url "http://127.0.0.1:$SERVER_PORT/grade"
)
