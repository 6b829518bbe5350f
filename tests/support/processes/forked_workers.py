"""Data workers as forks of one process that has already imported what each of them needs; this takes most of their start.

    with workers_forked():
        workers = DataWorkers(2, preparation)

Workers that may import torch start as those of a run, because that process has none. It serves all blocks of a test's process
and ends with that.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from multiprocessing import connection, forkserver, popen_forkserver
from typing import Any
from unittest import mock

from slime.utils import data_workers


@contextlib.contextmanager
def workers_forked() -> Iterator[None]:
    """In the block, workers are such forks."""
    with mock.patch.object(data_workers, "_Context", _Context):
        yield


class _Server(forkserver.ForkServer):
    """Stands in place of Python's module with its own server, which `run_distributed` has."""

    read_signed = staticmethod(forkserver.read_signed)


@functools.cache
def _server() -> _Server:
    server = _Server()
    server.set_forkserver_preload(["tests.support.processes.worker_imports"])
    return server


class _Popen(popen_forkserver.Popen):
    """May be polled by several threads at a time, as a pool and who closes it do: the status can be read only once."""

    def __init__(self, process: Any) -> None:
        self._reading = threading.Lock()
        super().__init__(process)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            return None
        with self._reading:
            return super().poll(flag)


class _Process(data_workers._Process):
    @staticmethod
    def _Popen(process: Any) -> _Popen:
        with mock.patch.object(popen_forkserver, "forkserver", _server()):
            return _Popen(process)


class _Context(data_workers._Context):
    def Process(self, *arguments: Any, **keywords: Any) -> data_workers._Process:
        _, preparation = keywords["args"][3]
        if preparation.trust_remote_code or preparation.sees_images:
            return super().Process(*arguments, **keywords)
        self.started.append(_Process(*arguments, **keywords))
        return self.started[-1]
