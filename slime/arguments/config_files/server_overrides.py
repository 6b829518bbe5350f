"""`overrides:` of a group of engines: every server argument is checked and converted like the flag of its name."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from slime.arguments.config_files.yaml_file import YamlMapping, plain
from slime.arguments.config_files.yaml_flags import FlagNames, attribute_name
from slime.arguments.plug_ins import flag_of
from slime.arguments.retired import DERIVED
from slime.arguments.server_flags import REFUSED, share_problem
from slime.arguments.surface import add_flag, load_surface
from slime.utils.errors import UserError

PREFIX = "sglang_"
_TENSOR_PARALLEL = "it follows from num_gpus_per_engine and pp_size; drop it"


@functools.cache
def server_flags() -> FlagNames | None:
    """The flags of the installed server; None where there is none, and any override may be right."""
    specs = load_surface("sglang")
    if specs is None:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for spec in specs:
        add_flag(parser, spec)
    return FlagNames(parser)


def read_overrides(overrides: YamlMapping, flags: FlagNames | None) -> tuple[dict[str, Any], list[str]]:
    """The server arguments by field name, and one message per wrong line. `model_path` stays for the model to judge."""
    values: dict[str, Any] = {}
    violations: list[str] = []
    for key in overrides:
        name = attribute_name(key).removeprefix(PREFIX)
        try:
            if flags is None or name == "model_path":
                values[name] = plain(overrides[key])
            else:
                field, value = _converted(overrides, key, name, flags)
                values[field] = value
        except UserError as error:
            violations.append(str(error))
    return values, violations


def _converted(overrides: YamlMapping, key: str, name: str, flags: FlagNames) -> tuple[str, Any]:
    flag = flags.find(PREFIX + name)
    dest = PREFIX + name if flag is None else flag.dest
    field = dest.removeprefix(PREFIX)
    follows = DERIVED.get(flag_of(dest))
    reason = _TENSOR_PARALLEL if field == "tp_size" else REFUSED.get(dest) or (follows and f"{follows}; drop it")
    if reason is not None:
        raise UserError(f"{overrides.where(key)}: {key} is set by the run: {reason}")
    if flag is None:
        near = flags.near(PREFIX + name)
        hint = (
            f"did you mean {near.removeprefix(PREFIX)}?" if near else "`train.py --help-grep sglang` shows all of them"
        )
        raise UserError(f"{overrides.where(key)}: unknown server argument {key}: {hint}")
    value = flags.convert(flag, overrides, key)
    problem = share_problem(value) if field == "mem_fraction_static" else None
    if problem is not None:
        raise UserError(f"{overrides.where(key)}: {key} {value}: {problem}")
    return field, value
