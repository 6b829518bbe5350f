"""Rows for Megatron's flags, by feature. Flags that only qualify another one need no row: they act with that one."""

from slime.arguments.not_yet.row import NotYet

_CONTEXT = "another context parallelism than gathering keys and values"
_EXPERTS = "mixture-of-experts training"
_ATTENTION = "another attention than causal self-attention with grouped queries"
_MLA = "multi-head latent attention"
_NORM = "another norm than RMSNorm with weights around one"
_ENGINE = "training with Transformer Engine's low-precision and fused kernels"
_FSDP = "Megatron's own FSDP"
_OPTIMIZER = "another optimizer than Adam"
_MEMORY = "moving activations or optimizer state to the host"
_GRAPHS = "CUDA graphs in training"
_GATHER = "gathering parameters behind the forward pass"
_CHECKPOINT = "another way of writing checkpoints than torch_dist in the foreground"
_LOGGING = "Megatron's own logging"
_PROFILING = "profiling of training steps"
_PROCESS = "that control of the training process"

_PARALLELISM = (
    NotYet("use_ring_exchange_p2p", "pipeline messages by an own build of PyTorch"),
    NotYet("pipeline_model_parallel_comm_backend", "pipeline messages over UCC", works=("nccl",)),
    NotYet("overlap_p2p_comm_warmup_flush", "overlapping the first messages of a pipeline (streams differ in length)"),
    NotYet("defer_embedding_wgrad_compute", _ENGINE),
    NotYet("num_microbatches_with_partial_activation_checkpoints", "recomputing some micro-batches only"),
    NotYet("cp_comm_type", _CONTEXT),
    NotYet("hierarchical_context_parallel_sizes", _CONTEXT),
    NotYet("hybrid_context_parallel", _CONTEXT),
    NotYet("expert_model_parallel_size", _EXPERTS, works=(1,)),
    NotYet("tp_comm_overlap", "overlap of tensor-parallel communication"),
    NotYet("delay_wgrad_compute", "delayed weight gradients"),
    NotYet("overlap_param_gather", _GATHER),
    NotYet("overlap_param_gather_with_optimizer_step", _GATHER),
    NotYet("create_all_gather_group", _GATHER),
    NotYet("num_distributed_optimizer_instances", "several distributed optimizers", works=(1,)),
    NotYet("use_megatron_fsdp", _FSDP),
    NotYet("use_custom_fsdp", _FSDP),
    NotYet("nccl_ub", "registered communication buffers"),
    NotYet("use_tp_pp_dp_mapping", "another order of the ranks"),
    NotYet("ddp_num_buckets", "a number of gradient buckets (--ddp-bucket-size works)"),
    NotYet("distributed_timeout_seconds_after_init", "a second collective timeout"),
    NotYet("data_parallel_random_init", "different random weights per data-parallel rank"),
    NotYet("check_weight_hash_across_dp_replicas_interval", "comparing weights of data-parallel ranks"),
    NotYet("ddp_reduce_scatter_with_fp32_accumulation", "that reduction of gradients"),
    NotYet("ddp_average_in_collective", "that reduction of gradients"),
)

_SHAPE = (
    NotYet("spec", "layer specs of one's own"),
    NotYet("transformer_impl", "that layer implementation", works=("transformer_engine", "local")),
    NotYet("position_embedding_type", "another position embedding than RoPE", works=("rope",)),
    NotYet("layernorm_zero_centered_gamma", _NORM),
    NotYet("gated_linear_unit", "another MLP than gated SiLU (--swiglu)"),
    NotYet("squared_relu", "another MLP than gated SiLU (--swiglu)"),
    NotYet("quick_geglu", "another MLP than gated SiLU (--swiglu)"),
    NotYet("glu_linear_offset", "another MLP than gated SiLU (--swiglu)", works=(0.0,)),
    NotYet("activation_func_clamp_value", "another MLP than gated SiLU (--swiglu)"),
    NotYet("use_te_activation_func", _ENGINE),
    NotYet("attention_dropout", "dropout in attention", works=(0.0,)),
    NotYet("softmax_type", _ATTENTION, works=("vanilla",)),
    NotYet("window_size", _ATTENTION),
    NotYet("qk_l2_norm", _ATTENTION),
    NotYet("qk_clip", _ATTENTION),
    NotYet("log_max_attention_logit", _LOGGING),
    NotYet("attention_output_gate", _ATTENTION),
    NotYet("no_rope_freq", _ATTENTION),
    NotYet("apply_query_key_layer_scaling", _ATTENTION),
    NotYet("attention_backend", "choosing between attention kernels", works=("auto", "flash")),
    NotYet("experimental_attention_variant", _ATTENTION),
    NotYet("multi_latent_attention", _MLA),
    NotYet("num_experts", _EXPERTS),
    NotYet("heterogeneous_block_specs", "layers that differ"),
    NotYet("is_hybrid_model", "Mamba layers"),
)

