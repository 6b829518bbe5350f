"""The groups of flags, in the order of `--help`: first our own, each flag declared once; then the flags that are read from
installed packages: Megatron-Core's by topic, SGLang's server and its router as one group each.

If a spelling occurs twice, our own flag wins: our groups come first, and the others leave out what is taken. Megatron's flags
are the fields of its dataclasses and the historical names; all spellings of one value set one attribute of `args`, and the
first of them carries the default. Every field of SGLang's `ServerArgs` becomes `--sglang-<field>`, every field of the router's
`RouterArgs` becomes `--router-<field>`. If one of these two is not installed its flags are missing: a run that only trains
does not need them.
"""

import argparse
import dataclasses
import re
from collections.abc import Container, Sequence
from typing import Any

from slime.arguments.flag import Bounds, Caller, Flag, Group
from slime.arguments.groups import run_flags as run
from slime.arguments.groups import training_flags as training
from slime.arguments.megatron import names
from slime.arguments.surface import VALUE_TYPES, FlagSpec, add_flag, load_surface, taken
from slime.utils.errors import UserError

OWN_GROUPS: tuple[Group, ...] = (
    run.CONFIGURATION, run.CLUSTER, training.CHECKPOINTS, training.WEIGHTS, run.ROLLOUT, run.DATA, run.EVALUATION, run.REWARD,
    training.ALGORITHM, training.OFF_POLICY, training.DISTILLATION, training.FSDP, run.FAULT_TOLERANCE, run.NETWORK,
    run.LOGGING, run.DEBUGGING, training.MEGATRON_HOOKS,
)  # fmt: skip
# Attribute -> its flag. In `--help` the group of the engines comes after Megatron's, beside those of SGLang and the router.
OWN_FLAGS: dict[str, Flag] = {flag.dest: flag for group in (*OWN_GROUPS, run.SERVING) for flag in group.flags}
# Attribute -> bounds, for our flags and Megatron's.
BOUNDS: dict[str, Bounds] = {
    **{name: flag.bounds for name, flag in OWN_FLAGS.items() if flag.bounds is not None},
    **names.BOUNDS,
}

# (title, pattern of its attributes). The first match in this order counts.
_TOPICS: tuple[tuple[str, str], ...] = (
    ("experts", r"^moe_|^num_experts$|overlap_moe|ep_overlap"),
    ("latent and linear attention", r"multi_latent|lora_rank|qk_head_dim|qk_pos_emb|v_head_dim|mscale|^beta_|rope_type"
     r"|rotary_scaling_factor|original_max|mla_latents|^dsa_|^linear_|experimental_attention"),
    ("checkpoints", r"ckpt|^load$|^save|no_save|no_load|finetune|^async_s|on_missing_checkpoint|from_checkpoint"),
    ("recomputation and offload", r"recompute|offload|activation_checkpoints|saved_activations|empty_unused"),
    ("optimizer and schedule", r"^lr|^min_lr|decoupled|weight_decay|optimizer|train_iters|opt_param|adam|muon|sgd"
     r"|clip_grad|apply_wd|main_\w+_dtype|exp_avg|param_remainders|pin_cpu"),
    ("precision and fusion", r"fp8|fp4|bf16|fp16|fp32|dtype|kitchen|fusion|fused|deterministic|batch_invariant|amax|quant"
     r"|autocast|loss_scale|hysteresis|num_layers_at_|precision|persist_layer|layer_norm$|jit_fuser|te_activation"),
    ("logging and profiling", r"^log_|logging|tensorboard|timing|profil|^memory|record_memory|config_logger|barrier"),
    ("parallelism", r"parallel|pipeline|tp_comm|ddp_|overlap|nccl|sharp|gloo|p2p|fsdp|grad_reduce|distributed|cp_comm"
     r"|communicator|stream_groups|collective|align_|check_for|all_gather|gather|vp_stage|sharding|replica|symmetric"
     r"|wgrad|div_fusion|communication_unit|double_buffer|tp_pp_dp|decoder_\w+_pipeline|virtual"),
    ("other", r"cuda_graph|inference|mamba|flash_decode|eterogen|hybrid|test_mode|^seed$|manual_gc|train_sync|prefill"
     r"|rng_tracker|experimental|meta_device|cpu_init|perform_init|batch_size|_interval$"),
)  # fmt: skip
_SHAPE_TOPIC = "model shape"
_ORDER = (
    "parallelism", _SHAPE_TOPIC, "experts", "latent and linear attention", "precision and fusion",
    "optimizer and schedule", "recomputation and offload", "checkpoints", "logging and profiling", "other",
)  # fmt: skip

