"""The inputs of the memory model, from checked `args`: shape, layout, precision, optimizer state, recomputation."""

import argparse
import importlib.util
from dataclasses import replace

from slime.arguments.checkpoints import OLD_ACTOR, REFERENCE, ROLLOUT_ACTOR, TEACHER, other_model_states
from slime.arguments.config_files.role_config import CRITIC
from slime.arguments.hf_config import read_hf_config
from slime.arguments.megatron.values import pipeline_stages
from slime.arguments.sizes import longest_sample, plans_for_gpus
from slime.estimates.activations import Kernels, Recompute
from slime.estimates.layout import ParallelLayout
from slime.estimates.serving_memory import quantised_shares
from slime.estimates.shape import ModelShape
from slime.estimates.training_memory import (
    ACCELERATOR_CHUNK_BYTES,
    ONE_THREAD_CHUNK_BYTES,
    RankMemory,
    StateBytes,
    TrainingSetup,
    training_memory,
)
from slime.models.qwen import DELTA_RULE_PACKAGES
from slime.models.shape_of_flags import SHAPE_FLAGS, model_shape_from_args, padded_vocabulary
from slime.plan.placement import sleeping_sides, trains
from slime.utils import env
from slime.utils.errors import UserError

# Memory that a rank takes before its first tensor: context of the CUDA driver, workspaces of cuBLAS, buffers of NCCL.
CUDA_OVERHEAD_BYTES = 2 * 2**30
_STATES = {REFERENCE: "reference", TEACHER: "teacher", OLD_ACTOR: "old actor", ROLLOUT_ACTOR: "rollout actor"}
_DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp8": 1, "uint8": 1}


def missing_shape_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags without which the model's shape is not known."""
    return tuple("--" + name.replace("_", "-") for name in SHAPE_FLAGS if vars(args)[name] is None)


def shape_of(args: argparse.Namespace) -> ModelShape | None:
    """The model's shape, its vocabulary padded as the trainer pads it; None while flags are missing."""
    if missing_shape_flags(args):
        return None
    padded = argparse.Namespace(**{**vars(args), "padded_vocab_size": padded_vocabulary(args)})
    return replace(model_shape_from_args(padded), value_head=args.role == CRITIC)


def parallel_layout(args: argparse.Namespace) -> ParallelLayout:
    """The layout of the training ranks.

    Raises:
        UserError: the sizes do not divide the number of ranks.
    """
    tensor = args.tensor_model_parallel_size
    return ParallelLayout(
        world_size=args.world_size,
        tensor=tensor,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        # As in Megatron, experts are by default cut like everything else.
        expert_tensor=(args.expert_tensor_parallel_size or tensor) if args.num_experts else 1,
        virtual_pipeline=args.virtual_pipeline_model_parallel_size or 1,
        sequence_parallel=args.sequence_parallel and tensor > 1,
        stages_beside=args.use_tp_pp_dp_mapping,
        optimizers=args.num_distributed_optimizer_instances,
    )


def state_bytes(args: argparse.Namespace, kernels: Kernels) -> StateBytes:
    """Bytes per parameter of weights, gradients and optimizer state."""
    weight = 4 if args.params_dtype_name == "float32" else 2
    gradient = 4 if args.accumulate_allreduce_grads_in_fp32 else weight
    if not trains(args):
        # There is a gradient buffer all the same, since the model allocates it when it is built.
        return StateBytes(weight=weight, gradient=gradient, main_parameter=0, moments=0)
    moments, vocabulary_moments = _moments(args)
    step = 0
    # An optimizer that updates the weights themselves goes through them in small parts, and needs no large buffers.
    if not _updates_weights(args):
        if kernels is not Kernels.TRANSFORMER_ENGINE and args.optimizer == "adam" and moments:
            step += 4  # the root of the second moment, for all parameters at once
        if kernels is Kernels.TORCH_CUDA and args.optimizer == "sgd" and args.weight_decay:
            step += 4  # gradients and decay, which SGD adds up for all parameters at once
        if gradient < 4 and weight < 4:
            step += 4  # the main parameters' gradients
    main_parameter = _main_parameter(args) if weight < 4 else 0
    distributed = args.optimizer == "dist_muon" or args.use_distributed_optimizer and args.optimizer != "muon"
    if args.no_save_optim:
        saved = 4 if args.use_stateless_adam and weight < 4 else 0
    else:
        # The distributed Adam saves main parameters and both moments in float32, whatever their dtypes are.
        saved = 12 if distributed and args.optimizer == "adam" else main_parameter + moments
    return StateBytes(
        weight=weight,
        gradient=gradient,
        main_parameter=main_parameter,
        # Parameters that are updated in host memory have a main copy there, and a whole one, not only remainders.
        host_main_parameter=_dtype_bytes(args.main_params_dtype)
        if weight < 4 or kernels is not Kernels.TORCH_CPU
        else 0,
        moments=moments,
        step=step,
        vocabulary_moments=vocabulary_moments,
        distributed=distributed,
        offloaded=args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0,
        saved=saved,
    )


