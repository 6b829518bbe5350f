"""`--megatron-config-path`: arguments that differ between the actor and the critic.

    megatron:
      - {name: actor, role: actor, overrides: {lr: 1.0e-6}}
      - {name: critic, role: critic, overrides: {lr: 1.0e-5, save: /checkpoints/critic}}

The run's arguments are those of the actor, so its overrides are merged into them like lines of `--custom-config-path`,
before anything is derived or checked. The critic's stay aside until `role_args` builds its arguments.

The overrides of a critic may say how it is trained. What it is trained on, and where, is the run's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from slime.algorithms.estimators import estimator, names_of_estimators
from slime.arguments.bounds import replace_wrong_sizes
from slime.arguments.config_files.custom_config import read_flag_values, set_from_file, sets_plug_in
from slime.arguments.config_files.yaml_file import FlagNames, YamlMapping, attribute_name, load_yaml, near_name
from slime.arguments.help_text import groups_of
from slime.arguments.paths import PATHS
from slime.arguments.sizes import MODEL_PARALLEL, divides_the_ranks, model_parallel_size
from slime.observability.run_record import shown
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

FLAG = "--megatron-config-path"
ROLES = (ACTOR, CRITIC) = ("actor", "critic")
_ENTRY_KEYS = ("name", "role", "overrides", "args", "num_nodes", "num_gpus_per_node")
_IGNORED_KEYS = ("num_nodes", "num_gpus_per_node")
_FILE_FLAGS = ("custom_config_path", "megatron_config_path")

# What a critic does not take over from the actor: it has no reference and no teacher, its output layer is a value head
# of its own, and its parameters are kept on the host while the actor works.
CRITIC_DEFAULTS: dict[str, Any] = {
    "kl_coef": 0.0,
    "use_opd": False,
    "custom_advantage_function_path": None,
    "untie_embeddings_and_output_weights": True,
    "disable_param_buffer_cpu_backup": False,
}


def apply_role_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Merge the actor's overrides into `args`; `args.role_overrides` holds those of both roles.

    Returns:
        One message per wrong line.
    """
    args.role_overrides, violations = load_role_configs(args, parser)
    overrides = args.role_overrides.get("actor", {})
    # The critic inherits what the run has, not what its actor was given.
    args.values_before_actor_overrides = {name: getattr(args, name, None) for name in overrides}
    for name, value in overrides.items():
        set_from_file(args, name, value, f"{place_in(args.megatron_config_path, 'actor', name)}: role actor")
    if "critic" in args.role_overrides and not estimator(args.advantage_estimator).needs_critic:
        logger.warning(
            "%s: the run has no critic (--advantage-estimator %s has), its entry has no effect",
            FLAG,
            names_of_estimators("needs_critic"),
        )
    return violations


