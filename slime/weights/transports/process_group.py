"""Weights from a training rank to the engines over a process group (NCCL, or Gloo on CPU).

Per bucket an HTTP call announces the tensors and, at the same time, a broadcast carries their bytes. The broadcast runs on
a thread of its own: if an engine refuses the HTTP half it does not receive, and the transfer fails with the engine's answer
instead of hanging in the collective. While a bucket is on its way the next one can be made.

On the host, allocating memory takes longer than anything else that is done with a byte. So there tensors are sent as they are,
without a flat bucket that both sides would have to fill first.

After a failure the group is closed on both sides, so that engines that still receive get an error instead of waiting on. If our
own broadcast hangs, its communicator is aborted first. With NCCL that ends it; with Gloo both sides wait for their time limits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil

from slime.utils import env
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError
from slime.utils.ports import service_host
from slime.weights.buckets import BucketFlattener
from slime.weights.transports.transport import Background, EnginesFailed, Receiver, Transport, naming_engines

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

_AFTER_FAILURE_SECONDS = 10.0
_JOINING_SECONDS = 3.0
_FAREWELL_SECONDS = 30.0
_POLL_SECONDS = 0.001
# From this size on tensors are sent as they are: a broadcast of its own costs little compared with the copies that it saves.
_LARGE_TENSOR_BYTES = 2**20
# Buffers up to this size stay from push to push on the host. If they were freed, the allocator would not find room for them
# again, and would grow with every push. Larger ones it maps separately, and gives back whole.
_KEPT_HOST_BYTES = 32 * 2**20

_GLOO_DTYPES = frozenset({"float32", "bfloat16", "float16", "float64", "int64", "int32", "int8", "uint8"})

# Names, dtypes and shapes of tensors, and the format in which they come.
Announced = tuple[list[str], list[str], list[list[int]], str | None]


def communicator_environment(args: Any) -> dict[str, str]:
    """The NCCL variables that have to be equal in training ranks and engines, since both are in one communicator.

    By itself SGLang turns NVLink SHARP off by default, and turns it on, with buffers of cuMem, for symmetric memory.
    """
    if not (args.has_trainer and args.has_engines):
        return {}
    symmetric = bool(vars(args).get("sglang_enable_symm_mem"))
    sharp = symmetric or bool(vars(args).get("sglang_enable_nccl_nvls"))
    # NCCL's own default is 2: use it if the hardware has it.
    given = env.library_environment().get("NCCL_NVLS_ENABLE", "2")
    values = {"NCCL_CUMEM_ENABLE": "1" if symmetric else "0", "NCCL_NVLS_ENABLE": "1" if sharp else given}
    return {name: str(args.train_env_vars.get(name, value)) for name, value in values.items()}


def weight_group_name(source: int) -> str:
    """The name under which engines know the group of a source."""
    return f"slime-pp_{source}"


class ProcessGroupTransport(Transport):
    """One group `slime-pp_{source}`: the source is rank 0, and every engine has a rank for each of its devices."""

    # Large, because nothing is sent while engines are being told to receive a bucket.
    host_bucket_bytes = 128 * 2**20
    # Time for ending the collective, leaving the group, waiting for the remaining answers, and the probes.
    giving_up_seconds = 6 * _AFTER_FAILURE_SECONDS

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._group_name = weight_group_name(source)
        # External engines may be on other machines, even if Ray has only this one.
        self._outside = [info.url for info in args.rollout_external_engine_infos or ()]
        self._timeout = 60.0 * args.distributed_timeout_minutes
        self._version: str | None = None  # until a push begins
        self._engines: list[Receiver] = []
        self._group: Any = None
        # Processes that wait at the store get an error when it is closed. So it is closed only with the group, or after a
        # failed try.
        self._store: Any = None
        self._in_flight: tuple[Mapping[int, Any], Background] | None = None
        # Answers to the order to leave the group, by engine.
        self._farewells: dict[int, Any] = {}
        self._bucket_bytes = self.bucket_bytes(args)
        self._flattener = BucketFlattener(max_bytes=self._bucket_bytes)
        # Buffers on a device are freed, because training needs its memory until the next push.
        self._kept_bytes = _KEPT_HOST_BYTES if get_accelerator().shares_host_memory else 0

    def connect(self, engines: Sequence[Receiver]) -> None:
        """Build the group; engine i takes the `num_gpus` ranks after those of the engines before it."""
        if self._group is not None and list(engines) == self._engines:
            return
        self.close()
        import torch.distributed as dist

        from slime.utils.process_groups import create_store, init_process_group

        timeout, name = timedelta(seconds=self._timeout), self._group_name
        host, backend = service_host(self._outside), get_accelerator().process_group_backend
        self._store, self._engines = create_store(host, timeout), list(engines)
        port = self._store.port
        world_size = 1 + sum(engine.num_gpus for engine in engines)
        # NCCL's watchdog breaks the group at its limit. Our wait for a bucket, after which we abort the communicator ourselves,
        # begins when the next bucket is made, which may itself take as long as a collective. Gloo has no watchdog: its limit
        # lets go of engines that hang in the broadcast.
        limit = timeout if backend == "gloo" else 2 * timeout + timedelta(seconds=self.giving_up_seconds)
        answers, offset = {}, 1
        for engine in engines:
            join = engine.handle.init_weights_update_group.remote
            answers[engine.id] = join(host, port, offset, world_size, name, backend, self._timeout)
            offset += engine.num_gpus

        def join_group() -> Any:
            client = dist.TCPStore(host, port, is_master=False, timeout=timeout)
            return init_process_group(backend, client, world_size, 0, name, limit)

        joining = Background(join_group, "weight group")
        self._settle_answers(answers, joining, "joining the weight group")
        self._group = joining.result

    def begin(self, version: int) -> None:
        self._version = str(version)
        # A push that the trainer has stopped may have left a bucket on its way.
        self._settle_bucket()
        if self._group is None:
            raise RunError("weight push: no engines are connected")

    def send(self, bucket: NamedTensors) -> None:
        announcement, sent = self._flat(bucket) if _goes_flat(bucket) else _as_it_is(bucket)
        self._settle_bucket()
        announcement = (*announcement[:3], self._group_name, self._version, announcement[3], self._timeout)
        answers = {
            engine.id: engine.handle.update_weights_from_distributed.remote(*announcement) for engine in self._engines
        }
        # The thread gets the group as a value, because this object may drop it before the broadcast begins.
        group = self._group
        self._in_flight = (answers, Background(lambda: _broadcast(sent, group), "weight broadcast"))
        if sum(tensor.nbytes for _, tensor in bucket) > self._bucket_bytes:
            # A tensor larger than a bucket must be sent before the next tensors are gathered, to save memory.
            self._settle_bucket()

    def _flat(self, bucket: NamedTensors) -> tuple[Announced, list[torch.Tensor]]:
        flat = self._flattener.flatten(bucket)
        # An engine allocates memory for a flat bucket and again for its tensors. So a single tensor is sent as it is: an
        # embedding may be much larger than a bucket.
        goes_as_bytes = len(bucket) > 1 or not _is_known(bucket[0][1])
        load_format, sent = ("flattened_bucket", flat.buffer) if goes_as_bytes else (None, flat.single())
        return (flat.names, flat.dtypes, flat.shapes, load_format), [sent]

    def finish(self) -> None:
        self._settle_bucket()
        self._flattener.release(above=self._kept_bytes)

    def close(self) -> None:
        if self._in_flight is not None:
            _end(self._in_flight[1], self._group)
        self._send_engines_away()
        group, self._group, self._store, self._in_flight, self._engines = self._group, None, None, None, []
        self._flattener.release()
        if group is not None:
            _leave(group)
        _errors_of(self._farewells, _FAREWELL_SECONDS)
        self._farewells = {}

    def _settle_bucket(self) -> None:
        """Return when the bucket that is on its way, if there is one, has arrived."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._settle_answers(*in_flight, "sending weights")

    def _settle_answers(self, answers: Mapping[int, Any], collective: Background, name: str) -> None:
        """Wait for the HTTP half, an answer per engine, and the collective half, which have one time limit.

        Raises:
            EnginesFailed: one of them failed, or did not end in time. The group is then closed.
        """
        try:
            self._finish(answers, collective, name)
        except Exception as error:
            raise self._blame(answers, collective, str(error)) from error

    def _finish(self, answers: Mapping[int, Any], collective: Background, name: str) -> None:
        """Wait for both halves; the first error of either ends the wait.

        Raises:
            RunError: one of them failed, or did not end in time.
        """
        from slime.observability.waiting import wait_for_all

        flag, deadline = "--distributed-timeout-minutes", time.monotonic() + self._timeout
        told = {"pending": naming_engines(answers), "on_poll": collective.raise_error, "flag": flag}
        wait_for_all(list(answers.values()), name, self._timeout, **told)
        late = f"{name}: the collective did not end within {self._timeout:.0f} s ({flag})"
        collective.wait(max(0.0, deadline - time.monotonic()), late)

    def _blame(self, answers: Mapping[int, Any], collective: Background, error: str) -> EnginesFailed:
        """The engines to blame for `error`: those that are gone or hang; if there are none, those that failed first.

        Only the former are certain, since an engine that has lost its peers fails, too, and its error may come first.
        """
        early = _errors_of(answers, 0.0)
        if self._group is None and self._store is not None:
            self._wait_for_who_joins(answers)
        self._abandon_group(collective)
        errors = _errors_of(answers, _AFTER_FAILURE_SECONDS)
        unheard = f"no answer after another engine had failed: {error}" if early else error
        certain = dict.fromkeys(_unanswered(answers), unheard)
        probes = {engine.id: engine.handle.get_weight_version.remote() for engine in self._engines}
        gone = _errors_of(probes, _AFTER_FAILURE_SECONDS)
        certain |= {id: errors.get(id, reason) for id, reason in gone.items()}
        certain |= dict.fromkeys(_unanswered(probes), unheard)
        return EnginesFailed(certain or early or errors or dict.fromkeys(answers, error), certain=bool(certain))

    def _abandon_group(self, collective: Background) -> None:
        """Close our side, even if something hangs there, so that the name of the group is free again."""
        group, self._group, self._store = self._group, None, None
        # An engine that refused closes its connections, which ends a broadcast to it.
        self._send_engines_away()
        _end(collective, group)
        group = group or collective.result
        if group is not None:
            _leave(group)

    def _wait_for_who_joins(self, answers: Mapping[int, Any]) -> None:
        """Return when all engines that have not answered are at the store, or when it is too late for them. An engine that
        comes after the store is closed would look for it until its own time limit."""
        ranks = {engine.id: engine.num_gpus for engine in self._engines}
        deadline = time.monotonic() + _JOINING_SECONDS
        # Polled, since a store does not report who connects.
        while time.monotonic() < deadline:
            if _visitors(self._store.port) >= sum(ranks[id] for id in _unanswered(answers)):
                return
            time.sleep(_POLL_SECONDS)

    def _send_engines_away(self) -> None:
        """Order the engines to leave the group, unless they have the order already."""
        for engine in self._engines:
            if engine.id not in self._farewells:
                self._farewells[engine.id] = engine.handle.destroy_weights_update_group.remote(self._group_name)


