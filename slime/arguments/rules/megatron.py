"""Rules about Megatron's flags: mistakes that Megatron itself would only find deep inside, after every rank has started.

Every message names the flags, their values, and a value that would work. Runs without training ranks build no model, so the
rules do not apply to them.
"""

import argparse
import importlib.util
import logging
import math
import re
from collections.abc import Iterator

from slime.arguments.flag import flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.hf_config import readable_config, takes_shape_of_config
from slime.arguments.megatron.effects import ACTS_WITH, FIXED
from slime.arguments.megatron.names import HISTORICAL
from slime.arguments.megatron.values import counted_as_layers, pipeline_stages, virtual_stages_per_rank
from slime.arguments.sizes import train_iterations
from slime.arguments.surface import load_surface
from slime.arguments.violations import Rule, Violation, about, broken, divisors, hint, refused, refused_each, where
from slime.estimates.layout import parts_of_layout
from slime.models.fsdp import FLASH_ATTENTION
from slime.models.shape_of_flags import SHAPE_FLAGS
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_GATHERED_CONTEXT_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def model_shape(args: argparse.Namespace) -> Iterator[Violation]:
    missing = [flag_of(name) for name in SHAPE_FLAGS if vars(args)[name] is None]
    if missing and takes_shape_of_config(args) and args.hf_checkpoint is not None:
        return  # the config could not be read, which was reported
    if missing and args.dry_run:
        return  # the plan reports it, and shows the parts that do not need the shape
    if missing:
        template = "the model's shape is not known: give {missing}, or {--model-args-from-hf} with {--hf-checkpoint}"
        yield broken(args, template, *missing, missing=", ".join(missing))
    elif args.padded_vocab_size is not None and args.padded_vocab_size < args.vocab_size:
        yield broken(args, "{--padded-vocab-size=} is below {--vocab-size=}; give at least that")


