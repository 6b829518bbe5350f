"""Rules about engines and router, and about placement.

A run that only trains ignores the flags of engines and router, so that one script serves both kinds of run. These rules do not
apply to it.
"""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from slime.arguments.config_files.serving_config import FLAG, arguments_of_group, served_groups, served_models
from slime.arguments.flag import flag_of
from slime.arguments.groups import OF_ROLES
from slime.arguments.hf_config import readable_config
from slime.arguments.server_flags import (
    NO_SHARE,
    ONE_MODEL,
    REFUSED,
    TOLD_TOKENS,
    attention_groups,
    is_share,
    tensor_parallel_size,
)
from slime.arguments.sizes import divides_the_ranks, layout_of
from slime.arguments.violations import Kind, Rule, Violation, about, broken, divisors, refused, refused_each, where
from slime.estimates.layout import ParallelLayout
from slime.estimates.serving_memory import require_whole_groups
from slime.models.config_entries import NUM_EXPERTS
from slime.models.families import FAMILIES, undivided_by_engines
from slime.scheduling.served_models import first_beside_a_sender, first_uneven, node_parts
from slime.utils.errors import UserError
from slime.utils.ports import normalize_external_engine_addr
from slime.utils.weight_transports import WEIGHT_TRANSPORTS

_POLICIES = ("router_policy", "router_prefill_policy", "router_decode_policy")
# Settings of our router without effect: (prefixes of the attributes, when, what gives them one).
_WITHOUT_EFFECT = (
    ("router_health_", lambda args: args.router_disable_health_check, "--no-router-disable-health-check"),
    ("router_cb_", lambda args: args.router_disable_circuit_breaker, "--no-router-disable-circuit-breaker"),
    ("router_retry_", lambda args: args.router_disable_retries, "--no-router-disable-retries"),
    (("router_queue_", "router_rate_limit_"), lambda args: (args.router_max_concurrent_requests or 0) < 1,
        "--router-max-concurrent-requests"),
    (("router_cache_", "router_balance_", "router_eviction_", "router_max_tree_"),
        lambda args: args.router_policy is not None and "cache_aware" not in map(vars(args).get, _POLICIES),
        "--router-policy cache_aware"),
)  # fmt: skip
# Settings that also count with a router that somebody else started, because our client reads them.
_OF_ANY_ROUTER = {"router_policy", "router_api_key"}
_DRAFTED = tuple(f"sglang_speculative_{name}" for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
# Features that SGLang breaks or refuses with several pipeline stages, and with engines that only prefill or decode.
_WITH_STAGES = {
    "use_rollout_routing_replay": "each stage keeps the experts of its layers, and the first, which answers, has 0 for others",
    "sglang_speculative_algorithm": "SGLang only drafts with stages in engines that prefill, and ends at its start in others",
    "sglang_enable_hierarchical_cache": "the first stage reports that all have flushed, even if another one has refused",
    **dict.fromkeys(("sglang_enable_return_hidden_states", "sglang_return_hidden_states_mode"),
        "only the last stage has them, and the first stage, which answers, does not get them"),
}  # fmt: skip
WITH_ROLES = {
    "use_rollout_routing_replay": "the engine that prefills keeps the experts of a prompt, and the other returns wrong ones",
    "update_weights_in_flight": "a paused engine transfers no caches, and cannot be flushed during a transfer (fully "
    "asynchronous generation and the rollout buffer imply the flag)",
}
_ADDRESS = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+(%\w+)?\]")


def engine_sizes(args: argparse.Namespace) -> Iterator[Violation]:
    """The product of pipeline and tensor-parallel size must be the number of GPUs of an engine."""
    gpus, stages = args.rollout_num_gpus_per_engine, args.sglang_pp_size or 1
    if stages < 1 or gpus % stages:
        template = (
            "{--rollout-num-gpus-per-engine=} is not divisible by {--sglang-pp-size=}; give {--sglang-pp-size} 1, or "
            "{--rollout-num-gpus-per-engine} {fitting}"
        )
        yield broken(args, template, fitting=max(1, stages) * gpus)
    elif args.sglang_tp_size not in (None, derived := tensor_parallel_size(args)):
        template = (
            "{--sglang-tp-size=} contradicts the tensor-parallel size {derived} of {--rollout-num-gpus-per-engine=}; leave it "
            "out, or give {--rollout-num-gpus-per-engine} {fitting}"
        )
        yield broken(args, template, derived=derived, fitting=args.sglang_tp_size * stages)


