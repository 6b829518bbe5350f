"""The names of Megatron-LM's flags, as far as the fields of Megatron-Core's configuration dataclasses do not give them.

The dataclasses describe most flags themselves (`slime.backends.megatron_utils.flag_surface`). This module adds three things:
the fields that Megatron-LM's parser keeps under another name (`FIELD_DESTS`), the changes of that parser or this trainer to a
field's flag (`DEFAULTS`, `CHOICES`, `TYPES`), and the flags that have no field (`HISTORICAL`).

`MEANINGS` explains the flags that model scripts and launch scripts use: the effect of the value, its unit, and the other flags
that it works with. For a flag that is not there `--help` shows the text of the installed Megatron-Core.
"""

from __future__ import annotations

from typing import Any

from slime.arguments.flag import ABOVE_ZERO, AT_LEAST_ONE, AT_LEAST_ZERO, Bounds, below_one, share, weight
from slime.arguments.surface import FlagSpec

# Field of a configuration dataclass -> attribute of `args`, for fields that Megatron-LM's parser calls otherwise.
FIELD_DESTS: dict[str, str] = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
    "use_te_rng_tracker": "te_rng_tracker",
    "bucket_size": "ddp_bucket_size",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "average_in_collective": "ddp_average_in_collective",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
}  # fmt: skip

# Attribute -> default of Megatron-LM's parser, if it differs from the dataclass's.
DEFAULTS: dict[str, Any] = {
    "gradient_accumulation_fusion": True, "masked_softmax_fusion": True, "bias_dropout_fusion": True,
    "apply_rope_fusion": True, "persist_layer_norm": True, "bias_activation_fusion": True, "align_param_gather": True,
    "check_for_nan_in_loss_and_grad": True,
    "q_lora_rank": None, "kv_lora_rank": 32, "rope_type": None, "rotary_scaling_factor": 1.0, "min_lr": 0.0,
    "optimizer_offload_fraction": 1.0, "cuda_graph_scope": [],
}  # fmt: skip

# Attribute -> default that this trainer sets, with the reason.
OUR_DEFAULTS: dict[str, tuple[Any, str]] = {
    "use_distributed_optimizer": (True, "optimizer state is sharded unless that is switched off"),
    "hidden_dropout": (0.0, "log-probs must not depend on chance"),
    "attention_dropout": (0.0, "log-probs must not depend on chance"),
    "num_query_groups": (None, "unset: as many as query heads"),
    "lr": (1e-6, "a learning rate for reinforcement learning"),
    "mtp_loss_scaling_factor": (0.2, "the weight that this trainer uses"),
    "variable_seq_lengths": (True, "packed streams differ in length"),
}

# Attribute -> the values that a field of type `str` takes.
CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adam", "sgd", "muon", "dist_muon"),
    "rope_type": ("rope", "yarn"),
    "data_parallel_sharding_strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "outer_dp_sharding_strategy": ("no_shard", "optim"),
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    "muon_scale_mode": ("spectral", "unit_rms_norm", "shape_scaling"),
    "muon_fp32_matmul_prec": ("low", "medium", "high"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
    "main_grads_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32", "fp16"),
}