def parallel_sizes(args: argparse.Namespace) -> Iterator[Violation]:
    """Checks the sizes of experts and optimizers. Tensor, pipeline and context sizes are checked where they are derived."""
    experts, ep, pp = args.num_experts, args.expert_model_parallel_size, args.pipeline_model_parallel_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    dense, of_expert = (args.world_size // (pp * ranks) for ranks in (args.tensor_model_parallel_size, etp * ep))
    alike = math.gcd(dense, of_expert)
    if alike % args.num_distributed_optimizer_instances:
        template = "{--num-distributed-optimizer-instances=} must divide the {alike} ranks with the same weights{hint}"
        fitting = hint("--num-distributed-optimizer-instances", divisors(alike))
        yield broken(args, template, alike=alike, hint=fitting)
    if not experts:
        return
    if args.world_size % (etp * ep * pp):
        fitting = [n for n in divisors(experts) if args.world_size % (etp * n * pp) == 0]
        template = (
            "{--expert-tensor-parallel-size} {etp} x {--expert-model-parallel-size=} x {--pipeline-model-parallel-size=} = "
            "{product} must divide the number of training ranks, {world_size}{hint}"
        )
        yield broken(args, template, etp=etp, product=etp * ep * pp, hint=hint("--expert-model-parallel-size", fitting))
    if experts % ep:
        template = "{--num-experts=} cannot be spread over {--expert-model-parallel-size=}{hint}"
        yield broken(args, template, hint=hint("--expert-model-parallel-size", divisors(experts)))
    # With one optimizer instance Megatron compares these numbers in floating point, so the same expression stands here.
    averages = args.ddp_average_in_collective and args.num_distributed_optimizer_instances == 1 and dense and of_expert
    if averages and of_expert / dense / of_expert != 1 / dense:
        template = (
            "{--ddp-average-in-collective} with {--num-experts=}: Megatron requires that {of_expert} / {dense} / {of_expert} "
            "(numbers of ranks that hold an expert, and that hold other weights) is 1 / {dense} to the last bit, and it is "
            "not; drop the flag: it only changes the rounding of a step"
        )
        yield broken(args, template, of_expert=of_expert, dense=dense)


def tensor_parallel(args: argparse.Namespace) -> Iterator[Violation]:
    size = args.tensor_model_parallel_size
    linear = ("linear_num_key_heads",) if args.linear_attention_freq is not None else ()
    for name in ("num_attention_heads", "ffn_hidden_size", "moe_ffn_hidden_size", "padded_vocab_size", *linear):
        value = vars(args)[name]
        if value is not None and value % size:
            yield _not_divided(args, flag_of(name), value)
    groups = args.num_query_groups if args.group_query_attention else None
    # If there are fewer groups than ranks, several ranks hold the same group.
    if groups and groups % size and size % groups and not args.multi_latent_attention:
        yield _not_divided(args, "--num-query-groups", groups)
    heads = args.num_attention_heads
    if heads and groups and not size % groups and not args.multi_latent_attention:
        # Megatron cuts the projection into equal parts, even where ranks share a group.
        queries = heads * (1 + args.attention_output_gate)
        channels = (queries + 2 * groups) * (args.kv_channels or args.hidden_size // heads)
        if channels % size:
            template = "{--tensor-model-parallel-size=} does not divide the {channels} channels of queries, keys and "
            template += "values, with {--num-attention-heads=} and {--num-query-groups=}{hint}"
            shared = [n for n in divisors(channels) if n < size and (groups % n == 0 or n % groups == 0)]
            fitting = [n for n in shared if heads % n == 0]
            yield broken(args, template, channels=channels, hint=hint("--tensor-model-parallel-size", fitting))


def _not_divided(args: argparse.Namespace, flag: str, value: int) -> Violation:
    fitting = [n for n in divisors(value) if n <= args.tensor_model_parallel_size]
    template = "{--tensor-model-parallel-size=} does not divide {0=}; {largest} would do"
    return broken(args, template, flag, largest=fitting[-1])


def grouped_heads(args: argparse.Namespace) -> Iterator[Violation]:
    count, groups = args.num_attention_heads, args.num_query_groups
    if groups and count and count % groups:
        fitting = hint("--num-query-groups", divisors(count))
        yield broken(args, "{--num-attention-heads=} is no multiple of {--num-query-groups=}{hint}", hint=fitting)


SHAPE_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.sequence_parallel and args.tensor_model_parallel_size == 1,
        "{--sequence-parallel} needs {--tensor-model-parallel-size} above 1; give 2, or drop it"),
    refused(lambda args: args.group_query_attention and args.num_query_groups is None,
        "{--group-query-attention} needs {--num-query-groups}, a divisor of {--num-attention-heads=}"),
    grouped_heads,
    refused_each(("rotary_seq_len_interpolation_factor", "softmax_scale"),
        lambda args, value: args.multi_latent_attention and value is not None,
        "{0=} has no effect with {--multi-latent-attention}; drop it"),
    refused(lambda args: args.num_attention_heads and args.hidden_size and args.kv_channels is None
            and args.hidden_size % args.num_attention_heads and not args.multi_latent_attention,
        "{--hidden-size=} is no multiple of {--num-attention-heads=}; give {--kv-channels}, a head's width"),
)  # fmt: skip


def full_recomputation(args: argparse.Namespace) -> Iterator[Violation]:
    is_full, method, count = args.recompute_granularity == "full", args.recompute_method, args.recompute_num_layers
    full = "{--recompute-granularity} full {--recompute-method} uniform {--recompute-num-layers} 1"
    if is_full and (method is None or count is None):
        missing = "--recompute-method" if method is None else "--recompute-num-layers"
        yield broken(args, f"{{--recompute-granularity=}} needs {{0}}; {full} recomputes every layer", missing)
    if not is_full and (method is not None or count is not None):
        typed = "--recompute-method" if method is not None else "--recompute-num-layers"
        yield broken(args, f"{{0=}} needs {{--recompute-granularity}} full; give {full}, or drop it", typed)


# Transformer Engine alone has them: flags and their values.
_ENGINE_FLAGS, _OF_ENGINE = ("fp8", "attention_backend"), ("e4m3", "hybrid", "fused")
_ON_WEIGHTS = ("use_precision_aware_optimizer", "optimizer_cpu_offload")

