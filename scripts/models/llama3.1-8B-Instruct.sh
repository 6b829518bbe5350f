#!/usr/bin/env bash
# meta-llama/Llama-3.1-8B-Instruct (dense).
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
  "${LLAMA3_LONG_CONTEXT_ARGS[@]}"
  --rotary-scaling-factor 8.0
)
