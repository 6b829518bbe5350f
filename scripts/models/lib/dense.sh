#!/usr/bin/env bash
# Families of dense models: the flags that all members of one share. Sizes stand in the model's own script.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

DENSE_BASE_ARGS=(
  --swiglu
  --normalization RMSNorm
  --disable-bias-linear
  --group-query-attention
)

DENSE_ROPE_ARGS=("${DENSE_BASE_ARGS[@]}" --use-rotary-position-embeddings)

QWEN2_ARGS=("${DENSE_ROPE_ARGS[@]}" --add-qkv-bias)

QWEN3_ARGS=("${DENSE_ROPE_ARGS[@]}" --qk-layernorm)

LLAMA3_ARGS=("${DENSE_ROPE_ARGS[@]}")

# Llama 3.1 and later stretch the rotary frequencies to 131072 positions; the factor differs from model to model.
LLAMA3_LONG_CONTEXT_ARGS=(
  --max-position-embeddings 131072
  --use-rope-scaling
)

# Two more norms per layer, and half of each head rotated in interleaved pairs.
GLM4_ARGS=(
  "${DENSE_ROPE_ARGS[@]}"
  --spec slime_plugins.models.glm4 get_glm_spec
  --post-self-attn-layernorm
  --post-mlp-layernorm
  --rotary-interleaved
  --rotary-percent 0.5
  --no-rope-fusion
)

# One layer that predicts a second token.
MIMO_ARGS=(
  "${DENSE_ROPE_ARGS[@]}"
  --add-qkv-bias
  --max-position-embeddings 32768
  --mtp-num-layers 1
)

# Three of four layers are linear attention, the fourth is full attention with a gate on its output.
QWEN3_5_ATTENTION_ARGS=(
  --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
  --qk-layernorm
  --use-gated-attention
  --attention-output-gate
  --apply-layernorm-1p
  --rotary-percent 0.25
)

QWEN3_5_ARGS=(
  "${DENSE_BASE_ARGS[@]}"
  --position-embedding-type rope
  "${QWEN3_5_ATTENTION_ARGS[@]}"
)