MEMORY_AND_PRECISION_RULES: tuple[Rule, ...] = (
    refused_each(("recompute_activations", "moe_layer_recompute"), lambda args, on: on and args.recompute_granularity == "full",
        "{0} means {--recompute-granularity} selective, not full; drop one of them"),
    full_recomputation,
    refused(lambda args: args.num_microbatches_with_partial_activation_checkpoints is not None and (args.use_routing_replay
            or args.recompute_granularity != "full" or args.pipeline_model_parallel_size == 1),
        "{--num-microbatches-with-partial-activation-checkpoints=} needs {--recompute-granularity} full and "
        "{--pipeline-model-parallel-size} above 1, and goes without {--use-routing-replay}; drop it"),
    refused(lambda args: args.distribute_saved_activations and args.sequence_parallel,
        "{--distribute-saved-activations} and {--sequence-parallel} exclude each other; drop the first"),
    refused(lambda args: args.bf16 and args.fp16, "{--bf16} and {--fp16} exclude each other; drop one"),
    refused(lambda args: args.fp8 and args.fp4, "{--fp8-format=} and {--fp4-format=} exclude each other; drop one"),
    refused_each(_ENGINE_FLAGS, lambda args, value: value in _OF_ENGINE and args.transformer_impl == "local",
        "{0=} needs {--transformer-impl} transformer_engine: the local layers would go without; drop one of them"),
    refused(lambda args: args.attention_backend == "fused" and args.multi_latent_attention,
        "{--attention-backend=}: latent attention of packed samples has kernels of PyTorch; give auto"),
    refused(lambda args: args.fp8 and args.data_pad_size_multiplier
            % {"mxfp8": 32, "blockwise": 128 if args.sequence_parallel else 16}.get(args.fp8_recipe, 16),
        "{--data-pad-size-multiplier=} with {--fp8-format=} {--fp8-recipe=}: products take more rows at a time; give 128"),
    refused(lambda args: args.grad_reduce_in_bf16 and args.accumulate_allreduce_grads_in_fp32,
        "{--grad-reduce-in-bf16} and {--accumulate-allreduce-grads-in-fp32} contradict each other; drop one"),
    refused(lambda args: args.ddp_num_buckets is not None and args.ddp_bucket_size is not None,
        "{--ddp-num-buckets=} and {--ddp-bucket-size=} say the same in two ways; drop one"),
    refused(lambda args: args.ddp_reduce_scatter_with_fp32_accumulation
            and (args.ddp_average_in_collective or args.num_distributed_optimizer_instances > 1),
        "{--ddp-reduce-scatter-with-fp32-accumulation} only sums, and over all ranks: drop it, or "
        "{--ddp-average-in-collective} and {--num-distributed-optimizer-instances}"),
    refused(lambda args: args.main_grads_dtype == "bf16" and (args.accumulate_allreduce_grads_in_fp32 or not args.bf16),
        "{--main-grads-dtype=} needs {--bf16}, and {--accumulate-allreduce-grads-in-fp32} contradicts it; give fp32"),
    refused(lambda args: args.main_params_dtype == "fp16" and args.params_dtype_name == "float32",
        "{--main-params-dtype=}: weights in float32 are main parameters themselves; give {--bf16}, or drop it"),
    refused_each(_ON_WEIGHTS, lambda args, asked: asked and (args.optimizer != "adam" or args.use_stateless_adam
                 or not args.use_distributed_optimizer),
        "{0} needs {--optimizer} adam with {--use-distributed-optimizer}, and not {--use-stateless-adam}; drop the former"),
    refused(lambda args: args.optimizer == "sgd" and args.use_distributed_optimizer,
        "{--optimizer=}: Megatron distributes the state of Adam alone; give {--no-use-distributed-optimizer}"),
    refused_each(_ON_WEIGHTS, lambda args, asked: asked and args.fp16 and not args.accumulate_allreduce_grads_in_fp32,
        "{0} with {--fp16}: gradients in float16 are not clipped; give {--accumulate-allreduce-grads-in-fp32}"),
    refused_each(("megatron_deepgemm_forward_layers", "megatron_deepgemm_moe_forward_layers"),
        lambda args, layers: layers and args.num_layers and max(layers) >= args.num_layers,
        "{0=}: decoder layers are counted from 0, and {--num-layers} is {num_layers}; name those that there are"),
)  # fmt: skip


