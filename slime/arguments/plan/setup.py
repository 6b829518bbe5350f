"""From `args` to what the memory model and the placement take: layout, precision, recomputation, engines.

Everything is read tolerantly: a plan is made of the flags that are there.
"""

import argparse
from typing import Any

from slime.arguments.planned_device import plans_for_gpus
from slime.scheduling.activations import Kernels, Recompute
from slime.scheduling.memory import LOG_PROBS_CHUNK_BYTES, StateBytes, TrainingSetup
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.parallel_layout import ParallelLayout
from slime.scheduling.pipeline_split import PipelineStage, split_into_stages
from slime.scheduling.shape_of_args import model_shape_from_args

SHAPE_FLAGS = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
# Context of the CUDA driver, workspaces of cuBLAS, buffers of NCCL: what a rank takes before its first tensor.
CUDA_OVERHEAD_BYTES = 2 * 2**30
# One thread's chunk of log-probs on CPU (slime/training/log_probs.py).
CPU_LOG_PROBS_CHUNK_BYTES = 2 * 2**20
_DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp8": 1, "uint8": 1}


def read(args: argparse.Namespace, name: str, default: Any) -> Any:
    """An attribute; `default` where it is absent or None."""
    value = getattr(args, name, None)
    return default if value is None else value


def missing_shape_flags(args: argparse.Namespace) -> tuple[str, ...]:
    """Flags without which the model's shape is not known."""
    return tuple("--" + name.replace("_", "-") for name in SHAPE_FLAGS if read(args, name, None) is None)


