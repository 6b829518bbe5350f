"""The modules that make trajectories: how they are found, and what they may say about groups.

A generator is a module with `TASK_TYPE`, the name by which runs ask for it (`--rollout-task-type`), and `run_rollout(data)`,
which is called in a process of its own with the data that the run has sent. It may have

* `is_valid_group(group, min_valid_group_size, task_type)` → bool: whether a full group is handed on, else it is dropped and
  counted. Without it every item needs a reward and an answer of the assistant;
* `transform_group(group, task_type)` → group: the group as it is handed on, with as many items;
* `get_group_data_meta_info(groups)` → dict: numbers about the groups of an answer, of which the run logs the means;

where a group is `(instance_id, items)` and `groups` is `{instance_id: items}`. The service's process calls them between two
requests, with as many of these arguments as they take, so they should be quick.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slime.utils.errors import UserError
from slime.utils.plugin_loader import calling_user_code, load_module
from slime_plugins.rollout_buffer.items import Item, ItemError, checked_item, has_answer
from slime_plugins.rollout_buffer.store import Group

FLAG = "--generator"
# Generators that come with the service; a user's generator with the same task replaces one.
SHIPPED = ("slime_plugins.rollout_buffer.math_generator",)
_PATTERN = "*_generator.py"


@dataclass(frozen=True)
class Generator:
    """A module that makes trajectories. `source`: its name, or its file."""

    task_type: str
    source: str
    module: ModuleType

    def settle(self, instance_id: str, items: list[Item]) -> list[Item] | None:
        """The items as which a full group is handed on; None: it is dropped.

        Raises:
            UserError: a function of the module raised, or returned something unusable.
        """
        is_valid = self._function("is_valid_group")
        if is_valid is None:
            valid = all(map(has_answer, items))
        else:
            valid = self._call(is_valid, (instance_id, items), len(items), self.task_type)
            # Comparisons of numpy give booleans of its own.
            if type(valid).__name__ not in ("bool", "bool_"):
                raise UserError(self._wrong("is_valid_group", valid, "True or False"))
        if not valid:
            return None
        transform = self._function("transform_group")
        if transform is None:
            return items
        result = self._call(transform, (instance_id, items), self.task_type)
        is_group = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], list)
        if not is_group or len(result[1]) != len(items):
            raise UserError(self._wrong("transform_group", result, f"(instance_id, list of {len(items)} items)"))
        try:
            return [checked_item(item) for item in result[1]]
        except ItemError as error:
            raise UserError(f"{FLAG} {self.source}: transform_group for instance {instance_id}: {error}") from error

    def meta_info(self, groups: Iterable[Group]) -> dict[str, Any]:
        """The module's numbers about `groups`; empty if it has no such function.

        Raises:
            UserError: as `settle`.
        """
        function = self._function("get_group_data_meta_info")
        if function is None:
            return {}
        items_of: dict[str, list[Item]] = {}
        for group in groups:
            items_of.setdefault(group.instance_id, []).extend(group.items)
        found = self._call(function, items_of)
        if not isinstance(found, dict):
            raise UserError(self._wrong("get_group_data_meta_info", found, "a dict"))
        return found

    def _function(self, name: str) -> Callable[..., Any] | None:
        return getattr(self.module, name, None)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(function).parameters.values()
        if not any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
            arguments = arguments[: sum(parameter.kind in by_place for parameter in parameters)]
        with calling_user_code(FLAG, self.source, function.__name__):
            return function(*arguments)

    def _wrong(self, name: str, found: Any, expected: str) -> str:
        return f"{FLAG} {self.source}: {name} returned {found!r:.200}; expected {expected}"


def find_generators(sources: Sequence[str]) -> dict[str, Generator]:
    """Generators by their task: the shipped ones, and those of `sources`, which are names of modules, files, or directories; in
    a directory every `*_generator.py` is a generator.

    Raises:
        UserError: a source cannot be imported or is no generator; or two of `sources` have one task.
    """
    found = {generator.task_type: generator for generator in map(load_generator, SHIPPED)}
    own: dict[str, Generator] = {}
    for source in (file for path in sources for file in _files(path)):
        generator = load_generator(source)
        if generator.task_type in own:
            other = own[generator.task_type].source
            raise UserError(f"{FLAG} {source}: TASK_TYPE {generator.task_type!r} is that of {other}, too; rename one")
        own[generator.task_type] = generator
    return {**found, **own}


def load_generator(source: str) -> Generator:
    """The generator in the module or file `source`.

    Raises:
        UserError: it cannot be imported, or lacks something that a generator needs.
    """
    module = load_module(source, flag=FLAG)
    task_type = getattr(module, "TASK_TYPE", None)
    if not isinstance(task_type, str) or not task_type:
        raise UserError(f'{FLAG} {source}: TASK_TYPE is {task_type!r}; give the module a name, TASK_TYPE = "my_task"')
    if not callable(getattr(module, "run_rollout", None)):
        raise UserError(f"{FLAG} {source}: there is no function run_rollout(data)")
    for name in ("is_valid_group", "transform_group", "get_group_data_meta_info"):
        if inspect.iscoroutinefunction(getattr(module, name, None)):
            raise UserError(f"{FLAG} {source}: {name} is async, and nobody awaits it here; write `def`")
    return Generator(task_type, source, module)


def _files(source: str) -> list[str]:
    if not Path(source).is_dir():
        return [source]
    files = sorted(map(str, Path(source).glob(_PATTERN)))
    if not files:
        raise UserError(f"{FLAG} {source}: the directory has no {_PATTERN}")
    return files
