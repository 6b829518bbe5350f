"""Symbolic equality in a few persistent worker processes, each comparison under a time limit.

A worker that exceeds the limit is ended and replaced, and the answer is False. The pool starts its first worker with the
first comparison that needs one: most answers are decided by their text or as exact rationals.
"""

import contextlib
import json
import logging
import queue
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path

from slime.rollout.rm_hub.restricted_math import Tree

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
START_LIMIT_S = 120.0
POOL_SIZE = 2
_WORKER_FILE = Path(__file__).with_name("symbolic_worker.py")


class SymbolicWorkerError(RuntimeError):
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
            raise SymbolicWorkerError("the worker for symbolic comparison did not start; is sympy installed?")

    def ask(self, left: Tree, right: Tree, timeout: float) -> bool | None:
        """The verdict, or None when it did not come in time or the worker died."""
        try:
            self._process.stdin.write(json.dumps([left, right]).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            return None
        line = self._read_line(timeout)
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
    """Up to `size` workers, started when needed."""

    def __init__(self, size: int = POOL_SIZE) -> None:
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._slots = threading.Semaphore(size)

    def are_equal(self, left: Tree, right: Tree, timeout: float = TIME_LIMIT_S) -> bool:
        """Whether two trees are equal; False when that is not shown within `timeout` seconds. Blocks; thread-safe."""
        with self._slots:
            worker = self._take()
            started = time.monotonic()
            verdict = worker.ask(left, right, timeout)
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


def are_equal(left: Tree, right: Tree, timeout: float = TIME_LIMIT_S) -> bool:
    """`SymbolicPool.are_equal` of the process-wide pool."""
    return _pool.are_equal(left, right, timeout)


def close_pool() -> None:
    """End the workers of the process-wide pool; the next comparison starts new ones."""
    _pool.close()
