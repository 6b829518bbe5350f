"""Flags of on-policy distillation: a teacher's log-probs as an extra term of the advantages."""

import argparse

TITLE = "on-policy distillation"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-opd", action="store_true", help="distil from a teacher, on top of any estimator; needs --opd-type"
    )
    group.add_argument(
        "--opd-type",
        choices=["sglang", "megatron"],
        default=None,
        help="where the teacher is: behind HTTP (--rm-url), or as further weights in the trainer (--opd-teacher-load)",
    )
    group.add_argument("--opd-kl-coef", type=float, default=1.0, help="weight of the distillation term")
    group.add_argument(
        "--opd-teacher-load",
        default=None,
        help="checkpoint of a teacher of the same architecture; --opd-type megatron only",
    )
    group.add_argument(
        "--opd-teacher-ckpt-step", type=int, default=None, help="iteration to take from --opd-teacher-load"
    )
