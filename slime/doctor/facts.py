"""Facts about the machine: packages, devices, limits, disks, ports, a Ray cluster, variables.

This module imports no installed packages at its top, so that a broken one cannot break the doctor. Work that is heavy or may
hang runs in a Python process of its own, with a time limit. A fact that cannot be found out raises an error, which the check
reports.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RAY_SESSIONS, MODELS = "sessions of Ray", "models of Hugging Face"
# The imports by which processes of a run use each package; without a GPU after an adapter, which does nothing with one.
IMPORTS = {
    "ray": "import ray",
    "megatron-core": "from slime.backends.megatron_utils import cpu_runtime; cpu_runtime.install(); "
    "from megatron.core.models.gpt import GPTModel",
    "sglang": "from slime.backends.sglang_utils import cpu_runtime; cpu_runtime.install(); "
    "from sglang.srt.entrypoints import http_server",
    "sglang-router": "from sglang_router.router import Router",
}
_TORCH = """
import json, torch
cuda = torch.version.cuda or torch.version.hip
found = {"version": torch.__version__, "cuda": cuda, "driver": None, "problem": None, "devices": []}
if cuda:
    if hasattr(torch._C, "_cuda_getDriverVersion"):
        found["driver"] = torch._C._cuda_getDriverVersion()
    try:
        torch.cuda.init()
        for index in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(index)
            try:
                free, total = torch.cuda.mem_get_info(index)
                problem = None
            except Exception as error:
                free, total = 0, torch.cuda.get_device_properties(index).total_memory
                problem = str(error).partition("\\n")[0]
            found["devices"].append({"name": name, "free": free, "total": total, "problem": problem})
    except Exception as error:
        found["problem"] = str(error).partition("\\n")[0]
print(json.dumps(found))
"""
# The cluster is asked without joining it: that would start a driver, and needs a node of the cluster on this machine.
_CLUSTER = """
import json, logging, sys
address = sys.argv[1]
if address.startswith("ray://"):
    import ray
    ray.init(address, logging_level=logging.ERROR)
    nodes = ray.nodes()
else:
    from ray._raylet import GcsClient
    told = GcsClient(address=address).get_all_node_info(timeout=30).values()
    nodes = [{"Alive": node.state == 0, "Resources": node.resources_total} for node in told]
alive = [node["Resources"] for node in nodes if node["Alive"]]
print(json.dumps({"nodes": len(alive), **{name: sum(one.get(name, 0) for one in alive) for name in ("GPU", "CPU")}}))
"""
# How long a listening process may take to accept a connection.
_CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Answer:
    """The answer of a process of its own: the JSON of its last line, or the problem.

    `timed_out`: it was ended because its time was over, and no other problem is known.
    """

    value: Any = None
    problem: str | None = None
    seconds: float = 0.0
    timed_out: bool = False


def ask(code: str, time_limit: float, words: Sequence[str] = ()) -> Answer:
    """Run `code`, which may print JSON, in a Python like this one. All processes that it starts end with it.

    Args:
        time_limit: in seconds.
        words: its `sys.argv[1:]`.
    """
    import asyncio

    from slime.utils.child_process import StillRunning, describe_exit_status, environment_for_python, run_to_end

    command = [sys.executable, "-W", "ignore", "-c", code, *words]
    # Files in the current directory must not be imported as packages.
    variables = {**environment_for_python(), "PYTHONSAFEPATH": "1"}
    began = time.monotonic()
    try:
        ended = asyncio.run(run_to_end(command, timeout=time_limit, env=variables))
    except StillRunning:
        return Answer(None, f"no answer within {time_limit:g} seconds", time_limit, timed_out=True)
    seconds = time.monotonic() - began
    if ended.code:
        lines = ended.err.decode(errors="replace").strip().splitlines()
        # The first line that names the error; advice may follow it.
        named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit)\b", line)]
        status = describe_exit_status(ended.code if ended.code < 128 else 128 - ended.code)
        return Answer(problem=(named or lines or [status])[-1][:300], seconds=seconds)
    lines = ended.out.decode(errors="replace").strip().splitlines()
    return Answer(json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None, None, seconds)


def import_of(distribution: str, time_limit: float) -> Answer:
    """Whether a package of `IMPORTS` can be imported in the way of a run."""
    return ask(IMPORTS[distribution], time_limit)


@dataclass(frozen=True)
class Packages:
    """Installed versions, and those that are known to work together.

    `installed`: by every name in `pins` or `required`; None if it is not installed. `unreadable`: why a version cannot be read.
    """

    python: tuple[int, ...]
    target: str
    pins_file: str | None
    pins: Mapping[str, str]
    required: Sequence[str]
    installed: Mapping[str, str | None]
    unreadable: Mapping[str, str] = field(default_factory=dict)


def read_packages(on_gpus: bool, root: Path = ROOT) -> Packages:
    """The pins of the target beside the package's own directory, and the versions that this Python finds."""
    file = root / "requirements" / f"{'gpu' if on_gpus else 'cpu'}.txt"
    pins = read_pins(file.read_text(encoding="utf-8")) if file.is_file() else {}
    required = read_required(root)
    installed: dict[str, str | None] = {}
    unreadable: dict[str, str] = {}
    for name in {**pins, **dict.fromkeys(required)}:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
        except Exception as error:
            unreadable[name] = f"{type(error).__name__}: {error}"
    shown = f"requirements/{file.name}" if pins else None
    return Packages(sys.version_info[:3], "GPU" if on_gpus else "CPU", shown, pins, required, installed, unreadable)


def read_pins(text: str) -> dict[str, str]:
    """The version of each package that a requirements file pins."""
    found = re.findall(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)", text, re.MULTILINE)
    return {one_spelling(name): version for name, version in found}


def one_spelling(name: str) -> str:
    """The spelling of a package's name that indexes use, for example pyyaml for PyYAML."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_required(root: Path = ROOT) -> list[str]:
    """The packages that slime cannot do without: as its pyproject.toml lists them, or its metadata where it was installed."""
    file = root / "pyproject.toml"
    if file.is_file():
        import tomllib

        lines = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = [line for line in importlib.metadata.requires("slime") or () if "extra ==" not in line]
    return [one_spelling(re.match(r"[A-Za-z0-9._-]+", line).group()) for line in lines]


@dataclass(frozen=True)
class Devices:
    """GPUs as the system has them, `present` device files and the version of the NVIDIA driver, and as torch sees them."""

    present: int
    nvidia_driver: str | None
    torch: Answer


def count_device_files() -> int:
    """The number of GPUs with device files, whether or not a program can use them."""
    nvidia = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(nvidia) or (len(list(Path("/dev/dri").glob("renderD*"))) if Path("/dev/kfd").exists() else 0)


def read_devices(time_limit: float) -> Devices:
    """The devices. Torch is asked in a process of its own, since it hangs if a driver does."""
    version = Path("/proc/driver/nvidia/version")
    found = re.search(r"Module\D*([\d.]+)", version.read_text()) if version.is_file() else None
    return Devices(count_device_files(), found and found.group(1), ask(_TORCH, time_limit))


@dataclass(frozen=True)
class Machine:
    """Cores, bytes of memory, and limits; None: there is no limit, or no /dev/shm.

    `open_files`: of a process that serves, which raises its limit as far as it may. `processes`: of this user or container,
    including threads.
    """

    cores: int
    cores_of_container: float | None
    memory: int
    available: int
    memory_of_container: int | None
    shared_memory: tuple[int, int] | None
    open_files: int | None
    processes: int | None


def read_machine() -> Machine:
    """This machine, with the limits of the container that this process is in."""
    lines = (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: 1024 * int(value.split()[0]) for name, _, value in lines}
    usage = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    few = [
        limit
        for limit in (_limit("pids.max", "pids/pids.max"), processes)
        if limit not in (None, resource.RLIM_INFINITY)
    ]
    quota, period = _limit("cpu.max", "cpu/cpu.cfs_quota_us"), _limit("cpu.max", "cpu/cpu.cfs_period_us", word=1)
    bytes_of_container = _limit("memory.max", "memory/memory.limit_in_bytes")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cores_of_container=quota / period if quota and period else None,
        memory=memory["MemTotal"],
        available=memory.get("MemAvailable", memory["MemFree"]),
        memory_of_container=bytes_of_container if (bytes_of_container or 2**62) < memory["MemTotal"] else None,
        shared_memory=usage and (usage.total, usage.free),
        open_files=_open_files(),
        processes=min(few, default=None),
    )


def _open_files() -> int | None:
    """The least hard limit of open files among this process and the raylets of this machine, which start those that serve."""
    found = []
    for process in (Path("/proc/self"), *Path("/proc").glob("[0-9]*")):
        # Processes end meanwhile.
        with contextlib.suppress(OSError):
            if process.name == "self" or (process / "comm").read_text() == "raylet\n":
                found += re.findall(r"Max open files +\S+ +(\d+)", (process / "limits").read_text())
    return min(map(int, found), default=None)


def _limit(second: str, first: str, word: int = 0) -> int | None:
    """A positive number of the control group of this container, by its file in version 2 or in version 1."""
    for name in (second, first):
        file = Path("/sys/fs/cgroup") / name
        words = file.read_text().split() if file.is_file() else []
        value = words[word] if len(words) > word else words[0] if words else ""
        if value.isdigit() and int(value) > 0:
            return int(value)
    return None


@dataclass(frozen=True)
class Disk:
    """A file system, in bytes. `uses`: by purpose, the directory on it; `unwritable`: why some of these cannot be written."""

    uses: dict[str, str]
    total: int
    free: int
    unwritable: dict[str, str] = field(default_factory=dict)


def read_disks(variables: Mapping[str, str]) -> list[Disk]:
    """The file systems of the places that a run writes to or reads models from."""
    from slime.utils import env
    from slime.utils.filesystem import existing_parent, unwritable

    home, cache = os.path.expanduser("~"), env.cache_home()
    places = {
        RAY_SESSIONS: str(_directory_of_ray(variables)),
        "temporary files": tempfile.gettempdir(),
        "this directory, with outputs/": os.getcwd(),
        "caches": str(cache / "slime") if cache else home,
        MODELS: variables.get("HF_HOME") or os.path.join(str(cache or home), "huggingface"),
    }
    found: dict[int, Disk] = {}
    for use, place in places.items():
        there = existing_parent(place)
        usage = shutil.disk_usage(there)
        disk = found.setdefault(os.stat(there).st_dev, Disk({}, usage.total, usage.free, {}))
        disk.uses[use] = place
        problem = unwritable(there)
        if problem is not None:
            disk.unwritable[place] = problem
    return list(found.values())


def _directory_of_ray(variables: Mapping[str, str]) -> Path:
    """Where Ray keeps its sessions, and the address of the cluster that it has started on this machine."""
    return Path(variables.get("RAY_TMPDIR") or variables.get("TMPDIR") or "/tmp") / "ray"


def read_listeners() -> dict[int, str]:
    """Who listens on which TCP port of this machine; "" where this user may not know."""
    import psutil

    names: dict[int, str] = {}
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN:
            owner = ""
            if connection.pid is not None:
                try:
                    owner = f"{psutil.Process(connection.pid).name()}, process {connection.pid}"
                except psutil.Error:
                    owner = f"process {connection.pid}"
            names[connection.laddr.port] = owner or names.get(connection.laddr.port, "")
    return names


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that variables or a file of Ray's on this machine name.

    `source` is that variable or file. `listens`: whether somebody takes connections there; None: there is no port to try.
    `answer`: nodes, and their `GPU` and `CPU`; nothing of an address for job submissions.
    """

    address: str
    source: str
    listens: bool | None
    answer: Answer = Answer()


def read_cluster(variables: Mapping[str, str], time_limit: float) -> Cluster | None:
    """The cluster that variables or Ray's file name; None if they name none."""
    file = _directory_of_ray(variables) / "ray_current_cluster"
    source, address = "RAY_ADDRESS", variables.get("RAY_ADDRESS", "")
    if address in ("", "auto") and file.is_file():
        source, address = f"RAY_ADDRESS=auto, {file}" if address else str(file), file.read_text().strip()
    if not address:
        return None
    from slime.observability.run_record import redacted_text

    # `shown` is the address without secrets.
    shown, (scheme, _, place) = redacted_text(address), address.rpartition("://")
    host, _, port = place.partition("/")[0].rpartition("@")[2].rpartition(":")
    if not host or not port.isdigit():
        return Cluster(shown, source, None)
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        return Cluster(shown, source, False, Answer(problem=str(error)))
    return Cluster(shown, source, True, Answer() if "http" in scheme else ask(_CLUSTER, time_limit, [address]))


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
