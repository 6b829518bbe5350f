"""Starts a Ray for one test, on this machine."""

from typing import Any

import ray
from ray._private.node import Node

from slime.ray.cluster import _patience_with_node, _replaced, _without_dashboard


def start_ray(**options: Any) -> None:
    """`ray.init` with `options`, without failing on a slow machine. `ray.shutdown` ends it."""
    # The monitor of logs is a process that looks for new lines all the time, and here nobody wants them.
    without_log_monitor = _replaced(Node, start_log_monitor=lambda self: None)
    with _patience_with_node(), _without_dashboard(), without_log_monitor:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # Most actors of tests have an environment of their own and cannot use workers that were started in advance.
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )
