#!/usr/bin/env bash
# meta-llama/Llama-3.2-3B-Instruct (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 28)"
  --hidden-size 3072
  --ffn-hidden-size 8192
  --num-attention-heads 24
  --vocab-size 128256
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 500000)"
  --max-position-embeddings 131072
  --disable-bias-linear
  --use-rope-scaling
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --rotary-scaling-factor 32
)