def experts(args: argparse.Namespace) -> Iterator[Violation]:
    frequency, groups = args.moe_layer_freq, args.moe_router_num_groups
    if isinstance(frequency, list) and args.num_layers and len(frequency) != args.num_layers:
        dense = frequency.count(0)
        template = "{--moe-layer-freq} lists {listed} layers of {--num-layers} {num_layers}; [0]*{dense}+[1]*{sparse} would fit"
        yield broken(args, template, listed=len(frequency), dense=dense, sparse=max(args.num_layers - dense, 0))
    if groups and args.num_experts % groups:
        fitting = hint("--moe-router-num-groups", divisors(args.num_experts))
        yield broken(args, "{--num-experts=} is no multiple of {--moe-router-num-groups=}{hint}", hint=fitting)
    given = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    types, weights = (value if isinstance(value, list) else [value] for value in given)
    if len(types) != len(weights):
        yield broken(args, "{--moe-router-load-balancing-type=} needs {count} {--moe-aux-loss-coeff}", count=len(types))
    if len({*types} - {"none"}) < len(types) > 1:
        yield broken(args, "{--moe-router-load-balancing-type=}: give each kind once, and `none` by itself")


def overlapped_experts(args: argparse.Namespace) -> Iterator[Violation]:
    in_parts = args.recompute_granularity != "full" and "moe" not in (args.recompute_modules or ())
    problems = (
        (args.expert_model_parallel_size == 1, "needs {--expert-model-parallel-size} above 1; give 2, or drop the former"),
        (not (args.bf16 or args.fp16), "needs {--bf16} or {--fp16}; give one of them, or drop the former"),
        (args.pipeline_model_parallel_size > 1 and (args.virtual_pipeline_model_parallel_size or 1) == 1,
         "with {--pipeline-model-parallel-size=} needs virtual stages; give {--num-virtual-stages-per-pipeline-rank} 2"),
        (not in_parts, "takes layers in parts: drop it, or {--recompute-granularity} full, "
         "{--moe-layer-recompute} and the moe of {--recompute-modules}; selective recomputation of other modules goes with it"),
        (args.moe_shared_expert_overlap, "and {--moe-shared-expert-overlap} fill the same time; drop one of them"),
        (args.enable_mtp_training, "takes no layers of {--enable-mtp-training}, in packed streams; drop one of them"),
    )  # fmt: skip
    yield from (broken(args, "{--overlap-moe-expert-parallel-comm} " + text) for is_so, text in problems if is_so)


def _expert_ranks(args: argparse.Namespace) -> int:
    return (args.expert_tensor_parallel_size or args.tensor_model_parallel_size) * args.expert_model_parallel_size