_PRECISION = (
    NotYet("fp8", _ENGINE),
    NotYet("fp4", _ENGINE),
    NotYet("use_kitchen", _ENGINE),
    NotYet("te_precision_config_file", _ENGINE),
    NotYet("te_rng_tracker", _ENGINE),
    NotYet("fused_single_qkv_rope", _ENGINE),
    NotYet("memory_efficient_layer_norm", _ENGINE),
    NotYet("batch_invariant_mode", "batch-invariant training kernels"),
    NotYet("fp32_residual_connection", "residuals in float32"),
    NotYet("enable_autocast", "autocast; parameters have one dtype"),
)

_OPTIMIZER_AND_MEMORY = (
    NotYet("optimizer", _OPTIMIZER, works=("adam",)),
    NotYet("use_precision_aware_optimizer", _ENGINE),
    NotYet("optimizer_cpu_offload", _MEMORY),
    NotYet("cpu_offloading", _MEMORY),
    NotYet("fine_grained_activation_offloading", _MEMORY),
    NotYet("cuda_graph_impl", _GRAPHS, works=("none",)),
    NotYet("enable_cuda_graph", _GRAPHS),
    NotYet("external_cuda_graph", _GRAPHS),
    NotYet("empty_unused_memory_level", "emptying the allocator's cache", works=(0,)),
    NotYet("manual_gc", _PROCESS),
    NotYet("train_sync_interval", _PROCESS),
)

_CHECKPOINTS = (
    NotYet("ckpt_format", _CHECKPOINT, works=("torch_dist",)),
    NotYet("dist_ckpt_workers", _CHECKPOINT, works=(1,)),
    NotYet("dist_ckpt_save_pre_mcore_014", _CHECKPOINT),
    NotYet("load_main_params_from_ckpt", _CHECKPOINT),
    NotYet("exit_on_missing_checkpoint", "refusing a first launch"),
)

_LOGGING_AND_PROFILING = (
    NotYet("log_interval", "logging less often than every step", works=(1,)),
    NotYet("log_throughput", _LOGGING),
    NotYet("log_params_norm", _LOGGING),
    NotYet("log_progress", _LOGGING),
    NotYet("log_timers_to_tensorboard", _LOGGING),
    NotYet("log_memory_to_tensorboard", _LOGGING),
    NotYet("log_world_size_to_tensorboard", _LOGGING),
    NotYet("log_validation_ppl_to_tensorboard", _LOGGING),
    NotYet("log_memory_interval", _LOGGING),
    NotYet("timing_log_level", _LOGGING, works=(0,)),
    NotYet("tensorboard_log_interval", _LOGGING, works=(1,)),
    NotYet("tensorboard_queue_size", _LOGGING, works=(1000,)),
    NotYet("logging_level", "log levels as numbers (--log-level takes names)"),
    NotYet("profile", _PROFILING),
    NotYet("use_pytorch_profiler", _PROFILING),
    NotYet("memory_snapshot_path", _PROFILING, works=("snapshot.pickle",)),
)

ROWS: tuple[NotYet, ...] = (
    *_PARALLELISM, *_SHAPE, *_PRECISION, *_OPTIMIZER_AND_MEMORY, *_CHECKPOINTS, *_LOGGING_AND_PROFILING,
)  # fmt: skip
