"""`--sglang-config`: the serving topology of a run, checked.

    sglang:
      - name: actor
        server_groups:
          - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2}
          - {worker_type: decode, num_gpus: 4, overrides: {mem_fraction_static: 0.8}}

Every model has a router of its own and at least one group of equal engines. All groups of a model serve the same
weights; the GPUs of all groups of all models are the run's `--rollout-num-gpus`. The first model generates.

In the `overrides:` of a group of engines every server argument is checked and converted like the flag of its name. What the
trainer, or whoever asks the first model, goes by is of the run, and none of its groups'.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import logging
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from slime.arguments.config_files.flag_names import FlagNames, attribute_name
from slime.arguments.flag import flag_of
from slime.arguments.origins import Origin
from slime.arguments.paths import absolute
from slime.arguments.server_flags import NO_SHARE, ONLY_AGAINST_PUSHES, REFUSED, is_share
from slime.arguments.surface import add_flag, load_surface
from slime.arguments.unknown_flags import DERIVED, unknown
from slime.scheduling.served_models import WORKER_TYPES, ModelServing, ServerGroup
from slime.utils.errors import UserError
from slime.utils.yaml_file import YamlMapping, load_yaml, plain

logger = logging.getLogger(__name__)

FLAG = "--sglang-config"
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")
_GROUP_LISTS = ("server_groups", "engine_groups")


def served_models(args: argparse.Namespace) -> list[ModelServing]:
    """The models that the run serves on its own GPUs: those of the file, else the one that the flags describe."""
    if args.sglang_config is not None and args.served_models:
        return args.served_models
    per_engine = max(1, args.rollout_num_gpus_per_engine)
    gpus, prefill = args.rollout_num_gpus or 0, (args.prefill_num_servers or 0) * per_engine
    sizes = {"prefill": prefill, "decode": gpus - prefill} if prefill else {"regular": gpus}
    groups = tuple(ServerGroup(worker_type, size, per_engine, {}) for worker_type, size in sizes.items() if size > 0)
    return [ModelServing("default", args.hf_checkpoint, True, groups)]


def served_groups(args: argparse.Namespace) -> list[ServerGroup]:
    """The groups of all models, in the order of their GPUs."""
    return [group for model in served_models(args) for group in model.groups]


def arguments_of_group(args: argparse.Namespace, group: ServerGroup, *, sleeps: bool = True) -> argparse.Namespace:
    """A copy of `args` as if every engine of the run were one of this group, with its overrides as the only typed flags.

    `sleeps`: whether these engines give their memory back where a run's engines do.
    """
    values = {PREFIX + name: value for name, value in group.overrides.items()}
    copied = copy.copy(args)
    vars(copied).update(values, rollout_num_gpus_per_engine=group.num_gpus_per_engine, sglang_config=None)
    copied.hf_checkpoint, copied.sglang_tp_size = group.model_path or args.hf_checkpoint, None
    copied.offload_rollout = args.offload_rollout and sleeps
    copied.origins = dict.fromkeys(vars(args), Origin.DEFAULT) | dict.fromkeys(values, Origin.YAML)
    if not group.update_weights:
        # Nobody trains on its experts or kept tokens, nor brings it weights in the trainer's dtype, or when it wakes.
        copied.bf16 = copied.fp16 = copied.use_rollout_routing_replay = copied.update_weights_in_flight = False
        copied.sglang_enable_weights_cpu_backup, copied.rollout_top_k = copied.offload_rollout or None, -1
        # Layers with which to draft are those of the run's model.
        vars(copied).update({name: values.get(name) for name in vars(args) if name.startswith(f"{PREFIX}speculative_")})
        copied.origins |= dict.fromkeys(ONLY_AGAINST_PUSHES, Origin.DEFAULT)
    return copied


def load_serving_config(args: argparse.Namespace) -> tuple[list[ModelServing], list[str]]:
    """The models in the file, defaults filled in, and one message per wrong line. Without `rollout_num_gpus` the groups may
    have any number of GPUs; 0: no engines, whatever the file says."""
    reader = _Reader(args)
    try:
        mapping = load_yaml(args.sglang_config, FLAG)
        models = list(reader.models(mapping))
    except UserError as error:
        return [], [*reader.violations, str(error)]
    if args.rollout_num_gpus == 0:
        return [ModelServing("default", args.hf_checkpoint or "", True, ())], reader.violations
    total = sum(group.num_gpus for model in models for group in model.groups)
    if not reader.violations and args.rollout_num_gpus not in (None, total):
        reader.violations.append(
            f"{mapping.where()}: the groups have {total} GPUs in all, --rollout-num-gpus says {args.rollout_num_gpus}; "
            f"give --rollout-num-gpus {total}, or change the groups"
        )
    return models, reader.violations


class _Reader:
    """Turns entries into models. What is wrong goes to `violations`; the entry is left out, and the rest is read."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.violations: list[str] = []
        self._hf_checkpoint = args.hf_checkpoint
        self._per_engine = args.rollout_num_gpus_per_engine

    def models(self, mapping: YamlMapping) -> Iterator[ModelServing]:
        self._check_keys(mapping, ("sglang",))
        first: dict[str, str] = {}
        for entry in _entries(mapping, "sglang"):
            found = len(self.violations)
            name = self._name(entry, first)
            path, per_engine = None, self._per_engine
            with self._noting():
                per_engine = _positive(entry, "num_gpus_per_engine", per_engine)
            groups = self._groups(entry, name, per_engine)
            with self._noting():
                path = self._model_path(entry, name, groups)
            updates = self._updates(entry, path)
            if len(self.violations) == found:
                groups = tuple(replace(group, model_path=path, update_weights=updates) for group in groups)
                yield ModelServing(name, path, updates, groups, entry.where())

    def _name(self, entry: YamlMapping, first: dict[str, str]) -> str:
        self._check_keys(entry, _MODEL_KEYS)
        self._generates = not first
        name = entry.get("name")
        if not isinstance(name, str) or not name:
            self.violations.append(f"{entry.where()}: the model needs a `name`")
            return "?"
        if name in first:
            self.violations.append(f"{entry.where('name')}: a second model {name}; the first: {first[name]}")
        if name == "default" and first:
            self.violations.append(f"{entry.where('name')}: `default` means the first model; give another name")
        first.setdefault(name, entry.where())
        return name

    def _groups(self, entry: YamlMapping, name: str, per_engine: int) -> tuple[ServerGroup, ...]:
        lists = [key for key in _GROUP_LISTS if key in entry]
        if len(lists) != 1:
            where = entry.where(lists[1] if lists else None)
            self.violations.append(f"{where}: model {name}: give `server_groups` once (old spelling: `engine_groups`)")
            return ()
        groups = []
        with self._noting():
            for group in _entries(entry, lists[0]):
                with self._noting():
                    groups.append(self._group(group, per_engine))
        return tuple(groups)

    def _group(self, entry: YamlMapping, per_engine: int) -> ServerGroup:
        self._check_keys(entry, _GROUP_KEYS)
        overrides = self._overrides(entry)
        worker_type = entry.get("worker_type", "regular")
        if worker_type not in WORKER_TYPES:
            self.violations.append(
                f"{entry.where('worker_type')}: worker_type {worker_type!r}: one of {', '.join(WORKER_TYPES)}"
            )
        if "num_gpus" not in entry:
            raise UserError(f"{entry.where()}: the group needs `num_gpus`")
        num_gpus = _positive(entry, "num_gpus", 0)
        per_engine = _positive(entry, "num_gpus_per_engine", per_engine)
        if worker_type != "placeholder" and num_gpus % per_engine:
            raise UserError(
                f"{entry.where('num_gpus')}: num_gpus {num_gpus} is no multiple of num_gpus_per_engine {per_engine}"
            )
        return ServerGroup(worker_type, num_gpus, per_engine, overrides, entry.where())

    def _overrides(self, entry: YamlMapping) -> dict[str, Any]:
        overrides = entry.get("overrides")
        if overrides is None:
            return {}
        if not isinstance(overrides, YamlMapping):
            self.violations.append(f"{entry.where('overrides')}: overrides: expected `name: value` lines below it")
            return {}
        values: dict[str, Any] = {}
        for key in overrides:
            name = attribute_name(key).removeprefix(PREFIX)
            with self._noting():
                flags = _server_flags()
                # `_model_path` checks the path, since all groups of a model share it.
                value = plain(overrides[key])
                if flags is not None and name != "model_path":
                    name, value = _converted(overrides, key, name, flags, self._generates)
                if name in values:
                    raise UserError(f"{overrides.where(key)}: {key}: a second line sets {name}; keep one")
                values[name] = value
        return values

    def _model_path(self, entry: YamlMapping, name: str, groups: tuple[ServerGroup, ...]) -> str:
        default = entry.get("model_path") or self._hf_checkpoint
        paths = {group.overrides.get("model_path", default) for group in groups}
        if len(paths) > 1:
            shown = ", ".join(sorted(map(str, paths)))
            raise UserError(
                f"{entry.where()}: model {name}: its groups have different models ({shown}); they share one"
            )
        path = paths.pop() if paths else default
        if not isinstance(path, str):
            raise UserError(f"{entry.where()}: model {name}: give `model_path`, or --hf-checkpoint")
        return absolute(path)

    def _updates(self, entry: YamlMapping, path: str | None) -> bool:
        if "update_weights" in entry:
            if not isinstance(entry["update_weights"], bool):
                self.violations.append(f"{entry.where('update_weights')}: update_weights: give true or false")
            return entry["update_weights"]
        updates = self._hf_checkpoint is not None and path == absolute(self._hf_checkpoint)
        if not updates and path is not None:
            logger.warning("%s: not --hf-checkpoint: its weights stay (update_weights: false)", entry.where())
        return updates

    def _check_keys(self, mapping: YamlMapping, known: Collection[str]) -> None:
        self.violations += [mapping.unknown(key, known) for key in mapping if key not in known]

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.violations.append(str(error))


