#!/usr/bin/env bash
# Qwen/Qwen3-VL-8B-Instruct (dense).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 36)"
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 32
  --vocab-size 151936
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --use-rotary-position-embeddings
  --rotary-base "$(rotary_base 5000000)"
  --disable-bias-linear
  --qk-layernorm
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --custom-model-provider-path slime_plugins.models.qwen3_vl.get_qwen3_vl_model_provider
)
