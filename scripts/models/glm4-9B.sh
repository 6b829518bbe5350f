#!/usr/bin/env bash
# THUDM/GLM-4-9B-0414 (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 40)"
  --hidden-size 4096
  --ffn-hidden-size 13696
  --num-attention-heads 32
  --vocab-size 151552
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 10000)"
  --disable-bias-linear
  --add-qkv-bias
  --post-self-attn-layernorm
  --post-mlp-layernorm
  --rotary-interleaved
  --rotary-percent 0.5
  --group-query-attention
  --num-query-groups 2
  --no-rope-fusion
  --spec slime_plugins.models.glm4 get_glm_spec
)
