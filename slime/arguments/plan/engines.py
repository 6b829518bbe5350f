"""The engines of a run as the plan sees them: which GPUs they take, and how their memory is divided."""

import argparse
from typing import Any

from slime.arguments.config_files.serving_config import ModelServing, serving_of
from slime.arguments.plan.placement import EnginePart
from slime.arguments.plan.setup import read, training_precision
from slime.arguments.planned_device import plans_for_gpus
from slime.scheduling.serving_memory import ServingSetup

# What SGLang chooses by itself lies between 0.8 and 0.9, depending on GPU and graph sizes.
ASSUMED_STATIC_FRACTION = 0.85
# What the engines of this product take on CPU, unless a flag says otherwise.
CPU_CACHE_TOKENS = 32768
_CACHE_BYTES = {"auto": None, "bfloat16": 2.0, "bf16": 2.0, "float32": 4.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}
_WEIGHT_BYTES = {"auto": None, "bfloat16": 2.0, "half": 2.0, "float16": 2.0, "float": 4.0, "float32": 4.0}


def starts_engines(args: argparse.Namespace) -> bool:
    """Whether the run has engines on GPUs of its own."""
    external = read(args, "rollout_external_engine_addrs", None)
    return args.has_engines and not external and bool(read(args, "rollout_num_gpus", 0))


def engine_parts(args: argparse.Namespace, first: int) -> tuple[EnginePart, ...]:
    """Runs of equal engines from GPU `first` on."""
    if not starts_engines(args):
        return ()
    per_engine = max(1, args.rollout_num_gpus_per_engine)
    groups = [(group.num_gpus, group.num_gpus_per_engine, group.worker_type) for group in _configured_groups(args)]
    prefill = read(args, "prefill_num_servers", 0) * per_engine
    if not groups and prefill:
        groups = [(prefill, per_engine, "prefill"), (args.rollout_num_gpus - prefill, per_engine, "decode")]
    groups = groups or [(args.rollout_num_gpus, per_engine, None)]
    parts = []
    for count, size, worker in groups:
        if worker != "placeholder" and count > 0:
            parts.append(EnginePart(first, count, size, None if worker == "regular" else worker))
        first += count
    return tuple(parts)


def serving_setup(args: argparse.Namespace, hf_config: dict[str, Any] | None, gpu_memory: int | None) -> ServingSetup:
    """How an engine divides its memory; of the first group, where `--sglang-config` has several.

    Args:
        hf_config: the config of --hf-checkpoint, for its quantisation; None when there is none.
        gpu_memory: bytes of one GPU; None on CPU.
    """
    groups = _configured_groups(args)
    overrides = groups[0].overrides if groups else {}
    gpus = groups[0].num_gpus_per_engine if groups else max(1, args.rollout_num_gpus_per_engine)

    def field(*names: str) -> Any:
        found = [overrides.get(name, read(args, f"sglang_{name}", None)) for name in names]
        return next((value for value in found if value is not None), None)

    pipeline = field("pp_size", "pp") or 1
    attention_data = (field("dp_size", "dp") or 1) if field("enable_dp_attention") else 1
    weight = weight_bytes(args)
    tokens = field("max_total_tokens")
    if gpu_memory is None and tokens is None:
        tokens = CPU_CACHE_TOKENS
    return ServingSetup(
        tensor=max(1, gpus // pipeline),
        pipeline=pipeline,
        attention_data=attention_data,
        weight_bytes=weight,
        quantised_bytes=quantised_bytes(args, hf_config, weight),
        cache_bytes=_CACHE_BYTES.get(field("kv_cache_dtype") or "auto") or weight,
        gpu_memory=gpu_memory or 0,
        static_fraction=None if gpu_memory is None else field("mem_fraction_static") or ASSUMED_STATIC_FRACTION,
        max_total_tokens=tokens,
    )


def weight_bytes(args: argparse.Namespace) -> float:
    """Bytes of one element of a served weight that is not quantised."""
    named = _WEIGHT_BYTES.get(str(read(args, "sglang_dtype", "auto")))
    if named is not None:
        return named
    if not plans_for_gpus(args):
        return 4.0
    return 4.0 if args.has_trainer and training_precision(args) == "float32" else 2.0


def quantised_bytes(args: argparse.Namespace, hf_config: dict[str, Any] | None, otherwise: float) -> float:
    """Bytes of one element of a weight of attention or an MLP: as the served checkpoint is quantised.

    With scales: block FP8 has a float32 for 128 x 128 weights, INT4 two bytes for each group.
    """
    config = (hf_config or {}).get("quantization_config") or {}
    method = str(config.get("quant_method") or read(args, "sglang_quantization", ""))
    if "fp8" in method:
        return 1.0 + 4 / (128 * 128)
    if "pack-quantized" in str(config) or method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        return 0.5 + 2 / int(config.get("group_size") or 32)
    return otherwise


def _configured_groups(args: argparse.Namespace) -> list[Any]:
    if not read(args, "sglang_config", None):
        return []
    models: list[ModelServing]
    models, _ = serving_of(args)
    return [group for model in models for group in model.groups]
