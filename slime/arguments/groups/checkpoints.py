"""Flags of checkpoints: what a run starts from, and what it leaves behind."""

import argparse

TITLE = "checkpoints"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_load(group)
    _add_save(group)


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--load",
        default=None,
        help="actor checkpoint: a Megatron directory is resumed, a Hugging Face directory is where a new run starts",
    )
    group.add_argument("--ckpt-step", type=int, default=None, help="iteration to take from --load; unset: the latest")
    group.add_argument(
        "--ref-load",
        default=None,
        help="reference checkpoint, Megatron or Hugging Face directory; also the initial one when --load gives nothing",
    )
    group.add_argument("--ref-ckpt-step", type=int, default=None, help="iteration to take from --ref-load")
    group.add_argument(
        "--no-load-optim",
        action="store_true",
        help="the optimizer starts fresh; its learning-rate schedule goes on where the checkpoint was",
    )
    group.add_argument("--no-load-rng", action="store_true", help="do not restore random generator states")
    group.add_argument(
        "--finetune", action="store_true", help="load weights only and start at rollout 0 with fresh data and scheduler"
    )


def _add_save(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--save", default=None, help="checkpoint directory; the data state goes to its `rollout/` folder"
    )
    group.add_argument(
        "--save-interval",
        type=int,
        default=None,
        help="save every N rollouts, at epoch ends and after the last; needs --save",
    )
    group.add_argument(
        "--keep-last",
        type=int,
        default=None,
        help="keep only the newest N checkpoints, with their data states and exports; unset: all",
    )
    group.add_argument("--async-save", action="store_true", help="write checkpoints in the background")
    group.add_argument(
        "--no-save-optim",
        action="store_true",
        help="leave the optimizer state out; a run that resumes from it starts its optimizer fresh",
    )
    group.add_argument(
        "--save-hf",
        default=None,
        help="with every save, also export to this Hugging Face directory; `{rollout_id}` is filled in; same "
        "quantisation as --hf-checkpoint",
    )
