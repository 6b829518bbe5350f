#!/usr/bin/env bash
# Qwen/Qwen3-VL-30B-A3B-Instruct (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 48)"
  --hidden-size 2048
  --ffn-hidden-size 6144
  --num-attention-heads 32
  --vocab-size 151936
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 5000000)"
  --disable-bias-linear
  --qk-layernorm
  --rotary-percent 1
  --num-experts 128
  --group-query-attention
  --num-query-groups 4
  --kv-channels 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 768
  --moe-layer-freq "$(moe_layer_freq 48 0)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall
  --moe-token-drop-policy probs
  --custom-model-provider-path slime_plugins.models.qwen3_vl.get_qwen3_vl_model_provider
)