def _entries(mapping: YamlMapping, key: str) -> list[YamlMapping]:
    entries = mapping.get(key)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, YamlMapping) for entry in entries):
        where = mapping.where(key if key in mapping else None)
        raise UserError(f"{where}: `{key}:` must be a list with at least one entry of `key: value` lines")
    return entries


def _positive(mapping: YamlMapping, key: str, default: int) -> int:
    value = mapping.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{mapping.where(key if key in mapping else None)}: {key} {value!r}: give a number above 0")
    return value


PREFIX = "sglang_"
# The first three are what requests to the first model rely on. Other models may have other values of them.
_OF_THE_RUN = (
    "context_length", "enable_deterministic_inference", "speculative_algorithm", "enable_nccl_nvls", "enable_symm_mem",
)  # fmt: skip
# Why a group's engines cannot be given a value of their own, beside what every run refuses.
_REASONS = {
    "tp_size": "it follows from num_gpus_per_engine and pp_size; drop it",
    **{name: f"all engines need the same; give {flag_of(PREFIX + name)}" for name in _OF_THE_RUN},
}


@functools.cache
def _server_flags() -> FlagNames | None:
    """The flags of the installed server; None where there is none, and any override may be right."""
    specs = load_surface("sglang")
    if specs is None:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for spec in specs:
        add_flag(parser, spec)
    return FlagNames(parser)


def _converted(overrides: YamlMapping, key: str, name: str, flags: FlagNames, generates: bool) -> tuple[str, Any]:
    flag = flags.find(PREFIX + name)
    dest = PREFIX + name if flag is None else flag.dest
    field = dest.removeprefix(PREFIX)
    follows = DERIVED.get(flag_of(dest))
    reason = REFUSED.get(dest) if field in _OF_THE_RUN[:3] and not generates else _REASONS.get(field, REFUSED.get(dest))
    if reason is None and follows is not None:
        reason = f"{unknown(follows).message}; drop it"
    if reason is not None:
        raise UserError(f"{overrides.where(key)}: {key} is set by the run: {reason}")
    if flag is None:
        near = flags.near(PREFIX + name)
        hint = (
            f"did you mean {near.removeprefix(PREFIX)}?" if near else "`train.py --help-grep sglang` shows all of them"
        )
        raise UserError(f"{overrides.where(key)}: unknown server argument {key}: {hint}")
    value = flags.convert(flag, overrides, key)
    if field == "mem_fraction_static" and not is_share(value):
        raise UserError(f"{overrides.where(key)}: {key} {value}: {NO_SHARE}")
    return field, value
