"""`--custom-config-path`: a YAML file merged into the arguments as if its lines were flags.

A key that names a flag is converted by that flag and wins over the command line. What names no flag is a value for the
user's own functions: below `custom:`, or beside the flags when the run sets a plug-in path. Everything else is a slip.
"""

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from slime.arguments.config_files.flag_names import FlagNames, attribute_name
from slime.arguments.flag import flag_of
from slime.arguments.origins import Origin
from slime.arguments.paths import MANAGER_PLUG_INS, RANK_PLUG_INS
from slime.arguments.unknown_flags import SAME, why_unknown
from slime.arguments.violations import Violation, about
from slime.observability.run_record import redacted, shown
from slime.utils.errors import UserError
from slime.utils.run_values import RunValues
from slime.utils.yaml_file import YamlMapping, load_yaml, plain

logger = logging.getLogger(__name__)

FLAG = "--custom-config-path"
CUSTOM = "custom"
# Attributes that no flag sets: books about the arguments, and what a run puts there after they were checked.
RESERVED = frozenset({"origins", "typed_flags", "asynchronous", "custom_config", "role_overrides", CUSTOM, "role", "plan_notes",
    *RunValues.__annotations__})  # fmt: skip


def apply_custom_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Merge the file of `--custom-config-path` into `args`; nothing without one.

    `args.custom_config` holds afterwards the accepted values that belong to no flag.

    Returns:
        One message per wrong line.
    """
    args.custom_config = {}
    if args.custom_config_path is None:
        return []
    try:
        mapping = load_yaml(args.custom_config_path, FLAG)
    except UserError as error:
        return [str(error)]
    names = FlagNames(parser)
    values, custom, violations = read_flag_values(mapping, names, plug_ins_set=sets_plug_in(args, mapping, names))
    if "custom_config_path" in values:
        key, _ = values.pop("custom_config_path")
        violations.append(f"{mapping.where(key)}: a file cannot name another {FLAG}")
    for dest, (key, value) in values.items():
        set_from_file(args, dest, value, mapping.where(key))
    for name, value in custom.items():
        setattr(args, name, value)
    args.custom_config = custom
    return violations


def overruled_values(args: argparse.Namespace) -> Iterator[Violation]:
    """A violation for every value of the user's own whose name the run uses itself; to be asked after derivation."""
    for name, value in args.custom_config.items():
        if vars(args).get(name, value) != value:
            of_actor = name in args.role_overrides.get("actor", {})
            place = args.megatron_config_path if of_actor else args.custom_config_path
            taken = f"{place}: {name} is set by the run itself"
            yield from about([f"{taken}; take another name in {shown('custom_config', {name: value})}"], FLAG)


def set_from_file(args: argparse.Namespace, dest: str, value: Any, where: str) -> None:
    """Give the flag `dest` the value of a file; a warning shows both values when the command line had another."""
    typed = args.origins.get(dest) is Origin.COMMAND_LINE
    if typed and vars(args)[dest] != value:
        both = (redacted({dest: each})[dest] for each in (value, vars(args)[dest]))
        logger.warning("%s: %s %s replaces %s of the command line", where, dest, *both)
    setattr(args, dest, value)
    # Written here too, because a value that equals the default is no change and still is the user's.
    args.origins[dest] = Origin.YAML
    args.typed_flags.add(dest)


def read_flag_values(
    mapping: YamlMapping, names: FlagNames, *, plug_ins_set: bool
) -> tuple[dict[str, tuple[str, Any]], dict[str, Any], list[str]]:
    """Sort the entries of `mapping` into flags and values of the user's own.

    Returns:
        Attribute → (key in the file, converted value); own names → values; one message per wrong line.
    """
    values: dict[str, tuple[str, Any]] = {}
    custom: dict[str, Any] = {}
    violations: list[str] = []
    for key in mapping:
        flag = names.find(key)
        try:
            if attribute_name(key) == CUSTOM and flag is None:
                _read_custom(mapping, key, names, custom, violations)
            elif flag is None:
                _accept_unknown(mapping, key, names, custom, plug_ins_set)
                custom[attribute_name(key)] = plain(mapping[key])
            elif flag.dest in values:
                first = values[flag.dest][0]
                raise UserError(f"{mapping.where(key)}: {key} and {first} ({mapping.where(first)}) set the same value")
            else:
                values[flag.dest] = (key, names.convert(flag, mapping, key))
        except UserError as error:
            violations.append(str(error))
    return values, custom, violations


def sets_plug_in(args: argparse.Namespace, mapping: YamlMapping, names: FlagNames) -> bool:
    """Whether the command line or the file names a function of the user, who may then want values of his own."""
    plug_ins = {*MANAGER_PLUG_INS, *RANK_PLUG_INS}
    in_file = {flag.dest for key in mapping if mapping[key] and (flag := names.find(key)) is not None}
    return bool(plug_ins & (in_file | args.typed_flags))


def _accept_unknown(mapping: YamlMapping, key: str, names: FlagNames, custom: dict, plug_ins_set: bool) -> None:
    flag = flag_of(attribute_name(key))
    known = why_unknown(flag)
    if known is not None:
        raise UserError(f"{mapping.where(key)}: {key} {known.message} (a value of your own: {CUSTOM}:)")
    meant = [attribute_name(other) for other in SAME.get(flag, ())] or [names.near(key)]
    if meant != [None]:
        raise UserError(
            f"{mapping.where(key)}: unknown key {key}: did you mean {' or '.join(meant)}? (a value of your own: {CUSTOM}:)"
        )
    _check_name(mapping, key, custom)
    if not plug_ins_set:
        similar = names.similar(key)
        hint = f"did you mean {' or '.join(similar)}? " if similar else ""
        raise UserError(f"{mapping.where(key)}: unknown key {key}: {hint}A value of your own goes below `{CUSTOM}:`")


def _read_custom(
    mapping: YamlMapping, key: str, names: FlagNames, custom: dict[str, Any], violations: list[str]
) -> None:
    own = mapping[key]
    if not isinstance(own, YamlMapping):
        raise UserError(f"{mapping.where(key)}: {CUSTOM}: expected `name: value` lines below it, not {shown(key, own)}")
    for name in own:
        flag = names.find(name)
        try:
            if flag is not None:
                raise UserError(f"{own.where(name)}: {name} is the flag {flag.option}: move it out of `{CUSTOM}:`")
            _check_name(own, name, custom)
            custom[attribute_name(name)] = plain(own[name])
        except UserError as error:
            violations.append(str(error))


def _check_name(mapping: YamlMapping, key: str, custom: dict) -> None:
    name = attribute_name(key)
    if name in custom:
        raise UserError(f"{mapping.where(key)}: {key}: a second line sets {name}; keep one")
    if name in RESERVED or name.startswith("_") or not name.isidentifier():
        raise UserError(f"{mapping.where(key)}: {key!r} cannot be the name of a value of your own; take another")
