"""Rules about engines and router, and the flags of theirs that a run refuses.

A run that only trains ignores the flags of engines and router, so that one script serves both kinds of run: none of these
rules applies to it.
"""

import argparse
import functools
import re
from collections.abc import Iterator

from slime.arguments.flag import as_typed, flag_of
from slime.arguments.hf_config import read_hf_config
from slime.arguments.rules import Rule
from slime.arguments.server_flags import REFUSED, share_problem, tensor_parallel_size
from slime.estimates.serving_memory import require_whole_groups
from slime.observability.run_record import redacted
from slime.utils.errors import UserError

# Router settings that have no effect while a switch is on: beginning of the attributes, the switch, what it turns off.
_SWITCHED_OFF = (
    ("router_health_", "router_disable_health_check", "health checks"),
    ("router_cb_", "router_disable_circuit_breaker", "circuit breaker"),
    ("router_retry_", "router_disable_retries", "retries"),
)
# What counts for a router that somebody else started, too: our client reads these.
_OF_ANY_ROUTER = {"router_policy", "router_api_key"}


def engine_sizes(args: argparse.Namespace) -> Iterator[str]:
    """Pipeline and tensor-parallel size must give the GPUs of an engine."""
    gpus, stages = args.rollout_num_gpus_per_engine, getattr(args, "sglang_pp_size", None) or 1
    if stages < 1 or gpus % stages:
        yield (
            f"--rollout-num-gpus-per-engine {gpus} is not divisible by --sglang-pp-size {stages}; give "
            f"--sglang-pp-size 1, or --rollout-num-gpus-per-engine {max(1, stages) * gpus}"
        )
        return
    typed, derived = getattr(args, "sglang_tp_size", None), tensor_parallel_size(args)
    if typed not in (None, derived):
        yield (
            f"--sglang-tp-size {typed} contradicts the tensor-parallel size {derived} of --rollout-num-gpus-per-engine "
            f"{gpus}; leave it out, or give --rollout-num-gpus-per-engine {typed * stages}"
        )


def attention_heads(args: argparse.Namespace) -> Iterator[str]:
    """Tensor-parallel ranks of an engine share the heads; key-value heads may also be repeated on equally many ranks."""
    found, latent = _heads(args)
    size = tensor_parallel_size(args)
    if getattr(args, "sglang_enable_dp_attention", None):
        size //= max(1, getattr(args, "sglang_dp_size", None) or 1)
    if found is None or size < 1 or _fits(*found, size):
        return
    heads, groups = found
    fitting = [n for n in range(1, heads + 1) if _fits(heads, groups, n)]
    nearest = [n for n in fitting if n < size][-1:] + [n for n in fitting if n > size][:1]
    message = (
        f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}: {size} tensor-parallel ranks cannot share the "
        f"model's {heads} attention heads and {groups} key-value heads evenly; {' or '.join(map(str, nearest))} would do"
    )
    if latent:
        message += ", or --sglang-enable-dp-attention with an equal --sglang-dp-size"
    if latent and args.dry_run:
        # Whether a server can pad the heads of latent attention is an affair of its version.
        args.plan_notes = [*args.plan_notes, message]
    else:
        yield message


def _fits(heads: int, groups: int, size: int) -> bool:
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


def _heads(args: argparse.Namespace) -> tuple[tuple[int, int] | None, bool]:
    """Attention heads and key-value heads of the model that the engines load, None where they are not known; latent?"""
    if args.hf_checkpoint is None or getattr(args, "sglang_config", None) is not None:
        return None, False  # that file gives groups of engines sizes of their own
    try:
        config = read_hf_config(args.hf_checkpoint)
    except UserError:
        return None, False  # said elsewhere
    heads = config.get("num_attention_heads")
    # Latent attention has no key-value heads to divide.
    latent = bool(config.get("kv_lora_rank"))
    groups = heads if latent else config.get("num_key_value_heads") or heads
    known = all(type(count) is int and count > 0 for count in (heads, groups))
    return ((heads, groups) if known else None), latent


def data_parallel_size(args: argparse.Namespace) -> Iterator[str]:
    size = getattr(args, "sglang_dp_size", None) or 1
    if size > 1 and not getattr(args, "sglang_enable_dp_attention", None):
        yield (
            f"--sglang-dp-size {size} needs --sglang-enable-dp-attention (whole copies of the model are more engines: a "
            "smaller --rollout-num-gpus-per-engine)"
        )
        return
    try:
        require_whole_groups(tensor_parallel_size(args), size)
    except UserError as error:
        yield str(error)