EXPERT_RULES: tuple[Rule, ...] = where(lambda args: args.num_experts,
    refused(lambda args: args.has_trainer and args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
        "{--num-experts=} with {--tensor-model-parallel-size=} needs {--sequence-parallel}"),
    refused(lambda args: args.moe_router_topk > args.num_experts, "{--moe-router-topk=} is above {--num-experts=}"),
    experts, *where(lambda args: args.overlap_moe_expert_parallel_comm, overlapped_experts),
    refused(lambda args: args.moe_router_load_balancing_type in ("none", ["none"]) and args.moe_aux_loss_coeff not in (0, [0]),
        "{--moe-aux-loss-coeff=} weighs no loss with {--moe-router-load-balancing-type=}; drop one of them"),
    refused(lambda args: "sinkhorn" in args.moe_router_load_balancing_type,
        "{--moe-router-load-balancing-type=}: with sinkhorn, all tokens of a stream compete for experts, and only in training "
        "steps; engines and other passes choose for each token alone, which is another policy; give global_aux_loss"),
    refused(lambda args: args.moe_apply_probs_on_input and args.moe_router_topk != 1,
        "{--moe-apply-probs-on-input} needs {--moe-router-topk} 1, not {moe_router_topk}: several experts share an input"),
    refused(lambda args: args.moe_router_group_topk and not args.moe_router_num_groups,
        "{--moe-router-group-topk=} needs {--moe-router-num-groups}"),
    refused(lambda args: args.moe_router_force_load_balancing and args.use_rollout_routing_replay,
        "{--moe-router-force-load-balancing} with {--use-rollout-routing-replay}: engines choose the experts; drop one"),
    refused(lambda args: args.moe_pad_expert_input_to_capacity
            and args.tensor_model_parallel_size * args.context_parallel_size % _expert_ranks(args),
        "{--moe-pad-expert-input-to-capacity} with {--expert-model-parallel-size=}: data-parallel ranks that share experts "
        "have streams of other lengths; drop it, or spread experts over tensor- and context-parallel ranks alone"),
    refused(lambda args: args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor is not None
            and args.moe_expert_capacity_factor * args.moe_router_topk > args.num_experts,
        "{--moe-pad-expert-input-to-capacity} with {--moe-expert-capacity-factor=} and {--moe-router-topk=} would give an "
        "expert more places than there are tokens; give at most {--num-experts} / {--moe-router-topk}"),
    refused(lambda args: args.moe_pad_expert_input_to_capacity and args.moe_router_enable_expert_bias,
        "{--moe-pad-expert-input-to-capacity} with {--moe-router-enable-expert-bias}: padding would count as load; drop one"),
    refused(lambda args: args.moe_shared_expert_overlap
            and (args.moe_token_dispatcher_type == "flex" or "shared_experts" in (args.recompute_modules or ())),
        "{--moe-shared-expert-overlap} needs {--moe-token-dispatcher-type} alltoall, and {--recompute-modules} without "
        "shared_experts"),
    refused(lambda args: args.use_tp_pp_dp_mapping and args.pipeline_model_parallel_size > 1 and _expert_ranks(args)
            != args.tensor_model_parallel_size * args.context_parallel_size,
        "{--use-tp-pp-dp-mapping} with {--num-experts=}: experts have other data-parallel ranks than the rest; drop it"),
    refused(lambda args: args.moe_enable_deepep and args.moe_token_dispatcher_type != "flex",
        "{--moe-enable-deepep} needs {--moe-token-dispatcher-type} flex, not {moe_token_dispatcher_type}"),
)  # fmt: skip


def gathered_context(args: argparse.Namespace) -> Iterator[Violation]:
    """`--allgather-cp` is written for models with sparse attention."""
    config = readable_config(args) if args.allgather_cp and args.context_parallel_size > 1 else {}
    names = config.get("architectures") or []
    if config and not set(names) & set(_GATHERED_CONTEXT_MODELS):
        template = "{--allgather-cp} with {--context-parallel-size=} works for {models} only, not for {names}; "
        models, names = " and ".join(_GATHERED_CONTEXT_MODELS), ", ".join(names) or "this model"
        yield broken(args, template + "drop {--allgather-cp}", models=models, names=names)


def settled_values(args: argparse.Namespace) -> Iterator[Violation]:
    for name, (value, reason) in FIXED.items():
        if name in args.typed_flags and vars(args)[name] != value:
            template = "{0=}: it is always {value} here ({reason}); drop the flag"
            yield broken(args, template, flag_of(name), value=value, reason=reason)


def idle_flags(args: argparse.Namespace) -> Iterator[Violation]:
    for group in ACTS_WITH:
        template = f"{{0=}} has nothing to act on without {group.needs}; give that, or drop it"
        yield from (broken(args, template, flag_of(name)) for name in group.idle(args))


