#!/usr/bin/env bash
# Qwen/Qwen2.5-1.5B-Instruct (dense). Its R1 distillation: MODEL_ARGS_ROTARY_BASE=10000.
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN2_ARGS[@]}"
  --num-layers "$(num_layers 28)"
  --hidden-size 1536
  --ffn-hidden-size 8960
  --num-attention-heads 12
  --num-query-groups 2
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