def of_groups(rule: Rule, *, frozen: bool = True) -> Rule:
    """Applies the rule to each group of `--sglang-config` (`frozen`: also to those that get no weights of the trainer), as if
    all engines were like it; without the file, to the run."""

    def asked(args: argparse.Namespace) -> Iterator[Violation]:
        if args.sglang_config is None or not args.has_engines:
            yield from rule(args)
            return
        for group in served_groups(args):
            asks = group.num_engines and (frozen or group.update_weights)
            for violation in rule(arguments_of_group(args, group)) if asks else ():
                message = violation.message.replace(flag_of("rollout_num_gpus_per_engine"), "num_gpus_per_engine")
                yield Violation((FLAG,), f"{group.where}: {message}", violation.kind)

    return asked


def attention_heads(args: argparse.Namespace) -> Iterator[Violation]:
    """Tensor-parallel ranks of an engine must divide the heads evenly, or hold each key-value head on equally many ranks."""
    found, latent = _heads(args)
    size = tensor_parallel_size(args) // max(1, attention_groups(args))
    if found is None or size < 1 or _fits(*found, size):
        return
    heads, groups = found
    fitting = [n for n in range(1, heads + 1) if _fits(heads, groups, n)]
    nearest = [n for n in fitting if n < size][-1:] + [n for n in fitting if n > size][:1]
    template = (
        "{--rollout-num-gpus-per-engine=}: {size} tensor-parallel ranks cannot share the model's {heads} attention heads and "
        "{groups} key-value heads evenly; {nearest} would do"
    )
    numbers = {"size": size, "heads": heads, "groups": groups, "nearest": " or ".join(map(str, nearest))}
    if latent:
        template += ", or {--sglang-enable-dp-attention} with an equal {--sglang-dp-size}"
    # Some versions of the server can pad the heads of latent attention, so a plan only notes this.
    yield broken(args, template, kind=Kind.NOT_BUILT if latent else Kind.WRONG, **numbers)


def _fits(heads: int, groups: int, size: int) -> bool:
    return heads % size == 0 and (groups % size == 0 or size % groups == 0)


def _heads(args: argparse.Namespace) -> tuple[tuple[int, int] | None, bool]:
    """Returns ((attention heads, key-value heads) or None if unknown, latent attention?) of the engines' model."""
    config = readable_config(args)
    heads = config.get("num_attention_heads")
    # Latent attention has no key-value heads to divide.
    latent = bool(config.get("kv_lora_rank"))
    groups = heads if latent else config.get("num_key_value_heads") or heads
    known = all(type(count) is int and count > 0 for count in (heads, groups))
    return (heads, groups) if known else None, latent


def drafts(args: argparse.Namespace) -> Iterator[Violation]:
    """SGLang makes a draft model from one layer for multi-token prediction, so the engines' model must have exactly one."""
    config = readable_config(args)
    if args.sglang_speculative_algorithm is None or not config:
        return
    family = FAMILIES.get(config.get("model_type"))
    layers = 0 if family is None else family.drafting_layers(config)
    if layers != 1:
        template = (
            "{--sglang-speculative-algorithm=}: engines draft with one layer for multi-token prediction of the model, and "
            "{--hf-checkpoint=} has {layers} that they can draft with; drop the flag"
        )
        yield broken(args, template, layers=layers or "none")


def groups_of_attention(args: argparse.Namespace) -> Iterator[Violation]:
    """Data-parallel attention must divide the ranks of an engine into equal groups."""
    try:
        require_whole_groups(tensor_parallel_size(args), attention_groups(args))
    except UserError as error:
        yield from about([error], "--sglang-dp-size", "--rollout-num-gpus-per-engine")


def models(args: argparse.Namespace) -> Iterator[Violation]:
    """Every model of `--sglang-config` must suit the trainer and the engines. Messages name its line in the file."""
    for position, model in enumerate(args.served_models or ()):
        trained, problem = args.has_trainer and model.update_weights, None
        types = {group.worker_type for group in model.groups}
        if trained and model.where and model.model_path != args.hf_checkpoint:
            problem = "the trainer's weights are those of --hf-checkpoint; leave model_path out, or give it there"
        elif args.has_trainer and position == 0 and not trained:
            problem = "the first model generates training samples; give update_weights: true, or put another one first"
        elif not trained and model.where and not args.dry_run and not os.path.isfile(f"{model.model_path}/config.json"):
            problem = f"no config.json in {model.model_path}; give the directory of a Hugging Face checkpoint"
        elif model.where and not any(group.num_engines for group in model.groups):
            problem = "no group has engines; give it one that is no placeholder, or leave the model out"
        elif ("prefill" in types) != ("decode" in types):
            problem = "prefill and decode groups need each other"
        elif {"prefill", "regular"} <= types:
            problem = "regular engines would get no requests beside those that prefill and decode"
        elif "encoder" in types:
            problem = f"worker_type encoder: {REFUSED['sglang_encoder_only']}, or give worker_type regular"
        if problem:
            yield from about([f"{model.where}: model {model.name}: {problem}"], FLAG)


