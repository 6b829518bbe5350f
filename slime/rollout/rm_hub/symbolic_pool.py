"""Symbolic equality in persistent worker processes, each comparison under a time limit.

The limit counts the time of the processor, so that a busy machine changes no verdict; waiting is bounded much later. A
worker that exceeds its limit ends and is replaced, and the answer is False. A worker starts when a comparison finds
none idle: most answers are decided by their text or as plain numbers.
"""

import contextlib
import json
import logging
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

from slime.utils.errors import RunError

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
# A worker that gets a tenth of a core still has its time.
WAIT_PER_SECOND = 10
START_LIMIT_S = 120.0
# The engines and the trainer use the same cores.
MAX_WORKERS = 32
_WORKER_FILE = Path(__file__).with_name("symbolic_worker.py")


class SymbolicWorkerError(RunError):
    """A worker could not be started, or died."""


class _Worker:
    """One process, asked one question at a time."""

    def __init__(self) -> None:
        # -I: neither the environment nor the current directory decides what the worker imports.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER_FILE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)
        if self._read_line(START_LIMIT_S) != b"ready\n":
            self.close()
            raise SymbolicWorkerError("the worker for symbolic comparison did not start; is math-verify installed?")

    def ask(self, given: str, truth: str, timeout: float) -> bool | None:
        """The verdict, or None when it took more than `timeout` seconds of the processor or the worker died."""
        try:
            self._process.stdin.write(json.dumps([given, truth, timeout]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._read_line(timeout * WAIT_PER_SECOND)
        return None if line is None else json.loads(line)

    def _read_line(self, timeout: float) -> bytes | None:
        # A worker writes whole short lines, so a readable pipe holds all of one.
        if not self._selector.select(timeout):
            return None
        return self._process.stdout.readline() or None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._selector.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        # A question that was never read is still in the buffer.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class SymbolicPool:
    """Up to `size` workers, started when needed; by default one per core that this process may use."""

    def __init__(self, size: int | None = None) -> None:
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self.size = size or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._slots = threading.Semaphore(self.size)

    def are_equal(self, given: str, truth: str, timeout: float = TIME_LIMIT_S) -> bool:
        """Whether two answers in LaTeX are equal; False when `timeout` s of the processor do not show it. Thread-safe."""
        with self._slots:
            worker = self._take()
            started = time.monotonic()
            verdict = worker.ask(given, truth, timeout)
            if verdict is None:
                worker.close()
                logger.info("a symbolic comparison was given up after %.1f s", time.monotonic() - started)
                return False
            self._idle.put(worker)
            return verdict

    def close(self) -> None:
        """End the idle workers."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return _Worker()
            if worker.alive:
                return worker
            worker.close()


_pool = SymbolicPool()


def pool_size() -> int:
    """Comparisons that the process-wide pool makes at a time."""
    return _pool.size


def are_equal(given: str, truth: str, timeout: float = TIME_LIMIT_S) -> bool:
    """`SymbolicPool.are_equal` of the process-wide pool."""
    return _pool.are_equal(given, truth, timeout)


def close_pool() -> None:
    """End the workers of the process-wide pool; the next comparison starts new ones."""
    _pool.close()
