#!/usr/bin/env bash
# XiaomiMiMo/MiMo-7B-RL (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 36)"
  --hidden-size 4096
  --ffn-hidden-size 11008
  --num-attention-heads 32
  --vocab-size 151680
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 640000)"
  --max-position-embeddings 32768
  --disable-bias-linear
  --add-qkv-bias
  --group-query-attention
  --num-query-groups 8
  --mtp-num-layers 1
)
