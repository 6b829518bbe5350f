#!/usr/bin/env bash
# MiniMaxAI/MiniMax-M2 (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 62)"
  --hidden-size 3072
  --ffn-hidden-size 1536
  --num-attention-heads 48
  --vocab-size 200064
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 5000000)"
  --disable-bias-linear
  --qk-layernorm
  --rotary-percent 0.5
  --num-experts 256
  --group-query-attention
  --num-query-groups 8
  --kv-channels 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --moe-layer-freq "$(moe_layer_freq 62 0)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --no-rope-fusion
  --attention-softmax-in-fp32
  --moe-token-dispatcher-type alltoall
  --moe-router-load-balancing-type none
  --spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec
)
