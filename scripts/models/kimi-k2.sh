#!/usr/bin/env bash
# moonshotai/Kimi-K2-Instruct (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 61)"
  --hidden-size 7168
  --ffn-hidden-size 18432
  --num-attention-heads 64
  --vocab-size 163840
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 50000)"
  --disable-bias-linear
  --qk-layernorm
  --multi-latent-attention
  --num-experts 384
  --q-lora-rank 1536
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --kv-channels 64
  --rotary-scaling-factor 32
  --mscale 1
  --mscale-all-dim 1
  --moe-router-topk 8
  --moe-ffn-hidden-size 2048
  --moe-shared-expert-intermediate-size 2048
  --moe-layer-freq "$(moe_layer_freq 61 1)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 2.827
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --moe-router-num-groups 1
  --moe-router-group-topk 1
  --attention-softmax-in-fp32
  --no-rope-fusion
  --moe-token-dispatcher-type alltoall
)
