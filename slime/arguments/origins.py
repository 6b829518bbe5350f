"""Notes where the value of every argument came from.

`args.origins` maps each attribute to the last phase that set it. A phase is a `with recording(args, origin)` block: what
differs after it was set in it, so that code which derives values need not keep books.

`args.typed_flags` is the set of attributes that the user set himself, on the command line or in YAML: nothing derived
may overrule those.
"""

import argparse
import contextlib
import copy
from collections.abc import Iterator
from enum import StrEnum


class Origin(StrEnum):
    """The sources of a value, in the order of a plan; YAML takes precedence over the command line."""

    DEFAULT = "default"
    DERIVED = "derived"
    HF_CONFIG = "HF config"
    YAML = "YAML"
    COMMAND_LINE = "command line"


_BOOKS = ("origins", "typed_flags")
_FIXED = {bool, float, int, str, type(None)}  # nothing changes these in place


def start_origins(args: argparse.Namespace, typed: set[str]) -> None:
    """Begin the notes: `typed` came from the command line, everything else is a default."""
    args.typed_flags = set(typed)
    args.origins = {
        name: Origin.COMMAND_LINE if name in typed else Origin.DEFAULT for name in vars(args) if name not in _BOOKS
    }


@contextlib.contextmanager
def recording(args: argparse.Namespace, origin: Origin) -> Iterator[None]:
    """Everything that the block adds to `args` or changes in it gets `origin`.

    What an inner block recorded stays. A value that the user typed stays his when it is only brought into another form
    (an absolute path, say); YAML alone takes precedence over the command line.
    """
    before = {n: v if type(v) in _FIXED else copy.deepcopy(v) for n, v in vars(args).items() if n not in _BOOKS}
    origins_before = dict(args.origins)
    yield
    for name, value in vars(args).items():
        if name in _BOOKS or (name in before and before[name] == value):
            continue
        recorded_inside = args.origins.get(name) != origins_before.get(name)
        if not recorded_inside and (origin is Origin.YAML or name not in args.typed_flags):
            args.origins[name] = origin
        if origin is Origin.YAML:
            args.typed_flags.add(name)
