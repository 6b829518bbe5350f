"""`--model-name` chooses the conversion of weights from a closed list; training ranks would find out at their first push."""

import argparse
import re
from collections.abc import Iterator

from slime.arguments.hf_config.training_limits import TRAINED_MODEL_TYPES
from slime.arguments.rules import Rule

# What a name without punctuation contains, the first that fits.
_FAMILIES = (
    "minimaxm2", "glm4moelite", "deepseekv3", "deepseekv32", "glmmoedsa", "kimi", "glm4moe", "glm4", "qwen3next", "qwen35",
    "qwen3vl", "qwen2moe", "qwen3moe", "qwen2", "qwen3", "llama", "mimo",
)  # fmt: skip


def known_family(args: argparse.Namespace) -> Iterator[str]:
    if args.model_name is not None and args.has_trainer and _family(args.model_name) is None:
        yield f"--model-name {args.model_name}: no such family; give one of {', '.join(sorted(_FAMILIES))}, or drop the flag"


def built_family(args: argparse.Namespace) -> Iterator[str]:
    if args.model_name is None or not args.has_trainer:
        return
    family = _family(args.model_name)
    if family is not None and family not in {name.replace("_", "") for name in TRAINED_MODEL_TYPES}:
        yield (
            f"--model-name {args.model_name}: the conversion of {family} is not built yet; {' or '.join(TRAINED_MODEL_TYPES)} "
            "can be trained (--dry-run plans with it)"
        )


def _family(name: str) -> str | None:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((family for family in _FAMILIES if family in plain), None)


MODEL_NAME_RULES: tuple[Rule, ...] = (known_family,)
