#!/usr/bin/env bash
# THUDM/GLM-4-9B-0414 (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${GLM4_ARGS[@]}"
  --num-layers "$(num_layers 40)"
  --hidden-size 4096
  --ffn-hidden-size 13696
  --num-attention-heads 32
  --num-query-groups 2
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 10000)"
  --vocab-size 151552
  --untie-embeddings-and-output-weights
  --add-qkv-bias
)