def _goes_flat(bucket: NamedTensors) -> bool:
    """Whether tensors go as one piece: on a GPU all do, on the host small ones, and those that Gloo does not know."""
    large = sum(tensor.nbytes for _, tensor in bucket) >= _LARGE_TENSOR_BYTES * len(bucket)
    return not (bucket[0][1].device.type == "cpu" and large and all(_is_known(tensor) for _, tensor in bucket))


def _is_known(tensor: torch.Tensor) -> bool:
    """Whether a broadcast supports the dtype of `tensor`: Gloo lacks some, such as eight-bit floats."""
    return tensor.device.type != "cpu" or str(tensor.dtype).removeprefix("torch.") in _GLOO_DTYPES


def _as_it_is(bucket: NamedTensors) -> tuple[Announced, list[torch.Tensor]]:
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
    announced = [name for name, _ in bucket], dtypes, [list(tensor.shape) for _, tensor in bucket], None
    return announced, [tensor.detach().contiguous() for _, tensor in bucket]


def _broadcast(tensors: Sequence[torch.Tensor], group: Any) -> None:
    import torch.distributed as dist

    accelerator = get_accelerator()
    # The default device belongs to a thread, and this is a new one.
    accelerator.set_device(tensors[0].device.index or 0)
    works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in tensors]
    for work in works:
        # On a GPU `wait` would wait for the device, which is gathering the next bucket. So wait only for these collectives; who
        # waits for this thread has the time limit, and a group that is aborted completes them.
        while tensors[0].device.type != "cpu" and not work.is_completed():
            time.sleep(_POLL_SECONDS)
        work.wait()


