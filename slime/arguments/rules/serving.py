"""Rules about engines and router, and the flags of theirs that a run sets itself.

A run that only trains ignores the flags of engines and router, so that one script serves both kinds of run: none of these
rules applies to it.
"""

import argparse
import functools
import re
from collections.abc import Callable, Iterator

from slime.arguments.hf_config.reading import read_hf_config
from slime.arguments.origins import Origin
from slime.arguments.plug_ins import as_typed, flag_of
from slime.observability.run_record import redacted
from slime.utils.errors import UserError
from slime.utils.ports import host_for_url

Rule = Callable[[argparse.Namespace], Iterator[str]]

_OWN_ENGINES = "the run starts its engines and registers them with the router; drop it"
_FOUND_ENGINES = "engines that the router finds by itself would not get the trainer's weights; drop it"
_OWN_ADDRESS = "it binds the address that its node announces; set SLIME_HOST_IP there for another one"
_ONE_KEY = "router and engines of a run share one key; give it as --router-api-key"
_HTTP_ONLY = "engines are controlled over HTTP; drop it"

# Flags that every server accepts and that a run cannot leave to the user: attribute → reason and way out. Here, and not
# missing from the command line, so that whoever types one reads why.
REFUSED: dict[str, str] = {
    "sglang_host": f"an engine is not free to choose: {_OWN_ADDRESS}",
    "sglang_api_key": _ONE_KEY,
    "sglang_admin_api_key": f"control requests carry the same key as all others: {_ONE_KEY}",
    "sglang_tokenizer_path": "the run encodes prompts with the tokenizer of --hf-checkpoint, and engines must agree; "
    "put the tokenizer there",
    "sglang_skip_tokenizer_init": "rollouts need the text of responses; drop it",
    "sglang_is_embedding": "rollouts need engines that generate; drop it",
    "sglang_weight_version": "the run numbers the versions of its weights; drop it",
    "sglang_allow_auto_truncate": "the trainer would learn from prompts of which the engine saw a part; give "
    "--rollout-max-prompt-len, which leaves out prompts that are too long",
    "sglang_delete_ckpt_after_loading": "it deletes --hf-checkpoint, which the run reads again; drop it",
    "sglang_checkpoint_engine_wait_weights_before_ready": "weights are pushed to engines that are ready, so the engine "
    "and the run would wait for each other; drop it",
    "sglang_gated_launch_port": "nobody in a run opens that gate, so the engine would never be ready; drop it",
    "sglang_grpc_mode": _HTTP_ONLY,
    "sglang_smg_grpc_mode": _HTTP_ONLY,
    "sglang_use_ray": "engines already live in Ray actors; drop it",
    "router_host": f"the router of a run is not free to choose: {_OWN_ADDRESS}, or start a router yourself and give "
    "--sglang-router-ip and --sglang-router-port",
    "router_port": "the router of a run takes a free port; start a router yourself and give --sglang-router-ip and "
    "--sglang-router-port",
    "router_worker_urls": _OWN_ENGINES,
    "router_prefill_urls": _OWN_ENGINES,
    "router_decode_urls": _OWN_ENGINES,
    "router_mini_lb": "it belongs to another program than the router; drop it",
    "router_enable_igw": "one router serves one model; drop it",
    "router_service_discovery": _FOUND_ENGINES,
    "router_service_discovery_port": _FOUND_ENGINES,
    "router_service_discovery_namespace": _FOUND_ENGINES,
    "router_selector": _FOUND_ENGINES,
    "router_prefill_selector": _FOUND_ENGINES,
    "router_decode_selector": _FOUND_ENGINES,
}

# Server fields that are known by other names too: field → those, all without `sglang_`.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "cuda_graph_bs_decode": ("cuda_graph_bs",),
    "cuda_graph_max_bs_decode": ("cuda_graph_max_bs",),
    "dp_size": ("dp", "data_parallel_size"),
    "ep_size": ("ep", "expert_parallel_size"),
    "pp_size": ("pp", "pipeline_parallel_size"),
    "tp_size": ("tp", "tensor_parallel_size"),
}

# Router settings that have no effect while a switch is on: beginning of the attributes, the switch, what it turns off.
_SWITCHED_OFF = (
    ("router_health_", "router_disable_health_check", "health checks"),
    ("router_cb_", "router_disable_circuit_breaker", "circuit breaker"),
    ("router_retry_", "router_disable_retries", "retries"),
)
# What counts for a router that somebody else started, too: our client reads these.
_OF_ANY_ROUTER = {"router_policy", "router_api_key"}


def bracket_router_address(args: argparse.Namespace) -> None:
    """Write an IPv6 `--sglang-router-ip` as URLs need it, in brackets."""
    ip = getattr(args, "sglang_router_ip", None)
    if ip is not None and ip.count(":") > 1:
        args.sglang_router_ip = host_for_url(ip)


def keep_names_equal(args: argparse.Namespace) -> None:
    """Give every other name of a server field the value of the field, for functions of the user that read it there."""
    for field, names in OTHER_NAMES.items():
        attribute = f"sglang_{field}"
        for name in names if hasattr(args, attribute) else ():
            setattr(args, f"sglang_{name}", getattr(args, attribute))
            args.origins[f"sglang_{name}"] = args.origins.get(attribute, Origin.DEFAULT)


def other_names(args: argparse.Namespace) -> set[str]:
    """The names without `sglang_` under which `keep_names_equal` repeated a field: no fields themselves."""
    return {name for field, names in OTHER_NAMES.items() if hasattr(args, f"sglang_{field}") for name in names}


def tensor_parallel_size(args: argparse.Namespace) -> int:
    """Ranks that share each layer of an engine: its GPUs over its pipeline stages."""
    return args.rollout_num_gpus_per_engine // (getattr(args, "sglang_pp_size", None) or 1)


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
    elif tensor_parallel_size(args) % size:
        yield (
            f"--sglang-dp-size {size} does not divide the engine's tensor-parallel size {tensor_parallel_size(args)}; give "
            f"--sglang-dp-size 1 or --sglang-dp-size {tensor_parallel_size(args)}"
        )


def server_limits(args: argparse.Namespace) -> Iterator[str]:
    share = getattr(args, "sglang_mem_fraction_static", None)
    if share is not None and not 0 < share < 1:
        yield f"--sglang-mem-fraction-static {share}: it is a share of the GPU's memory, such as 0.8"
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


SERVING_RULES: tuple[Rule, ...] = tuple(
    _with_engines(rule)
    for rule in (
        one_topology, engine_sizes, attention_heads, data_parallel_size, server_limits, router_address, router_settings,
        refused_flags,
    )
)  # fmt: skip
