"""Flags of the watch over engines."""

import argparse

TITLE = "fault tolerance"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--use-fault-tolerance",
        action="store_true",
        help="watch the engines, replace dead ones, and record failing samples instead of stopping the run",
    )
    group.add_argument(
        "--rollout-health-check-interval",
        type=float,
        default=30.0,
        help="pause between two checks while engines generate, in seconds",
    )
    group.add_argument(
        "--rollout-health-check-timeout",
        type=float,
        default=30.0,
        help="an engine that has not answered a check after this many seconds is dead",
    )
    group.add_argument(
        "--rollout-health-check-first-wait",
        type=float,
        default=0.0,
        help="grace before the first check, in seconds; raise it when engines compile kernels for long",
    )
