#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example delta_weight_sync` has of its own: pushes as files of what changed, and an engine of
# another cluster, which nobody of the run knows, that follows them.
SERVER_PORT="$(source scripts/lib/ray_node.sh && free_port 30200)"
OTHER_CLUSTER="$RUN_DIR/other_cluster"
# shellcheck disable=SC2016 # the shell of the other cluster expands
SERVER=(
  bash -c 'mkdir -p "$4" && "$0" tools/serve_on_cpu.py --model-path "$1" --port "$2" >"$4/engine.log" 2>&1 &
    exec "$0" examples/delta_weight_sync/follow.py --pushes "$3" --hf-checkpoint "$1" --local "$4/weights" --engines "http://127.0.0.1:$2"'
  "$PYTHON_BIN" "$TASK_DIR/model" "$SERVER_PORT" "$RUN_DIR/pushes" "$OTHER_CLUSTER"
)

EXAMPLE_ARGS=(
  --update-weight-transport disk
  --update-weight-mode delta
  --update-weight-disk-dir "$RUN_DIR/pushes"
  --update-weight-local-checkpoint-dir "$RUN_DIR/weights_of_engines"
)
