#!/usr/bin/env bash
# What `bash scripts/quickstart.sh --example fully_async` has of its own: generation that never stops, beside training.
PROGRAM=train_async.py

EXAMPLE_ARGS=(
  --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
  --eval-function-path slime.rollout.sglang_rollout.generate_rollout
  --max-weight-staleness 2
  --use-tis
)
