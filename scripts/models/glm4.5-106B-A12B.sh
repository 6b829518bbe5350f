#!/usr/bin/env bash
# zai-org/GLM-4.5-Air (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${GLM4_MOE_ARGS[@]}"
  --num-layers "$(num_layers 46)"
  --moe-layer-freq "$(moe_layer_freq 46 1)"
  --hidden-size 4096
  --ffn-hidden-size 10944
  --num-attention-heads 96
  --num-query-groups 8
  --kv-channels 128
  --num-experts 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 1408
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151552
)
