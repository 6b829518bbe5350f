#!/usr/bin/env bash
# MiniMaxAI/MiniMax-M2 (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${MINIMAX_M2_ARGS[@]}"
  --num-layers "$(num_layers 62)"
  --moe-layer-freq "$(moe_layer_freq 62 0)"
  --hidden-size 3072
  --ffn-hidden-size 1536
  --num-attention-heads 48
  --num-query-groups 8
  --kv-channels 128
  --num-experts 256
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 5000000)"
  --vocab-size 200064
)
