"""Rules of Megatron's flags: what its own code would only find out deep inside, after every rank has started.

Every rule yields messages that name the flags, their values, and a value that would work. Runs without training ranks
build no model, so nothing is asked of them.
"""

import argparse
import logging
from collections.abc import Iterator

from slime.arguments.flag import flag_of
from slime.arguments.hf_config import read_hf_config
from slime.arguments.megatron.effects import ACTS_WITH, FIXED
from slime.arguments.megatron.names import HISTORICAL
from slime.arguments.megatron.values import counted_as_layers, parts_of_layout, pipeline_stages
from slime.arguments.model_shape import SHAPE_FLAGS
from slime.arguments.rules import Rule, divisors, hint
from slime.arguments.sizes import train_iterations
from slime.arguments.surface import load_surface
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

_GATHERED_CONTEXT_MODELS = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")


def model_shape(args: argparse.Namespace) -> Iterator[str]:
    missing = [flag_of(name) for name in SHAPE_FLAGS if getattr(args, name) is None]
    if missing and args.model_args_from_hf and args.hf_checkpoint is not None:
        return  # the config could not be read, and that was said
    if missing and args.dry_run:
        return  # the plan itself says it, and shows what does not need the shape
    if missing:
        yield f"the model's shape is not known: give {', '.join(missing)}, or --model-args-from-hf with --hf-checkpoint"
        return
    if args.padded_vocab_size is not None and args.padded_vocab_size < args.vocab_size:
        yield f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}; give at least that"


def parallel_sizes(args: argparse.Namespace) -> Iterator[str]:
    """The expert layout; that of tensor, pipeline and context is checked where the sizes are derived."""
    experts = args.num_experts
    if not experts:
        return
    ep, pp = args.expert_model_parallel_size, args.pipeline_model_parallel_size
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.world_size % (etp * ep * pp):
        yield (
            f"--expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} x --pipeline-model-parallel-size "
            f"{pp} = {etp * ep * pp} must divide the number of training ranks, {args.world_size}"
            + hint(
                "--expert-model-parallel-size", [n for n in divisors(experts) if args.world_size % (etp * n * pp) == 0]
            )
        )
    if experts % ep:
        yield (
            f"--num-experts {experts} cannot be spread over --expert-model-parallel-size {ep}"
            + hint("--expert-model-parallel-size", divisors(experts))
        )


def tensor_parallel(args: argparse.Namespace) -> Iterator[str]:
    size = args.tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size", "moe_ffn_hidden_size", "padded_vocab_size"):
        value = getattr(args, name)
        if value is not None and value % size:
            yield f"--tensor-model-parallel-size {size} does not divide {flag_of(name)} {value}{_common(value, size)}"
    groups = args.num_query_groups if args.group_query_attention else None
    if groups and groups % size and not args.multi_latent_attention:
        yield f"--tensor-model-parallel-size {size} does not divide --num-query-groups {groups}{_common(groups, size)}"
    if args.sequence_parallel and size == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1; give 2, or drop it"


def heads(args: argparse.Namespace) -> Iterator[str]:
    count, groups, hidden = args.num_attention_heads, args.num_query_groups, args.hidden_size
    if args.group_query_attention and groups is None:
        yield f"--group-query-attention needs --num-query-groups, a divisor of --num-attention-heads {count}"
    if groups and count and count % groups:
        yield (
            f"--num-attention-heads {count} is no multiple of --num-query-groups {groups}"
            + hint("--num-query-groups", divisors(count))
        )
    if count and hidden and hidden % count and args.kv_channels is None and not args.multi_latent_attention:
        yield f"--hidden-size {hidden} is no multiple of --num-attention-heads {count}; give --kv-channels, a head's width"


