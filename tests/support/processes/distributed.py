"""Run a function in clean child processes that form a real process group (Gloo on CPU).

    results = run_distributed(worker, world_size=2, args=(tmp_path,))

`worker` is a module-level function of any test file; every rank calls `worker(*args)` in a process of its own, whose
environment holds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, so that `torch.distributed` initialises
from the environment. Arguments and return values travel by pickle. The children share nothing with the test's process:
their imports and patches do not reach it. They are forked from a server that has already imported torch and Megatron with its
CPU lifts (`preloaded.py`), because these imports take most of the time of a start. With `start_method="transformer engine"` the
server has Transformer Engine beside them (`preloaded_engine.py`), and with "spawn" a child starts without any imports.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

REPOSITORY = Path(__file__).resolve().parents[3]
_LOG_TAIL = 6000
# By start method, the server that processes are forked from, and what it imports before.
_SERVERS = {
    "forkserver": (multiprocessing.forkserver._forkserver, "tests.support.processes.preloaded"),
    "transformer engine": (multiprocessing.forkserver.ForkServer(), "tests.support.processes.preloaded_engine"),
}


class DistributedFailure(AssertionError):
    """A rank raised, died or did not finish in time; the message holds the end of every rank's output."""


def run_distributed(
    worker: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    start_method: str = "forkserver",
    grace_seconds: float = 5.0,
) -> list[Any]:
    """Call `worker(*args)` on `world_size` ranks and return their return values, by rank.

    Args:
        start_method: "forkserver"; "transformer engine" for a worker whose layers are Transformer Engine's; or "spawn" for one
            that depends on the order of imports, or on environment variables that are read at import.
        grace_seconds: how long the others have, once a rank has failed, to end with errors of their own.

    Raises:
        DistributedFailure: a rank failed (the others are then ended), or `timeout` seconds have passed.
    """
    from torch.distributed import TCPStore

    # The store lives in this process and lets the system choose its port, so that no other process can take it before.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="run_distributed_") as directory:
        ranks = [_Rank(rank, world_size, store.port, Path(directory), env or {}) for rank in range(world_size)]
        try:
            for rank in ranks:
                rank.start(worker, args, start_method)
            _wait(ranks, timeout, grace_seconds)
        finally:
            for rank in ranks:
                rank.end()
        return [rank.result() for rank in ranks]


class _Rank:
    """One child process with its files."""

    def __init__(self, rank: int, world_size: int, port: int, directory: Path, env: Mapping[str, str]) -> None:
        self.rank = rank
        self._log = directory / f"rank{rank}.log"
        self._result = directory / f"rank{rank}.result"
        self._process: multiprocessing.process.BaseProcess | None = None
        self._env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # This variable of torch's launcher makes all ranks clients of the parent's store.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **env,
        }

    def start(self, worker: Callable[..., Any], args: Sequence[Any], start_method: str) -> None:
        call = pickle.dumps((inspect.getfile(worker), worker.__qualname__, tuple(args)))
        context = multiprocessing.get_context("forkserver" if start_method in _SERVERS else start_method)
        self._process = context.Process(target=_run, args=(call, self._result, self._log, self._env, start_method))
        # Imports before `_run` sets the environment, in the server or a spawned interpreter, must see these variables too.
        with mock.patch.dict(os.environ, self._env), _asking_server(start_method):
            self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def sentinel(self) -> int:
        """A handle that is ready when the process has ended."""
        return self._process.sentinel

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def result(self) -> Any:
        return pickle.loads(self._result.read_bytes())

    def report(self) -> str:
        text = self._log.read_text(errors="replace")[-_LOG_TAIL:] if self._log.exists() else ""
        return f"--- rank {self.rank}, exit status {self.poll()} ---\n{text.strip()}"


@contextlib.contextmanager
def _asking_server(start_method: str) -> Iterator[None]:
    """Have `multiprocessing` ask the server of the start method for a process; it knows but one itself."""
    if start_method not in _SERVERS:
        yield
        return
    server, preloaded = _SERVERS[start_method]
    server.set_forkserver_preload([preloaded])
    connect = server.connect_to_new_process
    with mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", connect):
        yield


def _wait(ranks: list[_Rank], timeout: float, grace_seconds: float) -> None:
    deadline = time.monotonic() + timeout
    failed_at = None
    while running := [rank for rank in ranks if rank.poll() is None]:
        now = time.monotonic()
        if failed_at is None and any(rank.poll() for rank in ranks):
            failed_at = now
        # Other ranks usually notice a lost peer within moments, and their errors then show what they were doing.
        patience = deadline if failed_at is None else min(deadline, failed_at + grace_seconds)
        if now < patience:
            multiprocessing.connection.wait([rank.sentinel for rank in running], patience - now)
        elif failed_at is not None:
            break
        else:
            raise DistributedFailure("\n".join([f"not finished after {timeout} s", *(rank.report() for rank in ranks)]))
    if any(rank.poll() != 0 for rank in ranks):
        raise DistributedFailure("\n".join(["a rank failed", *(rank.report() for rank in ranks)]))


def _end_with_parent() -> None:
    def watch() -> None:
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _load(file: str, qualname: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("distributed_worker", file)
    module = importlib.util.module_from_spec(spec)
    # Checkpoint writers pickle classes of the worker's module by name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, qualname)


def _run(call: bytes, result_file: Path, log: Path, env: Mapping[str, str], start_method: str) -> None:
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable()  # A rank that dies in native code says where each of its threads was.
    os.environ.clear()
    os.environ.update(env)
    os.chdir(REPOSITORY)
    warnings.simplefilter("ignore")
    # A child inherits the start method of its parent. Processes that the worker starts must use the default one.
    multiprocessing.set_start_method(None, force=True)
    _end_with_parent()
    file, qualname, args = pickle.loads(call)
    result = _load(file, qualname)(*args)
    result_file.write_bytes(pickle.dumps(result))
    dist = sys.modules.get("torch.distributed")
    # A forked process ends without finalising its interpreter. In a spawned one, groups of Gloo would abort that.
    if start_method == "spawn" and dist is not None and dist.is_initialized():
        dist.destroy_process_group()
