"""Engines of another cluster follow a run: they get the weights of every push, through files that both clusters see.

    python examples/delta_weight_sync/follow.py --pushes /shared/pushes --hf-checkpoint MODEL --local /disk/weights \\
        --engines http://10.1.0.5:30000 http://10.1.0.6:30000

It runs on the host of the engines, beside them, one for all of them; `--local` is a directory there that is empty or was
written by this program, and that nobody else has. What the run publishes in its `--update-weight-disk-dir` is read once for
all engines of the host and applied to the copy there, which all of them load at once. Nobody of the run knows of them, so they
may lag behind. Engines with an `--api-key` are asked with the one in `SLIME_ENGINE_API_KEY`.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.child_process import exit_when_parent_dies
from slime.utils.errors import RunError, UserError
from slime.utils.hf_files import INDEX_FILE
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.publication import version_in

logger = logging.getLogger("follow")

# For an engine to say what it has.
_ANSWER_SECONDS = 60.0


@dataclass(frozen=True, order=True)
class Push:
    """What a run has published. Another run may publish the same version in the same place, at another time."""

    written_ns: int
    version: int
    directory: Path


def newest(pushes: Path) -> Push | None:
    """What was published last. Directories appear whole, in one step, and a new run begins again with version 1."""
    found: list[Push] = []
    for directory in pushes.glob("weight_v*"):
        try:
            found.append(Push((directory / INDEX_FILE).stat().st_mtime_ns, version_in(directory), directory))
        except (OSError, ValueError):
            # Deleted at this moment, for the run has published all of the weights since; or it is no push.
            continue
    return max(found, default=None)


def ask(
    engine: str, method: str, path: str, time_limit: float, payload: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON that an engine answers.

    Raises:
        RunError: it does not answer, or with an error.
    """
    key = os.environ.get("SLIME_ENGINE_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with requests.Session() as session:
            session.trust_env = False
            answer = session.request(method, f"{engine}{path}", json=payload, headers=headers, timeout=time_limit)
            if answer.ok:
                return answer.json()
    except (requests.RequestException, ValueError) as error:
        raise RunError(f"{engine}{path}: {type(error).__name__}") from None
    raise RunError(f"{engine}{path}: {answer.status_code} {answer.text[:200]}")


def of_each(engines: Sequence[str], work: Callable[[str], bool]) -> list[bool]:
    """What `work` gives for each engine; it is done for all at once, so that the slowest alone is waited for."""

    def do(engine: str, done: Future[bool]) -> None:
        try:
            done.set_result(work(engine))
        except BaseException as error:
            done.set_exception(error)

    futures = [Future[bool]() for _ in engines]
    for engine, done in zip(engines, futures, strict=True):
        # A daemon: whoever ends the process does not wait for an engine that does not answer.
        threading.Thread(target=do, args=(engine, done), name=engine, daemon=True).start()
    return [done.result() for done in futures]


class Follower:
    """Brings a directory of this host, and engines that load it, to what a run publishes.

    Args:
        local: what engines load; the files of `hf_checkpoint` at first.
        time_limit: for an engine to load them, in seconds.
    """

    def __init__(
        self, pushes: Path, hf_checkpoint: Path, local: Path, engines: Sequence[str], time_limit: float
    ) -> None:
        self._pushes, self._local, self._engines, self._time_limit = pushes, local, engines, time_limit
        # Two that write the same directory would each have engines load it while the other changes it.
        self._copy = LocalCheckpoint(local, hf_checkpoint, time_limit, alone=True)
        # What the local directory is, what it could not be made of, and what each engine has loaded.
        self._copied: Push | None = None
        self._unusable: Push | None = None
        self._loaded: dict[str, Push] = {}
        # Of each engine the last complaint: it is told once.
        self._complaints: dict[str, str] = {}

    def step(self) -> int | None:
        """Bring every engine to what was published last; its version if all have it now and one of them had not, else None.

        Raises:
            UserError: the local directory is somebody else's, or another follower or a run has it.
            RunError: it cannot be written.
        """
        wanted = newest(self._pushes)
        if wanted is None:
            return None
        have = of_each(self._engines, lambda engine: self._has(engine, wanted))
        behind = [engine for engine, has in zip(self._engines, have, strict=True) if not has]
        if not behind or wanted == self._unusable:
            return None
        if self._copied != wanted:
            # Nobody loads it meanwhile: engines do so only where they are told to, below.
            self._copied, refused = None, self._copy.bring_to(wanted.directory)
            if refused is not None:
                self._unusable = wanted
                logger.warning("%s cannot be used, and the next one is waited for: %s", wanted.directory, refused)
                return None
            self._copied = wanted
        loaded = of_each(behind, lambda engine: self._load(engine, wanted))
        return wanted.version if all(loaded) else None

    def close(self) -> None:
        """Leave the local directory to others."""
        self._copy.close()

    def _has(self, engine: str, wanted: Push) -> bool:
        """Whether the engine has loaded it, and was not started anew since."""
        if self._loaded.get(engine) != wanted:
            return False
        try:
            return ask(engine, "GET", "/model_info", _ANSWER_SECONDS).get("weight_version") == str(wanted.version)
        except RunError:
            return False

    def _load(self, engine: str, wanted: Push) -> bool:
        """Whether the engine now has the weights of the local directory. Requests that it works on are finished first."""
        version = str(wanted.version)
        payload = {"model_path": str(self._local), "flush_cache": True, "weight_version": version}
        self._loaded.pop(engine, None)
        try:
            ask(engine, "POST", "/update_weights_from_disk", self._time_limit, payload)
            found = ask(engine, "GET", "/model_info", _ANSWER_SECONDS).get("weight_version")
            if found != version:
                raise RunError(f"{engine} says that it has version {found} after it was given {version}")
        except RunError as error:
            if self._complaints.get(engine) != str(error):
                logger.warning("%s; it is asked again", error)
            self._complaints[engine] = str(error)
            return False
        self._loaded[engine] = wanted
        self._complaints.pop(engine, None)
        return True


def main(argv: list[str] | None = None) -> int:
    """Follow until the process is told to end, or until a version is reached; 0, or 2 where a directory is wrong."""
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pushes", type=Path, required=True, help="--update-weight-disk-dir of the run, as it is seen here"
    )
    parser.add_argument(
        "--hf-checkpoint", type=Path, required=True, help="that of the run: what its first delta changes"
    )
    parser.add_argument(
        "--local", type=Path, required=True, help="directory of this host for the copy that engines load"
    )
    parser.add_argument("--engines", nargs="+", required=True, help="URLs of SGLang servers that see --local")
    parser.add_argument("--poll-seconds", type=float, default=1.0, help="between two looks at --pushes (1)")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, help="seconds for an engine to load the weights (600)"
    )
    parser.add_argument("--until", type=int, help="end when the engines have this version, or a later one")
    given = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(message)s")
    if not (given.hf_checkpoint / "config.json").is_file():
        parser.error(f"--hf-checkpoint {given.hf_checkpoint} has no config.json; give the directory of the run's model")
    # At once, also while an engine does not answer: a copy that is left in the middle is known as one.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    engines = [engine.rstrip("/") for engine in given.engines]
    follower = Follower(given.pushes, given.hf_checkpoint, given.local.absolute(), engines, given.time_limit)
    with contextlib.closing(follower):
        while True:
            began = time.monotonic()
            try:
                version = follower.step()
            except (UserError, RunError) as error:
                logger.error("%s", error)
                return 2
            if version is not None:
                seconds = time.monotonic() - began
                logger.info("weights %d: %d engines have them after %.1f s", version, len(engines), seconds)
                if given.until is not None and version >= given.until:
                    return 0
            # A disk that machines share tells none of them what another one writes.
            time.sleep(given.poll_seconds)


if __name__ == "__main__":
    sys.exit(main())
