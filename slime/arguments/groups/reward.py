"""Flags of rewards."""

import argparse

TITLE = "reward"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rm-type", default=None, help="built-in grader; sample metadata may override it")
    group.add_argument("--custom-rm-path", default=None, help="plug-in path: own reward function or class")
    group.add_argument("--reward-key", default=None, help="entry to use when rewards are dictionaries")
    group.add_argument("--eval-reward-key", default=None, help="the same in evaluation; unset: --reward-key")
    group.add_argument("--group-rm", action="store_true", help="grade a whole prompt group in one call")
    group.add_argument("--rm-url", default=None, help="address of a remote reward service, for own reward functions")
    group.add_argument(
        "--rm-model-path", default=None, help="model_path of class-style rewards; unset: --hf-checkpoint"
    )
    group.add_argument(
        "--rm-concurrency",
        type=int,
        default=1024,
        help="reward calls in flight; of math and deepscaler at most one per core, up to 32",
    )
    group.add_argument(
        "--rm-timeout",
        type=float,
        default=600.0,
        help="limit of a reward call, in seconds; it is made twice before the sample fails",
    )
    group.add_argument(
        "--custom-reward-post-process-path", default=None, help="plug-in path: replaces group normalisation"
    )
    group.add_argument(
        "--custom-convert-samples-to-train-data-path",
        default=None,
        help="plug-in path: replaces the conversion to the train batch",
    )
