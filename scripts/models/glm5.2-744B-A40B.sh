#!/usr/bin/env bash
# zai-org/GLM-5.2 (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${GLM5_ARGS[@]}"
  --num-layers "$(num_layers 78)"
  --moe-layer-freq "$(moe_layer_freq 78 3)"
  --hidden-size 6144
  --ffn-hidden-size 12288
  --num-attention-heads 64
  --kv-channels 192
  --q-lora-rank 2048
  --kv-lora-rank 512
  --qk-head-dim 192
  --qk-pos-emb-head-dim 64
  --v-head-dim 256
  --num-experts 256
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --rotary-base "$(rotary_base 8000000)"
  --vocab-size 154880
)
