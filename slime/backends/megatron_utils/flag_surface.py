"""Describes the configuration dataclasses of the installed Megatron-Core as command-line flags.

Run as `python -m slime.backends.megatron_utils.flag_surface` in a child process: it imports Megatron-Core and prints the
description as JSON on its last line. Everything comes from the dataclasses themselves: name, type, default, and the first
sentence of the text below each field. A new version brings its new fields without a line here.

A field becomes a flag unless no word on a command line could be its value; `EXCLUDED` and `unrepresentable` say why not.

If the installed megatron-core has Megatron-LM's own parser (`megatron.training`), its flags follow: they are accepted so that
users' code can read them. Flags that the dataclasses describe are left out. So are flags that mean nothing here, for which an
explanation exists already.
"""

from __future__ import annotations

import argparse
import ast
import collections.abc
import dataclasses
import enum
import importlib.util
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from slime.arguments.surface import FlagSpec
from slime.arguments.unknown_flags import NOT_FOR_THIS, looked_up

# Fields that are no flags although their type would allow it.
EXCLUDED: dict[str, str] = {
    "params_dtype": "follows --bf16 and --fp16",
    "pipeline_dtype": "follows --bf16 and --fp16",
    "mtp_standalone": "Megatron sets it from the pipeline layout",
}

# The spellings of torch's dtypes on the command line.
DTYPE_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}

_LONGEST_HELP = 160


def config_classes() -> tuple[type, ...]:
    """The dataclasses whose fields are flags; where two define a field, the first one's default holds.

    The dataclass of Megatron's checkpointing is not among them: it holds the versions of the file format alone, and those
    are read from a checkpoint, never chosen.
    """
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    return TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig


def flag_specs() -> list[FlagSpec]:
    """One description per spelling and meaning; those of one field share their `dest`, the field's name.

    `metadata`: `field`, `configs` (names of the dataclasses that have it), and `other_spelling` where the flag sets the
    same attribute as the one before it.
    """
    return [spec for described in _fields().values() for spec in _specs_of(**described)]


def unrepresentable() -> dict[str, str]:
    """The constructor fields that are no flags, with the reason of each."""
    return {
        name: EXCLUDED.get(name) or f"no word on a command line is a {described['annotation']}"
        for name, described in _fields().items()
        if _value_form(**described) is None
    }


def _fields() -> dict[str, dict[str, Any]]:
    """Per field name: the dataclass field, its resolved annotation, its text, and the dataclasses that have it."""
    found: dict[str, dict[str, Any]] = {}
    for config in config_classes():
        hints, texts = typing.get_type_hints(config), _attribute_texts(config)
        for field in dataclasses.fields(config):
            if field.init and field.name in found:
                found[field.name]["configs"].append(config.__name__)
            elif field.init:
                found[field.name] = {
                    "field": field, "annotation": hints[field.name], "text": texts.get(field.name, ""),
                    "configs": [config.__name__],
                }  # fmt: skip
    return found


def _specs_of(field: dataclasses.Field, annotation: Any, text: str, configs: list[str]) -> Iterator[FlagSpec]:
    form = _value_form(field, annotation)
    if form is None:
        return
    plain = "--" + field.name.replace("_", "-")
    # Megatron-Core's notes for Megatron-LM's parser: other spellings, or another default.
    meta = field.metadata.get("argparse_meta", {})
    default = _plain(meta.get("default", _default(field)))
    historical = tuple(meta.get("arg_names", ()))
    metadata = {"field": field.name, "configs": configs, **form.pop("metadata", {})}
    common = {"dest": field.name, "default": default, "help": _first_sentence(text) or f"Megatron's {field.name}"}
    if annotation is bool or form.get("action") == "bool":
        yield from _switches(plain, historical, common, metadata)
    else:
        flags = tuple(dict.fromkeys((*historical, plain)))
        yield FlagSpec(flags=flags, metadata=metadata, **common, **form)


def _switches(
    plain: str, historical: tuple[str, ...], common: dict[str, Any], metadata: dict[str, Any]
) -> Iterator[FlagSpec]:
    if not common["default"]:
        flags = tuple(dict.fromkeys((*historical, plain)))
        yield FlagSpec(flags=flags, action="store_true", metadata=metadata, **{**common, "default": False})
        return
    yield FlagSpec(flags=(plain,), action="bool", metadata=metadata, **common)
    # Megatron-LM's parser spells switching off like this.
    off = historical or (plain.replace("--", "--disable-", 1),)
    names = tuple(name for name in off if name != plain.replace("--", "--no-", 1))
    if names:
        other = {**common, "help": f"same as {plain.replace('--', '--no-', 1)}"}
        yield FlagSpec(flags=names, action="store_false", metadata={**metadata, "other_spelling": True}, **other)


