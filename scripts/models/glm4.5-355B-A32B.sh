#!/usr/bin/env bash
# zai-org/GLM-4.5 (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${GLM4_MOE_ARGS[@]}"
  --num-layers "$(num_layers 92)"
  --moe-layer-freq "$(moe_layer_freq 92 3)"
  --hidden-size 5120
  --ffn-hidden-size 12288
  --num-attention-heads 96
  --num-query-groups 8
  --kv-channels 128
  --num-experts 160
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --moe-shared-expert-intermediate-size 1536
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151552
  --qk-layernorm
  --moe-router-topk-scaling-factor 2.5
)
