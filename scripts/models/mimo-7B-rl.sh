#!/usr/bin/env bash
# XiaomiMiMo/MiMo-7B-RL (dense).
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${MIMO_ARGS[@]}"
  --num-layers "$(num_layers 36)"
  --hidden-size 4096
  --ffn-hidden-size 11008
  --num-attention-heads 32
  --num-query-groups 8
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 640000)"
  --vocab-size 151680
  --untie-embeddings-and-output-weights
)
