"""The Ray cluster of a run: joined where `RAY_ADDRESS` names one, else started on this machine with what the plan needs.

Devices are Ray `GPU` resources; on a machine without GPUs they are logical. A cluster that is too small is an error at
once, with both numbers, never a silent wait.

What a run needs of machines and directories is checked here too, before anything starts (`refuse_…`, `check_machine`).
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import logging
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.state import GlobalState

from slime.arguments.config_files.role_config import critic_args
from slime.arguments.config_files.serving_config import arguments_of_group, served_groups
from slime.arguments.derivation import settle_precision
from slime.arguments.origins import Origin, recording
from slime.arguments.rules.megatron import MEGATRON_RULES
from slime.arguments.rules.serving import engine_around_a_sender
from slime.arguments.sizes import GpuRanges, expects_gpus, layout_of
from slime.arguments.violations import Refusal
from slime.backends.sglang_utils.server_arguments import require_cache_transfer, require_drafts
from slime.observability.waiting import watch_nothing
from slime.plan import require_memory_of_machine
from slime.plan.batch import batches_at_a_time, kept_tokens, train_batch_bytes
from slime.plan.prompt_files import place_of_images
from slime.serving.model_routers import require_given_router
from slime.utils import env
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import RunError, UserError

logger = logging.getLogger(__name__)

# Train batches are what needs room in the object store; this much is enough for everything else that travels through it.
_SMALLEST_OBJECT_STORE = 512 * 2**20
# An object lies in one piece, and the last one is only deleted a moment after nobody holds it: so there is room to spare.
_OBJECT_STORE_SLACK = 1.25
# The store gets at most this share of the machine's memory: training ranks and engines want theirs.
_OBJECT_STORE_SHARE = 0.3
_CONNECT_SECONDS = 10.0
_ROUTER_SECONDS = 5.0
# A head that takes connections may say nothing: it hangs, or another service has the port. Ray 2.60 waits 40 s for each answer,
# and asks 20 times, a quarter of an hour.
_QUESTIONS_TO_A_HEAD = 2
_NODE_SECONDS = 180.0
_NODE_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ClusterPlan:
    """Devices that a run needs, and the CPUs beside them."""

    layout: GpuRanges

    @property
    def gpus(self) -> int:
        return self.layout.gpus

    @property
    def cpus(self) -> int:
        """One per device bundle, and one for the rollout manager."""
        return self.gpus + 1

    @property
    def reserved(self) -> str | None:
        """Why there are devices on which nothing runs; None where there are none."""
        if self.gpus <= self.layout.actor_gpus + self.layout.rollout_gpus:
            return None
        return (
            "--actor-num-nodes x --actor-num-gpus-per-node stays reserved where a run only generates by external engines, "
            "so that both kinds of runs place alike"
        )


def plan_cluster(args: argparse.Namespace) -> ClusterPlan:
    """The devices of the run's layout."""
    return ClusterPlan(layout_of(args))


@contextlib.contextmanager
def ray_cluster(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """For the length of the block, connect to `RAY_ADDRESS`, or start Ray on this machine, which `check_machine` has passed.

    Gives the arguments for the processes of the run. They may differ from `args`, since the precision follows from the devices
    that the cluster turns out to have.

    Raises:
        UserError: the cluster has fewer devices than the plan needs, or flags do not go with its devices.
        RunError: Ray did not start, or the address does not answer.
    """
    plan = plan_cluster(args)
    address = env.ray_address()
    # Ray reads these variables when it starts. They keep its messages about itself from burying ours.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    if not (sys.stdout.isatty() and sys.stderr.isatty()):
        # Ray puts the name of a process before its lines, and colours it: that helps a person and hinders a program.
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address is None:
        _start_local(args, plan)
    else:
        _join(address, plan)
        _require_shared_directory(args)
    try:
        if address is not None:
            # The driver's own machine may have other devices than the nodes that will train.
            forced = env.forced_accelerator()
            args = _as_on(args, on_gpus=_has_gpus() if forced is None else forced != "cpu")
        with _agents_follow_driver() if address is None else contextlib.nullcontext():
            yield args
    finally:
        watch_nothing()
        ray.shutdown()


def _has_gpus() -> bool:
    """Whether nodes of the cluster have real GPUs. A node shows the type of those that Ray found by itself, if Ray knows it.
    What the driver's own node has, this machine knows anyhow, also of types that Ray does not know."""
    if any(name.startswith("accelerator_type:") for name in ray.cluster_resources()):
        return True
    if gpus_on_this_machine() == 0:
        return False
    own = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == own and node["Resources"].get("GPU", 0) > 0 for node in ray.nodes())


