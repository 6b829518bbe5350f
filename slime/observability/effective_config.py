"""The effective configuration of a run for its log: what its user set, and what follows from it that he should check."""

import argparse
import json
from typing import Any

from slime.observability.run_record import plain_arguments

# What the user said. What the model's config.json and the derivation add fills a screen, and stands in args.json.
_SAID = ("command line", "YAML")
_FOLLOWS = ("HF config", "derived")
# The results of the derivation that decide what a run computes; shown where they were not typed.
_CHECKED = (
    ("params_dtype_name", "parameters in {}"),
    ("data_parallel_size", "data-parallel size {}"),
    ("rollout_num_engines", "{} engines"),
    ("global_batch_size", "global batch size {}"),
    ("num_steps_per_rollout", "optimizer steps per rollout {}"),
)
_LONGEST_VALUE = 100
# Told by other names, or no settings.
_LEFT_OUT = frozenset({"custom_config", "values_before_actor_overrides", "plan_notes"})


def effective_configuration(args: argparse.Namespace) -> str:
    """A few lines: `command line: lr 1e-05, …`, `YAML: …`, and what was derived from them. Secrets are redacted."""
    origins, values = _told(args)
    derived = [
        text.format(values[name]) for name, text in _CHECKED if origins.get(name) == "derived" and name in values
    ]
    lines = [*_lines(_SAID, origins, values), *([f"  so: {', '.join(derived)}"] if derived else [])]
    return "\n".join(["configuration (what differs from the defaults):", *lines])


def derived_configuration(args: argparse.Namespace) -> str:
    """Every value that the model's config.json and the derivation gave: `derived: world_size 8, …`. Secrets are redacted."""
    return "\n".join(["configuration (what follows):", *_lines(_FOLLOWS, *_told(args))])


def _told(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    values = plain_arguments(args).items()
    shown = {name: value for name, value in values if name not in _LEFT_OUT and value not in ([], {})}
    return getattr(args, "origins", {}), shown


def _lines(chosen: tuple[str, ...], origins: dict[str, str], values: dict[str, Any]) -> list[str]:
    told = {
        origin: [f"{name} {_short(value)}" for name, value in values.items() if origins.get(name) == origin]
        for origin in chosen
    }
    return [f"  {origin}: {', '.join(settings)}" for origin, settings in told.items() if settings]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
