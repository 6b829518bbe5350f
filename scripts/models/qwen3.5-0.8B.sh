#!/usr/bin/env bash
# Qwen/Qwen3.5-0.8B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN3_5_ARGS[@]}"
  --num-layers "$(num_layers 24)"
  --hidden-size 1024
  --ffn-hidden-size 3584
  --num-attention-heads 8
  --num-query-groups 2
  --kv-channels 256
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 10000000)"
  --vocab-size 248320
)