def _moments(args: argparse.Namespace) -> tuple[int, int]:
    """Bytes of the moments of a parameter: (of a matrix, on top of that for embedding, head and norms)."""
    if args.optimizer == "sgd":
        return (4 if args.sgd_momentum else 0), 0
    if args.optimizer in ("muon", "dist_muon"):
        return 4, 4  # Muon has one momentum; the others are updated by Adam, which has two
    if args.use_stateless_adam:
        return 0, 0
    return _dtype_bytes(args.exp_avg_dtype) + _dtype_bytes(args.exp_avg_sq_dtype), 0


def _main_parameter(args: argparse.Namespace) -> int:
    if not _updates_weights(args):
        return 4
    size = _dtype_bytes(args.main_params_dtype)
    # The upper half of a float32 is the bfloat16 weight itself.
    remainder = args.params_dtype_name == "bfloat16" and args.store_param_remainders and size == 4
    return 2 if remainder else size


def _updates_weights(args: argparse.Namespace) -> bool:
    """Whether the optimizer updates the weights themselves, and keeps as a state of its own what their 16 bits cannot hold."""
    return args.use_precision_aware_optimizer or args.optimizer_cpu_offload


def kernels_of(args: argparse.Namespace) -> Kernels:
    """The kernels that compute the layers on the planned device."""
    if not plans_for_gpus(args):
        return Kernels.TORCH_CPU
    if args.transformer_impl == "transformer_engine":
        return Kernels.TRANSFORMER_ENGINE
    return Kernels.TORCH_CUDA


def delta_rule_has_kernels(args: argparse.Namespace) -> bool:
    """Whether kernels compute the gated delta rule on the planned device.

    A typed --qwen-gdn-backend means yes, since a run without its package ends with an error. Otherwise it depends on whether
    the package is installed: here on this machine, in a run on the machine of each rank.
    """
    if not plans_for_gpus(args):
        return False
    package = DELTA_RULE_PACKAGES[args.qwen_gdn_backend][0].partition(".")[0]
    return "qwen_gdn_backend" in args.typed_flags or importlib.util.find_spec(package) is not None


def recompute_of(args: argparse.Namespace) -> Recompute:
    """The recomputation that the flags ask for."""
    return Recompute(
        granularity=args.recompute_granularity,
        method=args.recompute_method,
        num_layers=args.recompute_num_layers or 1,
        modules=tuple(args.recompute_modules or ("core_attn",)),
        distributed=args.distribute_saved_activations,
    )


def recomputing_all(args: argparse.Namespace) -> str:
    """The flags that recompute every layer, in words."""
    instead = " without --moe-layer-recompute" if args.moe_layer_recompute else ""
    return f"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1{instead}"


def prompt_is_limited(args: argparse.Namespace) -> bool:
    """Whether `longest_sample` counts the prompt."""
    return args.rollout_max_context_len is not None or args.rollout_max_prompt_len is not None


def planned_sample(args: argparse.Namespace) -> int | None:
    """`longest_sample`, or if no flag limits it the length that is assumed (`--seq-length`)."""
    return longest_sample(args) or args.seq_length


def longest_request(args: argparse.Namespace) -> int | None:
    """Tokens of the longest sample that engines are asked for, by a rollout or an evaluation, as `longest_sample` counts."""
    lengths = [longest_sample(args)]
    context, prompt = args.eval_max_context_len, args.eval_max_prompt_len
    for dataset in args.eval_datasets if args.eval_interval is not None else ():
        of_set = argparse.Namespace(
            rollout_max_context_len=context,
            # A prompt that nothing else limits may fill the context but for one token.
            rollout_max_prompt_len=context - 1 if prompt is None and context is not None else prompt,
            rollout_max_response_len=dataset.max_response_len,
        )
        lengths.append(longest_sample(of_set))
    return max((length for length in lengths if length is not None), default=None)


