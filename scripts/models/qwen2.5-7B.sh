#!/usr/bin/env bash
# Qwen/Qwen2.5-7B-Instruct (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN2_ARGS[@]}"
  --num-layers "$(num_layers 28)"
  --hidden-size 3584
  --ffn-hidden-size 18944
  --num-attention-heads 28
  --num-query-groups 4
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 152064
  --untie-embeddings-and-output-weights
)
