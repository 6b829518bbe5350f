#!/usr/bin/env bash
# moonshotai/Moonlight-16B-A3B (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 27)"
  --hidden-size 2048
  --ffn-hidden-size 11264
  --num-attention-heads 16
  --vocab-size 163840
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-5
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 50000)"
  --disable-bias-linear
  --qk-layernorm
  --multi-latent-attention
  --rotary-percent 1
  --num-experts 64
  --kv-lora-rank 512
  --qk-head-dim 128
  --qk-pos-emb-head-dim 64
  --v-head-dim 128
  --kv-channels 128
  --rotary-scaling-factor 1
  --moe-router-topk 6
  --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 2816
  --moe-layer-freq "$(moe_layer_freq 27 1)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
  --moe-router-topk-scaling-factor 2.446
  --moe-router-load-balancing-type seq_aux_loss
  --moe-router-bias-update-rate 0
  --moe-router-num-groups 1
  --moe-router-group-topk 1
  --mscale 1
  --mscale-all-dim 1
  --attention-softmax-in-fp32
  --no-rope-fusion
  --moe-token-dispatcher-type alltoall
  --no-masked-softmax-fusion
  --moe-token-drop-policy probs
)
