#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example eval_multi_task` has of its own: three evaluation sets.
TASK_ARGS=(--data examples/eval_multi_task/toy_task.py:write_data)
EVAL_SETS=(--eval-config "$TASK_DIR/eval.yaml")
