#!/usr/bin/env bash
# Qwen/Qwen3-235B-A22B (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${QWEN3_MOE_ARGS[@]}"
  --num-layers "$(num_layers 94)"
  --moe-layer-freq "$(moe_layer_freq 94 0)"
  --hidden-size 4096
  --ffn-hidden-size 12288
  --num-attention-heads 64
  --num-query-groups 4
  --kv-channels 128
  --num-experts 128
  --moe-router-topk 8
  --moe-ffn-hidden-size 1536
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 151936
)