def _as_on(args: argparse.Namespace, *, on_gpus: bool) -> argparse.Namespace:
    """The arguments with what follows from the devices that the cluster has.

    Raises:
        UserError: flags do not go with these devices, which were not known when the flags were checked.
    """
    if args.on_gpus is on_gpus:
        return args
    settled = copy.copy(args)
    settled.origins = dict(args.origins)
    with recording(settled, Origin.DERIVED):
        settle_precision(settled, on_gpus=on_gpus)
    violations = [violation for rule in (*MEGATRON_RULES, engine_around_a_sender) for violation in rule(settled)]
    if violations:
        raise Refusal(violations)
    return settled


def object_store_bytes(args: argparse.Namespace) -> int:
    """Bytes of the object store of a Ray on this machine: room for the train batch of a step and, in the asynchronous loop, for
    the batches that wait, as far as the machine has it.

    Ray writes what does not fit to disk and reads it back, at a fraction of the speed; a warning tells both numbers.
    """
    batches = batches_at_a_time(args)
    if args.rollout_data_transport == "nixl" and not args.use_critic:
        # Batches then stay in the manager's own memory. With a critic they are counted all the same, for the columns that both
        # models exchange through the store.
        batches = 0
    wanted = max(_SMALLEST_OBJECT_STORE, round(_OBJECT_STORE_SLACK * batches * train_batch_bytes(args)))
    limits = {f"{_OBJECT_STORE_SHARE:.0%} of the memory": _OBJECT_STORE_SHARE * ray._private.utils.get_system_memory()}
    with contextlib.suppress(OSError):
        # Ray refuses a store as large as what is free, or puts it on disk.
        limits["what is free in /dev/shm"] = 0.95 * psutil.disk_usage("/dev/shm").free
    source, limit = min(limits.items(), key=lambda entry: entry[1])
    if wanted <= limit:
        return wanted
    granted = max(_SMALLEST_OBJECT_STORE, int(limit))
    if granted < wanted:
        logger.warning(
            "train batches of rollout steps may take %.1f GiB of Ray's object store, which gets %.1f GiB (%s); the rest "
            "goes through the disk: give the machine more, or lower --rollout-batch-size%s or the limits of a sample's length",
            wanted / 2**30, granted / 2**30, source, ", --rollout-top-k" if kept_tokens(args) else "",
        )  # fmt: skip
    return granted


# Rollout functions that are known to ask our engines. A user's own function may ask somebody else.
_ASKING = ("slime.rollout.sglang_rollout.", "slime.rollout.fully_async_rollout.")


def refuse_what_would_fail(args: argparse.Namespace) -> None:
    """Raise UserError for what the functions below find."""
    refuse_images_on_cpus(args)
    refuse_recording(args)
    refuse_transport(args)
    refuse_attention_variables(args)
    if args.has_engines:
        require_given_router(args, _ROUTER_SECONDS)


def refuse_images_on_cpus(args: argparse.Namespace) -> None:
    """Raise UserError if engines of ours on CPUs would be asked about images. Engines are known to run on CPUs if this machine,
    on which Ray starts, has no GPU, or if `SLIME_ACCELERATOR=cpu` says so of a cluster."""
    elsewhere = env.ray_address() is not None and env.forced_accelerator() != "cpu"
    if not args.has_engines or args.rollout_external or elsewhere or gpus_on_this_machine() > 0:
        return
    if args.multimodal_keys and _asks(args.rollout_function_path, args.custom_generate_function_path):
        places = ["--multimodal-keys"]
    else:
        sets = args.eval_datasets if args.eval_interval is not None else ()
        own = args.custom_generate_function_path
        asking = [one for one in sets if _asks(args.eval_function_path, one.custom_generate_function_path or own)]
        places = [place_of_images(args, one) for one in asking if one.multimodal_keys]
    if places:
        raise UserError(
            f"{places[0]}: engines on CPUs have no image processors, so answers to images need GPUs; run on GPUs, or give a "
            "--custom-generate-function-path that asks somebody else"
        )


