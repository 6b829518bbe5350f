"""Ray nodes on this machine, each with a loopback address of its own, started and ended by `scripts/cluster.sh`.

    with RayNodes(tmp_path, gpus=8, nodes=4) as nodes:
        ...  # RAY_ADDRESS=nodes.address

Each node has its own directory for temporary files, and so its own logs and sockets, as on a machine of its own.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.support.tables.shell_arrays import ROOT, bash

_SECONDS = 240
_ADDRESS_OF_RAYLET = re.compile(r"--node_ip_address=(\S+)")


class RayNodes:
    """A cluster of `nodes` nodes with `gpus` logical GPUs each, at 127.0.0.2 and the following addresses."""

    def __init__(self, directory: Path, nodes: int, gpus: int) -> None:
        self.addresses = [f"127.0.0.{2 + node}" for node in range(nodes)]
        self._directory, self._gpus = directory, gpus
        # The directory holds Unix sockets, whose paths must stay short.
        self._temporary = Path(tempfile.mkdtemp(prefix="nodes-", dir="/tmp"))
        port, dashboard_port = (_free_port(self.addresses[0]) for _ in range(2))
        self._ports = {"RAY_PORT": str(port), "DASHBOARD_PORT": str(dashboard_port)}
        self.address = f"{self.addresses[0]}:{port}"
        self.dashboard = f"http://127.0.0.1:{dashboard_port}"

    def __enter__(self) -> RayNodes:
        try:
            self._start(self.addresses[0], "head", **self._ports)
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda address: self._start(address, f"worker {self.address}"), self.addresses[1:]))
            status = self._cluster(
                self.addresses[0], f"status {len(self.addresses) * self._gpus}", STATUS_SECONDS="120"
            )
            assert status.returncode == 0, status.stdout + status.stderr
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop()

    def node_of(self, pid: int) -> str | None:
        """The address of the process's node; None if it belongs to no node of this cluster."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for parent in (process, *process.parents()):
                found = _ADDRESS_OF_RAYLET.search(" ".join(parent.cmdline()))
                if found and found[1] in self.addresses:
                    return found[1]
        return None

    def processes(self) -> dict[int, str]:
        """Process id -> command line, of all processes of the cluster and of programs that run on it."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.node_of(process.pid) is not None or str(self._temporary) in " ".join(process.cmdline()):
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def actors(self) -> dict[str, list[str]]:
        """The names of living actors, by the address of the node whose log has them."""
        found: dict[str, list[str]] = {address: [] for address in self.addresses}
        for address in self.addresses:
            for log in self._temporary_of(address).glob("session_latest/logs/worker-*.out"):
                names = re.findall(r"^:actor_name:(.*)$", log.read_text(errors="replace"), re.MULTILINE)
                if names and psutil.pid_exists(int(log.stem.rpartition("-")[2])):
                    found[address].append(names[-1])
        return found

    def listening(self) -> dict[str, set[tuple[str, str]]]:
        """Address of a node -> its listening TCP sockets: (command line of the process, address of the socket)."""
        found: dict[str, set[tuple[str, str]]] = {address: set() for address in self.addresses}
        for pid, command in self.processes().items():
            node = self.node_of(pid)
            with contextlib.suppress(psutil.NoSuchProcess):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if node is not None and connection.status == psutil.CONN_LISTEN:
                        found[node].add((command, connection.laddr.ip))
        return found

    def _temporary_of(self, address: str) -> Path:
        return self._temporary / address.rpartition(".")[2]

    def _start(self, address: str, command: str, **variables: str) -> None:
        done = self._cluster(address, command, SLIME_HOST_IP=address, NUM_GPUS=str(self._gpus), **variables)
        assert done.returncode == 0, done.stdout + done.stderr

    def _cluster(self, address: str, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return bash(
            f"bash scripts/cluster.sh {command}",
            cwd=ROOT,
            timeout=_SECONDS,
            CLUSTER_DIR=str(self._directory / address),
            RAY_TEMP_DIR=str(self._temporary_of(address)),
            RAY_AUTH_MODE="disabled",
            START_SECONDS=str(_SECONDS),
            **variables,
        )

    def _stop(self) -> None:
        with ThreadPoolExecutor() as pool:
            # The head ends last, because the other nodes tell it that they leave.
            ended = list(pool.map(lambda address: self._cluster(address, "stop"), self.addresses[:0:-1]))
        ended.append(self._cluster(self.addresses[0], "stop"))
        shutil.rmtree(self._temporary, ignore_errors=True)
        assert [result.returncode for result in ended] == [0] * len(ended), ended


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return server.getsockname()[1]
