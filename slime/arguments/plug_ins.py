"""The flags that name functions and classes of the user, and which process calls them.

Files, modules and names are looked for in the source before anything starts: nothing is imported in the driver, because
plug-ins may import heavy packages and do things that only their own process should do. They are loaded when the process that
calls them starts, not when they are first needed: one that fails ends a run in seconds, not after its first rollout.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from slime.utils.misc import load_function
from slime.utils.plugin_loader import file_of_path
from slime.utils.plugin_source import find_top, problem_of_path

# Attributes of `args`; each holds a path, a list of paths, or None.
MANAGER_PLUG_INS = (
    "rollout_function_path", "eval_function_path", "data_source_path", "custom_generate_function_path", "custom_rm_path",
    "dynamic_sampling_filter_path", "buffer_filter_path", "rollout_sample_filter_path", "rollout_sample_hook_path",
    "rollout_all_samples_process_path", "custom_rollout_log_function_path", "custom_eval_rollout_log_function_path",
    "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip
RANK_PLUG_INS = (
    "rollout_data_postprocess_path", "custom_loss_function_path", "custom_advantage_function_path",
    "custom_pg_loss_reducer_function_path", "custom_tis_function_path", "custom_model_provider_path",
    "custom_megatron_init_path", "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path", "custom_update_weight_post_write_path",
)  # fmt: skip
# Attributes that are better known by another spelling of their flag.
_SPELLINGS = {"fp8": "--fp8-format", "fp4": "--fp4-format"}


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


def flag_of(name: str) -> str:
    """The spelling on the command line of the attribute `name`."""
    return _SPELLINGS.get(name) or "--" + name.replace("_", "-")


def as_typed(value: Any) -> Any:
    """A value for a message: the words of a list as they stand on the command line."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _paths(args: argparse.Namespace, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for name in names:
        value = getattr(args, name)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                yield name, path