def refuse_recording(args: argparse.Namespace) -> None:
    """Raise UserError if, as far as this machine tells, training ranks could not record their memory: the recorder of
    `--memory-recorder` works on GPUs alone, or its package is missing."""
    if not args.record_memory_history or not args.has_trainer:
        return
    if args.memory_recorder == "torch" and expects_gpus(args) is False:
        raise UserError(
            "--record-memory-history: --memory-recorder torch records the memory of GPUs, and this run has none; give "
            "--memory-recorder memray, which records that of the host, or drop the flag"
        )
    if args.memory_recorder == "memray" and env.ray_address() is None and importlib.util.find_spec("memray") is None:
        raise UserError("--memory-recorder memray needs the package memray: pip install memray")


def refuse_transport(args: argparse.Namespace) -> None:
    """Raise UserError if, as far as this machine tells, batches could not travel as `--rollout-data-transport` says."""
    wanted = args.rollout_data_transport == "nixl" and args.has_trainer and env.ray_address() is None
    if wanted and importlib.util.find_spec("nixl") is None:
        raise UserError(
            "--rollout-data-transport nixl needs the package nixl, which is not installed here: pip install nixl, or leave the "
            "flag out"
        )


# What Megatron-Core makes of the variables of Transformer Engine, for each --attention-backend. It takes no other values.
_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_ATTENTION_VALUES = {"auto": "111", "flash": "100", "fused": "010", "unfused": "001", "local": "000"}


def refuse_attention_variables(args: argparse.Namespace) -> None:
    """Raise UserError if a variable of the environment, or of `--train-env-vars`, chooses other kernels for attention than
    `--attention-backend` does: Megatron-Core ends the ranks with an assertion then."""
    if not args.has_trainer or args.train_backend != "megatron":
        return
    given = {**env.library_environment(), **{name: str(value) for name, value in (args.train_env_vars or {}).items()}}
    for model in (args, *([critic_args(args)] if args.use_critic else ())):
        wanted = dict(zip(_ATTENTION_VARIABLES, _ATTENTION_VALUES[model.attention_backend], strict=True))
        other = [name for name, value in wanted.items() if given.get(name, value) != value]
        if other:
            shown = ", ".join(f"{name}={given[name]}" for name in other)
            raise UserError(
                f"{shown}: --attention-backend {model.attention_backend} needs "
                f"{', '.join(f'{name}={wanted[name]}' for name in other)}; unset {' and '.join(other)} (they may be in "
                "--train-env-vars), and choose the kernels by --attention-backend alone"
            )


def _asks(function: str, generate: str | None) -> bool:
    """Whether a rollout function that generates by `generate` (None: by its own) asks our engines."""
    return function.startswith(_ASKING) and (generate is None or generate.startswith("slime.rollout."))


def check_machine(args: argparse.Namespace) -> None:
    """Check that this machine can hold a run that starts Ray on it. A run that joins a cluster is not checked here.

    Raises:
        UserError: the machine has fewer GPUs than the run needs or, without GPUs, less memory; or it lacks what moves caches
            from engines that prefill to those that decode, or what engines draft with; or Ray's directory has too long a path.
    """
    if env.ray_address() is not None:
        return
    plan = plan_cluster(args)
    real, layout = gpus_on_this_machine(), plan.layout
    if real == 0:
        # The plan and every process of the run read this variable.
        os.environ["SLIME_ACCELERATOR"] = "cpu"
    if 0 < real < plan.gpus and plan.reserved is not None:
        raise UserError(
            f"the run reserves {plan.gpus} GPUs, but this machine has {real}: {plan.reserved}; lower "
            "--actor-num-gpus-per-node, or join a cluster by RAY_ADDRESS"
        )
    if 0 < real < plan.gpus:
        raise UserError(
            f"the run needs {layout.actor_gpus} GPUs for training and {layout.rollout_gpus} for engines"
            f"{', the same ones: ' if args.colocate else ' = '}{plan.gpus}, but this machine has {real}; lower "
            "--actor-num-gpus-per-node or --rollout-num-gpus, or join a cluster by RAY_ADDRESS"
        )
    groups = served_groups(args) if args.has_engines else ()
    for group in groups:
        of_group = arguments_of_group(args, group)
        require_drafts(of_group, on_cpu=real == 0)
        if group.worker_type in ("prefill", "decode"):
            require_cache_transfer(of_group, on_cpu=real == 0)
    require_memory_of_machine(args)
    _check_paths_of_sockets()


