#!/usr/bin/env bash
# Qwen/Qwen3-32B (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 64)"
  --hidden-size 5120
  --ffn-hidden-size 25600
  --num-attention-heads 64
  --vocab-size 151936
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --qk-layernorm
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
)
