#!/usr/bin/env bash
# Qwen/Qwen3.5-35B-A3B (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${QWEN3_5_MOE_ARGS[@]}"
  --num-layers "$(num_layers 40)"
  --moe-layer-freq "$(moe_layer_freq 40 0)"
  --hidden-size 2048
  --ffn-hidden-size 512
  --num-attention-heads 16
  --num-query-groups 2
  --kv-channels 256
  --num-experts 256
  --moe-router-topk 8
  --moe-ffn-hidden-size 512
  --moe-shared-expert-intermediate-size 512
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 10000000)"
  --vocab-size 248320
)
