#!/usr/bin/env bash
# deepseek-ai/DeepSeek-V3 (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${DEEPSEEK_ARGS[@]}"
  --num-layers "$(num_layers 61)"
  --moe-layer-freq "$(moe_layer_freq 61 3)"
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 128
  --kv-channels 128
  --q-lora-rank 1536
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --num-experts 256
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --norm-epsilon 1e-6
  --rotary-base "$(rotary_base 10000)"
  --vocab-size 129280
  --rotary-scaling-factor 40
  --moe-router-num-groups 8
  --moe-router-group-topk 4
  --moe-router-topk-scaling-factor 2.5
)
