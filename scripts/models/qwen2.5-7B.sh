#!/usr/bin/env bash
# Qwen/Qwen2.5-7B-Instruct (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 28)"
  --hidden-size 3584
  --ffn-hidden-size 18944
  --num-attention-heads 28
  --vocab-size 152064
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --group-query-attention
  --num-query-groups 4
)
