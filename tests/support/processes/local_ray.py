"""A Ray of the test's own, on this machine."""

from typing import Any

import ray

from slime.ray.cluster import _patience_with_node, _without_dashboard


def start_ray(**options: Any) -> None:
    """`ray.init` with `options`, however long a busy machine takes for it. `ray.shutdown` ends it."""
    with _patience_with_node(), _without_dashboard():
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            # Most actors of tests have an environment of their own, and find no use for what was started in advance.
            _system_config={"prestart_worker_first_driver": False},
            **options,
        )
