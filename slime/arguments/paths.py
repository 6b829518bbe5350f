"""Paths of the command line, and the functions and classes of the user that some of them name.

Paths are made absolute: Ray's workers do not run in the directory where the command was typed.

The files, modules and names of plug-ins are looked for in the source before anything starts. The driver imports none of them,
because plug-ins may import heavy packages and do things that only their own process should do. They are loaded when the process
that calls them starts, not when they are first needed: one that fails ends a run in seconds, not after its first rollout.
"""

import argparse
import copy
import os
import sys
from collections.abc import Iterator

from slime.arguments.flag import Caller, PathKind, flag_of
from slime.arguments.groups import OWN_FLAGS, plug_ins_of
from slime.arguments.violations import Violation, about, broken
from slime.utils.errors import UserError
from slime.utils.plugin_loader import file_of_path, load_to_call, subject_of
from slime.utils.plugin_source import find_top, problem_of_path
from slime.utils.yaml_file import EMPTY_PATH

# Megatron's flags name directories and files, too.
WRITTEN = (*(name for name, flag in OWN_FLAGS.items() if flag.path is PathKind.WRITTEN), "tensorboard_dir")
PATHS = (
    *(name for name, flag in OWN_FLAGS.items() if flag.path is PathKind.READ),
    *WRITTEN,
    "nccl_communicator_config_path",
)
_READ_HERE = tuple(name for name, flag in OWN_FLAGS.items() if flag.path is PathKind.HERE)
_PLUG_INS = tuple(name for name, flag in OWN_FLAGS.items() if flag.plug_in is not None)


def make_paths_absolute(args: argparse.Namespace) -> dict[str, Violation]:
    """Replace every relative path by an absolute one; data files keep their slice, plug-ins their attribute.

    Returns:
        A violation by attribute for every path that is empty, which has its default afterwards: most likely a variable of a
        shell script was not set, and the current directory is not what was meant.
    """
    empty = {}
    for name in (*PATHS, *_READ_HERE, "prompt_data", "eval_prompt_data", *_PLUG_INS):
        value = vars(args)[name]
        if value == "" or (isinstance(value, list) and "" in value):
            empty[name] = broken(args, f"{{0}}: {EMPTY_PATH}", flag_of(name))
            setattr(args, name, copy.copy(OWN_FLAGS[name].default) if name in OWN_FLAGS else None)
            args.typed_flags.discard(name)
    _absolute(args)
    return empty


def _absolute(args: argparse.Namespace) -> None:
    for names, full_form in ((PATHS, absolute), (_READ_HERE, os.path.expanduser)):
        for name in names:
            if vars(args)[name] is not None:
                setattr(args, name, full_form(vars(args)[name]))
    if args.prompt_data is not None:
        # Checked arguments hold a list of one path as that path.
        files = [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data
        args.prompt_data = [absolute(path) for path in files]
    words = args.eval_prompt_data or []
    # Pairs `name path`; one lone word is a path. Another odd number is wrong, and a message shows the words as typed.
    in_pairs = len(words) % 2 == 0
    args.eval_prompt_data = [
        absolute(word) if (in_pairs and position % 2) or len(words) == 1 else word
        for position, word in enumerate(words)
    ] or None
    for name in _PLUG_INS:
        value = vars(args)[name]
        if isinstance(value, list):
            setattr(args, name, [absolute_plug_in(path) for path in value])
        elif value is not None:
            setattr(args, name, absolute_plug_in(value))
    if args.spec is not None and len(args.spec) == 1:
        args.spec = [absolute_plug_in(*args.spec)]


def absolute(path: str) -> str:
    """`path` from the root; `~` is the user's home, also behind `=`, where the shell leaves it."""
    return os.path.abspath(os.path.expanduser(path))


def absolute_plug_in(path: str) -> str:
    """A plug-in path whose file, if it names one, is absolute."""
    # `file.py:attr` and `file.py` start with the file, so the rest stays as it is.
    return absolute(path) if file_of_path(path) is not None else path


# Attributes of `args`; each holds a path, a list of paths, or None.
MANAGER_PLUG_INS, RANK_PLUG_INS = plug_ins_of(Caller.MANAGER), plug_ins_of(Caller.RANKS)
# Megatron's flag `--spec` names a function of the user, too, by a module and a name, or by one path.
LOADED_BY_RANKS = (*RANK_PLUG_INS, "spec")
# Evaluation sets may have functions of their own, by keys that are called as the flags.
PLUG_INS_OF_SETS = ("custom_rm_path", "custom_generate_function_path")


def load_plug_ins(args: argparse.Namespace, names: tuple[str, ...]) -> None:
    """Import what the flags `names` point to, as far as it was typed (our own defaults need no proof), and what evaluation sets
    have in their places.

    Raises:
        UserError: a path that does not import, or names nothing that can be called as the flag's functions are.
    """
    for name, path in _paths(args, names):
        if name in args.typed_flags:
            load_to_call(path, flag_of(name), batched=_for_groups(args, name))
    for dataset in args.eval_datasets if args.eval_interval is not None else ():
        for name in PLUG_INS_OF_SETS:
            if not vars(dataset)[name] or name not in names:
                continue
            try:
                load_to_call(vars(dataset)[name], flag_of(name), batched=_for_groups(args, name))
            except UserError as error:
                raise UserError(f"evaluation set {dataset.name}: {error}") from error


def missing_plug_ins(args: argparse.Namespace) -> Iterator[Violation]:
    """A violation for every plug-in path whose file, package, module or name does not exist, as far as the source tells."""
    # A variable of the ranks, such as PYTHONPATH, may lead them to packages that this process does not see.
    elsewhere = LOADED_BY_RANKS if "PYTHONPATH" in (args.train_env_vars or {}) else ()
    for name, path in _paths(args, tuple(n for n in MANAGER_PLUG_INS + LOADED_BY_RANKS if n in args.typed_flags)):
        problem = problem_of_plug_in(args, name, path, flag_of(name), is_elsewhere=name in elsewhere)
        yield from about([problem] if problem is not None else [], flag_of(name))


def problem_of_plug_in(
    args: argparse.Namespace, name: str, path: str, key: str, *, is_elsewhere: bool = False
) -> str | None:
    """Why `path` is of no use to the flag with the attribute `name`, as far as the source tells; None if nothing is wrong.

    Args:
        key: what the path is given by, for the message.
        is_elsewhere: whether the process that loads it may have another search path.
    """
    file, subject = file_of_path(path), subject_of(key, path)
    if file is not None and not os.path.isfile(file):
        return f"{subject}: there is no file {os.path.realpath(file)}"
    if file is None and is_elsewhere:
        return None
    if file is None and not _is_importable(path):
        return (
            f"{subject}: there is no module or package {path.split('.')[0]!r}; install it, put its directory into PYTHONPATH, "
            "or give a file: path/to/file.py:function"
        )
    return problem_of_path(path, flag_of(name), key=key, batched=_for_groups(args, name), imports=not is_elsewhere)


def _for_groups(args: argparse.Namespace, name: str) -> bool:
    return name == "custom_rm_path" and args.group_rm


def _is_importable(path: str) -> bool:
    """Whether the first part of a dotted path is there; nothing is imported to find out."""
    top = path.strip().partition(":")[0].partition(".")[0]
    # A word that cannot be a name has a message of its own.
    return not top.isidentifier() or top in sys.modules or find_top(top) is not None


def _paths(args: argparse.Namespace, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        value = vars(args)[name]
        if name == "spec":
            # The layers of FSDP are those of transformers, whatever it says.
            value = ".".join(value) if value and args.train_backend != "fsdp" else None
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                yield name, path
