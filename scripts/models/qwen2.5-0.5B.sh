#!/usr/bin/env bash
# Qwen/Qwen2.5-0.5B-Instruct (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN2_ARGS[@]}"
  --num-layers "$(num_layers 24)"
  --hidden-size 896
  --ffn-hidden-size 4864
  --num-attention-heads 14
  --num-query-groups 2
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
