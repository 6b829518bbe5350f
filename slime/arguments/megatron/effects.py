"""The effects of Megatron's flags that do more or less than set a field of Megatron's configuration.

Such a flag is in one of four tables:

* `FIXED`: this trainer sets the value itself; typing another one is an error.
* `ACTS_WITH`: the flag qualifies another one and means nothing without it; typing it alone is an error.
* `NO_EFFECT`: this trainer always does what the flag asks for; it may be typed and changes nothing.
* `NOT_YET`: the flag asks for a feature that is not built.

A test checks that no flag is missing: none is accepted and ignored.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.arguments.flag import NotYet, features

# Attribute -> (its only value, reason).
FIXED: dict[str, tuple[Any, str]] = {
    "variable_seq_lengths": (True, "packed streams differ in length from micro-batch to micro-batch"),
    "attention_softmax_in_fp32": (True, "the attention kernels compute it in float32 in any case"),
    "use_gloo_process_groups": (True, "checkpoints of the distributed optimizer go through them"),
    "cross_entropy_loss_fusion": (False, "the loss is this trainer's own, not Megatron's"),
    "cross_entropy_fusion_impl": ("native", "the loss is this trainer's own, not Megatron's"),
    "async_tensor_model_parallel_allreduce": (True, "Megatron-Core ignores it"),
    "moe_extended_tp": (False, "Megatron-Core ignores it; --expert-tensor-parallel-size took its place"),
    "moe_token_dropping": (False, "Megatron-Core ignores it; --moe-expert-capacity-factor drops tokens"),
    "apply_residual_connection_post_layernorm": (False, "Megatron-Core has no such layer any more"),
    "test_mode": (False, "it is for Megatron's own tests"), "fp8_interval": (1, "Transformer Engine ignores it"),
    "ckpt_format": ("torch_dist", "it alone fits any layout, and it is what resumes, background saves and tools go by; "
                    "--ckpt-convert-format of Megatron-LM turns its older format into it"),
    "dist_ckpt_save_pre_mcore_014": (False, "checkpoints are written for any layout, which older versions cannot read"),
    "moe_use_legacy_grouped_gemm": (False, "the kernels of --moe-grouped-gemm are Transformer Engine's"),
    "moe_enable_routing_replay": (False, "--use-routing-replay is this trainer's own"),
    "moe_router_topk_limited_devices": (None, "--moe-router-num-groups and --moe-router-group-topk took its place"),
    "use_ring_exchange_p2p": (False, "it needs a build of torch that has ring_exchange, which no published one has"),
    "log_validation_ppl_to_tensorboard": (False, "evaluations grade answers: there is no loss of theirs"),
    "logging_level": (None, "--log-level says it, in words"),
    "memory_snapshot_path": ("snapshot.pickle", "every rank has one: --memory-snapshot-dir is where they go"),
    "position_embedding_type": ("rope", "every family rotates, and models that see images tell their positions themselves"),
    "mrope_section": (None, "models that see images have the sections of their config"),
    "softmax_type": ("vanilla", "learnable sinks come by --spec slime_plugins.models.learnable_softmax_attention "
                     "get_learnable_softmax_spec"),
    **{name: (value, "no family has such layers: no checkpoint and no engine could hold them") for name, value in {
        "moe_latent_size": None, "window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None, "qk_l2_norm": False,
        "squared_relu": False, "quick_geglu": False, "activation_func_clamp_value": None, "glu_linear_offset": 0.0,
        "heterogeneous_block_specs": False, "hetereogenous_dist_checkpoint": False, "is_hybrid_model": False,
        "mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": None,
        "use_mamba_mem_eff_path": True,
    }.items()},
    **dict.fromkeys(("qk_clip", "log_max_attention_logit"), (False, "it goes by the largest logits of attention, which the "
        "kernels of packed samples do not return; --clip-grad bounds what a step changes")),
    **{name: (value, "only layers of Transformer Engine can move what they keep to the host; --recompute-granularity full has "
        "any layer keep little") for name, value in {
        "cpu_offloading": False, "cpu_offloading_num_layers": 0, "cpu_offloading_activations": True, "offload_modules": [],
        "cpu_offloading_weights": False, "cpu_offloading_double_buffering": False, "min_offloaded_tensor_size": 2**20,
        "fine_grained_activation_offloading": False,
    }.items()},
    "delay_wgrad_compute": (False, "it takes layers of Transformer Engine that part the two gradients of a product; "
                            "--overlap-moe-expert-parallel-comm hides the messages of experts without it"),
    **{name: (value, "the engines generate, not Megatron") for name, value in {
        "flash_decode": False, "inference_rng_tracker": False, "inference_sampling_seed": 42,
        "inference_fuse_tp_communication": False, "use_inference_optimized_layers": False, "symmetric_ar_type": None,
        "mlp_chunks_for_prefill": 1, "cache_mla_latents": False,
    }.items()},
}  # fmt: skip

# Attribute -> reason why the flag changes nothing.
NO_EFFECT: dict[str, str] = {
    "add_position_embedding": "no table of positions is ever added: positions come from --position-embedding-type",
    "override_opt_param_scheduler": "on resume the settings of the command line hold unless the checkpoint's are asked for",
    "dist_ckpt_optim_fully_reshardable": "checkpoints can be loaded into any layout as it is",
    "distrib_optim_fully_reshardable_mem_efficient": "data-parallel ranks divide what a save gathers as it is",
    "ckpt_assume_constant_structure": "it allows a shortcut that is not taken: the layout is planned at every save",
    "use_persistent_ckpt_worker": "every checkpoint has writers of its own",
    "async_strategy": "the writers of --async-save are copies of the ranks' processes, of no library",
    "deallocate_pipeline_outputs": "a stage's outputs are freed as soon as that is safe",
    "bias_gelu_fusion": "no model with GELU is built", "log_loss_scale_to_tensorboard": "the loss scale is not logged",
    "tensorboard_queue_size": "what is logged is written at once, so that a run that is killed loses nothing",
    "log_timers_to_tensorboard": "the seconds of every phase are among the metrics of a rollout",
    **dict.fromkeys(("log_memory_to_tensorboard", "log_memory_interval"), "the memory of every phase is, too, on GPUs"),
    "auto_detect_ckpt_format": "the format of --load is always found out",
    "gated_linear_unit": "every MLP that is built is gated: --swiglu says it",
    "apply_query_key_layer_scaling": "attention has its scores in float32, where they need no scaling",
    "tokenizer_type": "the tokenizer is always that of --hf-checkpoint; the only choice says so",
}  # fmt: skip

# These values ask for nothing, so they may always be typed.
_NOTHING = (0, 1, "none")
# Of these floats, which multiply, that is true as well. Of others, such as a loss's coefficient, 1 asks for as much as 2.
_FACTORS = frozenset({"moe_router_topk_scaling_factor", "rope_scaling_factor", "rotary_scaling_factor", "mscale", "beta_slow",
    "loss_scale", "initial_loss_scale", "min_loss_scale", "muon_extra_scale_factor", "optimizer_offload_fraction"})  # fmt: skip
# Switches that are on by default. Typing them without their condition is no error.
_ON_BY_DEFAULT = frozenset((
    "align_grad_reduce", "align_param_gather", "batch_p2p_comm", "batch_p2p_sync", "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad",
    "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_split_ag", "tp_comm_split_rs", "pin_cpu_grads", "pin_cpu_params",
    "store_param_remainders", "muon_split_qkv", "preserve_fp32_weights", "gradient_reduce_div_fusion", "fp8_wgrad",
    "barrier_with_L1_time",
))  # fmt: skip


@dataclass(frozen=True)
class ActsWith:
    """The attributes `names` have an effect only if `condition` holds; `needs` is a template with the flags that make it so."""

    needs: str
    condition: Callable[[argparse.Namespace], bool]
    names: tuple[str, ...]

    def idle(self, args: argparse.Namespace) -> list[str]:
        """The typed attributes that would have no effect."""
        if self.condition(args):
            return []
        return [name for name in self.names if name in args.typed_flags and _asks(name, vars(args)[name])]


def _asks(name: str, value: Any) -> bool:
    if value is True:
        return name not in _ON_BY_DEFAULT
    if isinstance(value, float) and name not in _FACTORS:
        return value != 0
    return value is not None and value is not False and value not in _NOTHING


def _given(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: bool(vars(args)[name])


def _is(name: str, *values: Any) -> Callable[[argparse.Namespace], bool]:
    return lambda args: vars(args)[name] in values


def _above_one(name: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: (vars(args)[name] or 1) > 1


ACTS_WITH: tuple[ActsWith, ...] = (
    ActsWith("{--pipeline-model-parallel-size} above 1", _above_one("pipeline_model_parallel_size"), (
        "pipeline_model_parallel_comm_backend", "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
        "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "overlap_p2p_comm",
        "batch_p2p_comm", "batch_p2p_sync", "defer_embedding_wgrad_compute", "align_grad_reduce",
        "wgrad_deferral_limit", "overlap_p2p_comm_warmup_flush", "microbatch_group_size_per_vp_stage",
        "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "align_param_gather",
    )),
    ActsWith("{--context-parallel-size} above 1", _above_one("context_parallel_size"),
             ("hierarchical_context_parallel_sizes", "cp_comm_type", "hybrid_context_parallel")),
    ActsWith("{--hybrid-context-parallel}", _given("hybrid_context_parallel"), ("max_seqlen_per_dp_cp_rank",)),
    ActsWith("{--tp-comm-overlap}", _given("tp_comm_overlap"), (
        "tp_comm_bulk_wgrad", "tp_comm_bulk_dgrad", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad",
        "tp_comm_split_ag", "tp_comm_atomic_ag", "tp_comm_split_rs", "tp_comm_atomic_rs", "tp_comm_overlap_disable_qkv",
        "tp_comm_overlap_disable_fc1", "tp_comm_bootstrap_backend", "tp_comm_overlap_cfg",
    )),
    ActsWith("{--num-experts}", _given("num_experts"), (
        "expert_model_parallel_size", "expert_tensor_parallel_size", "overlap_moe_expert_parallel_comm",
        "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_layer_freq", "moe_ffn_hidden_size",
        "moe_router_load_balancing_type", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_score_function", "moe_router_dtype",
        "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_force_load_balancing", "moe_grouped_gemm",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_input_jitter_eps", "moe_token_dispatcher_type", "moe_enable_deepep",
        "moe_flex_dispatcher_backend", "moe_per_layer_logging", "moe_expert_capacity_factor", "moe_token_drop_policy",
        "moe_layer_recompute", "moe_permute_fusion", "moe_router_fusion", "moe_deepep_num_sms", "moe_hybridep_num_sms",
        "moe_apply_probs_on_input", "use_fused_weighted_squared_relu",
    )),
    ActsWith("{--moe-expert-capacity-factor}", _given("moe_expert_capacity_factor"), ("moe_pad_expert_input_to_capacity",)),
    ActsWith("{--overlap-moe-expert-parallel-comm}", _given("overlap_moe_expert_parallel_comm"),
             ("ep_overlap_early_attn_memory_release",)),
    ActsWith("{--moe-shared-expert-intermediate-size}", _given("moe_shared_expert_intermediate_size"),
             ("moe_shared_expert_overlap",)),
    ActsWith("{--multi-latent-attention}", _given("multi_latent_attention"), (
        "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "mscale",
        "mscale_all_dim", "beta_fast", "beta_slow", "original_max_position_embeddings",
    )),
    ActsWith("{--multi-latent-attention} or {--use-rope-scaling}",
             lambda args: args.multi_latent_attention or args.use_rope_scaling, ("rotary_scaling_factor",)),
    ActsWith("{--use-rope-scaling}", _given("use_rope_scaling"), ("rope_scaling_factor",)),
    ActsWith("{--experimental-attention-variant} dsa or a {--spec} with such layers",
             lambda args: args.experimental_attention_variant == "dsa" or bool(args.spec),
             tuple(f"dsa_indexer_{name}" for name in ("n_heads", "head_dim", "topk", "layers", "rope_interleave"))),
    ActsWith("{--dsa-indexer-topk} and a {--spec} with sparse attention", lambda args: args.dsa_indexer_topk and args.spec,
             ("dsa_indexer_loss_coeff",)),
    ActsWith("{--dsa-indexer-loss-coeff}", _given("dsa_indexer_loss_coeff"), ("dsa_indexer_use_sparse_loss",)),
    ActsWith("{--experimental-attention-variant} gated_delta_net or a {--spec} with such layers",
             lambda args: bool(args.experimental_attention_variant or args.spec), (
        "linear_attention_freq", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_key_heads", "linear_num_value_heads",
    )),
    ActsWith("{--group-query-attention}", _given("group_query_attention"), ("num_query_groups",)),
    ActsWith("{--qk-clip}", _given("qk_clip"), ("qk_clip_alpha", "qk_clip_threshold")),
    ActsWith("{--fp8-format}", _given("fp8"), (
        "fp8_recipe", "fp8_param_gather", "fp8_quantizer_factory", "fp8_margin", "fp8_amax_history_len",
        "fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention", "tp_only_amax_red",
        "activation_func_fp8_input_store", "disable_parameter_transpose_cache",
    )),
    ActsWith("{--fp8-param-gather}", _given("fp8_param_gather"), ("reuse_grad_buf_for_mxfp8_param_ag",)),
    ActsWith("{--fp4-format}", _given("fp4"), ("fp4_recipe", "fp4_param_gather", "fp4_quantizer_factory")),
    ActsWith("{--fp8-format} or {--fp4-format}", lambda args: bool(args.fp8 or args.fp4), (
        "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
        "moe_router_padding_for_quantization", "moe_router_padding_for_fp8",
    )),
    ActsWith("{--use-kitchen}", _given("use_kitchen"), ("use_kitchen_attention", "kitchen_attention_backend")),
    ActsWith("{--fp16}", _given("fp16"), ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window",
             "hysteresis")),
    ActsWith("{--bf16}", _given("bf16"), ("disable_bf16_reduced_precision_matmul", "grad_reduce_in_bf16")),
    ActsWith("{--grad-reduce-in-bf16} and {--use-distributed-optimizer}", lambda args: args.grad_reduce_in_bf16
             and args.use_distributed_optimizer, ("ddp_reduce_scatter_with_fp32_accumulation",)),
    ActsWith("{--bf16} or {--fp16}", lambda args: args.bf16 or args.fp16,
             ("fp32_residual_connection", "load_main_params_from_ckpt")),
    ActsWith("{--enable-autocast}", _given("enable_autocast"), ("autocast_dtype",)),
    ActsWith("{--use-distributed-optimizer}", _given("use_distributed_optimizer"), ("num_distributed_optimizer_instances",)),
    ActsWith("{--use-distributed-optimizer}, {--overlap-grad-reduce} and several steps per rollout", lambda args:
             args.use_distributed_optimizer and args.overlap_grad_reduce and args.num_steps_per_rollout != 1,
             ("overlap_param_gather",)),
    ActsWith("{--overlap-grad-reduce}", _given("overlap_grad_reduce"), ("ddp_bucket_size", "ddp_num_buckets")),
    ActsWith("{--use-megatron-fsdp}", _given("use_megatron_fsdp"), (
        "data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "suggested_communication_unit_size",
        "preserve_fp32_weights", "fsdp_double_buffer", "fsdp_manual_registration", "init_model_with_meta_device",
        "gradient_reduce_div_fusion", "keep_fp8_transpose_cache",
    )),
    ActsWith("{--use-nccl-ub}", _given("nccl_ub"), ("disable_symmetric_registration",)),
    ActsWith("{--use-sharp}", _given("use_sharp"), ("sharp_enabled_group",)),
    ActsWith("{--optimizer} sgd", _is("optimizer", "sgd"), ("sgd_momentum",)),
    ActsWith("{--optimizer} adam", lambda args: args.optimizer != "sgd", ("adam_beta1", "adam_beta2", "adam_eps")),
    ActsWith("{--optimizer} muon", _is("optimizer", "muon", "dist_muon"), ("muon_momentum", "muon_split_qkv",
             "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec", "muon_num_ns_steps", "muon_tp_mode",
             "muon_extra_scale_factor")),
    ActsWith("{--decoupled-lr}", _given("decoupled_lr"), ("decoupled_min_lr",)),
    ActsWith("{--lr-decay-style} WSD", _is("lr_decay_style", "WSD"), ("lr_wsd_decay_style", "lr_wsd_decay_iters")),
    ActsWith("{--start-weight-decay} and {--end-weight-decay}", lambda args: args.start_weight_decay is not None
             and args.end_weight_decay is not None, ("weight_decay_incr_style", "start_weight_decay", "end_weight_decay")),
    ActsWith("{--use-precision-aware-optimizer}", _given("use_precision_aware_optimizer"),
             ("store_param_remainders", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    ActsWith("{--optimizer-cpu-offload}", _given("optimizer_cpu_offload"), (
        "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload", "overlap_cpu_optimizer_d2h_h2d",
        "pin_cpu_grads", "pin_cpu_params",
    )),
    ActsWith("{--recompute-granularity} selective", _is("recompute_granularity", "selective"), ("recompute_modules",)),
    ActsWith("{--recompute-granularity} full", _is("recompute_granularity", "full"), ("distribute_saved_activations",)),
    ActsWith("{--cuda-graph-impl}", lambda args: args.cuda_graph_impl != "none", ("cuda_graph_scope",
             "cuda_graph_warmup_steps", "cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph")),
    ActsWith("{--ckpt-fully-parallel-load}", _given("ckpt_fully_parallel_load"), ("ckpt_fully_parallel_load_exchange_algo",)),
    ActsWith("{--load}", _given("load"), ("exit_on_missing_checkpoint",)),
    ActsWith("{--use-pytorch-profiler}", _given("use_pytorch_profiler"), (
        "profile_step_start", "profile_step_end", "profile_ranks", "pytorch_profiler_collect_shapes",
        "pytorch_profiler_collect_callstack",
    )),
    ActsWith("{--timing-log-level}", _given("timing_log_level"), ("timing_log_option", "barrier_with_L1_time")),
    ActsWith("{--manual-gc}", _given("manual_gc"), ("manual_gc_interval",)),
)  # fmt: skip


NOT_YET: tuple[NotYet, ...] = (
    # Parallelism
    *features("another kind of pipeline messages", pipeline_model_parallel_comm_backend="nccl"),
    NotYet("overlap_p2p_comm_warmup_flush", "overlapping the first messages of a pipeline (streams differ in length)"),
    *features("another context parallelism than gathering keys and values", "hierarchical_context_parallel_sizes",
        "hybrid_context_parallel", cp_comm_type="all_gather"),
    *features("gathering parameters in the optimizer's step, or in a group of its own",
        "overlap_param_gather_with_optimizer_step", "create_all_gather_group"),
    *features("Megatron's own FSDP", "use_megatron_fsdp", "use_custom_fsdp"),
    NotYet("nccl_ub", "registered communication buffers"),
    # Shape
    NotYet("transformer_impl", "that layer implementation", works=("transformer_engine", "local")),
    NotYet("attention_dropout", "dropout in attention", works=(0.0,)),
    NotYet("attention_backend", "that choice of attention kernels", works=("auto", "flash", "fused")),
    # Precision
    *features("training with these kernels of Transformer Engine", "fp4", "fp8_param_gather", "fp8_dot_product_attention",
        "fp8_multi_head_attention", "use_kitchen", "te_precision_config_file", "te_rng_tracker", "fused_single_qkv_rope",
        "memory_efficient_layer_norm", "defer_embedding_wgrad_compute", "tp_comm_overlap", "use_te_activation_func"),
    *features("autocast, or batch-invariant kernels, in training", "batch_invariant_mode", "enable_autocast"),
    # Optimizer, memory and checkpoints
    NotYet("optimizer", "another optimizer than Adam and SGD", works=("adam", "sgd")),
    *features("CUDA graphs in training", "enable_cuda_graph", "external_cuda_graph", cuda_graph_impl="none"),
    # Logging
    NotYet("log_progress", "Megatron's own logging"),
)  # fmt: skip
