"""Paths of the command line made absolute: Ray's workers do not run in the directory where the command was typed."""

import argparse
import os

from slime.arguments.plug_ins import MANAGER_PLUG_INS, RANK_PLUG_INS
from slime.utils.plugin_loader import file_of_path

PATHS = (
    "hf_checkpoint", "ref_load", "load", "initial_megatron_checkpoint", "opd_teacher_load", "save", "save_hf",
    "rm_model_path", "save_debug_rollout_data", "load_debug_rollout_data", "load_forge_rollout_data",
    "save_debug_train_data", "dump_details", "update_weight_disk_dir", "update_weight_local_checkpoint_dir",
    "memory_snapshot_dir", "ci_save_grad_norm", "ci_load_grad_norm", "wandb_dir",
)  # fmt: skip


def make_paths_absolute(args: argparse.Namespace) -> None:
    """Replace every relative path by an absolute one; data files keep their slice, plug-ins their attribute."""
    for name in PATHS:
        if getattr(args, name) is not None:
            setattr(args, name, os.path.abspath(getattr(args, name)))
    if args.prompt_data is not None:
        args.prompt_data = [os.path.abspath(path) for path in args.prompt_data]
    words = args.eval_prompt_data or []
    # Pairs `name path`; one lone word is a path.
    args.eval_prompt_data = [
        os.path.abspath(word) if position % 2 or len(words) == 1 else word for position, word in enumerate(words)
    ] or None
    for name in MANAGER_PLUG_INS + RANK_PLUG_INS:
        value = getattr(args, name)
        if isinstance(value, list):
            setattr(args, name, [absolute_plug_in(path) for path in value])
        elif value is not None:
            setattr(args, name, absolute_plug_in(value))


def absolute_plug_in(path: str) -> str:
    """A plug-in path whose file, if it names one, is absolute."""
    # `file.py:attr` and `file.py` start with the file, so the rest stays as it is.
    return os.path.abspath(path) if file_of_path(path) is not None else path
