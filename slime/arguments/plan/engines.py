"""The engines of a run as the plan sees them: which GPUs they take, and how their memory is divided."""

import argparse
from typing import Any

from slime.arguments.config_files.serving_config import ModelServing, ServerGroup, serving_of
from slime.arguments.plan import quantisation
from slime.arguments.plan.placement import EnginePart
from slime.arguments.planned_device import plans_for_gpus
from slime.scheduling.model_shape import ModelShape
from slime.scheduling.serving_memory import ServingSetup, WeightBytes

# What SGLang chooses by itself lies between 0.8 and 0.9, depending on GPU and graph sizes.
ASSUMED_STATIC_FRACTION = 0.85
# What the engines of this product take on CPU, unless a flag says otherwise.
CPU_CACHE_TOKENS = 32768
_CACHE_BYTES = {"auto": None, "bfloat16": 2.0, "bf16": 2.0, "float32": 4.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
_WEIGHT_BYTES = {"auto": None, "bfloat16": 2.0, "half": 2.0, "float16": 2.0, "float": 4.0, "float32": 4.0}


def starts_engines(args: argparse.Namespace) -> bool:
    """Whether the run has engines on GPUs of its own."""
    return args.has_engines and not args.rollout_external_engine_addrs and bool(args.rollout_num_gpus)


def engine_parts(args: argparse.Namespace, first: int) -> tuple[EnginePart, ...]:
    """Runs of equal engines from GPU `first` on."""
    if not starts_engines(args):
        return ()
    per_engine = max(1, args.rollout_num_gpus_per_engine)
    configured = [group for model in _configured_models(args) for group in model.groups]
    groups = [(group.num_gpus, group.num_gpus_per_engine, group.worker_type) for group in configured]
    prefill = (args.prefill_num_servers or 0) * per_engine
    if not groups and prefill:
        groups = [(prefill, per_engine, "prefill"), (args.rollout_num_gpus - prefill, per_engine, "decode")]
    groups = groups or [(args.rollout_num_gpus, per_engine, None)]
    parts = []
    for count, size, worker in groups:
        if worker != "placeholder" and count > 0:
            parts.append(EnginePart(first, count, size, None if worker == "regular" else worker))
        first += count
    return tuple(parts)


def serving_setup(
    args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None, gpu_memory: int | None
) -> ServingSetup:
    """How an engine of the trained model divides its memory; of its first group, where `--sglang-config` has several.

    Args:
        hf_config: the config of --hf-checkpoint, for its quantisation; None when there is none.
        gpu_memory: bytes of one GPU; None on CPU.
    """
    group = _group_of_trained_model(args)
    overrides = group.overrides if group is not None else {}
    gpus = group.num_gpus_per_engine if group is not None else max(1, args.rollout_num_gpus_per_engine)

    def field(*names: str) -> Any:
        found = [overrides.get(name, _server_flag(args, name)) for name in names]
        return next((value for value in found if value is not None), None)

    pipeline = field("pp_size", "pp") or 1
    attention_data = (field("dp_size", "dp") or 1) if field("enable_dp_attention") else 1
    weights = weight_bytes(args, shape, hf_config)
    tokens = field("max_total_tokens")
    if gpu_memory is None and tokens is None:
        tokens = CPU_CACHE_TOKENS
    return ServingSetup(
        tensor=max(1, gpus // pipeline),
        pipeline=pipeline,
        attention_data=attention_data,
        weight_bytes=weights,
        cache_bytes=_CACHE_BYTES.get(field("kv_cache_dtype") or "auto") or weights.rest,
        gpu_memory=gpu_memory or 0,
        static_fraction=None if gpu_memory is None else field("mem_fraction_static") or ASSUMED_STATIC_FRACTION,
        max_total_tokens=tokens,
        sharded_head=not field("enable_dp_lm_head"),
    )


def weight_bytes(args: argparse.Namespace, shape: ModelShape, hf_config: dict[str, Any] | None) -> WeightBytes:
    """Bytes of one element of a served weight by part, as --hf-checkpoint is quantised."""
    return quantisation.weight_bytes(shape, _plain_bytes(args), *_quantised_as(args, hf_config))


def unknown_format(args: argparse.Namespace, hf_config: dict[str, Any] | None) -> str | None:
    """How --hf-checkpoint is quantised, where its bytes are not known."""
    return quantisation.unknown_format(*_quantised_as(args, hf_config))


def _quantised_as(
    args: argparse.Namespace, hf_config: dict[str, Any] | None
) -> tuple[dict[str, Any] | None, str | None]:
    return (hf_config or {}).get("quantization_config"), _server_flag(args, "quantization")


def _plain_bytes(args: argparse.Namespace) -> float:
    """Bytes of one element of a served weight that is not quantised."""
    named = _WEIGHT_BYTES.get(_server_flag(args, "dtype") or "auto")
    if named is not None:
        return named
    if not plans_for_gpus(args):
        return 4.0
    return 4.0 if args.has_trainer and args.params_dtype_name == "float32" else 2.0


def _server_flag(args: argparse.Namespace, name: str) -> Any:
    """`--sglang-{name}`; None where it is not typed, or sglang is not installed."""
    return getattr(args, f"sglang_{name}", None)


def _group_of_trained_model(args: argparse.Namespace) -> ServerGroup | None:
    """The first group with engines, of a model that gets the trainer's weights where there is one."""
    models = sorted(_configured_models(args), key=lambda model: not model.update_weights)
    return next((group for model in models for group in model.groups if group.num_engines), None)


def _configured_models(args: argparse.Namespace) -> list[ModelServing]:
    return serving_of(args)[0] if args.sglang_config else []
