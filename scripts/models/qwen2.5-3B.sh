#!/usr/bin/env bash
# Qwen/Qwen2.5-3B-Instruct (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 36)"
  --hidden-size 2048
  --ffn-hidden-size 11008
  --num-attention-heads 16
  --vocab-size 151936
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --group-query-attention
  --num-query-groups 2
)
