"""Starts a Ray for one test, on this machine."""

from typing import Any

import ray

from slime.ray.cluster import _patience_with_node, _without_dashboard


def start_ray(**options: Any) -> None:
    """`ray.init` with `options`, without failing on a slow machine. `ray.shutdown` ends it."""
    with _patience_with_node(), _without_dashboard():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # Most actors of tests have an environment of their own and cannot use workers that were started in advance.
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )
