"""What Megatron's flags mean, in one line of ours: those that model scripts and launch scripts use.

A flag that is not here shows the text of the installed Megatron-Core in `--help`. Each line says what the value does, in which
unit, and which other flags it works with. Flags without a field of Megatron-Core have their text in `names`.
"""

# Attribute -> meaning.
MEANINGS: dict[str, str] = {
    # Parallelism
    "tensor_model_parallel_size": "GPUs that share every layer, each with a slice of its matrices; must divide the heads. "
    "Best kept within a node",
    "pipeline_model_parallel_size": "pipeline stages that the layers are split over; micro-batches flow through them",
    "expert_model_parallel_size": "GPUs that the routed experts are spread over; taken from the data- and context-parallel "
    "ranks",
    "expert_tensor_parallel_size": "GPUs that share each routed expert; unset: as --tensor-model-parallel-size",
    "sequence_parallel": "split norms and residuals over the tensor-parallel GPUs by tokens, which saves activations; needs "
    "--tensor-model-parallel-size above 1",
    "overlap_grad_reduce": "reduce gradients in buckets while the backward pass still runs",
    # Shape
    "num_layers": "decoder layers of the model, without multi-token-prediction layers",
    "hidden_size": "width of the residual stream, in channels",
    "ffn_hidden_size": "width inside the MLP of a dense layer; unset: 4 x --hidden-size",
    "num_attention_heads": "query heads of a layer, over all GPUs",
    "num_query_groups": "key and value heads of a layer, with --group-query-attention; must divide the query heads",
    "kv_channels": "width of one attention head; unset: --hidden-size / --num-attention-heads",
    "normalization": "the norm of every layer: RMSNorm, or LayerNorm with its mean and bias",
    "layernorm_epsilon": "number added to the variance inside a norm; part of the model, so as its config.json has it",
    "layernorm_zero_centered_gamma": "norm weights are stored as their distance from one, as Qwen3-Next and Gemma do",
    "add_bias_linear": "a bias in every linear layer; models of today have none",
    "add_qkv_bias": "a bias for queries, keys and values alone, as in Qwen2",
    "qk_layernorm": "norm queries and keys of each head before they are rotated, as in Qwen3",
    "rotary_interleaved": "rotate neighbouring channels together instead of the two halves of a head",
    "attention_output_gate": "multiply what attention gives by a learned gate, as Qwen3-Next does",
    "hidden_dropout": "share of the channels that are dropped after attention and MLP; 0 keeps log-probs repeatable",
    "attention_dropout": "share of the attention weights that are dropped; 0 keeps log-probs repeatable",
    "attention_backend": "which attention kernel is used; auto takes the fastest that fits",
    # Experts
    "moe_router_topk": "experts that each token goes to",
    "moe_ffn_hidden_size": "width inside one routed expert; unset: as --ffn-hidden-size",
    "moe_layer_freq": "which layers have experts: N for every N-th from the first, or a pattern such as [0]*3+[1]*58",
    "moe_shared_expert_intermediate_size": "width of the experts that every token goes to, all together; unset: none",
    "moe_shared_expert_gate": "weigh the shared experts by a learned gate",
    "moe_router_score_function": "how router logits become scores: softmax over the experts, or a sigmoid for each",
    "moe_router_pre_softmax": "make scores before the top experts are chosen, so that those kept need not sum to one",
    "moe_router_num_groups": "groups that the experts are divided into; a token first chooses groups",
    "moe_router_group_topk": "groups that a token chooses its experts from; needs --moe-router-num-groups",
    "moe_router_topk_scaling_factor": "factor on the weights of the chosen experts",
    "moe_router_enable_expert_bias": "a bias per expert that counts when experts are chosen, not in their weights; balances "
    "load without a loss",
    "moe_router_bias_update_rate": "how far that bias moves in an optimizer step; 0 freezes it",
    "moe_router_load_balancing_type": "how the load of the experts is evened out; none leaves it to the model",
    "moe_aux_loss_coeff": "weight of the balancing loss; 0 switches it off",
    "moe_router_dtype": "dtype of router logits and expert weights; fp32 is what large models need",
    "moe_grouped_gemm": "multiply all experts of a GPU in one kernel",
    "moe_permute_fusion": "sort tokens by expert in one fused kernel",
    "moe_token_dispatcher_type": "how tokens reach their experts: alltoall (which allgather becomes), or flex for DeepEP",
    "moe_token_drop_policy": "which tokens go when an expert is full; matters with --moe-expert-capacity-factor alone",
    "moe_enable_deepep": "send tokens by DeepEP's kernels; needs --moe-token-dispatcher-type flex",
    # Latent and linear attention
    "multi_latent_attention": "attention whose keys and values come from one small latent vector per token, as in DeepSeek-V3",
    "q_lora_rank": "width of the latent vector of queries; unset: queries are projected directly",
    "kv_lora_rank": "width of the latent vector that keys and values share; what the engines cache",
    "qk_head_dim": "channels of a query or key head that are not rotated",
    "qk_pos_emb_head_dim": "channels of a query or key head that carry the position",
    "v_head_dim": "channels of a value head",
    "rotary_scaling_factor": "how much longer YaRN makes the context, as a factor",
    "mscale": "YaRN's factor on attention logits, for the length it was stretched to",
    "mscale_all_dim": "the same for all channels; equal to --mscale the two cancel in the rotation",
    # Precision and kernels
    "bf16": "parameters and activations in bfloat16, main parameters in float32; the default on GPUs",
    "fp16": "parameters and activations in float16, with a loss scale",
    "fp8": "multiply matrices in FP8 of this format by Transformer Engine; --fp8-recipe says how it scales",
    "fp8_recipe": "how FP8 is scaled: per tensor, or blockwise as DeepSeek does; needs --fp8-format",
    "attention_softmax_in_fp32": "compute the softmax of attention in float32, as the kernels do in any case",
    "masked_softmax_fusion": "mask and softmax in one kernel, where attention is not fused as a whole",
    "gradient_accumulation_fusion": "add weight gradients into their buffer inside the matrix product; needs APEX or "
    "Transformer Engine",
    "deterministic_mode": "only kernels that give the same bits again; slower",
    # Optimizer
    "optimizer": "which optimizer updates the weights",
    "adam_beta1": "Adam: decay of the mean of gradients, per optimizer step",
    "adam_beta2": "Adam: decay of the mean of squared gradients, per optimizer step",
    "adam_eps": "Adam: number added to the root of the squared mean",
    "weight_decay": "share of a weight that a step takes off, times the learning rate; norms and biases are spared",
    "use_precision_aware_optimizer": "let main parameters and moments have narrower dtypes (--exp-avg-dtype and others)",
    "overlap_cpu_optimizer_d2h_h2d": "copy to and from the host while it updates; with --optimizer-cpu-offload",
    # Memory
    "recompute_granularity": "what the backward pass computes again instead of keeping it: selective (some modules) or full "
    "(whole layers)",
    "recompute_method": "with full: uniform (units of --recompute-num-layers over the whole stage) or block (only the first "
    "layers of a stage)",
    "recompute_num_layers": "layers of a unit with uniform, recomputed layers of a stage with block",
}
