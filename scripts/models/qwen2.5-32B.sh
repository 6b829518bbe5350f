#!/usr/bin/env bash
# Qwen/Qwen2.5-32B (dense). Instruct variants have another epsilon; the comparison with the config tells.
source "$(dirname "${BASH_SOURCE[0]}")/lib/dense.sh"

MODEL_ARGS=(
  "${QWEN2_ARGS[@]}"
  --num-layers "$(num_layers 64)"
  --hidden-size 5120
  --ffn-hidden-size 27648
  --num-attention-heads 40
  --num-query-groups 8
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 152064
  --untie-embeddings-and-output-weights
)
