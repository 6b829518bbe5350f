"""Values of Megatron's flags that follow from other flags or other spellings.

No typed value is overruled: if two typed flags contradict each other, a rule reports it. The rules, which refuse impossible
splits, and the plan share one function for the pipeline stages.
"""

import argparse

from slime.estimates.layout import PipelineStage, parts_of_layout, split_as_laid_out, split_into_stages


def derive_megatron_values(args: argparse.Namespace) -> argparse.Namespace:
    """Fill the values that the user left open, in place. Returns `args`."""
    if (args.recompute_activations or args.moe_layer_recompute) and args.recompute_granularity is None:
        args.recompute_granularity = "selective"
    if args.moe_layer_recompute:
        args.recompute_modules = list(dict.fromkeys([*(args.recompute_modules or ["core_attn"]), "moe"]))
    args.use_megatron_fsdp = args.use_megatron_fsdp or args.use_custom_fsdp
    if args.cuda_graph_impl == "none" and (args.enable_cuda_graph or args.external_cuda_graph):
        args.cuda_graph_impl = "local" if args.enable_cuda_graph else "transformer_engine"
    if args.use_rope_scaling and not args.multi_latent_attention and "rotary_scaling_factor" in args.typed_flags:
        # Scripts of Llama models type the factor under this name.
        args.rope_scaling_factor = args.rotary_scaling_factor
    if args.use_rotary_position_embeddings and "position_embedding_type" not in args.typed_flags:
        args.position_embedding_type = "rope"
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    if args.num_experts and args.moe_token_dispatcher_type == "allgather":
        # The allgather dispatcher cannot handle micro-batches of different lengths.
        args.moe_token_dispatcher_type = "alltoall"
    args.rope_type = args.rope_type or ("yarn" if args.multi_latent_attention else "rope")
    if args.virtual_pipeline_model_parallel_size is None:
        args.virtual_pipeline_model_parallel_size = virtual_stages_per_rank(args)
    if args.virtual_pipeline_model_parallel_size == 1:
        # Megatron takes any number here, even 1, for an interleaved pipeline.
        args.virtual_pipeline_model_parallel_size = None
    return args


def virtual_stages_per_rank(args: argparse.Namespace) -> int | None:
    """The number of model chunks per rank, from the flags that describe it in another way; None without any of these, and if
    the layers cannot be split so, which a rule refuses."""
    stages = args.pipeline_model_parallel_size
    if stages == 1 or not args.num_layers:
        return None
    if args.pipeline_model_parallel_layout is not None:
        return max(1, len(parts_of_layout(args.pipeline_model_parallel_layout)) // stages)
    if args.num_virtual_stages_per_pipeline_rank is not None:
        return args.num_virtual_stages_per_pipeline_rank
    layers, per_chunk = args.num_layers + counted_as_layers(args), args.num_layers_per_virtual_pipeline_stage
    return layers // stages // per_chunk if per_chunk and layers % (stages * per_chunk) == 0 else None


def pipeline_stages(args: argparse.Namespace) -> tuple[PipelineStage, ...]:
    """The pipeline stages of a model whose shape is known.

    Raises:
        UserError: the flags do not fit the number of layers.
    """
    if args.pipeline_model_parallel_layout is not None:
        return split_as_laid_out(args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size)
    return split_into_stages(
        args.num_layers,
        args.pipeline_model_parallel_size,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        virtual_pipeline=args.virtual_pipeline_model_parallel_size or 1,
        embedding_counts=args.account_for_embedding_in_pipeline_split,
        loss_counts=args.account_for_loss_in_pipeline_split,
    )


def counted_as_layers(args: argparse.Namespace) -> int:
    """The number of layers for which embedding and loss count in the pipeline split: 0, 1 or 2."""
    return bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
