"""Filling `args` from the config and comparing the two; what differs is shown in one table."""

import argparse
from collections.abc import Callable
from typing import Any

from slime.arguments.hf_config.families import family_of, model_args_from_hf
from slime.arguments.hf_config.flag_kinds import CHOICES, SUPPLEMENTS, shown, spelling
from slime.arguments.hf_config.training_limits import training_limits
from slime.arguments.model_shape import SHAPE_FLAGS, expert_layers
from slime.utils.errors import UserError

Config = dict[str, Any]
ModelArgs = dict[str, Any]


def apply_hf_config(args: argparse.Namespace, config: Config) -> list[str]:
    """Fill the model's flags that were not typed (with `--model-args-from-hf`: all of them) and compare all others.

    Under `--dry-run`, what only the training of the model lacks becomes a note in `args.plan_notes`.

    Returns:
        Violations; one table that starts with `hf_validate_args failed` when flags and config differ.
    """
    place = f"{args.hf_checkpoint}/config.json"
    try:
        family_of(config)
    except UserError as error:
        return _unknown_family(args, f"{place}: {error}")
    try:
        derived = model_args_from_hf(config)
    except UserError as error:
        return [f"{place}: {error}"]
    violations = [message for limit in training_limits(config, derived) for message in _noted(args, limit)]
    _fill(args, derived)
    return [*violations, *_differences(args, derived)]


def _unknown_family(args: argparse.Namespace, message: str) -> list[str]:
    described = all(getattr(args, name) for name in SHAPE_FLAGS)
    return _noted(args, f"{message} (planned from the typed flags alone)") if described else [message]


def _noted(args: argparse.Namespace, message: str) -> list[str]:
    """Under `--dry-run` the message becomes a note, else it is a violation."""
    if not args.dry_run:
        return [message]
    args.plan_notes = [*args.plan_notes, message]
    return []


def _fill(args: argparse.Namespace, derived: ModelArgs) -> None:
    for name, value in derived.items():
        if name not in args.typed_flags and (args.model_args_from_hf or name in SUPPLEMENTS):
            setattr(args, name, value)


def _differences(args: argparse.Namespace, derived: ModelArgs) -> list[str]:
    rows = [
        (spelling(name), shown(name, getattr(args, name)), shown(name, value))
        for name, value in derived.items()
        if name not in CHOICES and hasattr(args, name) and not _agree(args, derived, name)
    ]
    if not rows:
        return []
    hint = "drop the typed flags" if args.model_args_from_hf else "correct them, or give --model-args-from-hf"
    title = f"hf_validate_args failed: the flags and {args.hf_checkpoint}/config.json differ ({hint})"
    return [_table(title, ("flag", "typed or default", "config.json"), rows)]


def _table(title: str, header: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(3)]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])


def _agree(args: argparse.Namespace, derived: ModelArgs, name: str) -> bool:
    """Whether flag and config mean the same; an unset flag means what Megatron makes of it."""
    mine, theirs = getattr(args, name), derived[name]
    if mine == theirs:
        return True
    meaning = _MEANINGS.get(name)
    return meaning is not None and meaning(args, derived)


def _same_head_width(args: argparse.Namespace, derived: ModelArgs) -> bool:
    if derived["multi_latent_attention"]:
        return True  # the widths of latent attention have flags of their own
    width = args.kv_channels or (args.hidden_size or 0) // (args.num_attention_heads or 1)
    return width == derived["kv_channels"]


def _same_grouping(args: argparse.Namespace, derived: ModelArgs) -> bool:
    heads = args.num_attention_heads
    groups = (args.num_query_groups or heads) if args.group_query_attention else heads
    return groups == derived["num_query_groups"]


def _same_ffn_width(args: argparse.Namespace, derived: ModelArgs) -> bool:
    """A width that no layer has may differ."""
    return bool(derived["num_experts"]) and derived["moe_layer_freq"] == 1


def _same_expert_layers(args: argparse.Namespace, derived: ModelArgs) -> bool:
    try:
        mine = expert_layers(args.moe_layer_freq, args.num_layers or 0)
        return mine == expert_layers(derived["moe_layer_freq"], derived["num_layers"])
    except UserError:
        return False


def _same_expert_width(args: argparse.Namespace, derived: ModelArgs) -> bool:
    return (args.moe_ffn_hidden_size or args.ffn_hidden_size) == derived["moe_ffn_hidden_size"]


def _own_layers(args: argparse.Namespace, derived: ModelArgs) -> bool:
    """Whoever names a layer spec or a model provider answers for it."""
    return "spec" in args.typed_flags or args.custom_model_provider_path is not None


def _equal_or(name: str, neutral: Any) -> Callable[[argparse.Namespace, ModelArgs], bool]:
    """Unset means the neutral value."""
    return lambda args, derived: (getattr(args, name) or neutral) == (derived[name] or neutral)


_MEANINGS: dict[str, Callable[[argparse.Namespace, ModelArgs], bool]] = {
    "kv_channels": _same_head_width,
    "group_query_attention": _same_grouping,
    "num_query_groups": _same_grouping,
    "ffn_hidden_size": _same_ffn_width,
    "moe_layer_freq": _same_expert_layers,
    "moe_ffn_hidden_size": _same_expert_width,
    "moe_shared_expert_intermediate_size": _equal_or("moe_shared_expert_intermediate_size", 0),
    "moe_router_num_groups": _equal_or("moe_router_num_groups", 1),
    "moe_router_group_topk": _equal_or("moe_router_group_topk", 1),
    "moe_router_topk_scaling_factor": _equal_or("moe_router_topk_scaling_factor", 1.0),
    "num_experts": _equal_or("num_experts", 0),
    "add_qkv_bias": lambda args, derived: derived["multi_latent_attention"],
    "spec": _own_layers,
}
