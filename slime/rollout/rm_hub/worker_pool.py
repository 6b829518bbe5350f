"""Grading by libraries, in persistent worker processes: comparison of formulas, and checks of instructions.

What a model wrote is untrusted text. Each question has a limit of processor time, so that a busy machine changes no verdict;
the wait for it is bounded more generously. A worker that exceeds its limit ends and is replaced, and the question has no
answer. Workers start only when a question finds none idle, because most answers are decided by their text or as plain numbers.
"""

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
from typing import Any

from slime.utils.errors import RunError

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
# How many seconds to wait per second of processor time: a worker that gets a tenth of a core still has its time.
WAIT_PER_SECOND = 10
START_LIMIT_S = 120.0
# Bounded, because the engines and the trainer use the same cores.
MAX_WORKERS = 32
_WORKER_FILE = Path(__file__).with_name("grading_worker.py")
# Options of the interpreter. With -I neither the environment nor the current directory decides what a worker imports. With -P
# PYTHONPATH still does, because the checks of IFBench lie there.
FORMULAS, INSTRUCTIONS = "formulas", "instructions"
_INTERPRETER = {FORMULAS: "-I", INSTRUCTIONS: "-P"}


class GradingWorkerError(RunError):
    """A worker could not be started."""


class _Worker:
    """One worker process, which is asked one question at a time."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, _INTERPRETER[kind], str(_WORKER_FILE), kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        # A write must not block when the pipe of a worker that does not read is full.
        os.set_blocking(self._process.stdin.fileno(), False)
        self._questions, self._answers = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._questions.register(self._process.stdin, selectors.EVENT_WRITE)
        self._answers.register(self._process.stdout, selectors.EVENT_READ)
        if self._read_line(START_LIMIT_S) != b"ready\n":
            self.close()
            library = (
                " of formulas did not start; is math-verify installed?"
                if kind == FORMULAS
                else f" of {kind} did not start"
            )
            raise GradingWorkerError(f"the worker for grading{library}")

    def ask(self, question: list[Any], timeout: float) -> Any:
        """The answer; None if it took more than `timeout` seconds of processor time, or the worker died."""
        deadline = time.monotonic() + timeout * WAIT_PER_SECOND
        unwritten = memoryview(json.dumps([timeout, question]).encode() + b"\n")
        while unwritten:
            if not self._questions.select(deadline - time.monotonic()):
                return None
            try:
                unwritten = unwritten[os.write(self._process.stdin.fileno(), unwritten) :]
            except OSError:
                return None
        line = self._read_line(deadline - time.monotonic())
        return None if line is None else json.loads(line)

    def _read_line(self, timeout: float) -> bytes | None:
        # A worker writes short lines, each at once, so a readable pipe holds a whole one.
        if not self._answers.select(timeout):
            return None
        return self._process.stdout.readline() or None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._questions.close()
        self._answers.close()
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process.stdin.close()


class WorkerPool:
    """Up to `size` workers of one kind, started when needed; by default one per core that this process may use."""

    def __init__(self, kind: str, size: int | None = None) -> None:
        self._kind = kind
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self.size = size or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._slots = threading.Semaphore(self.size)

    def ask(self, question: list[Any], timeout: float = TIME_LIMIT_S) -> Any:
        """A worker's answer to `question`; None if `timeout` seconds of processor time do not give one. Thread-safe."""
        with self._slots:
            worker = self._take()
            started = time.monotonic()
            answer = worker.ask(question, timeout)
            if answer is None:
                worker.close()
                logger.info("grading of %s was given up after %.1f s", self._kind, time.monotonic() - started)
                return None
            self._idle.put(worker)
            return answer

    def close(self) -> None:
        """End the idle workers."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _take(self) -> _Worker:
        while True:
            try:
                worker = self._idle.get_nowait()
            except queue.Empty:
                return _Worker(self._kind)
            if worker.alive:
                return worker
            worker.close()


_pools = {kind: WorkerPool(kind) for kind in _INTERPRETER}


def pool_size() -> int:
    """How many questions of a kind the process-wide pools answer at a time."""
    return _pools[FORMULAS].size


def are_equal(given: str, truth: str, timeout: float = TIME_LIMIT_S) -> bool:
    """Whether two answers in LaTeX are equal; False if `timeout` seconds of processor time do not show it."""
    return bool(_pools[FORMULAS].ask([given, truth], timeout))


def followed_instructions(response: str, prompt: str, instructions: list[tuple[str, dict[str, Any]]]) -> Any:
    """For each (id, keywords) whether `response` follows it; None without a verdict in time; a text if no check can tell."""
    return _pools[INSTRUCTIONS].ask([response, prompt, instructions])


def close_pools() -> None:
    """End the workers of the process-wide pools; the next question starts new ones."""
    for pool in _pools.values():
        pool.close()
