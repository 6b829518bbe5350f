"""What is wrong with the facts, and what to do about it. These functions depend on the facts alone.

`WRONG` keeps runs of this kind from working; `WARNING` keeps some of them from working, or slows them down.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime.doctor.facts import MODELS, RAY_SESSIONS, Answer, Cluster, Devices, Disk, Machine, Packages

OK, WARNING, WRONG = "ok", "warning", "wrong"
GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Finding:
    """One line for a person and, if something is to be done, what."""

    level: str
    text: str
    remedy: str | None = None


ok, warning, wrong = (functools.partial(Finding, level) for level in (OK, WARNING, WRONG))


# Adapters and protocols were written for the pinned versions of these packages; for others any version that works will do.
WRITTEN_FOR = ("torch", "sglang", "sglang-router", "megatron-core", "ray", "transformers")
OLDEST_PYTHON, _PYTHON_OF_PINS = (3, 11), (3, 11)
_SHOWN = 6


def about_packages(found: Packages) -> Iterator[Finding]:
    """Versions that are missing, cannot be read, or are not those that were tried together."""
    whole_set = "bash scripts/install.sh" if found.target == "CPU" else "pip install -r requirements/gpu.txt"
    yield about_python(found.python, found.target)
    for name, problem in found.unreadable.items():
        yield wrong(f"{name}: what was installed cannot be read ({problem})", f"pip install --force-reinstall {name}")
    missing = [name for name, version in found.installed.items() if version is None]
    needed = [name for name in missing if name in found.required]
    if needed:
        yield wrong(f"not installed, and slime needs it: {', '.join(needed)}", whole_set)
    beside = [name for name in missing if name not in needed]
    if beside:
        yield warning(f"not installed, though {found.pins_file} lists them: {shortened(beside)}", whole_set)
    others = {
        name: version
        for name, version in found.installed.items()
        if version is not None and name in found.pins and public(version) != public(found.pins[name])
    }
    same = len(found.pins) - len(others) - sum(name in found.pins for name in (*missing, *found.unreadable))
    for name in WRITTEN_FOR:
        if name in others:
            text = f"{name} {others.pop(name)}: slime was written for, and is tested with, {found.pins[name]}"
            yield warning(text, f"pip install {name}=={found.pins[name]}")
    if others:
        told = [f"{name} {version} ({found.pins[name]})" for name, version in others.items()]
        yield warning(f"other versions than those of {found.pins_file}, in brackets: {shortened(told)}", whole_set)
    main = ", ".join(f"{name} {found.installed[name]}" for name in WRITTEN_FOR if found.installed.get(name)) or "none"
    if found.pins_file is None:
        yield ok(f"{main}; no requirements/ beside the package to compare versions with")
    else:
        yield ok(f"{same} of {len(found.pins)} packages are those of {found.pins_file}; {main}")


def about_python(python: Sequence[int], target: str) -> Finding:
    """Whether this Python is one that slime runs with, and one that the pins of the target, CPU or GPU, are for."""
    version = ".".join(map(str, python))
    if tuple(python) < OLDEST_PYTHON:
        return wrong(
            f"Python {version}: 3.11 or later is needed", "bash scripts/install.sh says where it looks for one"
        )
    if target == "CPU" and tuple(python[:2]) != _PYTHON_OF_PINS:
        return warning(
            f"Python {version}: the pins of the CPU are for 3.11", "bash scripts/install.sh makes .venv with it"
        )
    return ok(f"Python {version}")


def public(version: str) -> str:
    """A version without what its builder put behind it: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]


