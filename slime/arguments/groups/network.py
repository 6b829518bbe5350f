"""Flags of requests to engines and of the external rollout buffer service."""

import argparse

TITLE = "network and buffer service"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_requests(group)
    _add_buffer_service(group)


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--http-request-timeout", type=float, default=14400.0, help="one generation request, seconds")
    group.add_argument("--http-control-timeout", type=float, default=300.0, help="one control request, seconds")
    group.add_argument(
        "--http-max-retries",
        type=int,
        default=60,
        help="attempts, 1 s apart; connection errors, 429 and 5xx only",
    )
    group.add_argument(
        "--abort-timeout",
        type=float,
        default=300.0,
        help="limit for bringing engines and tasks of a step to their end, in seconds; who has not answered by then is left "
        "behind",
    )
    group.add_argument(
        "--use-distributed-post",
        action="store_true",
        help="spread generation requests over one client process per node",
    )


def _add_buffer_service(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollout-buffer-url", default=None, help="address of an external rollout buffer service")
    group.add_argument(
        "--fetch-trajectory-retry-times", type=int, default=-1, help="polls of that service per step; -1: no limit"
    )
    group.add_argument("--rollout-task-type", default="math", help="task name in requests to that service")
