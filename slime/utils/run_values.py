"""What a run finds out after its arguments were parsed, where functions of a user's own look for it: in their `args`.

Parsed arguments are never written to, and inside the framework such values are returned by who finds them and handed to who
needs them. A plug-in has `args` and little else of a run, so what it is given is a copy with the values of `RunValues`, made
here and nowhere else, before the process or the call that gets it has begun. The rollout manager's functions and its data
source share one copy: what the length of the data decides is put into it when the source is there. None of them may change it
for the others.
"""

import argparse
import copy
from collections.abc import Iterable
from typing import Any, TypedDict, TypeVar, Unpack

Arguments = TypeVar("Arguments")


class RunValues(TypedDict, total=False):
    """Each value by who finds it and who gets it."""

    # The session, before anything starts: all processes. The run's directory, and that of its logs.
    run_dir: str
    log_dir: str
    wandb_run_id: str | None
    # Who asked the engines that the run did not start: all processes.
    rollout_external_engine_infos: tuple[Any, ...]
    rollout_num_engines: int
    rollout_num_gpus: int
    # The owner of the engines: their processes and the router. The rollout manager: its functions of the user's.
    router_api_key: str
    # The rollout manager, when the router has an address: its functions of the user's. Served model → (host, port).
    sglang_router_ip: str
    sglang_router_port: int
    sglang_model_routers: dict[str, tuple[str, int]]
    # The rollout manager, when the data are there: its functions of the user's, and training ranks that had to wait for it.
    num_rollout: int
    rollouts_per_epoch: int | None
    # An evaluation, for its own time: all that generates in it.
    rollout_max_context_len: int | None
    # Who makes a training rank: its functions of the user's.
    rank: int


def add_run_values(copied: argparse.Namespace, **values: Unpack[RunValues]) -> None:
    """Put `values` into a copy that `with_run_values` made, and that something of the user's has been given before."""
    vars(copied).update(values)


def with_run_values(args: Arguments, **values: Unpack[RunValues]) -> Arguments:
    """A copy of `args`, a namespace, with `values`; one that cannot be changed where `args` cannot."""
    copied = copy.copy(args)
    vars(copied).update(values)
    return SharedArguments(copied, args.of_run() | values.keys()) if isinstance(args, SharedArguments) else copied


_CHANGE_A_COPY = (
    "; all functions of the run share `args`: change a copy (copy.copy(args)), or give the flag another value"
)


class SharedArguments(argparse.Namespace):
    """Arguments that many functions have at a time. What is there stays; they may put further attributes beside it.

    So do lists and dicts of flags, but for what lies deeper in those; others, of `custom:` in a file say, are for functions to
    fill. A copy (`copy.copy`, `copy.deepcopy`, pickle) is a namespace like any other, and its owner's, and so are its lists and
    dicts.

    Args:
        of_run: the names that stay; by default all that are there.
    """

    __slots__ = ("_of_run",)

    def __init__(self, args: Any, of_run: Iterable[str] | None = None) -> None:
        values = vars(args)
        kept = frozenset(values if of_run is None else of_run)
        # In a namespace that no parser made all are taken for flags.
        flags = kept & values.get("origins", values).keys() - (values.get("custom_config") or {}).keys()
        vars(self).update({name: _kept(name, value) if name in flags else value for name, value in values.items()})
        object.__setattr__(self, "_of_run", kept)

    def of_run(self) -> frozenset[str]:
        """The names that stay as they are."""
        return self._of_run

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._of_run and value != vars(self)[name]:
            raise AttributeError(f"args.{name} was to become {value!r} and is {vars(self)[name]!r}{_CHANGE_A_COPY}")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._of_run:
            raise AttributeError(f"args.{name} was to be deleted{_CHANGE_A_COPY}")
        super().__delattr__(name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _plain_namespace, (dict(vars(self)),)


def _plain_namespace(values: dict[str, Any]) -> argparse.Namespace:
    return argparse.Namespace(
        **{name: value.copy() if isinstance(value, Kept) else value for name, value in values.items()}
    )


class Kept:
    """Refuses to be changed in place. What `copy` returns, `copy.copy`, `copy.deepcopy` and pickle, is of the plain type."""

    attribute: str

    def _refuse(self, *arguments: Any, **keywords: Any) -> Any:
        raise TypeError(f"args.{self.attribute} was to be changed in place and is {self!r}{_CHANGE_A_COPY}")

    __setitem__ = __delitem__ = pop = clear = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        plain = self.copy()
        return type(plain), (plain,)


class _KeptList(Kept, list[Any]):
    append = extend = insert = remove = sort = reverse = __iadd__ = __imul__ = Kept._refuse


class _KeptDict(Kept, dict[Any, Any]):
    update = setdefault = popitem = __ior__ = Kept._refuse


def _kept(name: str, value: Any) -> Any:
    kind = {list: _KeptList, dict: _KeptDict}.get(type(value))
    if kind is None:
        return value
    kept = kind(value)
    kept.attribute = name
    return kept