# Attribute -> the numbers that it takes.
BOUNDS: dict[str, Bounds] = {
    **dict.fromkeys((
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
        "expert_tensor_parallel_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
        "num_query_groups", "kv_channels", "vocab_size", "seq_length", "max_position_embeddings", "train_iters",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size", "lr_decay_iters",
        "lr_wsd_decay_iters", "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "recompute_num_layers", "hysteresis",
        "make_vocab_size_divisible_by", "loss_scale_window", "ddp_num_buckets", "train_sync_interval", "dist_ckpt_workers",
        "distributed_timeout_seconds_after_init", "check_weight_hash_across_dp_replicas_interval",
        "num_distributed_optimizer_instances", "log_interval", "tensorboard_log_interval",
    ), AT_LEAST_ONE),
    **dict.fromkeys((
        "lr_warmup_iters", "moe_aux_loss_coeff", "moe_z_loss_coeff", "dsa_indexer_loss_coeff", "moe_router_bias_update_rate",
        "decoupled_lr", "decoupled_min_lr", "manual_gc_interval", "num_microbatches_with_partial_activation_checkpoints",
    ), AT_LEAST_ZERO),
    **dict.fromkeys(("adam_eps", "min_lr", "lr_warmup_init", "start_weight_decay", "end_weight_decay"), weight()),
    "weight_decay": weight(1, "0 to 0.1"),
    **dict.fromkeys((
        "layernorm_epsilon", "rotary_base", "init_method_std", "loss_scale", "initial_loss_scale", "min_loss_scale",
    ), ABOVE_ZERO),
    "adam_beta1": below_one(0.9), "adam_beta2": below_one(0.98), "sgd_momentum": below_one(0.9),
    "muon_momentum": below_one(0.95), "attention_dropout": below_one(0), "hidden_dropout": below_one(0),
    "optimizer_offload_fraction": share(1), "rotary_percent": share(1), "moe_input_jitter_eps": below_one(0.01),
}  # fmt: skip

# Attribute -> type, for fields of which Megatron-LM's parser is stricter.
TYPES: dict[str, str] = {"rotary_base": "int"}


def _value(
    flag: str, kind: str, default: Any, text: str, choices: tuple[Any, ...] | None = None, **more: Any
) -> FlagSpec:
    flags = tuple(flag.split())
    dest = more.pop("dest", None) or flags[0].removeprefix("--").replace("-", "_")
    return FlagSpec(flags=flags, dest=dest, type=kind, default=default, help=text, choices=choices, **more)


def _on(flag: str, text: str, **more: Any) -> FlagSpec:
    return _value(flag, "str", False, text, action="store_true", **more)


def _off(flag: str, dest: str, text: str) -> FlagSpec:
    """A switch that sets `dest` to False."""
    return _value(flag, "str", True, text, action="store_false", dest=dest)


def _either(flag: str, default: bool | None, text: str) -> FlagSpec:
    return _value(flag, "str", default, text, action="bool")


_SHAPE = (
    _value("--spec", "str", None, "module and function that return the layer spec: `module function`", nargs="*"),
    _on("--group-query-attention", "fewer key/value heads than query heads; needs --num-query-groups"),
    _value("--seq-length", "int", 4096, "sequence length that fixed-size buffers are made for; packed streams need none"),
    _value("--max-position-embeddings", "int", None, "longest sequence of the model; unset: --seq-length"),
    _value("--position-embedding-type", "str", "rope", "how positions enter the model", ("learned_absolute", "rope",
           "mrope", "relative", "none")),
    _on("--use-rotary-position-embeddings", "same as --position-embedding-type rope"),
    _off("--no-position-embedding", "add_position_embedding", "add no learned position embedding (rotary ones stay)"),
    _value("--rotary-base", "int", 10000, "RoPE base"),
    _value("--rotary-percent", "float", 1.0, "share of each head that is rotated"),
    _value("--rotary-seq-len-interpolation-factor", "int", None, "divide positions by this before rotating"),
    _on("--use-rope-scaling", "scale RoPE frequencies as Llama 3.1 does"),
    _value("--rope-scaling-factor", "float", 8.0, "factor of --use-rope-scaling"),
    _value("--vocab-size", "int", None, "vocabulary of the model, without padding"),
    _value("--make-vocab-size-divisible-by", "int", 128, "the vocabulary is padded to a multiple of this x the "
           "tensor-parallel size"),
    _on("--untie-embeddings-and-output-weights", "the output layer has its own weights"),
    _on("--swiglu", "gated SiLU in the MLP"),
    _on("--squared-relu", "squared ReLU in the MLP"),
    _on("--quick-geglu", "gated quick GELU in the MLP"),
    _value("--num-experts", "int", None, "routed experts per layer; unset: a dense model"),
    _off("--no-initialization", "perform_initialization", "leave weights as they are allocated (a checkpoint fills them)"),
    _on("--enable-experimental", "allow Megatron's experimental parts"),
    _value("--transformer-impl", "str", "transformer_engine", "layer implementation; without Transformer Engine always "
           "local", ("local", "transformer_engine", "inference_optimized")),
)  # fmt: skip