OF_ROLES = ("sglang_num_reserved_decode_tokens", "sglang_optimistic_prefill_attempts", *map("sglang_disaggregation_{}".format, (
    "transfer_backend", "ib_device", "enable_kv_checksum", "decode_retraction_backup", "decode_enable_radix_cache",
    "decode_extra_slots", "decode_polling_interval", "decode_host_receive_threshold")))  # fmt: skip
# Flags of SGLang and the router that rules and plans read; unset if the package is not installed.
READ = {
    "sglang": (
        "sglang_pp_size", "sglang_tp_size", "sglang_dp_size", "sglang_enable_dp_attention", "sglang_mem_fraction_static",
        "sglang_context_length", "sglang_dtype", "sglang_quantization", "sglang_enable_hierarchical_cache",
        "sglang_sampling_mask_max_tokens", "sglang_enable_deterministic_inference", "sglang_speculative_algorithm",
        *(f"sglang_speculative_{name}" for name in ("num_steps", "eagle_topk", "num_draft_tokens")), *OF_ROLES,
        "sglang_enable_dp_lm_head", "sglang_cuda_graph_backend_prefill", "sglang_enable_return_hidden_states",
        "sglang_return_hidden_states_mode", "sglang_kv_cache_dtype", "sglang_json_model_override_args",
    ),
    "router": ("router_backend", "router_dp_aware", "router_prefill_policy", "router_decode_policy"),
}  # fmt: skip

# Families of flags that are read from a package: (name for `load_surface`, title in `--help`).
REFLECTED = (
    ("sglang", "SGLang server (an unset flag leaves the default of run or server)"),
    ("router", "Router (fields of its RouterArgs)"),
)


def plug_ins_of(caller: Caller) -> tuple[str, ...]:
    """The attributes that hold the paths of plug-ins that `caller` calls."""
    return tuple(name for name, flag in OWN_FLAGS.items() if flag.plug_in is caller)


def add_megatron_flags(parser: argparse.ArgumentParser) -> None:
    """Add one argument group per topic.

    Raises:
        UserError: Megatron-Core is not installed.
    """
    reflected = load_surface("megatron")
    if reflected is None:
        raise UserError("megatron-core is not installed, and its flags come from it: pip install megatron-core")
    topics: dict[str, list[FlagSpec]] = {title: [] for title in _ORDER}
    for spec in merge(reflected):
        topics[topic_of(spec)].append(spec)
    dests = set(taken(parser).dests)
    for title, members in topics.items():
        group = parser.add_argument_group(f"Megatron: {title}")
        for spec in members:
            _add_what_is_free(group, spec, parser._option_string_actions, dests)


def merge(reflected: Sequence[FlagSpec]) -> list[FlagSpec]:
    """The reflected flags under Megatron-LM's names and with its defaults, then the historical flags without a field."""
    renamed = [_with_table_values(spec) for spec in reflected]
    by_dest: dict[str, FlagSpec] = {}
    for spec in renamed:
        if spec.metadata.get("other_spelling"):
            continue
        if spec.dest in by_dest:
            # Two dataclasses have different names for one value.
            flags = tuple(dict.fromkeys((*by_dest[spec.dest].flags, *spec.flags)))
            by_dest[spec.dest] = dataclasses.replace(by_dest[spec.dest], flags=flags)
        else:
            by_dest[spec.dest] = spec
    extra: list[FlagSpec] = []
    for spec in names.HISTORICAL:
        field = by_dest.get(spec.dest)
        if field is None:
            extra.append(spec)
        elif spec.action == "store_false" or field.action == "bool":
            extra.append(dataclasses.replace(spec, metadata={"other_spelling": True}))
        else:
            by_dest[spec.dest] = _with_historical(field, spec)
    fields = [by_dest[spec.dest] if not spec.metadata.get("other_spelling") else spec for spec in renamed]
    return [*fields, *extra]


