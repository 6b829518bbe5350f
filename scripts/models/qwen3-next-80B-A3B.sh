#!/usr/bin/env bash
# Qwen/Qwen3-Next-80B-A3B-Thinking (mixture of experts).
# Written by `python tools/write_model_scripts.py`; to change the flags, change a copy.
source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

MODEL_ARGS=(
  --num-layers "$(num_layers 48)"
  --hidden-size 2048
  --ffn-hidden-size 5120
  --num-attention-heads 16
  --vocab-size 151936
  --untie-embeddings-and-output-weights
  --normalization RMSNorm
  --norm-epsilon 1e-6
  --swiglu
  --position-embedding-type rope
  --rotary-base "$(rotary_base 10000000)"
  --disable-bias-linear
  --qk-layernorm
  --use-gated-attention
  --attention-output-gate
  --apply-layernorm-1p
  --rotary-percent 0.25
  --num-experts 512
  --group-query-attention
  --num-query-groups 2
  --kv-channels 256
  --moe-router-topk 10
  --moe-ffn-hidden-size 512
  --moe-shared-expert-intermediate-size 512
  --moe-shared-expert-gate
  --moe-layer-freq "$(moe_layer_freq 48 0)"
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
  --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall
  --moe-token-drop-policy probs
  --spec slime_plugins.models.qwen3_next get_qwen3_next_spec
)