def load_role_configs(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The overrides per role in the file of `--megatron-config-path`, converted by their flags.

    Returns:
        Role → attribute → value, with the values of the user's own among them; one message per wrong line.
    """
    path = getattr(args, "megatron_config_path", None)
    if path is None:
        return {}, []
    roles: dict[str, dict[str, Any]] = {}
    violations: list[str] = []
    names = FlagNames(parser)
    try:
        entries = _entries(load_yaml(path, FLAG), violations)
    except UserError as error:
        return {}, [str(error)]
    for role, overrides in entries:
        _drop_ignored(overrides)
        plug_ins_set = sets_plug_in(args, overrides, names)
        values, custom, wrong = read_flag_values(overrides, names, plug_ins_set=plug_ins_set)
        violations += wrong
        for dest in _FILE_FLAGS:
            if dest in values:
                violations.append(f"{overrides.where(values.pop(dest)[0])}: a role cannot name another file")
        if role == "critic":
            violations += check_flags(overrides, {dest: key for dest, (key, _) in values.items()}, parser)
        flags = {dest: _absolute(dest, value) for dest, (_, value) in values.items()}
        roles[role] = {**flags, **custom}
        if roles[role]:
            logger.info("%s, role %s: %s", path, role, ", ".join(roles[role]))
    return roles, violations


def role_args(args: argparse.Namespace, role: str) -> argparse.Namespace:
    """The arguments of one role, as a copy: the actor's are the run's, the critic's as the module says.

    Raises:
        ValueError: no such role.
    """
    if role not in ROLES:
        raise ValueError(f"role {role!r}: it must be one of {', '.join(ROLES)}")
    result = copy.copy(args)
    if role == "critic":
        inherited = getattr(args, "values_before_actor_overrides", {})
        overrides = getattr(args, "role_overrides", {}).get("critic", {})
        for name, value in {**inherited, **CRITIC_DEFAULTS, **overrides}.items():
            setattr(result, name, value)
    return result


def critic_values(args: argparse.Namespace) -> Iterator[str]:
    """A message for every size in the overrides of the critic that cannot be; to be asked after derivation."""
    if getattr(args, "role_overrides", {}).get("critic"):
        place = functools.partial(place_in, args.megatron_config_path, "critic")
        yield from size_violations(role_args(args, "critic"), args, place)


def place_in(path: str, role: str, *names: str) -> str:
    """`file:line` of the first override of `role` that sets one of the attributes, else of its overrides.

    `path`: a file that `load_role_configs` could read.
    """
    overrides = dict(_entries(load_yaml(path, FLAG), []))[role]
    return overrides.where(next((key for key in overrides if attribute_name(key) in names), None))


def _absolute(name: str, value: Any) -> Any:
    # The processes that use a role's paths do not run where the command was typed.
    return os.path.abspath(value) if name in PATHS and value is not None else value


def _entries(mapping: YamlMapping, violations: list[str]) -> list[tuple[str, YamlMapping]]:
    """(role, its overrides) of every entry that makes sense; what does not goes to `violations`."""
    found: dict[str, YamlMapping] = {}
    for key in mapping:
        if key not in ("megatron", "critic"):
            hint = near_name(key, ("megatron", "critic")) or "megatron"
            violations.append(f"{mapping.where(key)}: unknown key {key}: did you mean {hint}?")
    if "critic" in mapping:
        _add_old_form(mapping, found)
    listed = mapping.get("megatron", [])
    if not isinstance(listed, list):
        raise UserError(f"{mapping.where('megatron')}: megatron: expected a list of `{{name, role, overrides}}`")
    for entry in listed:
        if not isinstance(entry, YamlMapping):
            shown_entry = shown("megatron", entry)
            raise UserError(
                f"{mapping.where('megatron')}: megatron: {shown_entry} is no entry; write `{{role: actor, …}}`"
            )
        try:
            role = _role_of(entry)
            if role in found:
                raise UserError(
                    f"{entry.where()}: a second entry for the role {role}; the first is {found[role].where()}"
                )
            found[role] = _overrides_of(entry)
        except UserError as error:
            violations.append(str(error))
    return list(found.items())


def _add_old_form(mapping: YamlMapping, found: dict[str, YamlMapping]) -> None:
    """`critic: {lr: …}` at the top, from before roles were listed."""
    overrides = mapping["critic"]
    if not isinstance(overrides, YamlMapping):
        raise UserError(f"{mapping.where('critic')}: critic: expected `name: value` lines below it")
    if {attribute_name(key) for key in overrides} & {"overrides", "args"}:
        overrides = _overrides_of(overrides)
    logger.warning("%s: `critic:` is the old form; list it as `megatron: [{role: critic, …}]`", mapping.where("critic"))
    found["critic"] = overrides


def _role_of(entry: YamlMapping) -> str:
    unknown = [key for key in entry if attribute_name(key) not in _ENTRY_KEYS]
    if unknown:
        key = unknown[0]
        hint = near_name(attribute_name(key), _ENTRY_KEYS)
        raise UserError(
            f"{entry.where(key)}: unknown key {key}: "
            + (
                f"did you mean {hint}?"
                if hint
                else f"flags of the role go below `overrides:`; known: {', '.join(_ENTRY_KEYS)}"
            )
        )
    _drop_ignored(entry)
    role = entry.get("role", entry.get("name"))
    if role not in ROLES:
        where = entry.where("role" if "role" in entry else None)
        raise UserError(f"{where}: role {role!r}: it must be one of {', '.join(ROLES)}")
    return role


def _drop_ignored(mapping: YamlMapping) -> None:
    for key in [key for key in mapping if attribute_name(key) in _IGNORED_KEYS]:
        logger.warning("%s: %s has no effect: roles share the GPUs of the actor", mapping.where(key), key)
        del mapping[key]


def _overrides_of(entry: YamlMapping) -> YamlMapping:
    given = [key for key in entry if key in ("overrides", "args")]
    if len(given) > 1:
        raise UserError(f"{entry.where(given[1])}: `args` is another spelling of `overrides`; keep one")
    if not given or entry[given[0]] is None:
        return YamlMapping(entry.path, entry.line)
    overrides = entry[given[0]]
    if not isinstance(overrides, YamlMapping):
        raise UserError(
            f"{entry.where(given[0])}: {given[0]}: expected `name: value` lines below it, not "
            f"{shown(given[0], overrides)}"
        )
    return overrides


# Groups of flags that a run has once, for actor and critic together, and the flags in them that a critic may have alone.
_GROUPS_OF_THE_RUN = (
    "configuration", "cluster and placement", "rollout", "data and batches", "evaluation", "reward", "fault tolerance",
    "network and buffer service", "logging and tracking", "debugging", "SGLang", "Router",
)  # fmt: skip
_OF_A_CRITIC_TOO = frozenset(
    {"hf_checkpoint", "model_name", "micro_batch_size", "max_tokens_per_gpu", "data_pad_size_multiplier"}
)


def check_flags(overrides: YamlMapping, keys: dict[str, str], parser: argparse.ArgumentParser) -> Iterator[str]:
    """A message for every override of a flag that a critic cannot have for itself. `keys`: attribute → key in the file."""
    of_the_run = {
        action.dest
        for title, actions in groups_of(parser)
        if title.startswith(_GROUPS_OF_THE_RUN)
        for action in actions
    }
    for name in keys.keys() & (of_the_run - _OF_A_CRITIC_TOO):
        key = keys[name]
        yield f"{overrides.where(key)}: {key} is the same for actor and critic; give it on the command line"


def size_violations(critic: argparse.Namespace, run: argparse.Namespace, place: Callable[..., str]) -> Iterator[str]:
    """A message for every size of the critic that cannot be.

    Args:
        critic: a copy, which holds possible sizes afterwards.
        place: `file:line` of the first override of the critic that sets one of the attributes.
    """
    critic.typed_flags = set(critic.typed_flags)
    for name, message in replace_wrong_sizes(critic).items():
        yield f"{place(name)}: role critic: {message}"
    own = any(getattr(critic, name) != getattr(run, name) for name in MODEL_PARALLEL)
    if own and not divides_the_ranks(critic):
        yield (
            f"{place(*MODEL_PARALLEL)}: role critic: {' x '.join(MODEL_PARALLEL)} = {model_parallel_size(critic)} must divide "
            f"the {critic.world_size} training ranks, which it shares with the actor; 1 for each would do"
        )
