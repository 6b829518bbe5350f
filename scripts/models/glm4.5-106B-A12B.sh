#!/usr/bin/env bash
# zai-org/GLM-4.5-Air (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 46)"
  --hidden-size 4096
  --ffn-hidden-size 10944
  --num-attention-heads 96
  --vocab-size 151552
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --rotary-percent 0.5
  --num-experts 128
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 1408
  --moe-layer-freq "$(moe_layer_freq 46 1)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --moe-token-dispatcher-type alltoall
)
