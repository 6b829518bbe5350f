#!/usr/bin/env bash
# moonshotai/Kimi-K2-Thinking (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${KIMI_K2_ARGS[@]}"
  --num-layers "$(num_layers 61)"
  --moe-layer-freq "$(moe_layer_freq 61 1)"
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 64
  --kv-channels 64
  --q-lora-rank 1536
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --num-experts 384
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 50000)"
  --vocab-size 163840
  --rotary-scaling-factor 64.0
)