def recomputation(args: argparse.Namespace) -> Iterator[str]:
    granularity, method, count = args.recompute_granularity, args.recompute_method, args.recompute_num_layers
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    if args.recompute_activations and granularity == "full":
        yield "--recompute-activations means --recompute-granularity selective, not full; drop one of them"
    if granularity == "full" and (method is None or count is None):
        missing = "--recompute-method" if method is None else "--recompute-num-layers"
        yield f"--recompute-granularity full needs {missing}; {full} recomputes every layer"
    if granularity != "full" and (method is not None or count is not None):
        typed = f"--recompute-method {method}" if method is not None else f"--recompute-num-layers {count}"
        yield f"{typed} needs --recompute-granularity full; give {full}, or drop it"
    if granularity == "full" and count is not None and count < 1:
        yield f"--recompute-num-layers {count}: it must be at least 1"
    if args.distribute_saved_activations and args.sequence_parallel:
        yield "--distribute-saved-activations and --sequence-parallel exclude each other; drop the first"


def precision(args: argparse.Namespace) -> Iterator[str]:
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 exclude each other; drop one"
    if args.fp8 and args.fp4:
        yield f"--fp8-format {args.fp8} and --fp4-format {args.fp4} exclude each other; drop one"
    if args.grad_reduce_in_bf16 and "accumulate_allreduce_grads_in_fp32" in args.typed_flags:
        yield "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other; drop one"


def experts(args: argparse.Namespace) -> Iterator[str]:
    if not args.num_experts:
        return
    if args.moe_router_topk > args.num_experts:
        yield f"--moe-router-topk {args.moe_router_topk} is above --num-experts {args.num_experts}"
    frequency = args.moe_layer_freq
    if isinstance(frequency, list) and args.num_layers and len(frequency) != args.num_layers:
        dense = frequency.count(0)
        yield (
            f"--moe-layer-freq lists {len(frequency)} layers, but --num-layers is {args.num_layers}; "
            f"[0]*{dense}+[1]*{max(args.num_layers - dense, 0)} would fit"
        )
    groups = args.moe_router_num_groups
    if groups and args.num_experts % groups:
        yield (
            f"--num-experts {args.num_experts} is no multiple of --moe-router-num-groups {groups}"
            + hint("--moe-router-num-groups", divisors(args.num_experts))
        )
    if args.moe_router_group_topk and not groups:
        yield f"--moe-router-group-topk {args.moe_router_group_topk} needs --moe-router-num-groups"
    types = args.moe_router_load_balancing_type
    if isinstance(types, list) and (not isinstance(args.moe_aux_loss_coeff, list)):
        yield (
            f"--moe-router-load-balancing-type {' '.join(types)} needs as many --moe-aux-loss-coeff, {len(types)} numbers"
        )
    if args.moe_enable_deepep and args.moe_token_dispatcher_type != "flex":
        yield (f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, not {args.moe_token_dispatcher_type}")


def gathered_context(args: argparse.Namespace) -> Iterator[str]:
    """`--allgather-cp` is written for models with sparse attention."""
    size = args.context_parallel_size
    if not args.allgather_cp or size == 1 or args.hf_checkpoint is None:
        return
    try:
        names = read_hf_config(args.hf_checkpoint).get("architectures") or []
    except UserError:
        return  # said where the config is read for the shape
    if not set(names) & set(_GATHERED_CONTEXT_MODELS):
        yield (
            f"--allgather-cp with --context-parallel-size {size} works for {' and '.join(_GATHERED_CONTEXT_MODELS)} only, "
            f"not for {', '.join(names) or 'this model'}; drop --allgather-cp"
        )


def initialization(args: argparse.Namespace) -> Iterator[str]:
    if not args.perform_initialization and args.random_init:
        yield "--random-init with --no-initialization would train whatever lay in memory; drop --no-initialization"


def settled_values(args: argparse.Namespace) -> Iterator[str]:
    for name, (value, reason) in FIXED.items():
        found = getattr(args, name)
        if name in args.typed_flags and found != value:
            typed = flag_of(name) if found is True else f"{flag_of(name)} {found}"
            yield f"{typed}: it is always {value} here ({reason}); drop the flag"


def idle_flags(args: argparse.Namespace) -> Iterator[str]:
    for group in ACTS_WITH:
        for name in group.idle(args):
            value = getattr(args, name)
            typed = flag_of(name) if value is True else f"{flag_of(name)} {value}"
            yield f"{typed} has nothing to act on without {group.needs}; give that, or drop it"


def extra_flags(args: argparse.Namespace) -> Iterator[str]:
    """Flags that only Megatron-LM's own parser knows are accepted for code of the user; that is said, not forbidden."""
    extra = {spec.dest for spec in load_surface("megatron") or () if spec.metadata.get("megatron_lm")}
    known = {spec.dest for spec in HISTORICAL}
    typed = sorted((extra - known) & args.typed_flags)
    if typed:
        names = ", ".join(flag_of(name) for name in typed)
        logger.warning("%s: accepted as Megatron-LM's, but nothing here reads it; code of yours may", names)
    return iter(())


def _for_trainers(rule: Rule) -> Rule:
    def checked(args: argparse.Namespace) -> Iterator[str]:
        return rule(args) if args.has_trainer else iter(())

    return checked


def _common(value: int, size: int) -> str:
    fitting = [n for n in divisors(value) if n <= size]
    return f"; {fitting[-1]} would do"


_SPLIT_OTHERWISE = (
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def pipeline_split(args: argparse.Namespace) -> Iterator[str]:
    if args.pipeline_model_parallel_size == 1:
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            if getattr(args, name) is not None:
                yield (
                    f"{flag_of(name)} {getattr(args, name)} with --pipeline-model-parallel-size 1: one stage holds all "
                    "layers; drop it, or give a pipeline size above 1"
                )
        return
    if not args.num_layers or args.pipeline_model_parallel_layout is not None:
        return
    try:
        pipeline_stages(args)
    except UserError as error:
        yield str(error)


def virtual_stages(args: argparse.Namespace) -> Iterator[str]:
    per_stage, per_rank = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    if args.pipeline_model_parallel_layout is not None and (per_stage is not None or per_rank is not None):
        return  # said by `pipeline_layout`
    if per_stage is not None and per_rank is not None:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} and --num-virtual-stages-per-pipeline-rank {per_rank} "
            "say the same in two ways; drop one"
        )
    elif stages == 1 and (per_stage is not None or (per_rank or 1) > 1):
        name = (
            "num_layers_per_virtual_pipeline_stage" if per_stage is not None else "num_virtual_stages_per_pipeline_rank"
        )
        yield (
            f"{flag_of(name)} {getattr(args, name)} with --pipeline-model-parallel-size 1: nothing is interleaved there; "
            "drop it, or give a pipeline size above 1"
        )
    elif stages > 1 and per_stage and layers:
        yield from _layers_per_virtual_stage(args, layers + counted_as_layers(args))


