#!/usr/bin/env bash
# Qwen/Qwen3.5-27B (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 64)"
  --hidden-size 5120
  --ffn-hidden-size 17408
  --num-attention-heads 24
  --vocab-size 248320
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 10000000)"
  --disable-bias-linear
  --qk-layernorm
  --use-gated-attention
  --attention-output-gate
  --apply-layernorm-1p
  --rotary-percent 0.25
  --group-query-attention
  --num-query-groups 4
  --kv-channels 256
  --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
)
