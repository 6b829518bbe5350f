#!/usr/bin/env bash
# Qwen/Qwen3-30B-A3B (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${QWEN3_MOE_ARGS[@]}"
  --num-layers "$(num_layers 48)"
  --moe-layer-freq "$(moe_layer_freq 48 0)"
  --hidden-size 2048
  --ffn-hidden-size 6144
  --num-attention-heads 32
  --num-query-groups 4
  --kv-channels 128
  --num-experts 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 768
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
