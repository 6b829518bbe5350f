#!/usr/bin/env bash
# Qwen/Qwen3-Next-80B-A3B-Thinking (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${QWEN3_NEXT_ARGS[@]}"
  --num-layers "$(num_layers 48)"
  --moe-layer-freq "$(moe_layer_freq 48 0)"
  --hidden-size 2048
  --ffn-hidden-size 5120
  --num-attention-heads 16
  --num-query-groups 2
  --kv-channels 256
  --num-experts 512
  --moe-router-topk 10
  --moe-ffn-hidden-size 512
  --moe-shared-expert-intermediate-size 512
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 10000000)"
  --vocab-size 151936
)
