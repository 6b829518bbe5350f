"""One SGLang engine: starts a server process and controls it over HTTP.

The class is plain; the serving layer makes it a Ray actor. Invariants:
- Every wait has a deadline. While it waits for its server, the engine also watches the server's process.
- A call that fails because the server is dead says so, with exit status and last log lines; so does `wait_for_end`, which
  notices it even if nothing is called.
- The server binds the node's service address only and, if the run has an API key, answers nobody without it.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from operator import itemgetter
from pathlib import Path
from typing import Any

import urllib3

from slime.arguments.server_flags import attention_groups
from slime.backends.sglang_utils.server_arguments import (
    EnginePart,
    compute_server_arguments,
    compute_server_environment,
    kernel_cache,
    share_of_cores,
)
from slime.backends.sglang_utils.server_process import CAUSE_FILE, write_arguments_file
from slime.backends.sglang_utils.worker_watch import computing_seconds
from slime.utils.child_process import ChildProcess
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import RunError
from slime.utils.filesystem import make_scratch_directory, remove_scratch_directory
from slime.utils.ports import (
    LOOPBACK,
    PortReservation,
    host_for_url,
    random_port_start,
    reserve_port,
    reserve_row,
    service_host,
)
from slime.weights.local_checkpoint import LocalCheckpoint
from slime.weights.transports.transport import FLUSH_SECONDS

logger = logging.getLogger(__name__)

_FIRST_PORT = 15000
# Pauses between two polls: a server does not report that it is ready, or that its requests are done.
_READY_POLL_SECONDS = 0.1
_FLUSH_PAUSE_SECONDS = 1.0
_CONNECT_TIMEOUT_SECONDS = 10.0
# The number of threads that call at the same time.
_MOST_CONNECTIONS = 8
# Requests whose time grows with the size of the model, because all weights are read, hashed or put in place.
_LOADING = frozenset({"/update_weights_from_disk", "/weights_checker", "/end_weight_update"})
# Load formats of a server that read checkpoints as a push writes them. Of the others, what is loaded after the start is refused
# ("dummy", "gguf") or sought in files of another kind ("pt").
_READ_PUSHES = ("fastsafetensors", "flash_rl")
# SGLang's names for the kinds of its memory.
_WEIGHTS, _CACHES = ("weights",), ("kv_cache", "cuda_graph")
_MEMORY = (*_WEIGHTS, *_CACHES)
# Parts of names of tensors that no push brings: what a server computes from its config, where sglang 0.5.21 does not know that
# itself, and the part of a model that sees.
_NEVER_PUSHED = ("axis_map", "visual.")
_WATCH_POLL_SECONDS = 0.2
_LINES_OF_A_DEAD_SERVER = 12
_HEALTH_SECONDS = 5.0
# The address of no engine, which sglang 0.5.21 itself uses for warm-up requests of an engine that prefills.
_NOBODY = "2.2.2.2"
# An idle engine gives a token within this time; then its processor time is not looked at. SGLang 0.5.21 looks for it once a
# second, and not at once.
_IDLE_TOKEN_SECONDS = 2.0
# The least share of a check's time that an engine computes if it compiles or loads; one that hangs computes less.
_COMPUTING_SHARE = 0.02


class SGLangEngine:
    """Engine `rank` of a run, in a group of that `role`. Its server's log is `{log_dir}/engine_{rank}.log`.

    Without a GPU each of its ranks computes with `threads` threads; None: its share of the node's cores.
    """

    def __init__(self, args: Any, rank: int, log_dir: str | Path, role: str = "regular", threads: int | None = None):
        self._args = args
        self._threads = threads
        self.rank = rank
        self._role = role
        self._load_format: str | None = vars(args).get("sglang_load_format")
        # If it prefills: the port at which engines that decode ask for its caches.
        self._bootstrap: PortReservation | None = None
        self._row: list[PortReservation] = []
        self._log_dir = Path(log_dir)
        self._api_key = getattr(args, "router_api_key", None)
        self._process: ChildProcess | None = None
        self._scratch_dir: Path | None = None
        self._local_checkpoint: LocalCheckpoint | None = None
        self._url: str | None = None
        self._ending = threading.Event()
        # Kinds of memory that are given back; see `sleep`.
        self._given_back: set[str] = set()
        self._continues = self._has_slept = self._retracts = False
        # Internal traffic uses no proxy. A push has many short requests, so a light client is used.
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        self._connections = urllib3.PoolManager(maxsize=_MOST_CONNECTIONS, headers=headers, retries=False)

    def __repr__(self) -> str:
        # Ray puts this in front of every line that the engine's actor logs.
        return f"engine {self.rank}"

    # -- life -------------------------------------------------------------------------------------------------------

    def init(self, base_gpu_id: int = 0, timeout: float | None = None, part: EnginePart | None = None) -> str:
        """Start the server on this node, first GPU `base_gpu_id`, and wait until it is healthy.

        Args:
            timeout: in seconds; None: `--engine-start-timeout`.
            part: which server of an engine over several nodes it is.

        Returns:
            The server's URL.

        Raises:
            RunError: the server ended or was not healthy after `timeout` seconds; holds the log's path and last lines.
        """
        host = service_host()
        if part is None or part.node_rank == 0:
            self.reserve_bootstrap_port(host)
        with reserve_port(host, random_port_start(_FIRST_PORT)) as port, reserve_port(host, port.port + 1) as nccl_port:
            self._launch(port, nccl_port, base_gpu_id, part)
            self._url = f"http://{host_for_url(host)}:{port.port}"
            try:
                self._wait_until_healthy(self._args.engine_start_timeout if timeout is None else timeout)
            except BaseException:
                self.shutdown()
                raise
            finally:
                for reservation in filter(None, (self._bootstrap, *self._row)):
                    reservation.release()
        if part is None or part.node_rank == 0:
            self._call("POST", "/freeze_gc")
        return self._url

    def reserve_bootstrap_port(self, host: str) -> int | None:
        """Reserve a port at which engines that decode will ask for caches, if this one prefills and has none yet."""
        if self._role == "prefill" and self._bootstrap is None:
            self._bootstrap = reserve_port(host, random_port_start(_FIRST_PORT))
        return self.bootstrap_port()

    def bootstrap_port(self) -> int | None:
        """The port of `reserve_bootstrap_port`, None where there is none."""
        return None if self._bootstrap is None else self._bootstrap.port

    def reserve_first_port(self, host: str = LOOPBACK) -> str | None:
        """Reserve a row of ports on `host`. Returns the `first_port` of `compute_server_arguments`, or None."""
        if (groups := attention_groups(self._args)) > 1:
            self._row = reserve_row(30 + groups)
        return f"{host_for_url(host)}:{self._row[0].port}" if self._row else None

    def url(self) -> str:
        """Base URL of the server, without a trailing slash."""
        if self._url is None:
            raise RunError(f"engine {self.rank} was not started")
        return self._url

    def server_pid(self) -> int | None:
        """Process id of the server, None before `init`."""
        return None if self._process is None else self._process.pid

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of the server's log."""
        return "" if self._process is None else self._process.log_tail(lines)

    def wait_for_end(self) -> None:
        """Return when `shutdown` is called; until then watch the server's processes.

        Raises:
            RunError: the server, or its scheduler or detokenizer, has died; says how, with the log's last lines.
        """
        while not self._ending.wait(_WATCH_POLL_SECONDS):
            self.raise_if_dead()

    def raise_if_dead(self) -> None:
        """Raise RunError when the server has ended without `shutdown`, or another part of the engine has failed."""
        self._raise_if_another_part_failed()
        if self._process is not None and self._process.poll() is not None and not self._ending.is_set():
            raise RunError(f"engine {self.rank} died: {self._describe_end()}")

    def shutdown(self) -> None:
        """End the server and everything it started. Harmless when it already ended."""
        self._ending.set()
        if self._process is not None:
            # At once: a server holds nothing worth saving and takes up to 7 s to end politely.
            self._process.terminate(timeout=0)
        if self._local_checkpoint is not None:
            self._local_checkpoint.close()
        if self._scratch_dir is not None:
            remove_scratch_directory(self._scratch_dir)

    # -- questions --------------------------------------------------------------------------------------------------

    def health(self, timeout: float = 30.0) -> None:
        """Return when the server answers its health endpoint.

        Raises:
            RunError: it does not answer, or is dead.
        """
        self._call("GET", "/health", timeout=timeout)

    def makes_progress(self, timeout: float) -> bool:
        """Whether the server generates: it is asked for a token, repeatedly, for `timeout` seconds.

        Returns:
            True if it answered; False if it did not, but computed something else, such as a kernel or a load, or if it is not
            known whether it computed.

        Raises:
            RunError: it did not answer, and computed nothing; or it is dead.
        """
        if self._answers("/health_generate", min(_IDLE_TOKEN_SECONDS, timeout)):
            return True
        before = self._computing_seconds()
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # While it generates for other requests SGLang answers with any token of theirs, at no cost.
            if self._answers("/health_generate", left):
                return True
            self.raise_if_dead()
            time.sleep(_READY_POLL_SECONDS)
        after = self._computing_seconds()
        worked = None if before is None or after is None else after - before
        is_idle = worked is not None and worked < _COMPUTING_SHARE * timeout
        # The process that answers `/health` compiles and loads nothing, so it must answer.
        if is_idle or not self._answers("/health", _HEALTH_SECONDS):
            self.raise_if_dead()
            computed = (
                "its parts did not say what they computed" if worked is None else f"it computed for {worked:.1f} s"
            )
            raise RunError(
                f"engine {self.rank} hangs: it gave no token within {timeout:g} s (--rollout-health-check-timeout), in which "
                f"{computed}; {self._process.describe_log(_LINES_OF_A_DEAD_SERVER)}"
            )
        return False

    def generate(self, payload: dict[str, Any], timeout: float | None = None) -> Any:
        """POST `payload` to `/generate` of this engine, past the router; the parsed answer.

        An engine that prefills then sends its caches nowhere; one that decodes cannot be asked alone.
        """
        if self._role == "prefill":
            payload = {**payload, "bootstrap_host": _NOBODY, "bootstrap_room": 0}
        return self._call("POST", "/generate", payload, timeout=timeout)

    def has_requests(self) -> bool:
        """Whether any request runs or waits here."""
        # Imported late: nothing else in this process needs its libraries.
        from slime.utils.engine_answers import num_requests

        # Who asks does not wait for longer; an engine that hangs would be asked again and again until no call gets through.
        return self._found_by(num_requests, "GET", "/v1/loads?include=core", timeout=_HEALTH_SECONDS) > 0

    def get_weight_version(self, timeout: float | None = None) -> str:
        """The version that the server reports for its weights, within `timeout` seconds; None: those of control requests."""
        return str(self._found_by(itemgetter("weight_version"), "GET", "/model_info", timeout=timeout))

    def weights_checksum(self) -> dict[str, str]:
        """Checksum of every tensor that a push brings the engine, keyed `{engine-internal rank}/{tensor name}`."""
        payload = {"action": "checksum", "skip_tensor_list": _NEVER_PUSHED}
        # With data-parallel attention every group tells what all ranks hold.
        ranks = self._found_by(itemgetter("ranks"), "POST", "/weights_checker", payload)
        of_ranks = {rank["parallelism_info"][0]["rank"]: rank["checksums"] for rank in ranks}
        return {f"{rank}/{name}": value for rank, sums in of_ranks.items() for name, value in sums.items()}

    def carry_out(self, orders: Sequence[tuple[Any, ...]]) -> Any:
        """Call methods of this engine in turn, each given by its name and arguments; the first error ends it.

        Returns:
            The result of the last one.
        """
        result = None
        for method, *arguments in orders:
            result = getattr(self, method)(*arguments)
        return result

    # -- generation -------------------------------------------------------------------------------------------------

    def pause_generation(self, mode: str = "abort") -> None:
        """Stop generating; returns when the server has stopped. `mode`: `abort`, `retract` or `in_place`."""
        self._call("POST", "/pause_generation", {"mode": mode})
        self._retracts = mode == "retract"

    def continue_generation(self) -> None:
        """Undo `pause_generation`; if the engine's caches are given back, not before it has them again."""
        if "kv_cache" in self._given_back:
            self._continues = True
        else:
            self._call("POST", "/continue_generation", {})
            self._retracts = False

    def flush_cache(self) -> None:
        """Drop the prefix cache, trying once a second for a minute: the server refuses while requests run or await a grammar.

        Raises:
            RunError: requests still run after that, or the server does not answer in that time.
        """
        deadline = time.monotonic() + FLUSH_SECONDS
        while True:
            seconds = max(deadline - time.monotonic(), _FLUSH_PAUSE_SECONDS)
            response = self._request("POST", "/flush_cache", {}, seconds)
            if response.status < HTTPStatus.BAD_REQUEST:
                return
            if time.monotonic() + _FLUSH_PAUSE_SECONDS >= deadline:
                raise RunError(
                    f"engine {self.rank} refused to flush its cache for {FLUSH_SECONDS:g} s: {_text_of(response)[:500]}"
                )
            # sglang 0.5.21, paused with "retract", does not notice that a grammar has been compiled. So it goes on meanwhile.
            if self._retracts:
                self._call("POST", "/continue_generation", {}, seconds)
            time.sleep(_FLUSH_PAUSE_SECONDS)
            if self._retracts:
                self._call("POST", "/pause_generation", {"mode": "retract"}, seconds)

    # -- sleep ------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Let running requests end, hold back new ones, and give the memory of weights and caches back.

        Requests that arrive while the engine sleeps wait in its server until it goes on. Without CUDA the server keeps its
        memory, and everything else is the same.

        Raises:
            RunError: requests still run after a minute.
        """
        tags = [tag for tag in _MEMORY if tag not in self._given_back]
        if not tags:
            return
        if not self._given_back:
            self.flush_cache()
            # Requests that came since are aborted, because a server that releases memory while requests run would die.
            self.pause_generation()
            self.flush_cache()
            if self.rank == 0 and not self._has_slept and gpus_on_this_machine() == 0:
                logger.info("sleeping engines keep their memory here: SGLang gives it back on CUDA only")
            self._continues, self._has_slept = False, True
        self._call("POST", "/release_memory_occupation", {"tags": tags})
        self._given_back.update(tags)

    def wake_weights(self) -> None:
        """Take the memory of weights again. Its contents are undefined."""
        self._take_again(_WEIGHTS)

    def wake_caches(self) -> None:
        """Take the memory of caches again, and go on if `continue_generation` was called meanwhile.

        Raises:
            RunError: the memory of weights is given back still.
        """
        if not self._given_back.isdisjoint(_WEIGHTS):
            raise RunError(f"engine {self.rank} sleeps: its caches are of no use before it has weights")
        if self._take_again(_CACHES) and self._continues:
            self.continue_generation()

    def _take_again(self, tags: tuple[str, ...]) -> bool:
        """Take memory again that was given back, once, since the server dies of a second order. Returns whether any was."""
        given_back = [tag for tag in tags if tag in self._given_back]
        if given_back:
            self._call("POST", "/resume_memory_occupation", {"tags": given_back})
            self._given_back.difference_update(given_back)
        return bool(given_back)

    # -- weights ----------------------------------------------------------------------------------------------------

    def begin_weight_update(self) -> None:
        """Open a weight update; tensors and broadcasts are refused outside one."""
        self._call("POST", "/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close a weight update."""
        self._call("POST", "/end_weight_update", {})

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float | None = None,
    ) -> None:
        """Join the process group `group_name` as ranks `rank_offset, rank_offset + 1, …`, one per GPU of the engine."""
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._call("POST", "/init_weights_update_group", payload, timeout=timeout)

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave `group_name`."""
        self._call("POST", "/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Receive and load the tensors that rank 0 of `group_name` broadcasts. `dtypes` are names without `torch.`."""
        told = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group_name, "flush_cache": False}
        given = {"weight_version": weight_version, "load_format": load_format}
        payload = told | {name: value for name, value in given.items() if value is not None}
        self._call("POST", "/update_weights_from_distributed", payload, timeout=timeout)

    def update_weights_from_tensor(
        self,
        handles: list[str],
        load_format: str | None = None,
        timeout: float | None = None,
        weight_version: str | None = None,
    ) -> None:
        """Load the tensors that lie in memory which the server maps. `handles`: one per GPU of the engine, in base64."""
        payload = {"serialized_named_tensors": handles, "load_format": load_format, "weight_version": weight_version}
        self._call("POST", "/update_weights_from_tensor", payload | {"flush_cache": False}, timeout=timeout)

    def fetch_weights(self, published: str) -> str | None:
        """Update `--update-weight-local-checkpoint-dir` of this host to the weights in the directory `published`.

        Returns:
            Why the weights have to be published whole; None if they need not be.

        Raises:
            RunError, UserError: see `LocalCheckpoint.bring_to`.
        """
        if self._local_checkpoint is None:
            args = self._args
            self._local_checkpoint = LocalCheckpoint(
                args.update_weight_local_checkpoint_dir,
                args.hf_checkpoint,
                args.engine_load_timeout,
                args.sglang_custom_pull_weights_pre_read_hook,
            )
        return self._local_checkpoint.bring_to(Path(published))

    def update_weights_from_disk(self, path: str, weight_version: str | None = None) -> None:
        """Load the HF checkpoint at `path`. If that fails the server may have a mixture of new and old tensors."""
        load_format = self._load_format if self._load_format in _READ_PUSHES else "auto"
        payload: dict[str, Any] = {"model_path": str(path), "load_format": load_format, "flush_cache": True}
        if weight_version is not None:
            payload["weight_version"] = weight_version
        self._call("POST", "/update_weights_from_disk", payload)

    def prove_weight_version(self, version: str) -> None:
        """Return when the server reports `version`, as text, for its weights.

        Raises:
            RunError: it reports another one.
        """
        found = self.get_weight_version()
        if found != version:
            raise RunError(f"engine {self.rank} reports weight version {found} after it was sent {version}")

    def reset_weights(self) -> None:
        """Overwrite every tensor that a push brings with random numbers (self-test: what is not pushed again stays wrong)."""
        self._call("POST", "/weights_checker", {"action": "reset_tensors", "skip_tensor_list": _NEVER_PUSHED})

    # -- inside -----------------------------------------------------------------------------------------------------

    def _computing_seconds(self) -> float | None:
        """Processor seconds that the engine has used so far, which show whether it computes or hangs; None: unknown."""
        return computing_seconds(self._process.pid)

    def _raise_if_another_part_failed(self) -> None:
        """Does nothing: an engine on one node has one part."""

    def _launch(
        self, port: PortReservation, nccl_port: PortReservation, base_gpu_id: int, part: EnginePart | None
    ) -> None:
        on_cpu = gpus_on_this_machine() == 0
        arguments = compute_server_arguments(
            self._args,
            self.rank,
            host=port.host,
            port=port.port,
            nccl_port=nccl_port.port,
            base_gpu_id=base_gpu_id,
            on_cpu=on_cpu,
            part=part,
            role=self._role,
            bootstrap_port=self.bootstrap_port() if part is None else part.bootstrap_port,
            first_port=self.reserve_first_port() if part is None else part.first_port,
        )
        # Holds the arguments (with the API key) and the server's own temporary files; the path must stay short, because
        # the server's Unix sockets live there.
        self._scratch_dir = make_scratch_directory("engine")
        arguments_file = self._scratch_dir / "arguments.json"
        write_arguments_file(arguments_file, arguments)
        module = "slime.backends.sglang_utils.server_process"
        name = f"engine_{self.rank}" + (f"_node_{part.node_rank}" if part and part.node_rank else "")
        # The server's ranks meet through a file, or at our store; a store of their own would listen on all interfaces.
        meeting = f"file://{self._scratch_dir}/rendezvous" if part is None else f"tcp://{part.meeting_point}"
        self._process = ChildProcess(
            name.replace("_", " "),
            [sys.executable, "-m", module, "--arguments-file", str(arguments_file)],
            self._log_dir / f"{name}.log",
            {
                **compute_server_environment(
                    arguments, on_cpu, kernel_cache(), self._threads or share_of_cores(self._args)
                ),
                "TMPDIR": str(self._scratch_dir),
                "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": meeting,
                # The store is there already, so no rank opens one.
                **({} if part is None else {"TORCHELASTIC_USE_AGENT_STORE": "True"}),
            },
        )
        self._process.start()

    def _wait_until_healthy(self, timeout: float) -> None:
        # A server says nothing by itself: it is asked until it answers.
        started = time.monotonic()
        while time.monotonic() - started < timeout:
            if self._process.poll() is not None:
                raise RunError(f"engine {self.rank} failed to start: {self._process.describe_end()}")
            self._raise_if_another_part_failed()
            if self._answers("/health", _HEALTH_SECONDS):
                return
            time.sleep(_READY_POLL_SECONDS)
        raise RunError(
            f"engine {self.rank} was not healthy after {timeout:g} s (--engine-start-timeout): {self._process.describe_end()}"
        )

    def _answers(self, path: str, timeout: float) -> bool:
        """Whether a GET of `path` succeeds within `timeout` seconds."""
        try:
            return (
                self._connections.request("GET", f"{self._url}{path}", timeout=timeout).status < HTTPStatus.BAD_REQUEST
            )
        except urllib3.exceptions.HTTPError:
            return False

    def _describe_end(self) -> str:
        """How the server ended: the cause that it wrote itself, else its exit status; and the last lines of its log."""
        try:
            cause = (self._scratch_dir / CAUSE_FILE).read_text()
        except OSError:
            return self._process.describe_end(_LINES_OF_A_DEAD_SERVER)
        return f"{cause}; {self._process.describe_log(_LINES_OF_A_DEAD_SERVER)}"

    def _request(
        self, method: str, path: str, payload: dict[str, Any] | None = None, timeout: float | None = None
    ) -> urllib3.BaseHTTPResponse:
        """`timeout` in seconds; None: that of the flag for this kind of request."""
        flag = ""
        if timeout is None:
            name = "engine_load_timeout" if path in _LOADING else "http_control_timeout"
            timeout, flag = getattr(self._args, name), f" (--{name.replace('_', '-')})"
        try:
            limit = urllib3.Timeout(connect=min(_CONNECT_TIMEOUT_SECONDS, timeout), read=timeout)
            return self._connections.request(method, self.url() + path, json=payload, timeout=limit)
        except urllib3.exceptions.HTTPError as error:
            # A dying server closes its connections a moment before its process has ended.
            if self._process is not None and self._process.wait(2.0) is not None:
                raise RunError(f"engine {self.rank} died ({path}): {self._describe_end()}") from None
            raise RunError(f"engine {self.rank} did not answer {path} within {timeout:g} s{flag}: {error}") from None

    def _found_by(self, find: Callable[[Any], Any], method: str, path: str, *payload: Any, **options: float) -> Any:
        """What `find` takes out of an answer, which may be the page of a proxy before an engine that others started."""
        answer = self._call(method, path, *payload, **options)
        try:
            return find(answer)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RunError(f"engine {self.rank} answered {path} with {str(answer)[:500]!r}") from error

    def _call(self, method: str, path: str, payload: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        response = self._request(method, path, payload, timeout)
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise RunError(f"engine {self.rank} answered {response.status} to {path}: {_text_of(response)[:1000]}")
        try:
            return response.json()
        except ValueError:
            return _text_of(response)


def _text_of(response: urllib3.BaseHTTPResponse) -> str:
    """The body of an answer, which may be an error page of any server in between."""
    return response.data.decode(errors="replace")
