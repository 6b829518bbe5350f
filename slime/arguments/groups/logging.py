"""Flags of logging, tracking and debugging."""

import argparse

TITLE = "logging, tracking and debugging"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-level",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        default="INFO",
        help="Python log level in every process of the run",
    )
    group.add_argument(
        "--use-tensorboard", action=argparse.BooleanOptionalAction, default=True, help="write event files"
    )
    group.add_argument("--tb-project-name", default=None, help="first directory below outputs/; unset: slime")
    group.add_argument("--tb-experiment-name", default=None, help="second directory; unset: a time stamp")
    group.add_argument("--log-passrate", action="store_true", help="log pass@{1,2,4,...}")
    group.add_argument(
        "--log-reward-category", default=None, help="entry of reward dictionaries whose values are counted"
    )
    group.add_argument(
        "--log-correct-samples", action="store_true", help="log the response lengths of correct samples apart"
    )
    group.add_argument("--debug-rollout-only", action="store_true", help="engines only, no training ranks")
    group.add_argument("--debug-train-only", action="store_true", help="training ranks only, no engines")
    group.add_argument("--save-debug-rollout-data", default=None, help="dump rollouts; `{rollout_id}` is filled in")
    group.add_argument(
        "--load-debug-rollout-data", default=None, help="train on dumped rollouts; implies --debug-train-only"
    )
    group.add_argument(
        "--load-debug-rollout-data-subsample",
        type=float,
        default=None,
        help="take this share of a dump: its first and last halves",
    )
    group.add_argument(
        "--save-debug-train-data",
        default=None,
        help="dump train batches; `{rollout_id}` and `{rank}` are filled in",
    )
    group.add_argument("--dump-details", default=None, help="directory for both dumps")
    group.add_argument(
        "--check-weight-update-equal",
        action="store_true",
        help="prove that engine weights equal trainer weights: by checksums at start, by a log-prob probe after "
        "every sync",
    )