def _layers_per_virtual_stage(args: argparse.Namespace, layers: int) -> Iterator[str]:
    stages, per_stage = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if getattr(args, name) is not None:
            yield (
                f"--num-layers-per-virtual-pipeline-stage {per_stage} needs equal stages, but {flag_of(name)} is "
                f"{getattr(args, name)}; give --num-virtual-stages-per-pipeline-rank in its place"
            )
            return
    # Stages that are uneven by themselves are the affair of `pipeline_split`.
    if layers % stages == 0 and layers // stages % per_stage:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {per_stage} does not divide the {layers // stages} layers of each of "
            f"the --pipeline-model-parallel-size {stages} stages"
            + hint("--num-layers-per-virtual-pipeline-stage", divisors(layers // stages))
        )


def interleaved_schedule(args: argparse.Namespace) -> Iterator[str]:
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    if stages == 1 or chunks == 1:
        return
    if "overlap_p2p_comm" in args.typed_flags and not args.overlap_p2p_comm:
        yield (
            "--no-overlap-p2p-communication with virtual pipeline stages: messages for different stages of a rank could be "
            "swapped; drop it"
        )
    group = args.microbatch_group_size_per_vp_stage
    if group is not None and group < stages:
        yield (
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size {stages}; "
            f"give at least {stages}, or drop it"
        )


def pipeline_layout(args: argparse.Namespace) -> Iterator[str]:
    layout, stages = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    if layout is None or stages == 1:
        return
    for name in _SPLIT_OTHERWISE:
        if getattr(args, name):
            yield f"{flag_of(name)} and --pipeline-model-parallel-layout both split the layers; drop one of them"
    parts = parts_of_layout(layout)
    unknown = sorted(set("".join(parts)) - set("EtmL"))
    if unknown:
        yield (
            f"--pipeline-model-parallel-layout {layout}: {unknown[0]!r} means nothing; E stands for the embedding, t for a "
            "layer, L for the loss, | ends a stage, and (t|)*4 repeats"
        )
        return
    if len(parts) % stages:
        yield (
            f"--pipeline-model-parallel-layout {layout} has {len(parts)} stages, no multiple of "
            f"--pipeline-model-parallel-size {stages}"
        )
    layers = sum(part.count("t") for part in parts)
    if args.num_layers and layers != args.num_layers:
        yield f"--pipeline-model-parallel-layout {layout} has {layers} layers, but --num-layers is {args.num_layers}"
    if not parts[0].startswith("E") or not parts[-1].endswith("L") or "".join(parts).count("E") > 1:
        yield f"--pipeline-model-parallel-layout {layout} must begin with E, the embedding, and end with L, the loss"


def warmup(args: argparse.Namespace) -> Iterator[str]:
    fraction, steps = args.lr_warmup_fraction, args.lr_warmup_iters
    if fraction is not None and steps:
        yield f"--lr-warmup-fraction {fraction} and --lr-warmup-iters {steps} exclude each other; drop one"
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction {fraction}: it must be at least 0 and below 1, 0.1 for example"
    if args.lr_warmup_init > args.lr:
        yield f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}; give at most {args.lr} (0 is usual)"
    length, source = _decay_steps(args)
    if fraction is None and steps and length and steps >= length:
        yield (
            f"--lr-warmup-iters {steps} must be below the {length} optimizer steps of the schedule ({source}); give at most "
            f"{length - 1}, or --lr-decay-iters above {steps}"
        )


