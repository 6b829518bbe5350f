"""The flags that name functions and classes of the user, and which process calls them.

Files, modules and names are looked for in the source before anything starts: nothing is imported in the driver, because
plug-ins may import heavy packages and do things that only their own process should do. They are loaded when the process that
calls them starts, not when they are first needed: one that fails ends a run in seconds, not after its first rollout.
"""

import argparse
import os
import sys
from collections.abc import Iterator

from slime.arguments.flag import Caller, flag_of
from slime.arguments.groups import plug_ins_of
from slime.utils.misc import load_function
from slime.utils.plugin_loader import file_of_path
from slime.utils.plugin_source import find_top, problem_of_path

# Attributes of `args`; each holds a path, a list of paths, or None.
MANAGER_PLUG_INS, RANK_PLUG_INS = plug_ins_of(Caller.MANAGER), plug_ins_of(Caller.RANKS)


def load_plug_ins(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Import what the flags `names` point to, as far as it was typed: our own defaults need no proof.

    Raises:
        UserError: a path that does not import, or names nothing that can be called.
    """
    for name, path in _paths(args, names):
        if name in args.typed_flags:
            load_function(path, flag=flag_of(name), batched=name == "custom_rm_path" and args.group_rm)


def missing_plug_ins(args: argparse.Namespace) -> Iterator[str]:
    """A message for every plug-in path whose file, package, module or name does not exist, as far as the source tells."""
    # A variable of the ranks may lead them to packages that this process does not see.
    elsewhere = "PYTHONPATH" in (args.train_env_vars or {})
    for name, path in _paths(args, MANAGER_PLUG_INS + RANK_PLUG_INS):
        if name not in args.typed_flags:
            continue
        file = file_of_path(path)
        if file is not None and not os.path.isfile(file):
            yield f"{flag_of(name)} {path}: there is no file {os.path.realpath(file)}"
        elif file is None and elsewhere and name in RANK_PLUG_INS:
            continue
        elif file is None and not _is_importable(path):
            yield (
                f"{flag_of(name)} {path}: there is no module or package {path.split('.')[0]!r}; install it, put its directory "
                "into PYTHONPATH, or give a file: path/to/file.py:function"
            )
        else:
            problem = problem_of_path(path, flag_of(name), batched=name == "custom_rm_path" and args.group_rm)
            if problem is not None:
                yield problem


def _is_importable(path: str) -> bool:
    """Whether the first part of a dotted path is there; nothing is imported to find out."""
    top = path.strip().partition(":")[0].partition(".")[0]
    # What is no name has a message of its own.
    return not top.isidentifier() or top in sys.modules or find_top(top) is not None


def _paths(args: argparse.Namespace, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(args, name)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                yield name, path
