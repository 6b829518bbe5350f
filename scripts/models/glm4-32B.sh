#!/usr/bin/env bash
# THUDM/GLM-4-32B-0414 (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${GLM4_ARGS[@]}"
  --num-layers "$(num_layers 61)"
  --hidden-size 6144
  --ffn-hidden-size 23040
  --num-attention-heads 48
  --num-query-groups 2
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 10000)"
  --vocab-size 151552
  --untie-embeddings-and-output-weights
  --max-position-embeddings 32768
  --seq-length 32768
)
