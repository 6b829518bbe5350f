#!/usr/bin/env bash
# Qwen/Qwen2.5-32B (dense). Instruct variants have another epsilon; the comparison with the config tells.
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 64)"
  --hidden-size 5120
  --ffn-hidden-size 27648
  --num-attention-heads 40
  --vocab-size 152064
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --group-query-attention
  --num-query-groups 8
)
