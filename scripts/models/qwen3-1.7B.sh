#!/usr/bin/env bash
# Qwen/Qwen3-1.7B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN3_ARGS[@]}"
  --num-layers "$(num_layers 28)"
  --hidden-size 2048
  --ffn-hidden-size 6144
  --num-attention-heads 16
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
