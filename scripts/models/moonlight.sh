#!/usr/bin/env bash
# moonshotai/Moonlight-16B-A3B (mixture of experts).
source "$(dirname "${BASH_SOURCE[0]}")/lib/moe.sh"

MODEL_ARGS=(
  "${DEEPSEEK_ARGS[@]}"
  --num-layers "$(num_layers 27)"
  --moe-layer-freq "$(moe_layer_freq 27 1)"
  --hidden-size 2048
  --ffn-hidden-size 11264
  --num-attention-heads 16
  --kv-channels 128
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --num-experts 64
  --moe-router-topk 6
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 2816
  --norm-epsilon 1e-5
  --rotary-base "$(rotary_base 50000)"
  --vocab-size 163840
  --rotary-scaling-factor 1
  --rotary-percent 1.0
  --moe-router-num-groups 1
  --moe-router-group-topk 1
  --moe-router-topk-scaling-factor 2.446
  --no-masked-softmax-fusion
  --moe-token-drop-policy probs
)
