"""Flags of requests to engines."""

import argparse

TITLE = "network"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--http-request-timeout", type=float, default=14400.0, help="one generation request, seconds")
    group.add_argument("--http-control-timeout", type=float, default=300.0, help="one control request, seconds")
    group.add_argument(
        "--http-max-retries",
        type=int,
        default=60,
        help="attempts, 1 s apart; connection errors, 429 and 5xx only",
    )
    group.add_argument(
        "--abort-timeout", type=float, default=300.0, help="limit for bringing engines to idle, in seconds"
    )
