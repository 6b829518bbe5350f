#!/usr/bin/env bash
# Qwen/Qwen3-32B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN3_ARGS[@]}"
  --num-layers "$(num_layers 64)"
  --hidden-size 5120
  --ffn-hidden-size 25600
  --num-attention-heads 64
  --num-query-groups 8
  --kv-channels 128
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
  --untie-embeddings-and-output-weights
)
