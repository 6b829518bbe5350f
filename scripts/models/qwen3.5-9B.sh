#!/usr/bin/env bash
# Qwen/Qwen3.5-9B (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN3_5_ARGS[@]}"
  --num-layers "$(num_layers 32)"
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 16
  --num-query-groups 4
  --kv-channels 256
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 10000000)"
  --vocab-size 248320
  --untie-embeddings-and-output-weights
)
