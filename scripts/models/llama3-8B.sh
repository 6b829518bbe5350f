#!/usr/bin/env bash
# meta-llama/Meta-Llama-3-8B (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 32)"
  --hidden-size 4096
  --ffn-hidden-size 14336
  --num-attention-heads 32
  --vocab-size 128256
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 500000)"
  --max-position-embeddings 8192
  --disable-bias-linear
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
)