# What Ray 2.60 puts behind the path of its directory to name a socket, at the longest, and how long the whole may be.
_SOCKET = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_LONGEST_PATH_OF_SOCKET = 107


def _check_paths_of_sockets() -> None:
    directory = get_default_ray_temp_dir()
    over = len(os.fsencode(directory + _SOCKET)) - _LONGEST_PATH_OF_SOCKET
    if over > 0:
        raise UserError(
            f"{directory}, the directory of Ray, has a path that is {over} characters too long for the sockets in it; set "
            "RAY_TMPDIR (else TMPDIR) to a directory with a shorter one, such as /tmp"
        )


_SYSTEM_CONFIG = {
    # Our actors have environments of their own, so none would ever run in a process that Ray starts in advance.
    "prestart_worker_first_driver": False,
    # How often a raylet looks for the object store that it has started: every 50 ms instead of every second, for 10 s as by
    # default.
    "raylet_client_connect_timeout_milliseconds": 50,
    "raylet_client_num_connect_attempts": 200,
}


def _start_local(args: argparse.Namespace, plan: ClusterPlan) -> None:
    real = gpus_on_this_machine()
    if real == 0:
        # Ray compares the number of logical devices with this variable, which hides nothing here.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cores = os.cpu_count() or 1
    logger.info("starting Ray on this machine: %d %sGPUs", plan.gpus, "" if real else "logical ")
    try:
        settle_token()
        with _on_loopback_only(), _patience_with_node(), _without_dashboard():
            ray.init(
                address="local",
                num_gpus=plan.gpus,
                num_cpus=max(cores, plan.cpus),
                include_dashboard=False,
                logging_level=logging.getLevelName(logging.ERROR),
                object_store_memory=object_store_bytes(args),
                _system_config=_SYSTEM_CONFIG,
            )
    except Exception as error:  # Ray 2.60 raises that very class when its node is not up within 30 s
        raise RunError(f"Ray did not start on this machine: {error}") from error


@contextlib.contextmanager
def _on_loopback_only() -> Iterator[None]:
    """Let the Ray that starts in the block serve this machine alone, or join one that does.

    Ray's servers listen on loopback if that is the node's address, and on all interfaces otherwise. Ray 2.60 replaces a
    loopback address by the machine's own (`services.resolve_ip_for_localhost`), unless clusters of several nodes are off.
    `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0` does that on any system, but Ray reads it when it is imported, which has happened by
    now; so the constant that it sets is set here.
    """
    with _replaced(ray_constants, ENABLE_RAY_CLUSTER=False):
        yield


@contextlib.contextmanager
def _patience_with_node() -> Iterator[None]:
    """Notice a Ray node that starts in the block as soon as it is there, and give it more time on a busy machine.

    Ray 2.60 waits in `services.get_node`, which looks once a second and gives up after 30 s; no setting changes that.
    """
    get_node = services.get_node

    def wait_for_node(gcs_address: str, node_id: str) -> Any:
        state = GlobalState()
        state._initialize_global_state(services._get_gcs_client_options(gcs_address))
        deadline = time.monotonic() + _NODE_SECONDS
        while all(node["NodeID"] != node_id for node in state.node_table()) and time.monotonic() < deadline:
            time.sleep(_NODE_POLL_SECONDS)
        return get_node(gcs_address, node_id)

    with _replaced(services, get_node=wait_for_node):
        yield


# Appended to a raylet's flags; of a flag that is given twice it takes the last. A raylet wants an agent that lives as long as
# itself: `cat` reads a pipe that ends with the raylet. An agent reports −1 for a port that it does not have.
_NO_AGENT = (
    "--dashboard_agent_command=cat", "--metrics-agent-port=-1", "--metrics_export_port=-1",
    "--dashboard_agent_listen_port=-1",
)  # fmt: skip