def one_topology(args: argparse.Namespace) -> Iterator[Violation]:
    """There are three ways to say which engines there are, and a run must use only one of them."""
    names = ("prefill_num_servers", "sglang_config", "rollout_external_engine_addrs")
    given = [flag_of(name) for name in names if vars(args)[name]]
    if len(given) > 1:
        template = "{given} exclude each other: each of them says which engines there are; keep one"
        yield broken(args, template, *given, given=" and ".join(given))
    prefill, engines = args.prefill_num_servers, args.rollout_num_engines
    if prefill is not None and engines > 0 and not 0 < prefill < engines:
        numbers = {1: f"1, and --rollout-num-gpus {2 * args.rollout_num_gpus}", 2: "1"}
        template = (
            "{--prefill-num-servers=}: of the {engines} engines ({--rollout-num-gpus} over {--rollout-num-gpus-per-engine}) at "
            "least one must prefill and one decode; give {numbers}"
        )
        yield broken(args, template, engines=engines, numbers=numbers.get(engines, f"1 to {engines - 1}"))


def has_roles(args: argparse.Namespace) -> bool:
    """Whether engines of the run prefill and decode for each other."""
    return any(group.worker_type == "prefill" for group in served_groups(args))


def router_settings(args: argparse.Namespace) -> Iterator[Violation]:
    """Refuses settings of the router that would have no effect."""
    names = ("router_", "sglang_router_request_timeout_secs")
    typed = [name for name in vars(args) if name.startswith(names) and name in args.typed_flags]
    if args.sglang_router_ip is not None:
        template = "{0} has no effect on the router of {--sglang-router-ip=}, which has settings of its own; drop it"
        yield from (broken(args, template, flag_of(name)) for name in typed if name not in _OF_ANY_ROUTER)
        return
    for prefixes, is_idle, add in _WITHOUT_EFFECT:
        idle = [flag_of(name) for name in typed if name.startswith(prefixes)]
        if idle and is_idle(args):
            template = "{idle}: no effect beside the other settings of the router; add {add}, or drop what has none"
            yield broken(args, template, *idle, idle=", ".join(idle), add=add)


