"""Which flags would make a part of the memory smaller, as far as they are not already used to their end."""

import argparse

from slime.scheduling.memory import TrainingSetup

# Advice for a part that is less than this of the whole, or of the GPU where the whole is larger, would only distract.
_WORTH_WHILE = 0.02

_SERVING = {
    "weights": "--rollout-num-gpus-per-engine",
    "kv_cache": "--sglang-mem-fraction-static, --sglang-kv-cache-dtype fp8_e4m3",
}


def lower_training(args: argparse.Namespace, setup: TrainingSetup, part: str, share: float) -> str | None:
    """Flags that would lower `part`, which is `share` of the whole or of the GPU; None: not worth while, or none known."""
    if share < _WORTH_WHILE:
        return None
    find = {
        "weights": _sharding,
        "gradients": _gradients,
        "optimizer": _optimizer,
        "critic": _sharding,
        "activations": _activations,
        "logits": _logits,
        "buffers": _buffers,
    }.get(part)
    return ", ".join(find(args, setup)) if find is not None else None


def lower_serving(part: str, share: float) -> str | None:
    """The same for an engine."""
    return _SERVING.get(part) if share >= _WORTH_WHILE else None


def _sharding(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
    return ["--expert-model-parallel-size", *flags] if args.num_experts else flags


def _gradients(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    in_16_bits = ["--grad-reduce-in-bf16"] if setup.state.gradient > setup.state.weight else []
    return [*in_16_bits, *_sharding(args, setup)]


def _optimizer(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = []
    if not setup.state.distributed:
        flags.append("--use-distributed-optimizer")
    if setup.state.offloaded < 1:
        flags.append("--optimizer-cpu-offload")
    if setup.state.distributed and _keeps_whole_main_parameters(args):
        flags.append("--use-precision-aware-optimizer")
    return [*flags, "more --actor-num-nodes"]


def _keeps_whole_main_parameters(args: argparse.Namespace) -> bool:
    """Where their upper half is the weight itself, so that 16 bits would do."""
    narrow = args.use_precision_aware_optimizer or args.optimizer_cpu_offload
    return args.params_dtype_name == "bfloat16" and args.optimizer == "adam" and not narrow


def _activations(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    flags = []
    if setup.recompute.granularity != "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if setup.layout.tensor > 1 and not setup.layout.sequence_parallel:
        flags.append("--sequence-parallel")
    return [*flags, *_tokens(args), "--context-parallel-size"]


def _logits(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    return [*_tokens(args), "--tensor-model-parallel-size"]


def _buffers(args: argparse.Namespace, setup: TrainingSetup) -> list[str]:
    return ["--update-weight-buffer-size", "--tensor-model-parallel-size"]


def _tokens(args: argparse.Namespace) -> list[str]:
    if args.use_dynamic_batch_size:
        return ["--max-tokens-per-gpu"]
    return ["--micro-batch-size", "--use-dynamic-batch-size --max-tokens-per-gpu"]
