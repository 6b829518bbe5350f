#!/usr/bin/env bash
# Qwen/Qwen3-235B-A22B (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 94)"
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 64
  --vocab-size 151936
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --qk-layernorm
  --rotary-percent 1
  --num-experts 128
  --group-query-attention
  --num-query-groups 4
  --kv-channels 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --moe-layer-freq "$(moe_layer_freq 94 0)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall
  --moe-token-drop-policy probs
)
