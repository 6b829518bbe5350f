"""Every environment variable that changes this program's behaviour is read here and nowhere else."""

import difflib
import json
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slime.utils.errors import UserError


def debug_enabled() -> bool:
    """`SLIME_DEBUG=1`: debug log level and full tracebacks for errors that normally end with one message."""
    return os.environ.get("SLIME_DEBUG", "0") not in ("", "0")


def forced_accelerator() -> str | None:
    """`SLIME_ACCELERATOR`: name of the device backend to use instead of the detected one."""
    return os.environ.get("SLIME_ACCELERATOR") or None


def host_ip_override() -> str | None:
    """`SLIME_HOST_IP`: the address that this node announces to the others."""
    return os.environ.get("SLIME_HOST_IP") or None


def prefers_ipv6() -> bool:
    """`SLIME_PREFER_IPV6=1`: nodes announce only IPv6 addresses, unless `SLIME_HOST_IP` names an address.

    Raises:
        UserError: it is neither 1 nor 0.
    """
    value = os.environ.get("SLIME_PREFER_IPV6") or "0"
    if value not in ("0", "1"):
        raise UserError(f"SLIME_PREFER_IPV6={value}: give 1 for addresses of IPv6, or 0")
    return value == "1"


def gloo_interface() -> str | None:
    """`GLOO_SOCKET_IFNAME`: the network interface on which process groups on the host meet."""
    return os.environ.get("GLOO_SOCKET_IFNAME") or None


