#!/usr/bin/env bash
# zai-org/GLM-4.7-Flash (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 47)"
  --hidden-size 2048
  --ffn-hidden-size 10240
  --num-attention-heads 20
  --vocab-size 154880
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --add-qkv-bias
  --qk-layernorm
  --multi-latent-attention
  --num-experts 64
  --q-lora-rank 768
  --kv-lora-rank 512
  --qk-head-dim 192
  --qk-pos-emb-head-dim 64
  --v-head-dim 256
  --kv-channels 192
  --moe-router-topk 4
  --moe-ffn-hidden-size 1536
  --moe-shared-expert-intermediate-size 1536
  --moe-layer-freq "$(moe_layer_freq 47 1)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 1.8
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --no-position-embedding
  --no-rope-fusion
  --make-vocab-size-divisible-by 64
)