def decay(args: argparse.Namespace) -> Iterator[str]:
    if args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}; give at most {args.lr}"
    if args.use_checkpoint_opt_param_scheduler and args.override_opt_param_scheduler:
        yield "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler contradict each other; drop one"
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        yield "--lr-decay-style WSD needs --lr-wsd-decay-iters, the steps of its last phase"


def weight_decay(args: argparse.Namespace) -> Iterator[str]:
    start, end = args.start_weight_decay, args.end_weight_decay
    if (start is None) != (end is None):
        yield "--start-weight-decay and --end-weight-decay belong together; give both, or --weight-decay alone"
    if start is None or end is None or start == end:
        return
    both = f"--start-weight-decay {start} and --end-weight-decay {end}"
    if start > end:
        yield f"{both}: weight decay can only grow; give --end-weight-decay {start} or more"
    elif args.weight_decay_incr_style == "constant":
        yield f"{both} need --weight-decay-incr-style linear or cosine, not constant"


def _decay_steps(args: argparse.Namespace) -> tuple[int | None, str]:
    """Optimizer steps of the learning-rate schedule, and what they follow from; None where only the data set knows."""
    for name in ("lr_decay_iters", "train_iters"):
        if getattr(args, name):
            return getattr(args, name), f"--{name.replace('_', '-')}"
    without = f" without --num-critic-only-steps {args.num_critic_only_steps}" if args.num_critic_only_steps else ""
    return train_iterations(args), f"those of --num-rollout {args.num_rollout}{without}"


MEGATRON_RULES: tuple[Rule, ...] = tuple(
    _for_trainers(rule)
    for rule in (
        model_shape, parallel_sizes, tensor_parallel, heads, pipeline_split, virtual_stages, interleaved_schedule,
        pipeline_layout, recomputation, precision, warmup, decay, weight_decay,
        experts, gathered_context, initialization, settled_values, idle_flags, extra_flags,
    )
)  # fmt: skip