def tunes_allocator() -> bool:
    """`MALLOC_MMAP_THRESHOLD_`, `MALLOC_TRIM_THRESHOLD_` or `GLIBC_TUNABLES`: the user says how glibc keeps freed memory."""
    return any(name in os.environ for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"))


_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def allocator_of_ranks() -> dict[str, str]:
    """`SLIME_ENABLE_EXPANDABLE_SEGMENTS=1`: variables with which torch's allocator in training ranks on GPUs uses expandable
    segments, in addition to its present settings."""
    if os.environ.get("SLIME_ENABLE_EXPANDABLE_SEGMENTS", "0") in ("", "0"):
        return {}
    # Torch reads its allocator's settings from either variable.
    given = {name: os.environ[name].split(",") for name in _ALLOCATOR if os.environ.get(name)} or {_ALLOCATOR[0]: []}
    others = {name: [part for part in parts if "expandable_segments" not in part] for name, parts in given.items()}
    return {name: ",".join([*parts, "expandable_segments:True"]) for name, parts in others.items()}


def threads_of_user() -> int | None:
    """`OMP_NUM_THREADS`: the number of threads of a process, if the user sets it; the first one of a list.

    Ray sets it to 1 in a submitted job (`RAY_JOB_CONFIG_JSON_ENV_VAR` describes the job): there a 1 is the user's only if the
    job's runtime environment has it.

    Raises:
        UserError: it is not such a number.
    """
    name, job = "OMP_NUM_THREADS", os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR")
    value = os.environ.get(name, "").partition(",")[0].strip()
    if value == "1" and job and name not in ((json.loads(job).get("runtime_env") or {}).get("env_vars") or {}):
        return None
    return _as_whole_number(name, value, 0, 1) or None


_AGENT, _OLDER_AGENT = "SLIME_AGENT_", "SWE_"
# Variables of the example of coding agents, and of adapters.
_OF_CODING_AGENTS = ("ADAPTER_PORT", "ADAPTER_BIND_HOST", "SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS")


def _agent_variable(name: str) -> tuple[str, str]:
    """(the one of `SLIME_AGENT_{name}` and its older name `SWE_{name}` that is set, its value); the value is "" if none is
    set."""
    names = (_AGENT + name, _OLDER_AGENT + name)
    return next(((given, os.environ[given]) for given in names if os.environ.get(given)), (names[0], ""))


def whole_number(name: str, default: int, least: int = 0) -> int:
    """The variable `name` as a number of at least `least`; `default` if it is not set.

    Raises:
        UserError: it is no such number.
    """
    return _as_whole_number(name, os.environ.get(name, ""), default, least)


def _as_whole_number(name: str, value: str, default: int, least: int) -> int:
    if not value:
        return default
    if not (value.isascii() and value.isdigit()) or int(value) < least:
        raise UserError(f"{name}={value}: give a whole number, {least} or more")
    return int(value)


def sandbox_image_metadata_key() -> str:
    """`SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY`: the key of a sandbox's metadata that tells an E2B service the image.

    Raises:
        UserError: it is not set.
    """
    name, value = _agent_variable("SANDBOX_IMAGE_METADATA_KEY")
    if not value:
        raise UserError(
            f"{name} is not set: the key of a sandbox's metadata by which the E2B service is told the image"
        )
    return value


def sandbox_lifetime_sec() -> int:
    """`SLIME_AGENT_SANDBOX_LIFETIME_SEC`: seconds after which a container, or a sandbox of a service, ends by itself."""
    return _as_whole_number(*_agent_variable("SANDBOX_LIFETIME_SEC"), default=3600, least=1)


def sandbox_rpc_retries() -> int:
    """`SLIME_AGENT_SANDBOX_RPC_RETRIES`: how often a call to a sandbox of a service is repeated when it does not arrive."""
    return _as_whole_number(*_agent_variable("SANDBOX_RPC_RETRIES"), default=6, least=0)


def e2b_sandbox_size() -> str:
    """`SLIME_AGENT_E2B_SANDBOX_SIZE`: the template from which an E2B service makes sandboxes."""
    return _agent_variable("E2B_SANDBOX_SIZE")[1] or "md"


@dataclass(frozen=True)
class AgentProgram:
    """Settings of a command-line agent: a file with its package, further words of its command line, further variables."""

    tarball: Path | None
    extra_args: tuple[str, ...]
    extra_env: dict[str, str]


def agent_program(name: str) -> AgentProgram:
    """`SLIME_AGENT_{name}_TARBALL`, `…_EXTRA_ARGS` (as in a shell) and `…_EXTRA_ENVS` (JSON); `name` is CC or CODEX.

    Raises:
        UserError: there is no such file, or a value cannot be read.
    """
    words_of, words = _agent_variable(f"{name}_EXTRA_ARGS")
    variables_of, variables = _agent_variable(f"{name}_EXTRA_ENVS")
    try:
        extra_args = tuple(shlex.split(words))
    except ValueError as error:
        raise UserError(f"{words_of}={words}: cannot be read as words of a command line: {error}") from None
    try:
        extra_env = json.loads(variables or "{}")
    except ValueError:
        extra_env = None
    if not isinstance(extra_env, dict) or not all(isinstance(value, str) for value in extra_env.values()):
        # The message does not repeat the value, which may hold a key.
        raise UserError(f'{variables_of}: give a JSON object of texts, such as {{"NO_PROXY": "127.0.0.1"}}')
    return AgentProgram(_agent_file(f"{name}_TARBALL"), extra_args, extra_env)


def node_tarball() -> Path | None:
    """`SLIME_AGENT_NODE_TARBALL`: an archive of Node.js 22 for Linux, for sandboxes that cannot fetch one.

    Raises:
        UserError: there is no such file.
    """
    return _agent_file("NODE_TARBALL")


def _agent_file(name: str) -> Path | None:
    variable, value = _agent_variable(name)
    if value and not Path(value).is_file():
        raise UserError(f"{variable}={value}: there is no such file")
    return Path(value) if value else None


def adapter_bind_host() -> str | None:
    """`ADAPTER_BIND_HOST`: the address at which agents in sandboxes reach the adapter; None: the one this node announces."""
    return os.environ.get("ADAPTER_BIND_HOST") or None


_INT4_TRAINING = ("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "OPEN_TRAINING_INT4_GROUP_SIZE")


def int4_training_group_size() -> int | None:
    """`OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1`: train with weights rounded to INT4, in groups of `OPEN_TRAINING_INT4_GROUP_SIZE`.

    Raises:
        UserError: the first is neither 1 nor 0, or 1 and the second no positive number.
    """
    switch, size = (os.environ.get(name, "") for name in _INT4_TRAINING)
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise UserError(f"{_INT4_TRAINING[0]}={switch}: give 1 to train with INT4 numbers, or 0")
    if not size.isdigit() or int(size) == 0:
        raise UserError(
            f"{_INT4_TRAINING[0]}={switch} needs {_INT4_TRAINING[1]}, the group_size of the INT4 checkpoint in "
            f"--hf-checkpoint; it is {size!r}"
        )
    return int(size)


def engines_keep_shared_experts_whole() -> bool:
    """`SGLANG_SHARED_EXPERT_TP1`: each rank of an engine has the experts that see every token whole."""
    return os.environ.get("SGLANG_SHARED_EXPERT_TP1", "").lower() in ("true", "1", "yes", "y")


def reward_service_key() -> str | None:
    """`SLIME_RM_API_KEY`, else the text of the file `SLIME_RM_API_KEY_FILE`: the token for the service at `--rm-url`.

    The file is for clusters that were started before the run: the key itself is passed to no actor, because it would appear in
    Ray's logs.

    Raises:
        UserError: there is no such file, it is empty, or the token could not stand in a header.
    """
    return _service_key("SLIME_RM_API_KEY")


def buffer_service_key() -> str | None:
    """`SLIME_BUFFER_API_KEY`, else the text of the file `SLIME_BUFFER_API_KEY_FILE`: the token for the service at
    `--rollout-buffer-url`. As `reward_service_key`."""
    return _service_key("SLIME_BUFFER_API_KEY")


def _service_key(name: str) -> str | None:
    path, key, source = os.environ.get(f"{name}_FILE"), os.environ.get(name), name
    if not key and path:
        source = f"{name}_FILE {path}"
        try:
            key = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"{source}: cannot be read: {type(error).__name__}; give a file with the token alone"
            ) from None
        if not key:
            raise UserError(f"{source}: is empty; give a file with the token alone")
    if key and not (key.isascii() and key.isprintable()):
        raise UserError(f"{source}: the token may hold printable ASCII characters only, in one line")
    return key or None


def cache_home() -> Path | None:
    """`XDG_CACHE_HOME`, else `~/.cache`; None when the user has no home directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification asks to ignore relative paths.
    path = Path(named) if os.path.isabs(named) else Path(os.path.expanduser("~/.cache"))
    return path if path.is_absolute() else None


def tensorboard_dir() -> str | None:
    """`TENSORBOARD_DIR`: where event files go, in place of `outputs/{project}/{experiment}`."""
    return os.environ.get("TENSORBOARD_DIR") or None


def visible_devices() -> list[str] | None:
    """`CUDA_VISIBLE_DEVICES`, else `HIP_VISIBLE_DEVICES`, as a list of device ids; None when neither is set, empty when every
    device is hidden."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))
    return None if value is None else [part.strip() for part in value.split(",") if part.strip() not in ("", "-1")]


# Variables that are read before a process runs its first line of our code: by the dynamic loader, allocators and the
# interpreter; by libraries of threads, when Ray imports numpy; and by Ray when it starts the process.
READ_AT_PROCESS_START = (
    "LD_", "MALLOC_", "GLIBC_", "TCMALLOC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "RAY_",
)  # fmt: skip
_OF_THE_INTERPRETER = re.compile("PYTHON[A-Z]")
# Ray takes these from the environment of the driver. If they were given to an actor they would appear in its log.
_SECRETS_OF_RAY = re.compile("RAY_.*(TOKEN|PASSWORD|SECRET)$")


def is_read_at_process_start(name: str) -> bool:
    """Whether the variable `name` has no effect on a process that sets it itself, and is none of Ray's secrets."""
    if _SECRETS_OF_RAY.match(name):
        return False
    return name.startswith(READ_AT_PROCESS_START) or _OF_THE_INTERPRETER.match(name) is not None


def actor_environment() -> dict[str, str]:
    """The variables of every Ray actor of a run. Ray must not hide devices, since ranks and engines choose them by index.

    A joined cluster does not inherit the driver's environment, so our own variables are passed on.
    """
    variables = {
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES": "1",
        "RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK": "1",
        "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1",
        "RAY_USE_UVLOOP": "0",
    }
    key_files = ("SLIME_RM_API_KEY_FILE", "SLIME_BUFFER_API_KEY_FILE")
    names = ("SLIME_ACCELERATOR", "SLIME_DEBUG", "SLIME_PREFER_IPV6")
    handed_on = (*names, *key_files, *_INT4_TRAINING, *_OF_CODING_AGENTS)
    of_agents = [f"{prefix}{name}" for prefix in (_AGENT, _OLDER_AGENT) for name in _HANDED_ON_OF_AGENTS]
    return {**variables, **{name: os.environ[name] for name in (*handed_on, *of_agents) if name in os.environ}}


# Variables of agents that are passed on to actors. They hold no keys, since an actor's variables appear in Ray's logs; so
# `…_EXTRA_ARGS` and `…_EXTRA_ENVS`, which may hold one, are not among them.
_HANDED_ON_OF_AGENTS = (
    "AGENT_TIME_BUDGET_SEC", "BOOT_CONCURRENCY", "BOOT_RETRIES", "CC_TARBALL", "CODEX_TARBALL", "E2B_SANDBOX_SIZE",
    "EVAL_TIMEOUT_SEC", "NODE_TARBALL", "ROLLOUT_GUARD_SEC", "SANDBOX_IMAGE_METADATA_KEY", "SANDBOX_LIFETIME_SEC",
    "SANDBOX_RPC_RETRIES",
)  # fmt: skip


# Variables of libraries that ranks and engines use: NCCL, Gloo, Transformer Engine, SGLang, UCX (of NIXL).
_OF_LIBRARIES = ("NCCL_", "GLOO_", "NVTE_", "SGLANG_", "UCX_", "NIXL_")
# An actor's variables appear in Ray's logs, which everybody on the machine may read. The end of a name shows whether it is that
# of a key or a token. Elsewhere in a name these words are about counts and switches, as in SGLANG_INIT_NEW_TOKEN_RATIO; so are
# TOKENS and PER_TOKEN at the end, and NCCL_IB_PKEY is an index.
_SECRET = re.compile(
    "PASSWORD|SECRET|CREDENTIAL|((API|AUTH|ACCESS|BEARER)_?TOKENS|(?<!_PER_)TOKEN|(?<!_IB_P)KEYS?|KEY_ID)(_?[0-9]+)?$"
)


def library_environment() -> dict[str, str]:
    """The variables of libraries in our environment, for ranks and engines on nodes with an environment of their own."""
    return {
        name: value for name, value in os.environ.items() if name.startswith(_OF_LIBRARIES) and not _SECRET.search(name)
    }


# What a driver reads beside the variables of libraries, and hands on to its actors.
_OF_A_CALL = re.compile(
    "SLIME_|SWE_|ADAPTER_|OPEN_TRAINING_|WANDB_|TENSORBOARD_DIR$|PYTORCH_(CUDA_)?ALLOC_CONF$|TEACHER_PORT$"
)
# Variables of one machine or one process, and texts in which keys may stand.
_NOT_HANDED_ON = re.compile("SLIME_(HOST_IP|SESSION|START_COMMAND|BENCH_RUN)$|WANDB_(SERVICE$|_)")
_MAY_HOLD_KEYS = re.compile("_EXTRA_(ARGS|ENVS)$")


def is_handed_on(name: str) -> bool:
    """Whether a launch script hands the variable `name` on to the job that it submits, if its value is no secret."""
    is_read = name.startswith(_OF_LIBRARIES) or _OF_A_CALL.match(name) is not None
    return is_read and not _NOT_HANDED_ON.match(name)


def write_environment_of_call() -> None:
    """Write to standard output what a launch script hands on to the job that it submits, since a cluster that was started
    before has another environment: each variable as NAME=VALUE, or, if its value may be a secret, as NAME alone, followed by a
    null byte."""
    for name, value in sorted(os.environ.items()):
        if not value or not is_handed_on(name):
            continue
        is_secret = (_SECRET.search(name) or _MAY_HOLD_KEYS.search(name)) is not None
        print(name if is_secret else f"{name}={value}", end="\0")


# All variables that begin with SLIME_ and are read: here, by scripts and tools, and by processes and sandboxes that get them.
_READ = (
    "SLIME_ACCELERATOR", "SLIME_BENCH_RUN", "SLIME_BUFFER_API_KEY", "SLIME_BUFFER_API_KEY_FILE", "SLIME_DEBUG",
    "SLIME_ENABLE_EXPANDABLE_SEGMENTS", "SLIME_ENGINE_API_KEY", "SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", "SLIME_HOST_IP",
    "SLIME_PREFER_IPV6", "SLIME_RM_API_KEY", "SLIME_RM_API_KEY_FILE", "SLIME_SESSION", "SLIME_START_COMMAND",
)  # fmt: skip


# Advice for variables that nothing reads, by the beginnings of their names.
_INSTEAD = {
    "SLIME_DESTROY_WORLD_PROCESS_GROUP": "process groups stay while a rank lends its memory; set it to 0, or unset it",
    "SLIME_GRAD_COALESCE_CHUNK_BYTES": "give --ddp-bucket-size, the numbers of gradients that are reduced together",
    "SLIME_CONTRACT_": "give the paths of functions to `python -m slime.plugins check`, by their flags",
}


def warnings_about_names() -> list[str]:
    """A message for every variable that is set under a name of ours and that nothing reads."""
    messages = []
    for name in sorted(os.environ):
        if not name.startswith("SLIME_") or name in _READ or name.startswith(_AGENT):
            continue
        if (name, os.environ[name]) == ("SLIME_DESTROY_WORLD_PROCESS_GROUP", "0"):
            # 0 is the only behaviour there is.
            continue
        near = difflib.get_close_matches(name, _READ, n=1, cutoff=0.8)
        instead = next((hint for beginning, hint in _INSTEAD.items() if name.startswith(beginning)), "unset it")
        hint = f"did you mean {near[0]}?" if near else instead
        messages.append(f"the environment variable {name} is set and has no effect: nothing reads it; {hint}")
    return messages


def start_command() -> str | None:
    """`SLIME_START_COMMAND`: the command of the script that started this run, for messages that say how to start again."""
    return os.environ.get("SLIME_START_COMMAND") or None


def ray_address() -> str | None:
    """`RAY_ADDRESS`: the cluster to join (set by `ray job submit` and by users); None starts a local one."""
    return os.environ.get("RAY_ADDRESS") or None


def ray_token_is_given() -> bool:
    """Whether a Ray that is started here gets its token from somewhere else than `~/.ray/auth_token`, or needs none."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return True
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
