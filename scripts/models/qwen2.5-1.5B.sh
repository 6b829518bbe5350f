#!/usr/bin/env bash
# Qwen/Qwen2.5-1.5B-Instruct (dense). Its R1 distillation: MODEL_ARGS_ROTARY_BASE=10000.
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 28)"
  --hidden-size 1536
  --ffn-hidden-size 8960
  --num-attention-heads 12
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
