#!/usr/bin/env bash
# meta-llama/Llama-3.2-3B-Instruct (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${LLAMA3_ARGS[@]}"
  --num-layers "$(num_layers 28)"
  --hidden-size 3072
  --ffn-hidden-size 8192
  --num-attention-heads 24
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 500000)"
  --vocab-size 128256
  "${LLAMA3_LONG_CONTEXT_ARGS[@]}"
  --rotary-scaling-factor 32.0
)
