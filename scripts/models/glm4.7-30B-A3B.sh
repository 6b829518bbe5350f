#!/usr/bin/env bash
# zai-org/GLM-4.7-Flash (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${GLM4_MOE_LITE_ARGS[@]}"
  --num-layers "$(num_layers 47)"
  --moe-layer-freq "$(moe_layer_freq 47 1)"
  --hidden-size 2048
  --ffn-hidden-size 10240
  --num-attention-heads 20
  --kv-channels 192
  --q-lora-rank 768
  --kv-lora-rank 512
  --qk-head-dim 192
  --qk-pos-emb-head-dim 64
  --v-head-dim 256
  --num-experts 64
  --moe-router-topk 4
  --moe-ffn-hidden-size 1536
  --moe-shared-expert-intermediate-size 1536
  --rotary-base "$(rotary_base 1000000)"
  --vocab-size 154880
)