def extra_flags(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of flags that only Megatron-LM's parser knows, which the user's code may read; yields nothing."""
    extra = {spec.dest for spec in load_surface("megatron") or () if spec.metadata.get("megatron_lm")}
    known = {*OWN_FLAGS, *(spec.dest for spec in HISTORICAL)}
    typed = sorted((extra - known) & args.typed_flags)
    if typed:
        names = ", ".join(flag_of(name) for name in typed)
        logger.warning("%s: accepted as Megatron-LM's, but nothing here reads it; code of yours may", names)
    return iter(())


_UNEVEN_STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
_SPLIT_OTHERWISE = (
    *_UNEVEN_STAGES, *_VIRTUAL_STAGES,
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def pipeline_split(args: argparse.Namespace) -> Iterator[Violation]:
    one_stage = args.pipeline_model_parallel_size == 1
    if one_stage or not args.num_layers or args.pipeline_model_parallel_layout is not None:
        return
    try:
        pipeline_stages(args)
    except UserError as error:
        yield from about([error], "--num-layers", "--pipeline-model-parallel-size", *map(flag_of, _SPLIT_OTHERWISE))


def virtual_stages(args: argparse.Namespace) -> Iterator[Violation]:
    per_stage, per_rank = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if args.pipeline_model_parallel_layout is not None and (per_stage is not None or per_rank is not None):
        return  # a row of `MEGATRON_RULES` reports it
    if per_stage is not None and per_rank is not None:
        both = "{--num-layers-per-virtual-pipeline-stage=} and {--num-virtual-stages-per-pipeline-rank=}"
        yield broken(args, both + " say the same in two ways; drop one")
    elif stages == 1 and (per_stage is not None or (per_rank or 1) > 1):
        template = "{0=} with {--pipeline-model-parallel-size=}: nothing is interleaved there; drop it, or give a "
        name = _VIRTUAL_STAGES[0 if per_stage is not None else 1]
        yield broken(args, template + "pipeline size above 1", flag_of(name))
    elif stages > 1 and per_stage and layers:
        yield from _layers_per_virtual_stage(args, layers + counted_as_layers(args))


def _layers_per_virtual_stage(args: argparse.Namespace, layers: int) -> Iterator[Violation]:
    stages, per_stage = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    uneven = next((name for name in _UNEVEN_STAGES if vars(args)[name] is not None), None)
    if uneven is not None:
        template = (
            "{--num-layers-per-virtual-pipeline-stage=} needs equal stages, but {0} is {size}; give "
            "{--num-virtual-stages-per-pipeline-rank} in its place"
        )
        yield broken(args, template, flag_of(uneven), size=vars(args)[uneven])
    # `pipeline_split` reports layers that the stages do not divide.
    elif layers % stages == 0 and layers // stages % per_stage:
        template = (
            "{--num-layers-per-virtual-pipeline-stage=} does not divide the {layers} layers of each of the "
            "{--pipeline-model-parallel-size=} stages{hint}"
        )
        fitting = hint("--num-layers-per-virtual-pipeline-stage", divisors(layers // stages))
        yield broken(args, template, layers=layers // stages, hint=fitting)


def chunks_per_rank(args: argparse.Namespace) -> Iterator[Violation]:
    """A number of chunks that is typed beside another description of it must be the same."""
    given, meant = args.virtual_pipeline_model_parallel_size or 1, virtual_stages_per_rank(args)
    if "virtual_pipeline_model_parallel_size" in args.typed_flags and meant not in (None, given):
        template = "{--virtual-pipeline-model-parallel-size} {given} contradicts {0=}, which means {meant}; drop one"
        names = ("pipeline_model_parallel_layout", *reversed(_VIRTUAL_STAGES))
        other = next(flag_of(name) for name in names if vars(args)[name] is not None)
        yield broken(args, template, other, given=given, meant=meant)


INTERLEAVING_RULES: tuple[Rule, ...] = where(
    lambda args: args.pipeline_model_parallel_size > 1 and (args.virtual_pipeline_model_parallel_size or 1) > 1,
    refused(lambda args: "overlap_p2p_comm" in args.typed_flags and not args.overlap_p2p_comm,
        "{--no-overlap-p2p-communication} with virtual pipeline stages: messages for different stages of a rank could be "
        "swapped; drop it"),
    refused(lambda args: args.microbatch_group_size_per_vp_stage is not None
        and args.microbatch_group_size_per_vp_stage < args.pipeline_model_parallel_size,
        "{--microbatch-group-size-per-virtual-pipeline-stage} {microbatch_group_size_per_vp_stage} is below "
        "{--pipeline-model-parallel-size=}; give at least {pipeline_model_parallel_size}, or drop it"),
)  # fmt: skip


def _has_layout(args: argparse.Namespace) -> bool:
    return args.pipeline_model_parallel_layout is not None and args.pipeline_model_parallel_size > 1


def pipeline_layout(args: argparse.Namespace) -> Iterator[Violation]:
    if not _has_layout(args):
        return
    parts, stages = parts_of_layout(args.pipeline_model_parallel_layout), args.pipeline_model_parallel_size
    layout, given = "|".join(parts), args.mtp_num_layers or 0
    unknown, layers, predictions = sorted(set(layout) - set("EtmL|")), layout.count("t"), layout.count("m")
    # Chunks behind prediction layers send longer messages. If these layers stood before the last round of chunks, earlier
    # chunks would get such messages too.
    in_place = re.fullmatch("[^m]*m*[|L]*", layout) and predictions == "".join(parts[-stages:]).count("m")
    problems = (
        (unknown, ": {letter} means nothing; E stands for the embedding, t for a layer, m for one of {--mtp-num-layers}, L for "
         "the loss, | ends a stage, and (t|)*4 repeats"),
        (len(parts) % stages, " has {count} stages, no multiple of {--pipeline-model-parallel-size=}"),
        (args.num_layers and layers != args.num_layers, " has {layers} layers, but {--num-layers} is {num_layers}"),
        (not re.fullmatch("E[tm|]*L", layout), " must begin with its one E and end with its one L"),
        (predictions not in (0, given), " has {predictions} m, but {--mtp-num-layers} is {given}"),
        (not in_place, ": all m stand together, behind every t and in one of the last {stages} stages"),
    )  # fmt: skip
    values = {"letter": repr(unknown[0]) if unknown else "", "count": len(parts), "layers": layers, "stages": stages}
    for text in [text for is_so, text in problems if is_so][: 1 if unknown else None]:
        template = "{--pipeline-model-parallel-layout=}" + text
        yield broken(args, template, **values, predictions=predictions, given=given)


def phases(args: argparse.Namespace) -> Iterator[Violation]:
    """Warm-up and last phase must fit into the schedule. Without a flag for its length, only the data may tell it."""
    without = " without {--num-critic-only-steps=}" if args.num_critic_only_steps else ""
    length, source = train_iterations(args), "those of {--num-rollout=}" + without
    for flag, steps in (("--train-iters", args.train_iters), ("--lr-decay-iters", args.lr_decay_iters)):
        if steps:
            length, source = steps, f"{{{flag}}}"
    if not length:
        return
    share, last = args.lr_warmup_fraction, args.lr_wsd_decay_iters if args.lr_decay_style == "WSD" else None
    first = args.lr_warmup_iters if share is None else int(share * length)
    if share is None and first >= length:
        template = (
            f"{{--lr-warmup-iters=}} must be below the {{length}} optimizer steps of the schedule ({source}); give at most "
            "{most}, or {--lr-decay-iters} above {lr_warmup_iters}"
        )
        yield broken(args, template, length=length, most=length - 1)
    elif last and last > length - first > 0:
        template = (
            f"{{--lr-wsd-decay-iters=}} is above the {{most}} optimizer steps of the schedule ({source}) behind its warm-up: "
            "the learning rate would begin in the midst of its decay; give at most {most}"
        )
        yield broken(args, template, most=length - first)


def _decays_between(args: argparse.Namespace) -> bool:
    return None not in (args.start_weight_decay, args.end_weight_decay)


SCHEDULE_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.lr_warmup_fraction is not None and args.lr_warmup_iters,
        "{--lr-warmup-fraction=} and {--lr-warmup-iters=} exclude each other; drop one"),
    refused(lambda args: args.lr_warmup_fraction is not None and not 0 <= args.lr_warmup_fraction < 1,
        "{--lr-warmup-fraction=}: it must be at least 0 and below 1, 0.1 for example"),
    refused(lambda args: args.lr_warmup_init > args.lr, "{--lr-warmup-init=} is above {--lr=}; give at most {lr} (0 is usual)"),
    phases,
    refused(lambda args: args.min_lr is not None and args.min_lr > args.lr, "{--min-lr=} is above {--lr=}; give at most {lr}"),
    refused(lambda args: args.use_checkpoint_opt_param_scheduler and args.override_opt_param_scheduler,
        "{--use-checkpoint-opt-param-scheduler} and {--override-opt-param-scheduler} contradict each other; drop one"),
    refused(lambda args: args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None,
        "{--lr-decay-style=} needs {--lr-wsd-decay-iters}, the steps of its last phase"),
    refused(lambda args: (args.start_weight_decay is None) != (args.end_weight_decay is None),
        "{--start-weight-decay} and {--end-weight-decay} belong together; give both, or {--weight-decay} alone"),
    refused(lambda args: _decays_between(args) and args.start_weight_decay > args.end_weight_decay,
        "{--start-weight-decay=} and {--end-weight-decay=}: weight decay can only grow; give {--end-weight-decay} "
        "{start_weight_decay} or more"),
    refused(lambda args: _decays_between(args) and args.start_weight_decay < args.end_weight_decay
            and args.weight_decay_incr_style == "constant",
        "{--start-weight-decay=} and {--end-weight-decay=} need {--weight-decay-incr-style} linear or cosine, not constant"),
)  # fmt: skip

# For these modules Megatron discards outputs with functions of Transformer Engine, in any precision and in local layers too.
RECOMPUTED_BY_ENGINE = ("layernorm", "moe_act")

# The ranks' machines may differ from this one. A fusion that nobody typed is on if the ranks' machines have the module.
EXTENSION_RULES: tuple[Rule, ...] = where(lambda args: args.has_trainer,
    refused(lambda args: args.gradient_accumulation_fusion and "gradient_accumulation_fusion" in args.typed_flags
            and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None,
        "{--gradient-accumulation-fusion} needs the module fused_weight_gradient_mlp_cuda of Apex, which is not installed "
        "here; install Apex with its CUDA extensions, or leave the flag out: it is on by itself where the module is"),
    refused_each(_ENGINE_FLAGS, lambda args, value: value in _OF_ENGINE and (
            args.on_gpus is False or importlib.util.find_spec("transformer_engine") is None),
        "{0=} needs a GPU and Transformer Engine, one of which is missing here; install it, or leave the flag out"),
    refused(lambda args: args.recompute_granularity == "selective" and importlib.util.find_spec("transformer_engine") is None
            and not set(RECOMPUTED_BY_ENGINE).isdisjoint(args.recompute_modules or ()),
        "{--recompute-modules}: layernorm and moe_act need Transformer Engine, which is missing here; install it or drop them"),
    refused(lambda args: args.attn_implementation in FLASH_ATTENTION and args.train_backend == "fsdp" and (
            args.on_gpus is False or importlib.util.find_spec(FLASH_ATTENTION[args.attn_implementation][0]) is None),
        "{--attn-implementation=} needs a GPU and the package flash-attn (flash-attn-3 for flash_attention_3), one of which is "
        "missing here; install it, or give auto"),
)  # fmt: skip

MEGATRON_RULES: tuple[Rule, ...] = where(lambda args: args.has_trainer,
    model_shape, parallel_sizes, tensor_parallel, *SHAPE_RULES,
    refused_each(_UNEVEN_STAGES, lambda args, layers: args.pipeline_model_parallel_size == 1 and layers is not None,
        "{0=} with {--pipeline-model-parallel-size=}: one stage holds all layers; drop it, or give a pipeline size above 1"),
    refused(lambda args: args.spec is not None and len(args.spec) not in (1, 2),
        "{--spec=}: give the module and the function as two words, or as one path with a dot between them"),
    pipeline_split, virtual_stages, chunks_per_rank, *INTERLEAVING_RULES,
    refused_each(_SPLIT_OTHERWISE, lambda args, value: value and _has_layout(args),
        "{0} and {--pipeline-model-parallel-layout} both split the layers; drop one of them"),
    pipeline_layout, *MEMORY_AND_PRECISION_RULES, *SCHEDULE_RULES, *EXPERT_RULES, gathered_context,
    refused(lambda args: args.freeze_indexer and args.dsa_indexer_loss_coeff,
        "{--freeze-indexer} with {--dsa-indexer-loss-coeff=}: its loss would train nothing; drop one of them"),
    refused(lambda args: not args.perform_initialization and args.random_init,
        "{--random-init} with {--no-initialization} would train whatever lay in memory; drop {--no-initialization}"),
    refused_each(("hidden_dropout", "moe_input_jitter_eps"), lambda args, value: value and args.loss_type == "policy_loss",
        "{0=} with {--loss-type=}: the noise of a step would enter the ratio of its log-probs to the old ones; drop it, or "
        "give {--loss-type} sft_loss"),
    settled_values, idle_flags, extra_flags,
)  # fmt: skip
