"""Several names for one setting: brought together before anything is derived from it."""

import argparse
from typing import Any

from slime.arguments.origins import Origin

_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations")


def resolve_aliases(args: argparse.Namespace) -> list[str]:
    """Write each alias into the setting that it means; returns violations of aliases that contradict it."""
    if args.dry_run_json is not None:
        args.dry_run = True
    if args.use_gated_attention:
        _type(args, "attention_output_gate", True)
    if args.gradient_checkpointing and args.train_backend == "megatron":
        _recompute_every_layer(args)
    return _tis_threshold(args)


def _recompute_every_layer(args: argparse.Namespace) -> None:
    if args.typed_flags.isdisjoint(_RECOMPUTATION):
        args.recompute_granularity, args.recompute_method, args.recompute_num_layers = "full", "uniform", 1


def _tis_threshold(args: argparse.Namespace) -> list[str]:
    if args.tis_threshold is None:
        return []
    if "tis_clip" in args.typed_flags and args.tis_clip != args.tis_threshold:
        return [
            f"--tis-threshold {args.tis_threshold} and --tis-clip {args.tis_clip} are two names of one bound with two "
            "values; keep one"
        ]
    _type(args, "tis_clip", args.tis_threshold)
    return []


def _type(args: argparse.Namespace, name: str, value: Any) -> None:
    """Set `name` as if it had been given in place of its alias, so that nothing derived overrules it."""
    if name not in args.typed_flags:
        # The alias is what was typed, so messages are about that.
        args.origins[name] = Origin.DERIVED
    setattr(args, name, value)
    args.typed_flags.add(name)