def shortened(texts: Sequence[str]) -> str:
    """Some of the texts, and how many there are beside them."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{', '.join(texts[:_SHOWN])}{more}"


def about_import(distribution: str, answer: Answer) -> Finding:
    """Whether a package can be imported as a run does it."""
    if answer.problem is None:
        return ok(f"{distribution} imports ({answer.seconds:.0f} s)")
    text = f"{distribution} does not import: {answer.problem}"
    if answer.timed_out:
        return warning(text, "--time-limit SECONDS waits longer; a busy machine and a network disk are slow")
    return wrong(text, "install it, and what it needs, as requirements/ pins them")


# The share of a GPU's memory that has to be free: the driver always keeps some for itself.
_FREE_SHARE = 0.9


def about_devices(found: Devices, variables: Mapping[str, str]) -> Iterator[Finding]:
    """GPUs that torch does not see, or that others use."""
    if found.torch.problem is not None:
        yield about_import("torch", found.torch)
        return
    torch = found.torch.value
    build = f"torch {torch['version']}" + (f", built for CUDA or HIP {torch['cuda']}" if torch["cuda"] else "")
    driver = f", NVIDIA driver {found.nvidia_driver}" if found.nvidia_driver else ""
    if torch["driver"]:
        driver += f" (CUDA up to {torch['driver'] // 1000}.{torch['driver'] % 1000 // 10})"
    if not torch["devices"]:
        yield _about_no_device(found, variables, f"{build}{driver}")
        return
    yield ok(f"{build}{driver}; {len(torch['devices'])} of {max(found.present, len(torch['devices']))} GPUs visible")
    if variables.get("SLIME_ACCELERATOR") == "cpu":
        yield ok("runs leave the GPUs alone, since SLIME_ACCELERATOR=cpu is set")
    for index, device in enumerate(torch["devices"]):
        free, total = device["free"], device["total"]
        text = f"GPU {index}: {device['name']}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if device["problem"] is not None:
            yield wrong(f"{text}: {device['problem']}", "nvidia-smi shows who uses it, and its errors")
        elif free < _FREE_SHARE * total:
            yield warning(text, "somebody else's process has memory of it: nvidia-smi shows whose")
        else:
            yield ok(text)


def _about_no_device(found: Devices, variables: Mapping[str, str], build: str) -> Finding:
    if found.present == 0:
        return ok(f"{build}; no GPU here: runs compute on the CPU")
    if variables.get("SLIME_ACCELERATOR") == "cpu":
        return ok(f"{build}; SLIME_ACCELERATOR=cpu: runs compute on the CPU")
    text = f"{build}; it sees none of the {found.present} GPUs of this machine"
    hiding = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if variables.get(name) in ("", "-1")]
    if hiding:
        return warning(f"{text}: {hiding[0]} hides all of them", "unset it, or have it name devices")
    if found.torch.value["cuda"] is None:
        remedy = "install a build for GPUs (pip install -r requirements/gpu.txt), or set SLIME_ACCELERATOR=cpu"
        return warning(f"{text}: it is a build for the CPU", remedy)
    cause = f": {found.torch.value['problem']}" if found.torch.value["problem"] else ""
    remedy = "take a driver that knows this CUDA, or a torch built for an older one; a container needs `docker run --gpus all`"
    return wrong(f"{text}{cause}", remedy)


# The number that Ray advises; with half as many it warns of lost connections.
_FEW_FILES = 8192
# Each rank, engine and actor of Ray has dozens of threads.
_FEW_PROCESSES = 4096
# Two buckets of weights, which are handed over in shared memory if there is no GPU; and Ray's smallest object store.
_BUCKETS, _OBJECT_STORE = 128 * MIB, 512 * MIB
# The quick start, Ray, a trainer and two engines of a toy model, takes 2.6 GiB.
_LITTLE_MEMORY = 4 * GIB


def about_machine(found: Machine) -> Iterator[Finding]:
    """Cores, memory, shared memory and limits that are too small for Ray, SGLang or weights that are handed over."""
    cores = min(found.cores, found.cores_of_container or found.cores)
    text = f"{found.cores} cores" + (f", of which this container gets {cores:g}" if cores < found.cores else "")
    yield (ok(text) if cores >= 2 else warning(text, "trainer, engines and Ray share them: 2 are the least"))
    limit = found.memory_of_container
    text = f"{found.available / GIB:.1f} of {found.memory / GIB:.1f} GiB of memory available"
    text += f", this container may have {limit / GIB:.1f} GiB" if limit else ""
    if min(found.available, limit or found.available) < _LITTLE_MEMORY:
        yield warning(text, "little even for a toy run; --dry-run says what a run needs")
    else:
        yield ok(text)
    yield _about_shared_memory(found.shared_memory)
    files = found.open_files
    if files is None or files >= _FEW_FILES:
        yield ok(f"open files: {'no limit' if files is None else files}")
    else:
        remedy = "raise the hard limit (/etc/security/limits.conf, or docker run --ulimit nofile=65535:65535)"
        remedy += " and start Ray under it; the router takes two files for each request"
        yield warning(f"open files: at most {files} of a process; Ray advises {_FEW_FILES} or more", remedy)
    count = found.processes
    if count is None or count >= _FEW_PROCESSES:
        yield ok(f"processes and threads: {'no limit' if count is None else count}")
    else:
        remedy = "raise it: ulimit -u, or docker run --pids-limit; each rank, engine and actor has dozens of threads"
        yield warning(f"processes and threads: at most {count}", remedy)


def _about_shared_memory(shared: tuple[int, int] | None) -> Finding:
    remedy = "docker run --shm-size=8g or --ipc=host; elsewhere mount -o remount,size=8g /dev/shm"
    if shared is None:
        return wrong("there is no /dev/shm, where Ray and torch share memory", remedy)
    total, free = shared
    text = f"/dev/shm: {free / GIB:.2f} of {total / GIB:.2f} GiB free"
    if free < _BUCKETS:
        return wrong(f"{text}; weights handed over in shared memory need {_BUCKETS // MIB} MiB", remedy)
    # Ray refuses a store that takes all that is free.
    if 0.95 * free < _OBJECT_STORE:
        return warning(f"{text}; Ray's object store, {_OBJECT_STORE // MIB} MiB or more, goes to the disk", remedy)
    return ok(text)


# Ray writes nothing more to a disk that is 95 % full.
_FULL, _LITTLE_DISK = 0.95, 10 * GIB


def about_disks(disks: Sequence[Disk]) -> Iterator[Finding]:
    """Places that cannot be written, and disks that are full."""
    for disk in disks:
        uses = ", ".join(f"{use} ({place})" for use, place in disk.uses.items())
        text = f"{disk.free / GIB:.1f} of {disk.total / GIB:.1f} GiB free for {uses}"
        for place, problem in disk.unwritable.items():
            # Models can still be read from a place that cannot be written.
            level = WARNING if [use for use, used in disk.uses.items() if used == place] == [MODELS] else WRONG
            remedy = "give this user a directory there, or name another (TMPDIR, RAY_TMPDIR, HF_HOME)"
            yield Finding(level, f"{place} {problem}", remedy)
        if RAY_SESSIONS in disk.uses and disk.free < (1 - _FULL) * disk.total:
            yield wrong(
                f"{text}: Ray writes no objects to a disk that is {_FULL:.0%} full",
                "free some, or set RAY_TMPDIR",
            )
        elif disk.free < _LITTLE_DISK:
            yield warning(text, "free some: checkpoints and dumps of runs are large")
        else:
            yield ok(text)


# The variable with a port of a cluster's head → (its default, its use).
_PORTS_OF_HEAD = {"RAY_PORT": (6379, "Ray heads"), "DASHBOARD_PORT": (8265, "the dashboard and job submissions of Ray")}
# Where routers and engines, each with their metrics, begin to look for free ports.
_PORTS_OF_RUNS = {range(3000, 4000): "routers and their metrics", range(15000, 16000): "engines"}


def about_ports(
    listeners: Mapping[int, str], variables: Mapping[str, str], cluster: Cluster | None
) -> Iterator[Finding]:
    """Ports of Ray that are taken, and how many are taken among those where a run looks for free ones.

    Args:
        listeners: by port, who listens; "": this user may not know who.
    """
    runs = cluster is not None and cluster.listens is True
    for name, (default, use) in _PORTS_OF_HEAD.items():
        given = variables.get(name) or str(default)
        port = int(given) if given.isdigit() else default
        if port not in listeners:
            yield ok(f"port {port}, of {use}, is free")
            continue
        text = f"port {port}, of {use}, is taken ({listeners[port] or 'by a process of another user'})"
        if runs:
            yield ok(f"{text}, and a Ray cluster runs")
        else:
            yield warning(text, f"only a head that is started here wants it: {name}=PORT bash scripts/cluster.sh head")
    for ports, use in _PORTS_OF_RUNS.items():
        taken = [f"{port} ({listeners[port] or 'another user'})" for port in ports if port in listeners]
        text = f"ports {ports.start} to {ports.stop - 1}, of {use}: {len(taken)} taken"
        yield ok(f"{text}{': ' if taken else ''}{shortened(taken)}; runs take free ones")


def about_cluster(found: Cluster | None) -> Finding:
    """Whether a run would find the Ray cluster that it is to join."""
    if found is None:
        return ok("no cluster is named by RAY_ADDRESS, and none runs here: a run starts a Ray of its own")
    is_asked_for = found.source.startswith("RAY_ADDRESS")
    where = f"the Ray cluster at {found.address} ({found.source})"
    if found.listens is None:
        return wrong(f"{found.source}={found.address} names no cluster", "give HOST:PORT of a head, or unset it")
    if not found.listens and not is_asked_for:
        return ok(f"{where} has ended; a run starts a Ray of its own")
    if not found.listens:
        remedy = "start its head (bash scripts/cluster.sh head), open its port, or unset RAY_ADDRESS"
        return wrong(f"nobody answers for {where}: {found.answer.problem}", remedy)
    if found.answer.problem is not None:
        level = WRONG if is_asked_for else WARNING
        remedy = (
            "does the head ask for a token? RAY_AUTH_MODE=token and its ~/.ray/auth_token here; or is it another Ray?"
        )
        return Finding(level, f"{where} takes connections and says nothing: {found.answer.problem}", remedy)
    size = ""
    if found.answer.value is not None:
        size = "; nodes: {nodes}, GPUs: {GPU:g}, CPUs: {CPU:g}".format(**found.answer.value)
    own = "" if is_asked_for else f"; train.py joins it only with RAY_ADDRESS={found.address}"
    return ok(f"{where} is reachable{size}{own}")


@dataclass(frozen=True)
class Extra:
    """A module that some runs need: what for, how it is installed, and whether it is for GPUs only."""

    module: str
    use: str
    way: str
    needs_gpus: bool = False


_TRANSFORMER_ENGINE = "pip install --no-build-isolation 'transformer-engine[pytorch]>=2.9.0a0,<2.12.0'"
_FLASH_ATTN_3 = "build hopper/ of the sources of flash-attention"
_FOR_TRANSFORMER_ENGINE = "copy flash_attn_interface.py into the directory flash_attn_3 beside it"
# The commands do not install `slime[wandb]`, because pip would also install dependencies that the pins leave out on purpose.
EXTRAS = (
    Extra("wandb", "--use-wandb", "pip install wandb"),
    Extra("e2b", "sandboxes of a service, E2BSandbox", "pip install e2b"),
    Extra("lm_eval", "--rm-type ifbench, the checks of IFEval", "pip install 'lm-eval[ifeval]'"),
    Extra("blake3", "--update-weight-delta-checksum blake3", "pip install blake3"),
    Extra("nixl", "--rollout-data-transport nixl", "pip install nixl"),
    Extra("matplotlib", "pictures of tools/report.py", "pip install matplotlib"),
    Extra(
        "mooncake",
        "engines that prefill or decode",
        "pip install mooncake-transfer-engine-non-cuda; where there are GPUs, without -non-cuda",
    ),
    Extra(
        "megatron.training", "flags of Megatron-LM that megatron-core lacks", "a checkout of Megatron-LM on PYTHONPATH"
    ),
    Extra("transformer_engine", "fused layers, FP8, --moe-grouped-gemm", _TRANSFORMER_ENGINE, True),
    Extra("flash_attn", "faster attention in training", "pip install --no-build-isolation 'flash-attn<=2.8.3'", True),
    Extra(
        "flash_attn_interface", "flash-attn-3, on Hopper: --attn-implementation flash_attention_3", _FLASH_ATTN_3, True
    ),
    Extra("flash_attn_3.flash_attn_interface", "flash-attn-3 in Transformer Engine", _FOR_TRANSFORMER_ENGINE, True),
    Extra("fla", "--qwen-gdn-backend fla: Qwen3-Next, Qwen3.5", "pip install flash-linear-attention", True),
    Extra("flash_qla", "--qwen-gdn-backend flashqla", "pip install flash-qla", True),
    Extra(
        "fused_weight_gradient_mlp_cuda", "--gradient-accumulation-fusion", "build Apex with its CUDA extensions", True
    ),
    Extra("deep_ep", "--moe-enable-deepep", "build DeepEP", True),
    Extra("torch_memory_saver", "engines that sleep: --colocate", "pip install torch-memory-saver", True),
    Extra("torchvision", "image processors of most models", "pip install torchvision, built for this torch", True),
)
# Without them a run on GPUs works and is slow, or the usual arrangement does not.
_EXPECTED_ON_GPUS = ("transformer_engine", "flash_attn", "torch_memory_saver")


def about_extras(installed: Callable[[str], bool], on_gpus: bool) -> Iterator[Finding]:
    """Modules that some runs need and that are not here."""
    asked = [extra for extra in EXTRAS if on_gpus or not extra.needs_gpus]
    there = [extra.module for extra in asked if installed(extra.module)]
    yield ok(f"here: {', '.join(there) or 'none'}")
    for extra in asked:
        if extra.module not in there:
            # Either version of flash-attn will do: they are two packages.
            replaced = extra.module == "flash_attn" and "flash_attn_interface" in there
            level = WARNING if on_gpus and extra.module in _EXPECTED_ON_GPUS and not replaced else OK
            yield Finding(level, f"{extra.module} is not here; it is for {extra.use}", extra.way)


# The variables that are shown; of secrets, only whether they are set is shown.
SHOWN_VARIABLES = (
    "SLIME_ACCELERATOR", "SLIME_DEBUG", "SLIME_ENABLE_EXPANDABLE_SEGMENTS", "SLIME_HOST_IP", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "RAY_ADDRESS", "RAY_TMPDIR", "RAY_AUTH_MODE", "OMP_NUM_THREADS", "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "HF_HOME", "HF_HUB_OFFLINE", "TORCHDYNAMO_DISABLE", "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_DEVICE_MAX_CONNECTIONS", "TMPDIR", "XDG_CACHE_HOME", "TENSORBOARD_DIR",
)  # fmt: skip
SECRET_VARIABLES = (
    "WANDB_API_KEY", "HF_TOKEN", "E2B_API_KEY", "RAY_AUTH_TOKEN", "SLIME_RM_API_KEY", "SLIME_BUFFER_API_KEY",
    "SLIME_ENGINE_API_KEY",
)  # fmt: skip
# How alike names must be: a letter or two of a long name may differ.
_NEAR = 0.93


def about_variables(variables: Mapping[str, str], unread: Sequence[str], refused: Sequence[str]) -> Iterator[Finding]:
    """Variables that matter, names that are nearly theirs, and values that a run would refuse.

    Args:
        unread: a run's messages about names that begin like ours.
        refused: a run's messages about values.
    """
    from slime.observability.run_record import redacted_text

    values = [f"{name}={redacted_text(variables[name])}" for name in SHOWN_VARIABLES if name in variables]
    yield ok(f"set: {', '.join(values) or 'none of those that matter'}")
    yield ok(", ".join(f"{name} {'set' if variables.get(name) else 'not set'}" for name in SECRET_VARIABLES))
    yield from (wrong(problem) for problem in refused)
    yield from (warning(problem) for problem in unread)
    known = [name for name in (*SHOWN_VARIABLES, *SECRET_VARIABLES) if not name.startswith("SLIME_")]
    for name in sorted(set(variables) - set(known)):
        near = difflib.get_close_matches(name, known, n=1, cutoff=_NEAR)
        if near:
            yield warning(
                f"the environment variable {name} is set, which nothing is known to read; did you mean {near[0]}?"
            )
    if variables.get("PYTHONDONTWRITEBYTECODE"):
        text = "PYTHONDONTWRITEBYTECODE is set: every process of a run compiles all that it imports"
        yield warning(text, "unset it")
