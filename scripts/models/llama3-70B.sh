#!/usr/bin/env bash
# meta-llama/Meta-Llama-3-70B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${LLAMA3_ARGS[@]}"
  --num-layers "$(num_layers 80)"
  --hidden-size 8192
  --ffn-hidden-size 28672
  --num-attention-heads 64
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 500000)"
  --vocab-size 128256
  --untie-embeddings-and-output-weights
  --max-position-embeddings 8192
)
