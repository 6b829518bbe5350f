"""The arguments of one SGLang server, computed from ours, and the flags by which a user sets them.

Order of precedence: values that follow from the run (addresses, sizes, paths) cannot be set by the user; then every
`args.sglang_<field>` that is not None, which means that its flag was given; then our defaults, which depend on the device.
They are computed without sglang, torch or further processes, with one exception: for engines that transfer caches, a process
of its own finds out whether the library for that can be imported.

`python -m slime.backends.sglang_utils.server_arguments` prints the flags of the installed server as JSON. Every field of
`ServerArgs` is `--sglang-<field>` and lives in `args.sglang_<field>`. All spellings that a field has on sglang's own command
line, and the short ones in common use, set that one attribute, so they cannot disagree. Values are converted while they are
parsed, in the driver. The few types that only sglang knows stay text and are converted in the server process by sglang's own
parser (`server_process`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.arguments.hf_config import read_hf_config
from slime.arguments.rules.serving import engine_sizes
from slime.arguments.server_flags import OTHER_NAMES, attention_groups, tensor_parallel_size
from slime.arguments.surface import FlagSpec, version_of
from slime.backends.sglang_utils.cpu_runtime import SEEING_MODELS
from slime.plan.placement import sleeping_sides
from slime.utils import env
from slime.utils.child_process import describe_exit_status, environment_for_python
from slime.utils.errors import UserError
from slime.utils.ports import group_environment

logger = logging.getLogger(__name__)

# Fields that follow from the run, so that a value of the user could only contradict them.
NOT_EXPOSED = frozenset(
    {
        "base_gpu_id",
        "config",
        "dist_init_addr",
        "enable_memory_saver",
        "enable_return_routed_experts",
        "gpu_id_step",
        "model_path",
        "nccl_port",
        "nnodes",
        "node_rank",
        "port",
        "random_seed",
        "skip_server_warmup",
        "trust_remote_code",
    }
)

# Values of a run for fields that the user does not set.
RUN_DEFAULTS: dict[str, Any] = {
    "log_level": "warning",
    "enable_metrics": True,
    "enable_draft_weights_cpu_backup": True,
}

# Without a GPU: the attention and sampling code that torch has, full precision (the log-probs of trainer and engine are
# compared in float32), no graphs or overlap (both are CUDA features), small caches of keys and values and of the states of
# linear attention (else 16 GB are taken, and a share of the memory), a scheduler that sleeps when idle (else it burns a core).
CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 32768,
    # Four for each request, of which one runs and others are of prefixes.
    "max_mamba_cache_size": 256,
    "max_running_requests": 64,
    "sleep_on_idle": True,
    "enable_metrics": False,
}

# Attributes `args.sglang_<name>` that configure the router or our client, not the server.
_NOT_SERVER_FIELDS = frozenset(
    {
        "router_ip",
        "router_port",
        "router_request_timeout_secs",
        "server_concurrency",
        "config",
        "custom_pull_weights_pre_read_hook",
        "model_routers",
    }
)

# How engines with these roles distribute requests over ranks. Engines that decode find a prompt's caches by its room number.
_LOAD_BALANCE = {"prefill": "follow_bootstrap_room", "decode": "round_robin"}
# The only way in which sglang 0.5.21 transfers caches in host memory; and for each way the module and the package that it
# needs.
_TRANSFER_ON_CPU, _PACKAGE_ON_CPU = "mooncake_tcp", "mooncake-transfer-engine-non-cuda"
_TRANSFERS = {
    "mooncake": ("mooncake.engine", "mooncake-transfer-engine"),
    "mooncake_tcp": ("mooncake.engine", "mooncake-transfer-engine"),
    "nixl": ("nixl._api", "nixl"),
    "mori": ("mori.io", "mori"),
}
_IMPORT_SECONDS = 120.0

# Fields that follow from the run. A user's value for one of them is refused or was never accepted, and is not read.
DERIVED_FIELDS = NOT_EXPOSED | {"host", "api_key", "tp_size", "disaggregation_mode", "disaggregation_bootstrap_port"}

_ENVIRONMENT = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    # Two names of one setting; sglang 0.5.21 reads the latter.
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    # A day. By default a server closes a connection after 5 idle seconds, perhaps just when the next order arrives: then the
    # order is lost, and the engine counts as failed.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Directories of compiled kernels, below SGLANG_CACHE_DIR. sglang 0.5.21 sets most of these variables, but too late if torch was
# imported before: then kernels go to the directory for temporary files, which is deleted with the server.
_KERNEL_CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TILELANG_CACHE_DIR": "tilelang",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "SGLANG_JIT_CACHE_DIR": "jit",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",
    "CUDA_CACHE_PATH": "nv",
    # FlashInfer adds `.cache/flashinfer` itself.
    "FLASHINFER_WORKSPACE_BASE": "",
}


@dataclasses.dataclass(frozen=True)
class ServerArguments:
    """`values`: field → value for sglang's `ServerArgs`; `typed`: the fields among them that the user set.

    A field that the installed sglang does not know is an error if the user typed it and is left out otherwise.
    """

    values: dict[str, Any]
    typed: frozenset[str]


@dataclasses.dataclass(frozen=True)
class EnginePart:
    """One of the servers of an engine over several nodes. The first one answers requests, the others only compute.

    Attributes:
        meeting_point: host and port at which the ranks of all parts find each other.
        bootstrap_port: that of the first part, if the engine prefills.
        first_port: see `compute_server_arguments`.
    """

    nodes: int
    node_rank: int
    meeting_point: str
    bootstrap_port: int | None = None
    first_port: str | None = None


def compute_server_arguments(
    args: Any,
    rank: int,
    *,
    host: str,
    port: int,
    nccl_port: int,
    base_gpu_id: int = 0,
    on_cpu: bool,
    part: EnginePart | None = None,
    role: str = "regular",
    bootstrap_port: int | None = None,
    first_port: str | None = None,
) -> ServerArguments:
    """Arguments of engine `rank`, or of the server that is a `part` of it.

    Args:
        role: the worker type of its group.
        bootstrap_port: where an engine that prefills is asked for its caches.
        first_port: host and port. The processes of an engine with data-parallel attention reach each other at ports that
            SGLang counts from this one, so those behind it are theirs too. None for other engines.

    Raises:
        UserError: `--sglang-tp-size` contradicts `--rollout-num-gpus-per-engine`; sizes do not divide, or not over the nodes;
            caches cannot be moved here; or engines are to draft, and cannot.
    """
    stages, nodes = args.sglang_pp_size or 1, part.nodes if part else 1
    for problem in engine_sizes(args):
        raise UserError(problem.message)
    if stages % nodes and nodes % stages:
        raise UserError(
            f"engine {rank}: {stages} pipeline stages on {nodes} nodes; a server has whole stages, or a part of one: give a "
            "--sglang-pp-size that divides, or is a multiple of, the number of nodes of an engine"
        )
    require_drafts(args, on_cpu)
    if role in _LOAD_BALANCE:
        require_cache_transfer(args, on_cpu)
    # Only engines that prefill look prefixes up, and keep them in host memory.
    not_of_role = ("enable_hierarchical_cache", "hicache_") if role == "decode" else ()
    typed = {name: value for name, value in typed_fields(args).items() if not name.startswith(not_of_role)}
    derived = {
        "model_path": args.hf_checkpoint,
        "trust_remote_code": args.trust_remote_code,
        "random_seed": args.seed + rank * args.num_gpus_per_node,
        "tp_size": tensor_parallel_size(args),
        "skip_server_warmup": True,
        "api_key": args.router_api_key,
        "host": host,
        "port": port,
        "nccl_port": nccl_port,
        "nnodes": nodes,
        "node_rank": part.node_rank if part else 0,
        "dist_init_addr": first_port or (part.meeting_point if part else None),
        # Without a GPU the server would take this number for that of a NUMA node.
        "base_gpu_id": 0 if on_cpu else base_gpu_id,
        "gpu_id_step": 1,
    }
    if role in _LOAD_BALANCE:
        derived |= {"disaggregation_mode": role, "load_balance_method": _LOAD_BALANCE[role]}
    if bootstrap_port is not None:
        derived["disaggregation_bootstrap_port"] = bootstrap_port
    return ServerArguments({**_values_of_run(args, role, on_cpu), **typed, **derived}, frozenset(typed))


def _values_of_run(args: Any, role: str, on_cpu: bool) -> dict[str, Any]:
    """What the run has engines start with, unless a flag of theirs was typed."""
    values: dict[str, Any] = {**RUN_DEFAULTS, **(defaults_on_cpu(args.hf_checkpoint) if on_cpu else {})}
    if on_cpu and role in _LOAD_BALANCE:
        values["disaggregation_transfer_backend"] = _TRANSFER_ON_CPU
    if not on_cpu and (args.fp16 or (args.bf16 and args.has_trainer)):
        # By itself an engine computes in the dtype that its config.json names, and in float16 where that is float32 or none.
        values["dtype"] = args.params_dtype_name
    if args.use_rollout_routing_replay:
        values["enable_return_routed_experts"] = True
        if attention_groups(args) > 1:
            # In sglang 0.5.21 a graph of prefill notes the experts of one group where those of decode are looked for.
            values["cuda_graph_backend_prefill"] = "disabled"
    if not on_cpu and sleeping_sides(args).engines:
        values["enable_memory_saver"] = True
        # sglang 0.5.21 captures prefill in graphs of a kind that cannot give memory back, and refuses to start with both.
        values["cuda_graph_backend_prefill"] = "disabled"
        if "vision_config" in _config_of(args.hf_checkpoint):
            # A push brings no vision tower, which would come back from sleep with whatever lies in its memory then.
            values["enable_weights_cpu_backup"] = True
    return values


def _config_of(model: str | Path) -> Mapping[str, Any]:
    """The config of the Hugging Face directory `model`, empty if there is none: a server says so itself."""
    return read_hf_config(model) if Path(model, "config.json").is_file() else {}


def defaults_on_cpu(model: str | Path) -> dict[str, Any]:
    """`CPU_DEFAULTS`, and what a server without a GPU must be told of the Hugging Face directory `model`."""
    if set(SEEING_MODELS).isdisjoint(_config_of(model).get("architectures") or ()):
        return CPU_DEFAULTS
    # Such a server refuses images.
    return {**CPU_DEFAULTS, "language_model_only": True}


def require_cache_transfer(args: Any, on_cpu: bool) -> None:
    """Refuse engines that prefill or decode if caches cannot be transferred between them.

    Raises:
        UserError: this machine has no GPU, and the chosen way needs one; or its library is not installed here, or cannot be
            imported.
    """
    backend = args.sglang_disaggregation_transfer_backend or (_TRANSFER_ON_CPU if on_cpu else "mooncake")
    what, way_out = "prefill and decode on different engines", "leave --prefill-num-servers and such worker types out"
    if on_cpu and backend != _TRANSFER_ON_CPU:
        raise UserError(
            f"{what}: --sglang-disaggregation-transfer-backend {backend} moves caches between GPUs, and this machine has none; "
            f"give {_TRANSFER_ON_CPU}, or {way_out}"
        )
    if backend not in _TRANSFERS:
        return
    module, package = _TRANSFERS[backend]
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        problem = import_problem(module)
        if problem is None:
            return
        raise UserError(
            f"{what}: --sglang-disaggregation-transfer-backend {backend} needs {module}, which is installed here and cannot be "
            f"imported ({problem}); install what is missing there, or {way_out}"
        )
    if on_cpu:
        raise UserError(
            f"{what}: moving their caches needs GPUs, which this machine has not, or the package {_PACKAGE_ON_CPU}, which "
            f"moves them in host memory and is not installed here; install it, or {way_out}"
        )
    raise UserError(
        f"{what}: --sglang-disaggregation-transfer-backend {backend} needs the package {package}, which is not installed here; "
        f"install it, or {way_out}"
    )


def import_problem(module: str) -> str | None:
    """Why an installed module cannot be imported, for example for lack of a system library; None if it can, or if that takes
    too long to find out. A process of its own imports it, because some modules start threads, or end the process."""
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_IMPORT_SECONDS,
            env=environment_for_python(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [describe_exit_status(done.returncode)])[-1]


def require_drafts(args: Any, on_cpu: bool) -> None:
    """Refuse engines that draft if this machine cannot.

    Raises:
        UserError: this machine has no GPU. There sglang 0.5.21 accepts the likeliest token whatever the temperature is, by
            kernels of `sgl_kernel`, and wants attention by AMX.
    """
    algorithm = typed_fields(args).get("speculative_algorithm")
    if on_cpu and algorithm is not None:
        raise UserError(
            f"--sglang-speculative-algorithm {algorithm}: engines draft on GPUs alone, and this machine has none; leave "
            "out all flags that begin with --sglang-speculative"
        )


# How many rounds a thread spins while it waits for the next operator; OpenMP's default is 300,000. Between two steps there is
# no operator, and router, detokenizer and manager need these cores: with the default a small model took a quarter longer.
_ROUNDS_AWAKE = "20000"


def share_of_cores(args: Any) -> int:
    """The number of threads of each rank of an engine without a GPU: its share of the cores of this node.

    Training ranks have a share, too, if they compute at the same time.
    """
    ranks = min(args.rollout_num_gpus, args.num_gpus_per_node)
    if args.asynchronous and args.has_trainer:
        ranks += min(args.world_size, args.actor_num_gpus_per_node)
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def compute_server_environment(
    arguments: ServerArguments, on_cpu: bool, cache: Path | None = None, threads: int = 1
) -> dict[str, str]:
    """The whole environment of the server process: that of this process, with settings for SGLang that the user has not set.

    The trainer's allocator settings are removed. Internal traffic ignores proxies, and ranks meet on the server's host. On CPU
    every rank computes with `threads` threads: if there are more than cores, ranks take turns at every operator, which costs a
    factor of 20. The driver's SGLANG_HOST_IP is ignored, since it may be that of another node; the server's host follows from
    SLIME_HOST_IP of its own node.

    Args:
        cache: the directory of compiled kernels; None: SGLang's own.
        threads: threads of a rank on CPU; not used with a GPU.
    """
    environment = {**_ENVIRONMENT, **environment_for_python()}
    if arguments.values.get("enable_memory_saver"):
        # Graphs give their memory back too. Inside them all-reduces then copy what they add up into a buffer first, which other
        # engines are spared.
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
    if cache is not None:
        root = environment.setdefault("SGLANG_CACHE_DIR", str(cache))
        for name, part in _KERNEL_CACHES.items():
            environment.setdefault(name, os.path.join(root, part))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment.pop(name, None)
    environment["NO_PROXY"] = environment["no_proxy"] = "*"
    # By itself SGLang chooses the address of the route to the internet.
    host = arguments.values["host"]
    environment.update(group_environment(host), SGLANG_HOST_IP=host)
    ranks = arguments.values["tp_size"] * arguments.values.get("pp_size", 1)
    return environment_on_cpu(environment, ranks, threads) if on_cpu else environment


def kernel_cache() -> Path | None:
    """The user's directory for kernels that servers compile, one for each installed version; created if missing, never cleaned.

    None: there is no home directory, it cannot be written, or other users can write there, whose code a server would load.
    """
    home = env.cache_home()
    if home is None:
        return None
    path = home / "slime" / "-".join(f"{name}-{version_of(name)}" for name in ("sglang", "torch"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        logger.info("servers keep no compiled kernels of their versions: %s", error)
        return None
    return path if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(path, os.W_OK) else None


def environment_on_cpu(environment: dict[str, str], ranks: int, threads: int = 1) -> dict[str, str]:
    """`environment` completed for a server without a GPU, which has `ranks` processes, the tensor-parallel ones of each stage,
    with `threads` threads each."""
    # There may be GPUs that the user chose not to use; torch must not see them.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = str(threads)
    if threads > 1 and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _ROUNDS_AWAKE)
    environment["SGLANG_USE_CPU_ENGINE"] = "1"
    # torch.compile needs a C++ compiler on CPU and half a minute at the first seeded request.
    environment.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Else the last inputs of a convolution before linear attention are kept in bfloat16.
    environment.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    if ranks > 1:
        # sglang 0.5.21 requires cores for each rank, or a NUMA node. It would bind threads to them by kernels that no package
        # for CPUs has; so nothing is bound, and each rank is given all cores.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * ranks))
    return environment


def typed_fields(args: Any) -> dict[str, Any]:
    """The server fields that the user set, by name."""
    fields = {
        attribute.removeprefix("sglang_"): value
        for attribute, value in vars(args).items()
        if attribute.startswith("sglang_") and value is not None
    }
    # Some fields are repeated in `args` under other names, which are no fields.
    repeated = {name for field, names in OTHER_NAMES.items() if hasattr(args, f"sglang_{field}") for name in names}
    not_fields = _NOT_SERVER_FIELDS | DERIVED_FIELDS | repeated
    return {name: value for name, value in fields.items() if name not in not_fields}


# -- flags ---------------------------------------------------------------------------------------------------------------

# Spellings in common use that sglang 0.5.21 does not have (its own command line takes any unique beginning of a name).
_MORE_SPELLINGS = {
    "cuda_graph_bs_decode": "cuda_graph_bs",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "dp_size": "dp",
    "ep_size": "ep",
    "pp_size": "pp",
    "tp_size": "tp",
}

# Name of the function by which sglang's command line reads a value → name of our type. Others are kept as text.
_TYPES = {
    "str": "str",
    "int": "int",
    "float": "float",
    "human_readable_int": "human_int",
    "loads": "json_any",
    "json_list_type": "json_any",
}


def describe() -> list[FlagSpec]:
    """One description for every field that sglang's command line knows; imports sglang.

    Fields that sglang itself does not put on its command line (callbacks, notes of its own resolution) are left out.
    """
    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__) - NOT_EXPOSED
    known_spellings = {option for action in parser._actions for option in action.option_strings}
    return [
        spec
        for action in parser._actions
        if action.dest in fields
        for spec in _describe_action(action, known_spellings)
    ]


def _describe_action(action: argparse.Action, known_spellings: set[str]) -> Iterator[FlagSpec]:
    flags = _spellings(action, known_spellings)
    negative = tuple(flag for flag in flags if flag.startswith("--sglang-no-"))
    common: dict[str, Any] = {
        "dest": f"sglang_{action.dest}",
        "help": _help(action),
        "metadata": {"field": action.dest, "server_default": action.default},
    }
    if action.nargs == 0:
        yield FlagSpec(tuple(flag for flag in flags if flag not in negative), action="bool", **common)
    else:
        yield FlagSpec(
            flags,
            type=_TYPES.get(getattr(action.type, "__name__", "str"), "str"),
            nargs=action.nargs,
            const=action.const,
            choices=tuple(sorted(action.choices)) if action.choices else None,
            **common,
        )
    if negative:
        off = {**common, "help": f"same as --no-{flags[0].removeprefix('--')}"}
        yield FlagSpec(negative, action="store_false", **off)


def _spellings(action: argparse.Action, known_spellings: set[str]) -> tuple[str, ...]:
    names = [action.dest, *(option.removeprefix("--") for option in action.option_strings)]
    short = _MORE_SPELLINGS.get(action.dest, "")
    if short and "--" + short.replace("_", "-") not in known_spellings:
        names.append(short)
    return tuple(dict.fromkeys(f"--sglang-{name.replace('_', '-')}" for name in names))


def _help(action: argparse.Action) -> str:
    text = "" if action.help in (None, argparse.SUPPRESS) else " ".join(action.help.split())
    default = f"server default: {'none' if action.default is None else json.dumps(action.default)}"
    for table, where in ((RUN_DEFAULTS, "in a run"), (CPU_DEFAULTS, "on CPU")):
        if action.dest in table:
            default += f"; {where}: {json.dumps(table[action.dest])}"
    return f"{text or 'field of ServerArgs'} [{default}]"


def main() -> None:
    """Print the descriptions as one line of JSON."""
    print(json.dumps([dataclasses.asdict(spec) for spec in describe()]))


if __name__ == "__main__":
    main()
