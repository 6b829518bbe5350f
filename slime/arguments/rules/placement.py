"""Rules about modes, GPUs and who makes room for whom."""

import argparse
import re
from collections.abc import Iterator

from slime.arguments.rules import Rule

_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


def modes(args: argparse.Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:
        other = "--load-debug-rollout-data implies --debug-train-only" if args.load_debug_rollout_data else ""
        yield f"--debug-rollout-only and --debug-train-only exclude each other; drop one. {other}".strip()
    if args.has_engines and args.rollout_num_gpus is None and not args.rollout_external:
        yield (
            "--rollout-num-gpus is not set: give the number of GPUs for the engines, or --colocate, or --debug-train-only"
        )
    if args.has_engines and args.hf_checkpoint is None:
        yield "--hf-checkpoint is needed: the engines load their config and tokenizer from it"


def engine_sizes(args: argparse.Namespace) -> Iterator[str]:
    total, each = args.rollout_num_gpus or 0, args.rollout_num_gpus_per_engine
    if total % each:
        nearest = sorted({max(each, total // each * each), (total // each + 1) * each})
        yield (
            f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {each}; give "
            + " or ".join(str(number) for number in nearest)
        )
    if each > args.num_gpus_per_node and each % args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {each} is above --num-gpus-per-node {args.num_gpus_per_node} and no multiple of "
            "it: an engine fills whole nodes or a part of one"
        )


def external_addresses(args: argparse.Namespace) -> Iterator[str]:
    for address in args.rollout_external_engine_addrs or []:
        host, _, port = address.removeprefix("http://").rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}/?", port):
            yield f"--rollout-external-engine-addrs {address}: give host:port, such as 10.0.0.5:30000"


def fsdp(args: argparse.Namespace) -> Iterator[str]:
    if args.train_backend != "fsdp":
        for name, off in (("attn_implementation", "auto"), ("fsdp_cpu_offload", False)):
            if getattr(args, name) != off:
                yield f"--{name.replace('_', '-')} has no effect with --train-backend {args.train_backend}; drop it"
        return
    for name in _MODEL_PARALLEL:
        if getattr(args, name) > 1:
            yield (
                f"--{name.replace('_', '-')} {getattr(args, name)}: --train-backend fsdp shards parameters over all ranks "
                "instead; give 1, or --train-backend megatron"
            )
    if args.use_critic:
        yield "--advantage-estimator ppo: --train-backend fsdp has no critic; give grpo, or --train-backend megatron"
    if args.opd_type == "megatron":
        yield "--opd-type megatron needs --train-backend megatron; with fsdp give --opd-type sglang"


PLACEMENT_RULES: tuple[Rule, ...] = (modes, engine_sizes, external_addresses, fsdp)
