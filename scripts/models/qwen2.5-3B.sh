#!/usr/bin/env bash
# Qwen/Qwen2.5-3B-Instruct (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN2_ARGS[@]}"
  --num-layers "$(num_layers 36)"
  --hidden-size 2048
  --ffn-hidden-size 11008
  --num-attention-heads 16
  --num-query-groups 2
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