@contextlib.contextmanager
def _without_dashboard() -> Iterator[None]:
    """Keep a Ray node that starts in the block from starting what a dashboard or an autoscaler would need: it has neither.

    Even with `include_dashboard=False`, Ray 2.60 starts a server without a page, an agent for it on the node, and the monitor
    of an autoscaler. It imports what these need, and waits for the server and then for the agent.
    """
    start_process = services.start_ray_process

    def start_without_agent(command: list[str], process_type: str, **options: Any) -> Any:
        more = _NO_AGENT if process_type == ray_constants.PROCESS_TYPE_RAYLET else ()
        return start_process([*command, *more], process_type, **options)

    with (
        _replaced(Node, start_api_server=lambda self, **options: None, start_monitor=lambda self: None),
        _replaced(services, start_ray_process=start_without_agent),
        _replaced(ray._private.utils, get_dashboard_dependency_error=lambda: None),
    ):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of `owner` other values in the block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def settle_token() -> None:
    """Give a Ray of our own the token that clients have to show, in a file that nobody else can read.

    Ray 2.60 makes one where there is none, and leaves it readable by everybody.
    """
    if env.ray_token_is_given():
        return
    path = Path.home() / ".ray" / "auth_token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as own, contextlib.suppress(FileExistsError):
                draft = Path(own, "token")
                draft.touch(0o600)
                draft.write_text(secrets.token_hex(32))
                # A link appears with all of the content, and never replaces another: runs that start together share one.
                os.link(draft, path)
        if (status := path.stat()).st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise RunError(
            f"its token cannot be kept in {path} ({error}); make room there, or set RAY_AUTH_TOKEN"
        ) from error


@contextlib.contextmanager
def _agents_follow_driver() -> Iterator[None]:
    """If the driver is killed in the block, kill the agents of our Ray node too; everything else of Ray ends by itself.

    An agent that finds its node dead would try for a minute to report that to the dead cluster. So a shell waits on a pipe that
    only the driver holds: end of file means that the driver died, a line that all is well.
    """
    raylets = ray._private.worker._global_node.all_processes["raylet"]
    children = [child for raylet in raylets for child in psutil.Process(raylet.process.pid).children()]
    # Workers are left out: they come and go, and by then another process may have the number of one that is gone.
    agents = [str(child.pid) for child in children if "agent" in _command_of(child)]
    watch = 'read line || kill -9 "$@" 2>/dev/null'
    with subprocess.Popen(
        ["sh", "-c", watch, "ray-agents", *agents],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as watcher:
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                watcher.stdin.write(b"done\n")
                watcher.stdin.flush()


def _command_of(process: psutil.Process) -> str:
    """The command line in lower case; empty for a process that has ended meanwhile."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline()).lower()
    return ""


def _require_listener(address: str) -> None:
    """Raise OSError where nobody listens: Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()


def _answers_on_loopback_only(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if host not in ("127.0.0.1", "localhost"):
        return False
    try:
        _require_listener(f"{ray.util.get_node_ip_address()}:{port}")
    except OSError:
        return True
    return False


def _require_shared_directory(args: argparse.Namespace) -> None:
    """Raise UserError if ranks would have to write files for engines on other nodes, and no directory is known that all see."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    if nodes > 1 and args.check_weight_update_equal and not args.save:
        ray.shutdown()
        raise UserError(
            f"--check-weight-update-equal on a cluster of {nodes} nodes needs --save: engines load a checkpoint that ranks of "
            "other nodes write, and it is written beside those of the run; give a directory that all nodes see"
        )


def _join(address: str, plan: ClusterPlan) -> None:
    try:
        _require_listener(address)
        place = _on_loopback_only() if _answers_on_loopback_only(address) else contextlib.nullcontext()
        with place, _replaced(ray_constants, NUM_REDIS_GET_RETRIES=_QUESTIONS_TO_A_HEAD):
            # A node with several addresses is in the cluster under one of them.
            ray.init(
                address=address,
                _node_ip_address=env.host_ip_override(),
                logging_level=logging.getLevelName(logging.ERROR),
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there: {error}. If the cluster asks for a token (`ray start` says "
            "so), set RAY_AUTH_MODE=token"
        ) from error
    have, layout = ray.cluster_resources(), plan.layout
    gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 0))
    logger.info("joined the Ray cluster at %s: %d GPUs, %d CPUs", address, gpus, cpus)
    if gpus < plan.gpus or cpus < plan.cpus:
        ray.shutdown()
        uses = plan.reserved or f"{layout.actor_gpus} for training, {layout.rollout_gpus} for engines"
        raise UserError(
            f"the run needs {plan.gpus} GPUs ({uses}) and "
            f"{plan.cpus} CPUs, but the cluster at {address} has {gpus} GPUs and {cpus} CPUs; add nodes, or start the node "
            f"with `ray start --head --num-gpus {plan.gpus} --num-cpus {plan.cpus}`"
        )