def whole_engines(args: argparse.Namespace) -> Iterator[Violation]:
    total, each = args.rollout_num_gpus or 0, args.rollout_num_gpus_per_engine
    if args.sglang_config is None and total % each:
        nearest = sorted({max(each, total // each * each), (total // each + 1) * each})
        template = "{--rollout-num-gpus=} is no multiple of {--rollout-num-gpus-per-engine=}; give {nearest}"
        yield broken(args, template, nearest=" or ".join(str(number) for number in nearest))


def engine_around_a_sender(args: argparse.Namespace) -> Iterator[Violation]:
    """With `--colocate` on GPUs, an engine that shares a GPU with a sender of weights must share all its GPUs with training."""
    ranks, way = layout_of(args).actor_gpus, WEIGHT_TRANSPORTS[args.update_weight_transport]
    if not (args.colocate and ranks and way.colocated and args.on_gpus and divides_the_ranks(args)):
        return
    layout = ParallelLayout(
        ranks, args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size,
        stages_beside=args.use_tp_pp_dp_mapping,
    )  # fmt: skip
    first = layout_of(args).first_rollout_gpu
    for group in served_groups(args):
        total, each = group.num_gpus if group.num_engines else 0, group.num_gpus_per_engine
        found = first_beside_a_sender(total, first, each, layout) if group.update_weights else None
        if found is not None:
            name = "num_gpus_per_engine" if group.where else "{--rollout-num-gpus-per-engine}"
            template = (
                f"{name} {each} with {{--colocate}}: an engine would have the GPUs {{start}} to {{last}} of the run, some "
                "beside those of the {ranks} training ranks, and be in one NCCL group with rank {sender}, which sends weights "
                f"and is on one of them: NCCL refuses two ranks on a GPU; give {name} {{fitting}}, or "
                "{--update-weight-transport} disk"
            )
            fitting = [n for n in divisors(total) if n < each and not first_beside_a_sender(total, first, n, layout)]
            start, sender = found
            numbers = {"start": start, "last": start + each - 1, "ranks": ranks, "sender": sender}
            violation = broken(args, template, **numbers, fitting=" or ".join(map(str, fitting[-2:])))
            yield replace(violation, flags=(FLAG,)).at(group.where) if group.where else violation
        first += group.num_gpus


def engines_over_nodes(args: argparse.Namespace) -> Iterator[Violation]:
    """An engine over several nodes must have equally many GPUs on each. GPUs are counted in the order of `layout_of`."""
    if args.rollout_external or not args.rollout_num_gpus:
        return
    first, per_node = layout_of(args).first_rollout_gpu, args.num_gpus_per_node
    training = f", training takes the first {first}" if first else ""
    for group in served_groups(args):
        total, each = group.num_gpus if group.num_engines else 0, group.num_gpus_per_engine
        start = first_uneven(total, first, each, per_node)
        if start is not None:
            fitting = [n for n in divisors(total) if n < each and first_uneven(total, first, n, per_node) is None]
            name = "num_gpus_per_engine" if group.where else "{--rollout-num-gpus-per-engine}"
            template = (
                f"{name} {each}: an engine would have the GPUs {{start}} to {{last}} of the run, {{parts}} on its nodes "
                f"({{--num-gpus-per-node=}}{training}), and needs equally many on each; give {name} {{fitting}}, or another "
                "number of GPUs to what comes before it"
            )
            parts = " and ".join(map(str, node_parts(start, each, per_node)))
            last, some = start + each - 1, " or ".join(map(str, fitting[-2:]))
            found = broken(args, template, start=start, last=last, parts=parts, fitting=some)
            yield replace(found, flags=(FLAG,)).at(group.where) if group.where else found
        first += group.num_gpus


def external_addresses(args: argparse.Namespace) -> Iterator[Violation]:
    first: dict[str, int] = {}
    for position, address in enumerate(args.rollout_external_engine_addrs or []):
        problem = "give host:port, such as 10.0.0.5:30000"
        with contextlib.suppress(ValueError):
            again = first.setdefault(normalize_external_engine_addr(address), position) != position
            problem = "this address is there twice; name each engine once" if again else None
        if problem:
            told = {"address": address, "problem": problem}
            yield broken(args, "{--rollout-external-engine-addrs} {address}: {problem}", **told)


# A run that only trains ignores the flags of engines and router.
SERVING_RULES: tuple[Rule, ...] = where(lambda args: args.has_engines,
    models, one_topology, of_groups(engine_sizes), of_groups(attention_heads), of_groups(drafts),
    of_groups(lambda args: (broken(args, "{--sglang-pp-size=}: {problem}", problem=problem)
        for problem in undivided_by_engines(readable_config(args), args.sglang_pp_size or 1))),
    of_groups(refused_each(_DRAFTED, lambda args, value: value is not None and args.sglang_speculative_algorithm is None,
        "{0=} has no effect without {--sglang-speculative-algorithm}; drop it, or add that with EAGLE")),
    of_groups(refused(
        lambda args: args.sglang_speculative_algorithm and len({vars(args)[name] is None for name in _DRAFTED}) == 2,
        "{--sglang-speculative-num-steps}, {--sglang-speculative-eagle-topk} and {--sglang-speculative-num-draft-tokens} go "
        "together: an engine ends if it gets only some of them; give all three, such as 3, 1 and 4, or none")),
    of_groups(refused(
        lambda args: args.sglang_speculative_algorithm is not None and args.sglang_enable_deterministic_inference,
        "{--sglang-speculative-algorithm=} with {--sglang-enable-deterministic-inference} (which {--true-on-policy-mode} "
        "implies): the answer for a seed would depend on the drafts; drop one of them")),
    of_groups(refused(
        lambda args: args.sglang_speculative_algorithm and attention_groups(args) > 1 and not args.sglang_enable_dp_lm_head,
        "{--sglang-speculative-algorithm=} with {--sglang-enable-dp-attention} needs {--sglang-enable-dp-lm-head}: without it "
        "SGLang overwrites other memory when a request asks for log-probs of its prompt; add it")),
    of_groups(refused(lambda args: args.use_rollout_routing_replay and attention_groups(args) > 1
            and args.sglang_cuda_graph_backend_prefill not in (None, "disabled"),
        "{--sglang-cuda-graph-backend-prefill=} with {--sglang-enable-dp-attention} and {--use-rollout-routing-replay}: SGLang "
        "would return the experts of other tokens; drop it")),
    refused(lambda args: any(len({arguments_of_group(args, group).sglang_speculative_algorithm is None
            for group in model.groups if group.worker_type in ("prefill", "decode")}) == 2 for model in served_models(args)),
        "{--sglang-config}: the engines of a model that prefill and decode must all draft, or none of them: those that decode "
        "continue the drafts of the others; give speculative_algorithm to all their groups"),
    refused(lambda args: args.sglang_config is not None and args.sglang_tp_size is not None,
        "{--sglang-tp-size=}: in {--sglang-config} each group has a size of its own; drop it"),
    of_groups(groups_of_attention),
    of_groups(refused(lambda args: attention_groups(args) > 1 and _heads(args)[0]
            and not any(map(readable_config(args).get, NUM_EXPERTS)),
        "{--sglang-enable-dp-attention}: the model has no experts that the groups could share, and SGLang computes most such "
        "models wrongly then; drop it, and give a smaller {--rollout-num-gpus-per-engine} for more engines")),
    of_groups(refused(lambda args: (args.sglang_dp_size or 1) != attention_groups(args),
        "{--sglang-dp-size=} needs {--sglang-enable-dp-attention} (whole copies of the model are more engines: a smaller "
        "{--rollout-num-gpus-per-engine})")),
    refused(lambda args: not is_share(args.sglang_mem_fraction_static), f"{{--sglang-mem-fraction-static=}}: {NO_SHARE}"),
    refused_each(("rollout_max_context_len", "eval_max_context_len"),
        lambda args, wanted: None not in (args.sglang_context_length, wanted) and wanted > args.sglang_context_length,
        "{0=} is above {--sglang-context-length=}: engines would refuse the longest requests; give {--sglang-context-length} "
        "{value}, or leave it out"),
    refused(lambda args: (args.sglang_router_ip is None) != (args.sglang_router_port is None),
        "{--sglang-router-ip} and {--sglang-router-port} belong together; give both, or none and a router is started"),
    refused(lambda args: args.sglang_router_ip is not None and not _ADDRESS.fullmatch(args.sglang_router_ip),
        "{--sglang-router-ip=}: give the address alone, such as 10.0.0.1 or [fd00::1]; its port has a flag"),
    refused(lambda args: args.sglang_router_port is not None and not 0 < args.sglang_router_port < 65536,
        "{--sglang-router-port=}: a port is a number from 1 to 65535, such as 30000"),
    of_groups(refused(lambda args: args.has_trainer and args.sglang_json_model_override_args not in (None, "{}"),
        f"{{--sglang-json-model-override-args=}}: {ONE_MODEL}"), frozen=False),
    of_groups(refused(lambda args: args.use_rollout_routing_replay and args.sglang_enable_hierarchical_cache,
        "{--sglang-enable-hierarchical-cache} loses the experts that {--use-rollout-routing-replay} asks for; drop it")),
    of_groups(refused(lambda args: args.update_weights_in_flight and args.sglang_enable_hierarchical_cache,
        "{--sglang-enable-hierarchical-cache} with {--update-weights-in-flight}: a paused engine does not see that prefixes "
        "have reached host memory, and refuses a flush until it does; drop one of them")),
    *(refused_each((name,), lambda args, value: value and has_roles(args), f"{{0=}} beside engines that only prefill or decode"
        f": {reason}; drop it, or {{--prefill-num-servers}} and such worker types") for name, reason in WITH_ROLES.items()),
    refused(lambda args: any(group.worker_type in ("prefill", "decode") and
            (arguments_of_group(args, group).sglang_pp_size or 1) > 1 for group in served_groups(args)),
        "{--sglang-pp-size} in engines that only prefill or decode: there a stage of SGLang carries out a push before it "
        "passes it on, and hangs; drop it, or {--prefill-num-servers} and such worker types"),
    *(of_groups(refused_each((name,), lambda args, value: value and (args.sglang_pp_size or 1) > 1,
        f"{{0=}} with {{--sglang-pp-size=}}: {reason}; drop one of them")) for name, reason in _WITH_STAGES.items()),
    of_groups(refused(lambda args: args.rollout_top_k > (args.sglang_sampling_mask_max_tokens or TOLD_TOKENS),
        f"{{--rollout-top-k=}}: an engine reports at most {{--sglang-sampling-mask-max-tokens}} kept tokens ({TOLD_TOKENS} by "
        "default), and refuses to sample from more; give fewer")),
    router_settings,
    refused_each(_POLICIES, lambda args, value: value == "power_of_two",
        "{0=}: the router asks engines for their loads at /get_load, which they do not have, and so would choose at random; "
        "give round_robin, cache_aware or consistent_hashing"),
    refused(lambda args: args.router_dp_aware and all(attention_groups(arguments_of_group(args, group)) == 1
            for group in served_groups(args)),
        "{--router-dp-aware}: no engine has groups to choose among; drop it, or add {--sglang-enable-dp-attention}"),
    refused(lambda args: args.router_dp_aware and has_roles(args),
        "{--router-dp-aware} beside engines that only prefill or decode: the router would keep dead engines; drop one"),
    refused_each(("router_prefill_policy", "router_decode_policy", *OF_ROLES),
        lambda args, value: value not in (None, False) and not (has_roles(args) or args.rollout_external),
        "{0=} has no effect: no engine only prefills or decodes; give {--prefill-num-servers}, or drop it"),
    of_groups(refused(lambda args: args.sglang_disaggregation_transfer_backend == "fake",
        "{--sglang-disaggregation-transfer-backend=} moves no caches, and answers would be noise; give mooncake")),
    refused(lambda args: args.sglang_router_ip is None and args.router_backend not in (None, "sglang"),
        "{--router-backend=}: the engines are SGLang servers; give sglang, or leave it out"),
    lambda args: (broken(args, "{0=}: {reason}", flag_of(name), reason=reason) for name, reason in REFUSED.items()
        if vars(args).get(name) is not None and vars(args)[name] is not False),
)  # fmt: skip
PLACEMENT_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.debug_rollout_only and args.debug_train_only,
        "{--debug-rollout-only} excludes {--debug-train-only} ({--load-debug-rollout-data} implies that); drop one"),
    refused(lambda args: args.has_engines and args.rollout_num_gpus is None and not args.rollout_external,
        "{--rollout-num-gpus} is not set: give the number of GPUs for the engines, or {--colocate}, or {--debug-train-only}"),
    refused(lambda args: args.has_engines and args.rollout_num_gpus == 0 and not args.rollout_external
            and args.router_api_key is None and args.sglang_router_ip is None,
        "{--rollout-num-gpus=}: engines that you start for this run must register with the key of its router; give a key by "
        "{--router-api-key}, or your own router by {--sglang-router-ip} and {--sglang-router-port}"),
    refused(lambda args: args.has_engines and args.hf_checkpoint is None,
        "{--hf-checkpoint} is needed: the engines load their config and tokenizer from it"),
    whole_engines, engine_around_a_sender, engines_over_nodes, external_addresses,
    refused(lambda args: args.rollout_external and args.colocate,
        "{--colocate}: the engines of {--rollout-external-engine-addrs} have GPUs of their own; drop one of the two"),
    refused(lambda args: args.rollout_external and args.offload_rollout and not args.colocate,
        "{--offload-rollout} (or {--offload}): the engines of {--rollout-external-engine-addrs} do not sleep; drop it"),
    refused_each(("attn_implementation", "fsdp_cpu_offload"),
        lambda args, value: args.train_backend != "fsdp" and value not in ("auto", False),
        "{0} has no effect with {--train-backend=}; drop it"),
    *where(lambda args: args.train_backend == "fsdp",
        refused_each(("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"),
            lambda args, size: size > 1,
            "{0=}: {--train-backend=} shards parameters over all ranks instead; give 1, or {--train-backend} megatron"),
        refused(lambda args: args.attn_implementation == "eager" and args.context_parallel_size > 1,
            "{--attn-implementation=} computes scores of whole sequences; {--context-parallel-size=} splits them; give sdpa"),
        refused(lambda args: args.use_critic,
            "{--advantage-estimator=}: {--train-backend=} has no critic; give grpo, or {--train-backend} megatron"),
        refused(lambda args: args.opd_type == "megatron",
            "{--opd-type=} needs {--train-backend} megatron; with fsdp give {--opd-type} sglang")),
)  # fmt: skip
