"""`python -m slime_plugins.rollout_buffer`: start the service."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile

from aiohttp import web

from slime.utils import env
from slime.utils.child_process import exit_when_parent_dies
from slime.utils.errors import RunError, UserError
from slime_plugins.rollout_buffer.generators import find_generators
from slime_plugins.rollout_buffer.service import RolloutBuffer, make_app
from slime_plugins.rollout_buffer.store import Store

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def main() -> int:
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(
        prog="python -m slime_plugins.rollout_buffer",
        description="Take trajectories from generators, and hand them to a run in whole groups.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; not loopback: set SLIME_BUFFER_API_KEY"
    )
    parser.add_argument("--port", type=int, default=8889)
    parser.add_argument(
        "--generator",
        action="append",
        default=[],
        help="module, file, or directory of *_generator.py, each with TASK_TYPE and run_rollout(data); may be given again",
    )
    parser.add_argument(
        "--state", help="file that holds the groups, so that a service started again goes on; unset: in memory"
    )
    parser.add_argument("--log-dir", help="directory for what generators print; unset: a temporary one")
    parser.add_argument("--max-bytes", type=int, default=2**26, help="longest body of a request")
    parser.add_argument(
        "--trajectory-timeout",
        type=float,
        default=14400.0,
        help="seconds for a trajectory of BaseGenerator, then it counts as failed; no generator may be silent for longer",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="let generators run code of the checkpoint, where the run has this flag, too",
    )
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if not 0 < given.trajectory_timeout < float("inf"):
            parser.error(f"--trajectory-timeout {given.trajectory_timeout:g}: expected seconds above 0")
        api_key = env.buffer_service_key()
        if api_key is None and given.host not in _LOOPBACK:
            parser.error(f"--host {given.host}: everybody on the network could ask; set SLIME_BUFFER_API_KEY")
        generators = find_generators(given.generator)
        with contextlib.closing(Store(given.state)) as store, contextlib.ExitStack() as stack:
            directory = given.log_dir or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="slime-rollout-buffer-")
            )
            buffer = RolloutBuffer(
                store,
                generators,
                directory,
                trust_remote_code=given.trust_remote_code,
                trajectory_timeout=given.trajectory_timeout,
            )
            app = make_app(buffer, api_key=api_key, max_bytes=given.max_bytes)
            logging.info("tasks: %s; logs of generators below %s", ", ".join(sorted(generators)), directory)
            web.run_app(app, host=given.host, port=given.port, access_log=None, shutdown_timeout=2.0)
    except (UserError, RunError) as error:
        print(error, file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"--host {given.host} --port {given.port}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