def shape_of(args: argparse.Namespace) -> ModelShape | None:
    """The model's shape, its vocabulary padded as the trainer pads it; None while flags are missing."""
    if missing_shape_flags(args):
        return None
    if read(args, "padded_vocab_size", None) is None:
        multiple = read(args, "make_vocab_size_divisible_by", 128) * read(args, "tensor_model_parallel_size", 1)
        padded = -(-args.vocab_size // multiple) * multiple
        args = argparse.Namespace(**{**vars(args), "padded_vocab_size": padded})
    return model_shape_from_args(args)


def parallel_layout(args: argparse.Namespace) -> ParallelLayout:
    """The layout of the training ranks.

    Raises:
        UserError: the sizes do not divide the number of ranks.
    """
    tensor = read(args, "tensor_model_parallel_size", 1)
    return ParallelLayout(
        world_size=args.actor_num_nodes * args.actor_num_gpus_per_node,
        tensor=tensor,
        pipeline=read(args, "pipeline_model_parallel_size", 1),
        context=read(args, "context_parallel_size", 1),
        expert=read(args, "expert_model_parallel_size", 1),
        # Megatron's own default: experts are cut like everything else.
        expert_tensor=read(args, "expert_tensor_parallel_size", tensor) if read(args, "num_experts", None) else 1,
        virtual_pipeline=read(args, "virtual_pipeline_model_parallel_size", 1),
        sequence_parallel=bool(read(args, "sequence_parallel", False)) and tensor > 1,
    )


def stages_of(args: argparse.Namespace, layout: ParallelLayout) -> tuple[PipelineStage, ...]:
    """The pipeline stages.

    Raises:
        UserError: the layers cannot be split so.
    """
    return split_into_stages(
        args.num_layers,
        layout.pipeline,
        first=read(args, "decoder_first_pipeline_num_layers", None),
        last=read(args, "decoder_last_pipeline_num_layers", None),
        virtual_pipeline=layout.virtual_pipeline,
        embedding_counts=bool(read(args, "account_for_embedding_in_pipeline_split", False)),
        loss_counts=bool(read(args, "account_for_loss_in_pipeline_split", False)),
    )


def training_precision(args: argparse.Namespace) -> str:
    """Name of the parameters' dtype: typed, or what the planned device makes of it."""
    if read(args, "fp16", False):
        return "float16"
    typed = getattr(args, "typed_flags", set())
    if read(args, "bf16", False) or ("bf16" not in typed and plans_for_gpus(args)):
        return "bfloat16"
    return "float32"


def state_bytes(args: argparse.Namespace, kernels: Kernels) -> StateBytes:
    """Bytes per parameter of weights, gradients and optimizer state."""
    weight = 4 if training_precision(args) == "float32" else 2
    in_fp32 = read(args, "accumulate_allreduce_grads_in_fp32", False) or (
        # Gradients of bfloat16 weights are accumulated in float32 unless that is switched off.
        training_precision(args) == "bfloat16" and not read(args, "grad_reduce_in_bf16", False)
    )
    gradient = 4 if in_fp32 else weight
    main = moments = 0
    if weight < 4:
        main = _dtype_bytes(args, "main_params_dtype")
    if not read(args, "use_stateless_adam", False):
        moments = _dtype_bytes(args, "exp_avg_dtype") + _dtype_bytes(args, "exp_avg_sq_dtype")
    if read(args, "optimizer", "adam") == "sgd":
        moments = 4 if read(args, "sgd_momentum", 0.9) else 0
    step = 0
    if kernels is not Kernels.TRANSFORMER_ENGINE:
        step += 4  # the root of the second moment, for all parameters at once
    if gradient < 4 and weight < 4:
        step += 4  # the main parameters' gradients
    offloads = read(args, "optimizer_cpu_offload", False) or read(args, "offload_optimizer_states", False)
    return StateBytes(
        weight=weight,
        gradient=gradient,
        main_parameter=main,
        moments=moments,
        step=step,
        distributed=bool(read(args, "use_distributed_optimizer", True)),
        offloaded=float(read(args, "optimizer_offload_fraction", 1.0)) if offloads else 0.0,
    )


def kernels_of(args: argparse.Namespace) -> Kernels:
    """Who computes the layers on the planned device."""
    if not plans_for_gpus(args):
        return Kernels.TORCH_CPU
    if read(args, "transformer_impl", "transformer_engine") == "transformer_engine":
        return Kernels.TRANSFORMER_ENGINE
    return Kernels.TORCH_CUDA


def recompute_of(args: argparse.Namespace) -> Recompute:
    """What the backward pass computes again."""
    granularity = read(args, "recompute_granularity", None)
    method, layers = read(args, "recompute_method", None), read(args, "recompute_num_layers", 1)
    if granularity is None and read(args, "gradient_checkpointing", False):
        granularity, method, layers = "full", "uniform", 1
    return Recompute(
        granularity=granularity,
        method=method,
        num_layers=layers,
        modules=tuple(read(args, "recompute_modules", ("core_attn",))),
        distributed=bool(read(args, "distribute_saved_activations", False)),
    )


def longest_sample(args: argparse.Namespace) -> int | None:
    """Tokens of the longest allowed sample, prompt and response; of the response alone where nothing limits the prompt.

    None where nothing limits the response either.
    """
    context = read(args, "rollout_max_context_len", None)
    prompt, response = read(args, "rollout_max_prompt_len", None), read(args, "rollout_max_response_len", None)
    both = response if prompt is None or response is None else prompt + response
    return min((length for length in (context, both) if length is not None), default=None)


def planned_sample(args: argparse.Namespace) -> int | None:
    """`longest_sample`, or where there is none the length that is assumed (`--seq-length`)."""
    return longest_sample(args) or read(args, "seq_length", None)


def prompt_is_limited(args: argparse.Namespace) -> bool:
    """Whether `longest_sample` counts the prompt."""
    names = ("rollout_max_context_len", "rollout_max_prompt_len")
    return any(read(args, name, None) is not None for name in names)


def tokens_of_stream(args: argparse.Namespace, layout: ParallelLayout) -> int | None:
    """Tokens of one full micro-batch on one rank, padding included; None where no flag says it."""
    if read(args, "use_dynamic_batch_size", False) and read(args, "max_tokens_per_gpu", None):
        tokens = args.max_tokens_per_gpu
    else:
        sample = planned_sample(args)
        if sample is None:
            return None
        tokens = -(-read(args, "micro_batch_size", 1) * sample // layout.context)
    return padded_stream(args, layout, tokens)


def padded_stream(args: argparse.Namespace, layout: ParallelLayout, tokens: int) -> int:
    """`tokens` rounded up to what streams are padded to."""
    multiple = read(args, "data_pad_size_multiplier", 128) * layout.tensor
    return -(-tokens // multiple) * multiple


def training_setup(
    args: argparse.Namespace, layout: ParallelLayout, stream_tokens: int, micro_batches: int | None
) -> TrainingSetup:
    """What the memory of the training ranks follows from.

    Raises:
        UserError: the layers cannot be split over the pipeline stages.
    """
    kernels = kernels_of(args)
    on_gpus = kernels is not Kernels.TORCH_CPU
    rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    per_rank = -(-rollouts // layout.data)
    return TrainingSetup(
        layout=layout,
        stages=stages_of(args, layout),
        state=state_bytes(args, kernels),
        kernels=kernels,
        recompute=recompute_of(args),
        stream_tokens=stream_tokens,
        micro_batches=micro_batches or layout.pipeline,
        rollout_tokens=per_rank * (planned_sample(args) or 0),
        log_probs_chunk=LOG_PROBS_CHUNK_BYTES if on_gpus else CPU_LOG_PROBS_CHUNK_BYTES,
        push_bucket=read(args, "update_weight_buffer_size", 0) if getattr(args, "has_engines", True) else 0,
        gloo=not on_gpus,
        host_copies=len(host_copies(args)),
        sleeps=bool(read(args, "offload_train", False)),
        overhead=CUDA_OVERHEAD_BYTES if on_gpus else 0,
    )


def host_copies(args: argparse.Namespace) -> tuple[str, ...]:
    """Sets of weights in host memory: those that take turns with the actor, and the actor's, put aside meanwhile.

    The last is kept for the whole run, because pinned memory is slow to allocate.
    """
    others = []
    if read(args, "use_kl_loss", False) or read(args, "kl_coef", 0.0):
        others.append("reference")
    if read(args, "opd_type", None) == "megatron":
        others.append("teacher")
    if read(args, "keep_old_actor", False):
        others += ["old actor", "rollout actor"]
    return (*others, "actor put aside") if others else ()


def _dtype_bytes(args: argparse.Namespace, name: str) -> int:
    if not read(args, "use_precision_aware_optimizer", False):
        return 4
    return _DTYPE_BYTES.get(str(read(args, name, "fp32")).removeprefix("torch."), 4)
