"""Values that a run finds out after its arguments were parsed, and that users' functions look for in their `args`.

Parsed arguments are never written to. Inside the framework such a value is returned by the code that finds it, and handed to
the code that needs it. A plug-in has `args` and little else of a run, so it is given a copy with the values of `RunValues`.
Copies are made here and nowhere else, before the process or the call that gets one has begun. The rollout manager's functions
and its data source share one copy; the values that depend on the length of the data are added when the source is there. None
of the functions may change the copy for the others.
"""

import argparse
import copy
from collections.abc import Iterable
from typing import Any, TypedDict, TypeVar, Unpack

Arguments = TypeVar("Arguments")


class RunValues(TypedDict, total=False):
    """The values. A comment before each group says who finds them and, after the colon, who gets them."""

    # The session, before anything starts: all processes. These are the run's directory, that of its logs, and wandb's run.
    run_dir: str
    log_dir: str
    wandb_run_id: str | None
    # The check of engines that the run did not start: all processes.
    rollout_external_engine_infos: tuple[Any, ...]
    rollout_num_engines: int
    rollout_num_gpus: int
    # The owner of the engines: their processes and the router. Also the rollout manager: the user's functions in it.
    router_api_key: str
    # The rollout manager, when the router has an address: the user's functions in it. Routers: served model → (host, port).
    sglang_router_ip: str
    sglang_router_port: int
    sglang_model_routers: dict[str, tuple[str, int]]
    # The rollout manager, when the data are there: the user's functions in it, and training ranks that had to wait for it.
    num_rollout: int
    rollouts_per_epoch: int | None
    # An evaluation, while it runs: everything that generates in it.
    rollout_max_context_len: int | None
    # The code that makes a training rank: the user's functions in it.
    rank: int


def add_run_values(copied: argparse.Namespace, **values: Unpack[RunValues]) -> None:
    """Add `values` to a copy that `with_run_values` made, even if the user's code has been given that copy already."""
    vars(copied).update(values)


def with_run_values(args: Arguments, **values: Unpack[RunValues]) -> Arguments:
    """A copy of the namespace `args` with `values`. It refuses changes if `args` does."""
    copied = copy.copy(args)
    vars(copied).update(values)
    return SharedArguments(copied, args.of_run() | values.keys()) if isinstance(args, SharedArguments) else copied


_CHANGE_A_COPY = (
    "; all functions of the run share `args`: change a copy (copy.copy(args)), or give the flag another value"
)


class SharedArguments(argparse.Namespace):
    """Arguments that many functions share. They cannot change the attributes that are there, but may add others.

    Nor can they change lists and dicts of flags in place, except for values nested in these. Other lists and dicts, such as
    those of `custom:` in a file, are for functions to fill. A copy (`copy.copy`, `copy.deepcopy`, pickle) is an ordinary
    namespace with ordinary lists and dicts, which its owner may change.

    Args:
        of_run: the names that cannot be changed; by default all that are there.
    """

    __slots__ = ("_of_run",)

    def __init__(self, args: Any, of_run: Iterable[str] | None = None) -> None:
        values = vars(args)
        kept = frozenset(values if of_run is None else of_run)
        # In a namespace that no parser made every attribute counts as a flag.
        flags = kept & values.get("origins", values).keys() - (values.get("custom_config") or {}).keys()
        vars(self).update({name: _kept(name, value) if name in flags else value for name, value in values.items()})
        object.__setattr__(self, "_of_run", kept)

    def of_run(self) -> frozenset[str]:
        """The names that cannot be changed."""
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
    """A list or dict that refuses changes in place. Its copies (`copy`, `copy.deepcopy`, pickle) are of the plain type."""

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
