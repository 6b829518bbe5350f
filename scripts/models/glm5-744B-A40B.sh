#!/usr/bin/env bash
# zai-org/GLM-5 (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 78)"
  --hidden-size 6144
  --ffn-hidden-size 12288
  --num-attention-heads 64
  --vocab-size 154880
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 1000000)"
  --disable-bias-linear
  --qk-layernorm
  --multi-latent-attention
  --num-experts 256
  --q-lora-rank 2048
  --kv-lora-rank 512
  --qk-head-dim 192
  --qk-pos-emb-head-dim 64
  --v-head-dim 256
  --kv-channels 192
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq "$(moe_layer_freq 78 3)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 2.5
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --no-position-embedding
  --make-vocab-size-divisible-by 16
  --enable-experimental
  --allgather-cp
  --spec slime_plugins.models.glm5.glm5 get_glm5_spec
)
