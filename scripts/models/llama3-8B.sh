#!/usr/bin/env bash
# meta-llama/Meta-Llama-3-8B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${LLAMA3_ARGS[@]}"
  --num-layers "$(num_layers 32)"
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 500000)"
  --vocab-size 128256
  --untie-embeddings-and-output-weights
  --max-position-embeddings 8192
)