def topic_of(spec: FlagSpec) -> str:
    """The topic under which the flag is listed."""
    if spec.dest in names.SHAPE:
        return _SHAPE_TOPIC
    for title, pattern in _TOPICS:
        if re.search(pattern, spec.dest):
            return title
    return _SHAPE_TOPIC if "TransformerConfig" in spec.metadata.get("configs", ()) else "other"


def _with_table_values(spec: FlagSpec) -> FlagSpec:
    dest = names.FIELD_DESTS.get(spec.dest, spec.dest)
    renamed = () if dest == spec.dest or spec.metadata.get("other_spelling") else ("--" + dest.replace("_", "-"),)
    changes: dict[str, Any] = {"dest": dest, "flags": tuple(dict.fromkeys((*renamed, *spec.flags)))}
    if dest in names.MEANINGS and not spec.metadata.get("other_spelling"):
        changes["help"] = names.MEANINGS[dest]
    if dest in names.OUR_DEFAULTS:
        changes["default"] = names.OUR_DEFAULTS[dest][0]
    elif dest in names.DEFAULTS:
        changes["default"] = names.DEFAULTS[dest]
    if dest in names.CHOICES:
        changes["choices"] = names.CHOICES[dest]
    if dest in names.TYPES:
        changes["type"] = names.TYPES[dest]
    if spec.action == "store_true" and changes.get("default"):
        changes["action"] = "bool"
    return dataclasses.replace(spec, **changes)


def _with_historical(field: FlagSpec, historical: FlagSpec) -> FlagSpec:
    """One flag with the spellings of both. Help text, type and choices are those of the historical flag."""
    default = field.default if field.dest in names.OUR_DEFAULTS else historical.default
    flags = tuple(dict.fromkeys((*historical.flags, *field.flags)))
    return dataclasses.replace(historical, flags=flags, default=default, metadata=field.metadata)


def _add_what_is_free(group: argparse._ArgumentGroup, spec: FlagSpec, flags: Container[str], dests: set[str]) -> None:
    """Add the spellings of `spec` that the parser does not have yet; it has `flags` and the attributes `dests`."""
    free = tuple(flag for flag in spec.flags if flag not in flags)
    if not free:
        return
    known = spec.dest in dests
    dests.add(spec.dest)
    if known or spec.metadata.get("other_spelling"):
        spec = dataclasses.replace(spec, default=argparse.SUPPRESS)
    if spec.action == "bool" and any("--no-" + flag.removeprefix("--") in flags for flag in free):
        spec = dataclasses.replace(spec, action="store_true")
    spec = dataclasses.replace(spec, flags=free)
    if spec.metadata.get("one_or_more"):
        group.add_argument(
            *spec.flags, dest=spec.dest, action=_OneOrMore, nargs="+", type=VALUE_TYPES[spec.type],
            choices=list(spec.choices) if spec.choices else None, default=spec.default, help=spec.help.replace("%", "%%"),
        )  # fmt: skip
    else:
        add_flag(group, spec)


class _OneOrMore(argparse.Action):
    """Stores a single word as a value, several words as a list, for fields in which Megatron gives both a meaning."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(parser, "note_given"):
            parser.note_given(self.dest, option_string or "", values)
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add one group for each installed package, without flags whose spelling one of our own has."""
    for package, title in REFLECTED:
        specs = load_surface(package)
        if specs is None:
            parser.set_defaults(**dict.fromkeys(READ[package]))
            continue
        own = taken(parser).flags
        group = parser.add_argument_group(title)
        for spec in specs:
            if own.isdisjoint(spec.flags):
                add_flag(group, spec)
