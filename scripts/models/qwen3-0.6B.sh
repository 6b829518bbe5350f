#!/usr/bin/env bash
# Qwen/Qwen3-0.6B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN3_ARGS[@]}"
  --num-layers "$(num_layers 28)"
  --hidden-size 1024
  --ffn-hidden-size 3072
  --num-attention-heads 16
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