def server_limits(args: argparse.Namespace) -> Iterator[str]:
    share = getattr(args, "sglang_mem_fraction_static", None)
    problem = share_problem(share)
    if problem is not None:
        yield f"--sglang-mem-fraction-static {share}: {problem}"
    context = getattr(args, "sglang_context_length", None)
    for name in ("rollout_max_context_len", "eval_max_context_len"):
        wanted = getattr(args, name, None)
        if context is not None and wanted is not None and wanted > context:
            yield (
                f"{flag_of(name)} {wanted} is above --sglang-context-length {context}: engines would refuse the longest "
                f"requests; give --sglang-context-length {wanted}, or leave it out"
            )


def one_topology(args: argparse.Namespace) -> Iterator[str]:
    """Three ways to say which engines there are; one run takes one of them."""
    names = ("prefill_num_servers", "sglang_config", "rollout_external_engine_addrs")
    given = [flag_of(name) for name in names if getattr(args, name, None)]
    if len(given) > 1:
        yield f"{' and '.join(given)} exclude each other: each of them says which engines there are; keep one"
    prefill, engines = getattr(args, "prefill_num_servers", None), args.rollout_num_engines
    if prefill is not None and engines > 0 and not 0 < prefill < engines:
        numbers = {1: f"1, and --rollout-num-gpus {2 * args.rollout_num_gpus}", 2: "1"}
        yield (
            f"--prefill-num-servers {prefill}: of the {engines} engines (--rollout-num-gpus over "
            "--rollout-num-gpus-per-engine) at least one must prefill and one decode; give "
            + numbers.get(engines, f"1 to {engines - 1}")
        )


def router_address(args: argparse.Namespace) -> Iterator[str]:
    ip, port = args.sglang_router_ip, args.sglang_router_port
    if (ip is None) != (port is None):
        yield "--sglang-router-ip and --sglang-router-port belong together; give both, or none and a router is started"
    if ip is not None and not re.fullmatch(r"[\w.-]+|\[[0-9a-fA-F:.]+(%\w+)?\]", ip):
        yield f"--sglang-router-ip {ip}: give the address alone, such as 10.0.0.1 or [fd00::1]; its port has a flag"
    if port is not None and not 0 < port < 65536:
        yield f"--sglang-router-port {port}: a port is a number from 1 to 65535, such as 30000"


def router_settings(args: argparse.Namespace) -> Iterator[str]:
    """Settings that would be accepted and have no effect."""
    names = ("router_", "sglang_router_request_timeout_secs")
    typed = [name for name in vars(args) if name.startswith(names) and name in args.typed_flags]
    if args.sglang_router_ip is not None:
        for name in typed:
            if name not in _OF_ANY_ROUTER:
                yield (
                    f"{flag_of(name)} has no effect on the router of --sglang-router-ip {args.sglang_router_ip}, which was "
                    "started with settings of its own; drop it"
                )
        return
    for prefix, switch, what in _SWITCHED_OFF:
        idle = [flag_of(name) for name in typed if name.startswith(prefix)]
        if idle and getattr(args, switch, None):
            yield (
                f"{', '.join(idle)}: no effect while the {what} of the router is off; add "
                f"--no-{flag_of(switch).removeprefix('--')}"
            )
    backend = getattr(args, "router_backend", None)
    if backend not in (None, "sglang"):
        yield f"--router-backend {backend}: the engines are SGLang servers; give sglang, or leave it out"


def refused_flags(args: argparse.Namespace) -> Iterator[str]:
    for name, reason in REFUSED.items():
        value = getattr(args, name, None)
        if value is None or value is False:
            continue
        shown = "" if value is True else f" {as_typed(redacted({name: value})[name])}"
        yield f"{flag_of(name)}{shown}: {reason}"


def _with_engines(rule: Rule) -> Rule:
    """`rule` for runs that have engines of their own."""

    @functools.wraps(rule)
    def applied(args: argparse.Namespace) -> Iterator[str]:
        return rule(args) if args.has_engines else iter(())

    return applied


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


def whole_engines(args: argparse.Namespace) -> Iterator[str]:
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
        yield (
            f"--advantage-estimator {args.advantage_estimator}: --train-backend fsdp has no critic; give grpo, or "
            "--train-backend megatron"
        )
    if args.opd_type == "megatron":
        yield "--opd-type megatron needs --train-backend megatron; with fsdp give --opd-type sglang"


SERVING_RULES: tuple[Rule, ...] = tuple(
    _with_engines(rule)
    for rule in (
        one_topology, engine_sizes, attention_heads, data_parallel_size, server_limits, router_address, router_settings,
        refused_flags,
    )
)  # fmt: skip
PLACEMENT_RULES: tuple[Rule, ...] = (modes, whole_engines, external_addresses, fsdp)
