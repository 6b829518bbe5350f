"""Flags of log lines, metrics and trackers."""

import argparse

TITLE = "logging and tracking"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-level",
        type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        default="INFO",
        help="Python log level in every process of the run; SLIME_DEBUG=1 means DEBUG with tracebacks",
    )
    _add_metrics(group)
    _add_tensorboard(group)
    _add_wandb(group)


def _add_metrics(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-samples-interval",
        type=int,
        default=10,
        help="show the first and the last sample of the run's first rollout and of one in so many after it, and of every "
        "evaluation set likewise; 0: never",
    )
    group.add_argument("--log-passrate", action="store_true", help="log pass@{1,2,4,...}")
    group.add_argument(
        "--log-multi-turn",
        action="store_true",
        help="log the number of turns and response lengths without the text of tools",
    )
    group.add_argument(
        "--log-reward-category", default=None, help="entry of reward dictionaries whose values are counted"
    )
    group.add_argument(
        "--log-correct-samples",
        action="store_true",
        help="log the response lengths (and entropy, where it is computed) of correct samples apart",
    )


def _add_tensorboard(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-tensorboard",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="write event files; unset: yes, unless another tracker is chosen or the package is missing",
    )
    group.add_argument(
        "--tb-project-name", default=None, help="first directory below outputs/; unset: slime. TENSORBOARD_DIR wins"
    )
    group.add_argument("--tb-experiment-name", default=None, help="second directory; unset: a time stamp")


def _add_wandb(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--use-wandb", action="store_true", help="report to Weights & Biases")
    group.add_argument(
        "--wandb-mode",
        choices=["online", "offline", "disabled"],
        default=None,
        help="takes precedence over WANDB_MODE; offline writes to --wandb-dir only",
    )
    group.add_argument(
        "--wandb-dir", default=None, help="directory of its local files; unset: the run's output directory"
    )
    group.add_argument("--wandb-key", default=None, help="API key; better in WANDB_API_KEY. Never logged")
    group.add_argument("--wandb-host", default=None, help="address of an own server")
    group.add_argument("--wandb-team", default=None, help="team (entity) that owns the run")
    group.add_argument("--wandb-group", default=None, help="group of runs, and first part of the run's name")
    group.add_argument("--wandb-project", default=None, help="project")
    group.add_argument(
        "--wandb-run-id", default=None, help="id of the run, to continue one; unset: made by the driver and shared"
    )
    group.add_argument(
        "--disable-wandb-random-suffix",
        dest="wandb_random_suffix",
        action="store_false",
        help="leave the 6 random characters out of the run's name",
    )
    group.add_argument(
        "--wandb-always-use-train-step",
        action="store_true",
        help="plot everything over optimizer steps instead of rollouts",
    )