def _value_form(field: dataclasses.Field, annotation: Any, **_: Any) -> dict[str, Any] | None:
    """action, type, nargs and choices of the flag; None when there is no command-line form."""
    if field.name in EXCLUDED or field.name.startswith("_"):
        return None
    kinds = _alternatives(annotation)
    if bool in kinds:
        return {"action": "bool"}
    if _is_dtype(kinds):
        return {"choices": tuple(DTYPE_NAMES.values())}
    enums = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, enum.Enum)]
    lists = [kind for kind in kinds if typing.get_origin(kind) in (list, collections.abc.Sequence)]
    if int in kinds and lists:
        return {"type": "layer_pattern"}
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return {"type": "integers"}
    if lists:
        return _list_form(kinds, lists, enums)
    if enums:
        return {"choices": tuple(member.name for member in enums[0])}
    return _scalar_form(kinds)


def _list_form(kinds: list[Any], lists: list[Any], enums: list[type[enum.Enum]]) -> dict[str, Any] | None:
    items = [item for kind in lists for item in typing.get_args(kind)]
    if int in items or float in items or str in items:
        kind = next(kind for kind in (int, float, str) if kind in items)
        either = any(scalar in kinds for scalar in (int, float, str)) or bool(enums)
        return {"type": kind.__name__, "nargs": "+", "metadata": {"one_or_more": either}}
    return None


def _scalar_form(kinds: list[Any]) -> dict[str, Any] | None:
    literals = [value for kind in kinds if typing.get_origin(kind) is typing.Literal for value in typing.get_args(kind)]
    if literals:
        return {"type": type(literals[0]).__name__, "choices": tuple(literals)}
    for kind in (float, int, str):
        if kind in kinds:
            return {"type": kind.__name__}
    return None


def _alternatives(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    return [annotation]


def _is_dtype(kinds: list[Any]) -> bool:
    import torch

    return torch.dtype in kinds


def _default(field: dataclasses.Field) -> Any:
    # Some fields say themselves that their flag has another default than their constructor.
    described = field.metadata.get("argparse_meta", {})
    if "default" in described:
        return described["default"]
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _plain(value: Any) -> Any:
    """The default as it could be typed: dtypes and enums by name."""
    import torch

    if isinstance(value, torch.dtype):
        return DTYPE_NAMES[str(value).removeprefix("torch.")]
    return value.name if isinstance(value, enum.Enum) else value


def _attribute_texts(config: type) -> dict[str, str]:
    """The string below each field, of the class and the classes that it is derived from."""
    texts: dict[str, str] = {}
    for base in reversed(config.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(inspect.cleandoc(inspect.getsource(base))).body[0].body
        for field, text in zip(body, body[1:], strict=False):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                texts[field.target.id] = str(text.value.value)
    return texts


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    sentence = re.split(r"(?<=[a-z0-9)\"'])\. (?=[A-Z])", flat, maxsplit=1)[0].rstrip(".")
    if len(sentence) <= _LONGEST_HELP:
        return sentence
    return sentence[:_LONGEST_HELP].rsplit(" ", 1)[0] + " ..."


_ACTIONS = {"_StoreTrueAction": "store_true", "_StoreFalseAction": "store_false", "BooleanOptionalAction": "bool"}
_PATTERNS = ("moe_freq_type", "la_freq_type", "no_rope_freq_type")


def megatron_lm_specs(known: Iterable[FlagSpec]) -> Iterator[FlagSpec]:
    """One description per option that `known` lacks; `metadata["megatron_lm"]` is True."""
    if importlib.util.find_spec("megatron.training") is None:
        return
    try:
        from megatron.training.arguments import add_megatron_arguments
    except ImportError as error:
        print(f"the flags of megatron.training are left out, it cannot be imported: {error}", file=sys.stderr)
        return
    known = list(known)
    dests, flags = {spec.dest for spec in known}, {flag for spec in known for flag in spec.flags}
    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        free = [flag for flag in action.option_strings if flag not in flags and not looked_up(NOT_FOR_THIS, flag)]
        if free and action.dest not in dests and action.dest != "help":
            yield _spec_of_action(action, tuple(free))


def _spec_of_action(action: argparse.Action, flags: tuple[str, ...]) -> FlagSpec:
    kind = getattr(action.type, "__name__", "str")
    positive = tuple(flag for flag in flags if not flag.startswith("--no-"))
    is_either = type(action).__name__ == "BooleanOptionalAction"
    return FlagSpec(
        flags=positive if is_either else flags,
        dest=action.dest,
        action=_ACTIONS.get(type(action).__name__, "store"),
        type="layer_pattern" if kind in _PATTERNS else kind if kind in ("int", "float") else "str",
        nargs=None if action.nargs == 0 else action.nargs,
        choices=None if action.choices is None else tuple(_plain_of_parser(choice) for choice in action.choices),
        default=_plain_of_parser(action.default),
        help=" ".join((action.help or action.dest).split()).replace("%%", "%"),
        metadata={"megatron_lm": True},
    )


def _plain_of_parser(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    try:
        return json.loads(json.dumps(value))
    except TypeError:
        return str(value)


def main() -> None:
    """Print the description as JSON on one line."""
    specs = flag_specs()
    specs += megatron_lm_specs(specs)
    print(json.dumps([dataclasses.asdict(spec) for spec in specs]))


if __name__ == "__main__":
    main()