HISTORICAL: tuple[FlagSpec, ...] = (
    # Parallelism
    _value("--decoder-first-pipeline-num-layers", "int", None, "layers of the first pipeline stage; unset: an even split"),
    _value("--decoder-last-pipeline-num-layers", "int", None, "layers of the last pipeline stage; unset: an even split"),
    _value("--num-layers-per-virtual-pipeline-stage", "int", None, "layers of one virtual stage (interleaved schedule)"),
    _value("--num-virtual-stages-per-pipeline-rank", "int", None, "virtual stages of a pipeline rank (interleaved schedule)"),
    _off("--no-overlap-p2p-communication", "overlap_p2p_comm", "do not overlap pipeline messages with computation"),
    _on("--accumulate-allreduce-grads-in-fp32", "accumulate and reduce gradients in float32"),
    _on("--grad-reduce-in-bf16", "reduce gradients in bfloat16, whatever the parameters are"),
    _off("--no-check-for-nan-in-loss-and-grad", "check_for_nan_in_loss_and_grad", "skip and count a "
         "step whose loss or gradient is NaN or infinite, instead of stopping there"),
    _off("--no-gradient-reduce-div-fusion", "gradient_reduce_div_fusion", "divide gradients apart from their reduction"),
    _off("--no-align-grad-reduce --disable-align-grad-reduce", "align_grad_reduce", "pipeline stages reduce gradients on "
         "their own, not together"),
    _off("--no-align-param-gather", "align_param_gather", "pipeline stages gather parameters on their own, not together"),
    _value("--ddp-num-buckets", "int", None, "number of gradient buckets; not together with --ddp-bucket-size"),
    _value("--ddp-bucket-size", "int", None, "parameters in one gradient bucket"),
    _on("--use-nccl-ub", "register the parameter and gradient buffers with NCCL", dest="nccl_ub"),
    _either("--use-gloo-process-groups", True, "make Gloo groups beside the NCCL ones"),
    _off("--disable-gloo-process-groups", "use_gloo_process_groups", "same as --no-use-gloo-process-groups"),
    _on("--use-tp-pp-dp-mapping", "order of the ranks: tensor, pipeline, data (usual: tensor, context, expert, data, "
        "pipeline)"),
    _value("--nccl-communicator-config-path", "str", None, "YAML file with settings of the NCCL communicators"),
    _on("--use-sharp", "SHARP for the data-parallel collectives"),
    _value("--sharp-enabled-group", "str", None, "which groups use SHARP", ("dp", "dp_replica")),
    _value("--high-priority-stream-groups", "str", [], "communicators whose stream gets high priority", nargs="+"),
    _value("--distributed-timeout-seconds-after-init", "int", None, "shorter collective timeout after the first step, s"),
    _on("--create-all-gather-group", "a group of its own for parameter gathers"),
    _value("--tp-comm-overlap-cfg", "str", None, "YAML file that tunes --tp-comm-overlap"),
    _value("--microbatch-group-size-per-virtual-pipeline-stage", "int", None, "consecutive micro-batches of one virtual "
           "stage", dest="microbatch_group_size_per_vp_stage"),
    *_SHAPE,
    # Precision and fusion
    _off("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", "no fused accumulation of weight gradients"),
    _off("--no-masked-softmax-fusion", "masked_softmax_fusion", "no fused softmax"),
    _off("--no-bias-dropout-fusion", "bias_dropout_fusion", "no fused bias and dropout"),
    _off("--no-rope-fusion", "apply_rope_fusion", "no fused RoPE kernel"),
    _off("--no-bias-gelu-fusion", "bias_gelu_fusion", "no fused bias and GELU"),
    _off("--no-bias-swiglu-fusion", "bias_swiglu_fusion", "no fused bias and SwiGLU"),
    _value("--te-precision-config-file", "str", None, "YAML file with the precision of single layers"),
    _on("--data-parallel-random-init", "every data-parallel rank drops other channels; all start from the first one's weights"),
    # Optimizer
    _value("--lr-decay-style", "str", "linear", "shape of the learning-rate schedule", ("constant", "linear", "cosine",
           "inverse-square-root", "WSD")),
    _value("--lr-wsd-decay-style", "str", "exponential", "decay of the WSD schedule", ("exponential", "linear", "cosine",
           "minus_sqrt")),
    _value("--lr-decay-iters", "int", None, "optimizer steps of the decay; unset: the whole run, so that a longer run has "
           "another curve"),
    _value("--lr-wsd-decay-iters", "int", None, "optimizer steps of the last phase of WSD"),
    _value("--lr-warmup-iters", "int", 0, "optimizer steps of linear warm-up"),
    _value("--lr-warmup-fraction", "float", None, "warm-up as share of the decay length; not with --lr-warmup-iters"),
    _value("--lr-warmup-init", "float", 0.0, "learning rate at which the warm-up starts"),
    _value("--min-lr", "float", 0.0, "lowest learning rate of the schedule"),
    _value("--start-weight-decay", "float", None, "weight decay at the start; with --end-weight-decay"),
    _value("--end-weight-decay", "float", None, "weight decay at the end; with --start-weight-decay"),
    _value("--weight-decay-incr-style", "str", "constant", "curve of weight decay from start to end", ("constant", "linear",
           "cosine")),
    _value("--train-iters", "int", None, "optimizer steps that the schedules are made for; unset: those of --num-rollout"),
    _on("--override-opt-param-scheduler --override-opt_param-scheduler", "on resume the schedule and the optimizer "
        "settings of this command line hold (always, unless --use-checkpoint-opt-param-scheduler is given)"),
    _on("--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler", "on resume the checkpoint's settings "
        "hold: learning rates and their curve, weight decay, betas, epsilon"),
    _off("--muon-no-split-qkv", "muon_split_qkv", "Muon treats QKV as one matrix"),
    _off("--no-pin-cpu-grads", "pin_cpu_grads", "gradients on the host are not pinned"),
    _off("--no-pin-cpu-params", "pin_cpu_params", "parameters on the host are not pinned"),
    _on("--recompute-activations", "same as --recompute-granularity selective"),
    _value("--empty-unused-memory-level", "int", 0, "empty the allocator's cache: 1 before updates, 2 after too", (0, 1, 2)),
    _on("--manual-gc", "collect Python garbage at fixed steps only"),
    _value("--manual-gc-interval", "int", 0, "optimizer steps between two collections; 0: never"),
    _value("--train-sync-interval", "int", None, "synchronise host and device every N steps"),
    _value("--check-weight-hash-across-dp-replicas-interval", "int", None, "stop where replicas differ after N steps, 2N, …"),
    # Checkpoints
    _value("--save-interval --persistent-save-interval", "int", None, "save every N rollouts"),
    _value("--ckpt-format", "str", "torch_dist", "format of checkpoints", ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor")),
    _on("--auto-detect-ckpt-format", "find out the format of --load"),
    _on("--no-save-rng", "leave the random generators out"),
    _on("--exit-on-missing-checkpoint", "a first launch, with a --load that is still empty, is an error"),
    _either("--use-persistent-ckpt-worker", True, "one process writes all checkpoints of --async-save"),
    _either("--ckpt-fully-parallel-load", True, "data-parallel ranks read a share each and exchange it"),
    _either("--ckpt-fully-parallel-save", True, "data-parallel ranks write a share each"),
    _either("--ckpt-assume-constant-structure", True, "plan the layout of a checkpoint once, not at every save"),
    _value("--ckpt-fully-parallel-load-exchange-algo", "str", "broadcast", "how the shares are exchanged", ("broadcast",
           "gather_rounds", "gather_object")),
    _value("--dist-ckpt-strictness", "str", "assume_ok_unexpected", "what to do when keys of checkpoint and model differ",
           ("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all", "return_unexpected",
            "return_all", "ignore_all")),
    _value("--dist-ckpt-workers", "int", 2, "writer processes of one rank, each with a file of its own"),
    _on("--dist-ckpt-save-pre-mcore-014", "write the optimizer as Megatron-Core did before 0.14"),
    _on("--dist-ckpt-optim-fully-reshardable", "write the optimizer so that any layout can load it (always)"),
    _on("--distrib-optim-fully-reshardable-mem-efficient", "--dist-ckpt-optim-fully-reshardable with less memory (always)"),
    _on("--load-main-params-from-ckpt", "take main parameters from the checkpoint if no optimizer state is loaded"),
    _value("--async-strategy", "str", "nvrx", "library of --async-save", ("nvrx", "mcore")),
    # Logging
    _value("--log-interval", "int", 1, "optimizer steps between two lines about a rollout"),
    _on("--log-throughput", "log train/tflops_per_gpu: 10^12 floating-point operations of the model per second and GPU"),
    _on("--log-params-norm", "log train/params_norm, the norm of all weights"),
    _on("--log-progress", "write a progress file beside the checkpoints"),
    _on("--log-timers-to-tensorboard", "send the seconds of every phase to the trackers (always)"),
    _on("--log-memory-to-tensorboard", "send the memory of every phase to the trackers (always, on GPUs)"),
    _on("--log-world-size-to-tensorboard", "log train/world_size, the number of training ranks"),
    _on("--log-validation-ppl-to-tensorboard", "send the validation perplexity to TensorBoard"),
    _off("--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard", "log_loss_scale_to_tensorboard",
         "do not send the loss scale to TensorBoard"),
    _value("--log-memory-interval", "int", None, "log memory every N steps (every rollout has the peak of its phases)"),
    _value("--timing-log-level", "int", 0, "log Megatron's timers of optimizer steps: 1, or 2 with micro-batches", (0, 1, 2)),
    _value("--timing-log-option", "str", "minmax", "which ranks' timers are shown", ("max", "minmax", "all")),
    _value("--tensorboard-dir", "str", None, "directory of the event files; unset: below outputs/"),
    _value("--tensorboard-log-interval", "int", 1, "optimizer steps between two points of train/ in TensorBoard and W&B"),
    _value("--tensorboard-queue-size", "int", 1000, "events kept before they are written (always none)"),
    _value("--logging-level", "int", None, "Python log level as a number; --log-level is the usual one"),
    _on("--profile", "only together with --use-pytorch-profiler, which is enough by itself"),
    _on("--use-pytorch-profiler", "training ranks trace some rollouts with the PyTorch profiler"),
    _on("--pytorch-profiler-collect-shapes", "the profile holds tensor shapes"),
    _on("--pytorch-profiler-collect-callstack", "the profile holds call stacks"),
    _value("--profile-step-start", "int", 10, "first rollout that is traced"),
    _value("--profile-step-end", "int", 12, "rollout before which tracing ends"),
    _value("--profile-ranks", "int", [], "ranks that are profiled; unset: 0", nargs="+"),
    _value("--memory-snapshot-path", "str", "snapshot.pickle", "file of the memory snapshot"),
    _value("--tokenizer-type", "str", None, "the tokenizer is that of --hf-checkpoint", ("HuggingFaceTokenizer",)),
)  # fmt: skip

# Attributes that describe the model, whatever topic their names would match.
SHAPE: frozenset[str] = frozenset(spec.dest for spec in _SHAPE) - {"num_experts", "enable_experimental"}


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
    "attention_output_gate": "multiply the output of attention by a learned gate, as Qwen3-Next does",
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
    "moe_router_pre_softmax": "compute scores before the top experts are chosen, so that the chosen ones need not sum to one",
    "moe_router_num_groups": "groups that the experts are divided into; a token first chooses groups",
    "moe_router_group_topk": "groups that a token chooses its experts from; needs --moe-router-num-groups",
    "moe_router_topk_scaling_factor": "factor on the weights of the chosen experts",
    "moe_router_enable_expert_bias": "a bias per expert that counts when experts are chosen, not in their weights; balances "
    "load without a loss",
    "moe_router_bias_update_rate": "change of the experts' bias in an optimizer step; 0 freezes it",
    "moe_router_load_balancing_type": "a loss that evens loads: of each stream, sample (seq_) or step (global_); none: no loss",
    "moe_apply_probs_on_input": "multiply the input of experts by their weight, not their output; for --moe-router-topk 1",
    "moe_aux_loss_coeff": "weight of the balancing loss; 0 switches it off",
    "moe_router_dtype": "dtype of router logits and expert weights; fp32 is what large models need",
    "moe_grouped_gemm": "multiply all experts of a GPU in one kernel",
    "moe_permute_fusion": "sort tokens by expert in one fused kernel",
    "moe_input_jitter_eps": "in steps of --loss-type sft_loss multiply what a router sees by noise from 1 - eps to 1 + eps",
    "moe_router_force_load_balancing": "choose experts at random and evenly, the same in every pass; only to measure speed",
    "moe_per_layer_logging": "log the losses of --moe-aux-loss-coeff and --moe-z-loss-coeff by layer: train/moe_*/layer_N",
    "moe_token_dispatcher_type": "how tokens reach their experts: alltoall (which allgather becomes), or flex for DeepEP",
    "moe_token_drop_policy": "which tokens are dropped when an expert is full; only with --moe-expert-capacity-factor",
    "moe_enable_deepep": "send tokens by DeepEP's kernels; needs --moe-token-dispatcher-type flex",
    # Latent and linear attention
    "multi_latent_attention": "attention whose keys and values come from one small latent vector per token, as in DeepSeek-V3",
    "q_lora_rank": "width of the latent vector of queries; unset: queries are projected directly",
    "kv_lora_rank": "width of the latent vector that keys and values share; what the engines cache",
    "qk_head_dim": "channels of a query or key head that are not rotated",
    "qk_pos_emb_head_dim": "channels of a query or key head that carry the position",
    "v_head_dim": "channels of a value head",
    "dsa_indexer_loss_coeff": "weight of the loss by which indexers learn to score keys as attention does; 0: they are frozen",
    "dsa_indexer_use_sparse_loss": "this loss is over the keys that an indexer chooses, not over all that a row sees",
    "rotary_scaling_factor": "how much longer YaRN makes the context, as a factor",
    "mscale": "YaRN's factor on attention logits, for the length it was stretched to",
    "mscale_all_dim": "YaRN's factor for all channels; if it equals --mscale, the two cancel in the rotation",
    # Precision and kernels
    "bf16": "parameters and activations in bfloat16, main parameters in float32; the default on GPUs",
    "fp16": "parameters and activations in float16, with a loss scale",
    "fp8": "multiply matrices in FP8 of this format by Transformer Engine; --fp8-recipe says how it scales",
    "fp8_recipe": "how FP8 is scaled: per tensor, or blockwise as DeepSeek does; needs --fp8-format",
    "attention_softmax_in_fp32": "compute the softmax of attention in float32, as the kernels do in any case",
    "masked_softmax_fusion": "mask and softmax in one kernel, where attention is not fused as a whole",
    "gradient_accumulation_fusion": "add weight gradients into their buffer inside the matrix product; on where Transformer "
    "Engine and the extension fused_weight_gradient_mlp_cuda of Apex are installed, but not in INT4 training",
    "deterministic_mode": "only kernels that give the same bits again; slower",
    # Optimizer
    "optimizer": "which optimizer updates the weights; sgd has the decay of weights in its momentum",
    "adam_beta1": "Adam: decay of the mean of gradients, per optimizer step",
    "adam_beta2": "Adam: decay of the mean of squared gradients, per optimizer step",
    "adam_eps": "Adam: number added to the root of the squared mean",
    "weight_decay": "share of a weight that a step subtracts, times the learning rate; not for norms and biases",
    "use_precision_aware_optimizer": "let main parameters and moments have narrower dtypes (--exp-avg-dtype and others)",
    "overlap_cpu_optimizer_d2h_h2d": "copy to and from the host during the update; with --optimizer-cpu-offload",
    # Memory
    "recompute_granularity": "activations that the backward pass computes again: selective (some modules) or full (whole "
    "layers)",
    "recompute_method": "with full: uniform (units of --recompute-num-layers over the whole stage) or block (only the first "
    "layers of a stage)",
    "recompute_num_layers": "layers of a unit with uniform, recomputed layers of a stage with block",
}
