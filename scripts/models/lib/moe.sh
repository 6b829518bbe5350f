#!/usr/bin/env bash
# Families of mixtures of experts: the flags that all members of one share. Sizes stand in the model's own script.
source "$(dirname "${BASH_SOURCE[0]}")/dense.sh"

MOE_ARGS=(
  --swiglu
  --normalization RMSNorm
  --disable-bias-linear
  --position-embedding-type rope
  --untie-embeddings-and-output-weights
  --moe-grouped-gemm
  --moe-permute-fusion
  --moe-router-dtype fp32
  --moe-aux-loss-coeff 0
)

SOFTMAX_ROUTER_ARGS=(
  --moe-router-score-function softmax
  --moe-token-dispatcher-type alltoall
  --moe-token-drop-policy probs
)

# Experts are chosen by a sigmoid score plus a bias per expert.
SIGMOID_ROUTER_ARGS=(
  --moe-router-score-function sigmoid
  --moe-router-pre-softmax
  --moe-router-enable-expert-bias
)

# The bias stays as it was pretrained.
FROZEN_BIAS_ARGS=(
  --moe-router-bias-update-rate 0
  --moe-router-load-balancing-type seq_aux_loss
)

QWEN3_MOE_ARGS=(
  "${MOE_ARGS[@]}"
  "${SOFTMAX_ROUTER_ARGS[@]}"
  --group-query-attention
  --qk-layernorm
  --rotary-percent 1.0
)

QWEN3_NEXT_ARGS=(
  "${MOE_ARGS[@]}"
  "${SOFTMAX_ROUTER_ARGS[@]}"
  --spec slime_plugins.models.qwen3_next get_qwen3_next_spec
  --group-query-attention
  --qk-layernorm
  --use-gated-attention
  --attention-output-gate
  --apply-layernorm-1p
  --rotary-percent 0.25
  --moe-shared-expert-gate
)

QWEN3_5_MOE_ARGS=(
  "${MOE_ARGS[@]}"
  "${SOFTMAX_ROUTER_ARGS[@]}"
  --group-query-attention
  "${QWEN3_5_ATTENTION_ARGS[@]}"
  --moe-shared-expert-gate
)

GLM4_MOE_ARGS=(
  "${MOE_ARGS[@]}"
  "${SIGMOID_ROUTER_ARGS[@]}"
  "${FROZEN_BIAS_ARGS[@]}"
  --group-query-attention
  --add-qkv-bias
  --rotary-percent 0.5
  --moe-token-dispatcher-type alltoall
)

GLM4_MOE_LITE_ARGS=(
  "${MOE_ARGS[@]}"
  "${SIGMOID_ROUTER_ARGS[@]}"
  "${FROZEN_BIAS_ARGS[@]}"
  --multi-latent-attention
  --add-qkv-bias
  --qk-layernorm
  --no-position-embedding
  --no-rope-fusion
  --make-vocab-size-divisible-by 64
  --moe-router-topk-scaling-factor 1.8
)

# Sparse attention: an indexer picks the keys, so context parallelism gathers them (--allgather-cp).
GLM5_ARGS=(
  "${MOE_ARGS[@]}"
  "${SIGMOID_ROUTER_ARGS[@]}"
  "${FROZEN_BIAS_ARGS[@]}"
  --spec slime_plugins.models.glm5.glm5 get_glm5_spec
  --multi-latent-attention
  --qk-layernorm
  --no-position-embedding
  --enable-experimental
  --allgather-cp
  --make-vocab-size-divisible-by 16
  --moe-router-topk-scaling-factor 2.5
)

# DeepSeek V3 and the models built like it; groups and scaling factors differ.
DEEPSEEK_ARGS=(
  "${MOE_ARGS[@]}"
  "${SIGMOID_ROUTER_ARGS[@]}"
  "${FROZEN_BIAS_ARGS[@]}"
  --multi-latent-attention
  --qk-layernorm
  --attention-softmax-in-fp32
  --no-rope-fusion
  --mscale 1.0
  --mscale-all-dim 1.0
  --moe-token-dispatcher-type alltoall
)

KIMI_K2_ARGS=(
  "${DEEPSEEK_ARGS[@]}"
  --moe-router-num-groups 1
  --moe-router-group-topk 1
  --moe-router-topk-scaling-factor 2.827
)

# The norm of queries and keys spans all heads at once.
MINIMAX_M2_ARGS=(
  "${MOE_ARGS[@]}"
  "${SIGMOID_ROUTER_ARGS[@]}"
  --spec slime_plugins.models.minimax_m2 get_minimax_m2_layer_spec
  --group-query-attention
  --qk-layernorm
  --rotary-percent 0.5
  --no-rope-fusion
  --attention-softmax-in-fp32
  --moe-router-load-balancing-type none
  --moe-token-dispatcher-type alltoall
)