def _end(collective: Background, group: Any) -> None:
    """Wait for the end of the collective. If it hangs abort the communicator, whose kernel would block the device."""
    if collective.ended_within(_AFTER_FAILURE_SECONDS) or group is None:
        return
    Background(group.abort, "aborting the weight group").ended_within(_AFTER_FAILURE_SECONDS)
    collective.ended_within(_AFTER_FAILURE_SECONDS)


def _leave(group: Any) -> None:
    """Close our side of the group, with a short time limit, since its peers may be dead."""
    import torch.distributed as dist

    leaving = Background(lambda: dist.destroy_process_group(group), "leaving the weight group")
    leaving.ended_within(_AFTER_FAILURE_SECONDS)


def _visitors(port: int) -> int:
    """The number of connections of other processes to a port on which this process listens."""
    connections = [
        found for found in psutil.Process().net_connections("tcp") if found.status == psutil.CONN_ESTABLISHED
    ]
    own = sum(found.raddr.port == port for found in connections)
    return sum(found.laddr.port == port for found in connections) - own


def _unanswered(answers: Mapping[int, Any]) -> list[int]:
    import ray

    _, waiting = ray.wait(list(answers.values()), num_returns=len(answers), timeout=0)
    return [id for id, answer in answers.items() if answer in waiting]


def _errors_of(answers: Mapping[int, Any], seconds: float) -> dict[int, str]:
    """The errors among the answers that arrive within `seconds`, by engine."""
    import ray

    from slime.observability.waiting import wait_for

    if not answers:
        return {}
    ready, _ = ray.wait(list(answers.values()), num_returns=len(answers), timeout=seconds)
    errors = {}
    for id, answer in answers.items():
        if answer in ready:
            try:
                wait_for(answer, f"engine {id}", _AFTER_FAILURE_SECONDS)
            except Exception as error:
                errors[id] = str(error)
    return errors