def tokens_of_stream(args: argparse.Namespace, layout: ParallelLayout) -> int | None:
    """Tokens of one full micro-batch on one rank, padding included; None if no flag determines it."""
    if args.use_dynamic_batch_size:
        tokens = args.max_tokens_per_gpu
    else:
        sample = planned_sample(args)
        if sample is None:
            return None
        tokens = -(-args.micro_batch_size * sample // layout.context)
    return padded_stream(args, layout, tokens)


def padded_stream(args: argparse.Namespace, layout: ParallelLayout, tokens: int) -> int:
    """`tokens` rounded up to the multiple to which streams are padded."""
    multiple = args.data_pad_size_multiplier * layout.tensor
    return -(-tokens // multiple) * multiple


def training_setup(
    args: argparse.Namespace, layout: ParallelLayout, stream_tokens: int, micro_batches: int | None
) -> TrainingSetup:
    """The setup from which the memory of the training ranks follows.

    Raises:
        UserError: the layers cannot be split over the pipeline stages.
    """
    kernels = kernels_of(args)
    on_gpus = kernels is not Kernels.TORCH_CPU
    rollouts = args.rollout_batch_size * args.n_samples_per_prompt if trains(args) else 0
    per_rank = -(-rollouts // layout.data)
    return TrainingSetup(
        layout=layout,
        stages=pipeline_stages(args),
        state=state_bytes(args, kernels),
        trains=trains(args),
        kernels=kernels,
        delta_rule_kernels=delta_rule_has_kernels(args),
        residual_bytes=4 if args.fp32_residual_connection else 0,
        recompute=recompute_of(args),
        stream_tokens=stream_tokens,
        micro_batches=micro_batches or layout.pipeline,
        rollout_tokens=per_rank * (planned_sample(args) or 0),
        microbatch_group=args.microbatch_group_size_per_vp_stage,
        kept_whole=args.num_microbatches_with_partial_activation_checkpoints or 0,
        predictions=(args.mtp_num_layers or 0) if args.enable_mtp_training else 0,
        log_probs_chunk=ACCELERATOR_CHUNK_BYTES if on_gpus else ONE_THREAD_CHUNK_BYTES,
        push_bucket=args.update_weight_buffer_size if args.has_engines else 0,
        push_lends=on_gpus and args.colocate and args.update_weight_transport == "nccl",
        push_snapshot=args.has_engines and args.update_weight_mode == "delta",
        gloo=not on_gpus,
        host_copies=len(host_copies(args)),
        sleeps=trainer_sleeps(args),
        saves=args.save is not None and trains(args),
        loads_float32=_loads_float32(args),
        fp8=args.fp8 is not None,
        rounded=rounded_parts(args),
        saves_in_background=args.async_save,
        shares_saves=args.ckpt_fully_parallel_save,
        overhead=CUDA_OVERHEAD_BYTES if on_gpus else 0,
    )


def rounded_parts(args: argparse.Namespace) -> dict[str, float]:
    """Part of a layer -> the share of its weights that layers round to INT4 (`OPEN_TRAINING_INT4_FAKE_QAT_FLAG`), which is what
    --hf-checkpoint packs. A critic, which no engine serves, rounds none.

    Args:
        args: flags in which the model's shape is known.
    """
    if env.int4_training_group_size() is None or args.role == CRITIC or args.hf_checkpoint is None:
        return {}
    try:
        config = read_hf_config(args.hf_checkpoint).get("quantization_config")
    except UserError:
        return {}
    return quantised_shares(shape_of(args), config) if config else {}


def trainer_sleeps(args: argparse.Namespace) -> bool:
    """Whether the ranks move their state to host memory while engines work. On CPU it goes into a file, and that of a trainer
    that ends meanwhile is in a checkpoint."""
    return plans_for_gpus(args) and sleeping_sides(args).trainer and not args.release_train


def _loads_float32(args: argparse.Namespace) -> bool:
    """Whether a rank may hold its weights in float32 on the host while it loads them: not where the optimizer's state brings
    copies, nor from a Hugging Face directory, which is read weight by weight."""
    source = args.initial_weights
    if source is None or source.kind != "megatron" or source.resume and not args.no_load_optim:
        return False
    return args.load_main_params_from_ckpt and args.params_dtype_name != "float32" and trains(args)


def step_memory(
    args: argparse.Namespace, layout: ParallelLayout, tokens: int, micro_batches: int
) -> tuple[RankMemory, ...]:
    """The memory of the tensors of a step on a rank of every stage, without weight pushes, data of the rollout, and overhead.

    Args:
        args: flags in which the model's shape is known.
        tokens: length of a stream on each rank, before padding.
    """
    setup = training_setup(args, layout, padded_stream(args, layout, tokens), micro_batches)
    return training_memory(shape_of(args), replace(setup, push_bucket=0, overhead=0, rollout_tokens=0))


def host_copies(args: argparse.Namespace) -> tuple[str, ...]:
    """Names of the sets of weights in host memory: those that take turns with the actor, and room for the actor's own, which
    are put aside meanwhile.

    That room is kept for the whole run, because pinned memory is slow to allocate.
    """
    others = tuple(_STATES[name] for name in other_model_states(args))
    return (*others, "actor put aside") if others else ()


def _dtype_bytes(name: object) -> int:
    return _DTYPE_BYTES[str(name).removeprefix("torch.")]
