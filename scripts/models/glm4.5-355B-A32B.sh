#!/usr/bin/env bash
# zai-org/GLM-4.5 (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 92)"
  --hidden-size 5120
  --ffn-hidden-size 12288
  --num-attention-heads 96
  --vocab-size 151552
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --qk-layernorm
  --rotary-percent 0.5
  --num-experts 160
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --moe-shared-expert-intermediate-size 1536
  --moe-layer-freq "$(moe_layer_freq 92 3)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 2.5
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --moe-token-dispatcher-type alltoall
)
