"""`--eval-config`: evaluation sets from a file.

eval:                # or the same at the top
  defaults: {n_samples_per_eval_prompt: 2, temperature: 0.6}
  datasets:          # a list with names, or a mapping name → entry
    - {name: aime, path: data/aime.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16}
"""

import argparse
from collections.abc import Callable, Collection
from typing import Any

from slime.arguments.paths import PLUG_INS_OF_SETS, absolute, absolute_plug_in
from slime.utils.errors import UserError
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, eval_dataset_keys, value_problem
from slime.utils.yaml_file import YamlMapping, load_yaml, plain

FLAG = "--eval-config"


def load_eval_config(args: argparse.Namespace, path: str) -> tuple[list[EvalDatasetConfig], list[str]]:
    """The evaluation sets in the file, every value resolved, and one message per wrong line."""
    try:
        mapping = load_yaml(path, FLAG)
        defaults, entries = _parts(mapping)
    except UserError as error:
        return [], [str(error)]
    violations: list[str] = []
    keys = eval_dataset_keys()
    default_keys = [key for key in keys if key not in ("name", "path")]
    _check(defaults, default_keys, "eval.defaults", violations)
    # Without those that were refused just now, or every set would repeat it.
    usable = {
        key: value for key, value in plain(defaults).items() if key in default_keys and not value_problem(key, value)
    }
    configs: dict[str, EvalDatasetConfig] = {}
    lines: dict[str, str] = {}
    for name, entry in entries:
        found = len(violations)
        _check(entry, keys, f"evaluation set {name}", violations)
        if name in lines:
            violations.append(
                f"{entry.where()}: evaluation sets need different names; {name} also stands at {lines[name]}"
            )
        lines.setdefault(name, entry.where())
        if len(violations) > found or name in configs:
            continue
        try:
            values = {"name": name, **_with_absolute_paths(plain(entry))}
            (configs[name],) = build_eval_dataset_configs(args, [values], _with_absolute_paths(usable))
        except UserError as error:
            violations.append(f"{entry.where()}: {error}")
    return list(configs.values()), violations


def places_in(path: str | None) -> Callable[[str, str], str | None]:
    """(name of a set, key) → `file:line` of the value, in the set or in the defaults; None where the file has none, or null.

    Args:
        path: a file that `load_eval_config` could read; None: a run without one.
    """
    defaults, entries = _parts(load_yaml(path, FLAG)) if path is not None else ({}, [])
    sets = dict(entries)

    def place(name: str, key: str) -> str | None:
        owner = next((found for found in (sets.get(name, {}), defaults) if key in found), None)
        return None if owner is None or owner[key] is None else owner.where(key)

    return place


def _parts(mapping: YamlMapping) -> tuple[YamlMapping, list[tuple[str, YamlMapping]]]:
    """The defaults, and (name, entry) of every set."""
    root = mapping
    if "eval" in mapping:
        root = mapping["eval"]
        if len(mapping) > 1 or not isinstance(root, YamlMapping):
            raise UserError(
                f"{mapping.where('eval')}: eval: expected `defaults:` and `datasets:` below it, nothing beside"
            )
    for key in root:
        if key not in ("defaults", "datasets"):
            raise UserError(root.unknown(key, ("defaults", "datasets")))
    defaults = root.get("defaults")
    if defaults is None:
        defaults = YamlMapping(root.path, root.line)
    if not isinstance(defaults, YamlMapping):
        raise UserError(f"{root.where('defaults')}: defaults: expected `key: value` lines below it")
    return defaults, _named_entries(root)


def _named_entries(root: YamlMapping) -> list[tuple[str, YamlMapping]]:
    datasets = root.get("datasets")
    where = root.where("datasets" if "datasets" in root else None)
    if isinstance(datasets, YamlMapping):
        entries = list(datasets.items())
    elif isinstance(datasets, list):
        entries = [(entry.get("name") if isinstance(entry, dict) else None, entry) for entry in datasets]
    else:
        raise UserError(
            f"{where}: `datasets:` must be a list of `{{name: …, path: …}}`, or a mapping of names to those"
        )
    if not entries:
        raise UserError(f"{where}: `datasets:` names no evaluation set")
    for name, entry in entries:
        if not isinstance(entry, YamlMapping):
            raise UserError(f"{where}: evaluation set {name or len(entries)}: expected `key: value` lines below it")
        if not isinstance(name, str) or not name:
            raise UserError(f"{entry.where()}: the evaluation set needs a `name`")
    return entries


def _check(mapping: YamlMapping, keys: Collection[str], subject: str, violations: list[str]) -> None:
    for key, value in mapping.items():
        if key not in keys:
            violations.append(mapping.unknown(key, keys, subject))
            continue
        problem = value_problem(key, plain(value))
        if problem is not None:
            violations.append(f"{mapping.where(key)}: {subject}: {problem}")


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    # Like paths of the command line, relative ones start where the command was typed.
    full_forms = {"path": absolute, **dict.fromkeys(PLUG_INS_OF_SETS, absolute_plug_in)}
    return {key: full_forms[key](value) if key in full_forms and value else value for key, value in values.items()}
