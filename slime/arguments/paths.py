"""Paths of the command line made absolute: Ray's workers do not run in the directory where the command was typed."""

import argparse
import os

from slime.arguments.flag import Path, flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.utils.plugin_loader import file_of_path

PATHS = tuple(name for name, flag in OWN_FLAGS.items() if flag.path in (Path.READ, Path.WRITTEN))
_READ_HERE = tuple(name for name, flag in OWN_FLAGS.items() if flag.path is Path.HERE)
_PLUG_INS = tuple(name for name, flag in OWN_FLAGS.items() if flag.plug_in is not None)


def make_paths_absolute(args: argparse.Namespace) -> dict[str, str]:
    """Replace every relative path by an absolute one; data files keep their slice, plug-ins their attribute.

    Returns:
        A message by attribute for every path that is empty, and unset afterwards: most likely a variable of a shell
        script was not set, and the current directory is not what was meant.
    """
    empty = {}
    for name in (*PATHS, *_READ_HERE, "prompt_data", *_PLUG_INS):
        value = getattr(args, name, None)
        if value == "" or (isinstance(value, list) and "" in value):
            empty[name] = f"{flag_of(name)}: the path is empty; is a variable of the shell not set? Give a path"
            # An empty list is what a repeatable flag has when it was not given.
            setattr(args, name, [] if OWN_FLAGS[name].action == "append" else None)
            args.typed_flags.discard(name)
    _absolute(args)
    return empty


def _absolute(args: argparse.Namespace) -> None:
    for name in PATHS:
        if getattr(args, name) is not None:
            setattr(args, name, absolute(getattr(args, name)))
    for name in _READ_HERE:
        if getattr(args, name, None) is not None:
            setattr(args, name, os.path.expanduser(getattr(args, name)))
    if args.prompt_data is not None:
        # Checked arguments have a lone path for a list of one.
        files = [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data
        args.prompt_data = [absolute(path) for path in files]
    words = args.eval_prompt_data or []
    # Pairs `name path`; one lone word is a path. Of another odd number nobody knows, and a message shows them as typed.
    in_pairs = len(words) % 2 == 0
    args.eval_prompt_data = [
        absolute(word) if (in_pairs and position % 2) or len(words) == 1 else word
        for position, word in enumerate(words)
    ] or None
    for name in _PLUG_INS:
        value = getattr(args, name)
        if isinstance(value, list):
            setattr(args, name, [absolute_plug_in(path) for path in value])
        elif value is not None:
            setattr(args, name, absolute_plug_in(value))


def absolute(path: str) -> str:
    """`path` from the root; `~` is the user's home, also behind `=`, where the shell leaves it."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_plug_in(path: str) -> str:
    """A plug-in path whose file, if it names one, is absolute."""
    # `file.py:attr` and `file.py` start with the file, so the rest stays as it is.
    return absolute(path) if file_of_path(path) is not None else path
