"""The effective configuration of a run for its log: what differs from the defaults, and who said so."""

import argparse
import json
from typing import Any

from slime.observability.run_record import plain_arguments

# From the strongest claim of the user to the weakest; what stays at its default is not told.
_ORIGINS = ("command line", "YAML", "HF config", "derived")
_LONGEST_VALUE = 100
# Told by other names, or no settings.
_LEFT_OUT = frozenset({"custom_config", "values_before_actor_overrides", "plan_notes"})


def effective_configuration(args: argparse.Namespace) -> str:
    """One block of text with a line per origin: `command line: lr 1e-05, …`. Secrets are redacted."""
    origins = getattr(args, "origins", {})
    values = {
        name: value for name, value in plain_arguments(args).items() if name not in _LEFT_OUT and value not in ([], {})
    }
    lines = []
    for origin in _ORIGINS:
        told = [f"{name} {_short(value)}" for name, value in values.items() if origins.get(name) == origin]
        if told:
            lines.append(f"  {origin}: {', '.join(told)}")
    return "\n".join(["configuration (what differs from the defaults):", *lines])


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
