"""Weights from the trainer to the engines over a process group (NCCL, or Gloo on CPU).

One push: pause all engines → flush their caches → begin → per bucket an HTTP call that announces the tensors and, at
the same time, the broadcast of their bytes → end → set the version and read it back → continue.

Invariants:
- Every training rank joins `update_weights`, because the bucket iterator contains collectives; only the source rank
  talks to engines. All engines of the group take part in every step.
- While a bucket travels, the next one is converted.
- Nothing waits without a deadline. The broadcast runs on a thread of its own: when an engine refuses the HTTP half,
  nobody receives, and the push fails with the engine's answer instead of hanging in the collective.
- No tensor travels whose name the engines' checkpoint does not have.
- `continue` is sent whatever happened. A failed push may leave engines half-updated: it raises, and whoever catches
  that must not let them generate before a whole push or a restart.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slime.utils.device import get_accelerator
from slime.utils.errors import RunError
from slime.utils.ports import service_host
from slime.weights.buckets import BucketFlattener, FlatBucket, PushedNames

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_GROUP_NAME = "slime-pp_0"
# Between the end of an engine's own time limit and its answer.
_ANSWER_SECONDS = 30.0
_AFTER_FAILURE_SECONDS = 10.0


class ProcessGroupWeightUpdater:
    """Pushes the tensors of `named_tensor_buckets()` to all connected engines.

    Args:
        args: reads `distributed_timeout_minutes`, `http_control_timeout` and `engine_load_timeout`.
        named_tensor_buckets: a fresh iterator over buckets of (HF name, tensor) for each push; the same on every rank.
        is_source_rank: whether this rank is the one that talks to the engines.
        expected_names: names of the engines' checkpoint; None skips the comparison.
    """

    def __init__(
        self,
        args: Any,
        named_tensor_buckets: Callable[[], Iterator[list[tuple[str, torch.Tensor]]]],
        is_source_rank: bool,
        expected_names: set[str] | None = None,
    ):
        self._named_tensor_buckets = named_tensor_buckets
        self._is_source_rank = is_source_rank
        self._expected_names = expected_names
        self._timeout = 60.0 * args.distributed_timeout_minutes
        # Engines put what they received in place when a push ends, which takes the longer the larger the model is.
        self._control_timeout = max(args.http_control_timeout, args.engine_load_timeout) + _ANSWER_SECONDS
        self._engines: Sequence[Any] = ()
        self._group: Any = None
        self._in_flight: tuple[list[Any], _Background] | None = None
        self._flattener = BucketFlattener()
        self._metrics: dict[str, float] = {}
        self.weight_version = 0

    # -- connection -------------------------------------------------------------------------------------------------

    def connect_rollout_engines(
        self,
        engines: Sequence[Any],
        lock: Any,
        engine_gpu_counts: Sequence[int],
        engine_gpu_offsets: Sequence[int],
        engine_parallel_configs: Any = None,
    ) -> None:
        """Build the group: this rank is 0, engine `i` takes the next `engine_gpu_counts[i]` ranks.

        `engines` are Ray handles of `SGLangEngine`. `lock` is not used: with one group nobody else broadcasts to the
        engines at the same time. Ranks other than the source rank only remember that they are connected.
        """
        self.disconnect_rollout_engines()
        self._engines = list(engines)
        if not self._is_source_rank:
            return
        from slime.utils.process_groups import create_store, init_process_group

        timeout = timedelta(seconds=self._timeout)
        host, backend = service_host(), get_accelerator().process_group_backend
        store = create_store(host, timeout)
        world_size = 1 + sum(engine_gpu_counts)
        offsets = [1 + sum(engine_gpu_counts[:index]) for index in range(len(engines))]
        answers = [
            engine.init_weights_update_group.remote(
                host, store.port, offset, world_size, _GROUP_NAME, backend, self._timeout
            )
            for engine, offset in zip(engines, offsets, strict=True)
        ]
        joining = _Background(
            lambda: init_process_group(backend, store, world_size, 0, _GROUP_NAME, timeout), "weight group"
        )
        self._finish(answers, joining, "joining the weight group")
        self._group = joining.result

    def disconnect_rollout_engines(self) -> None:
        """Leave the group. Errors are ignored: the engines may be gone."""
        group, self._group = self._group, None
        if group is None:
            return
        import ray
        import torch.distributed as dist

        answers = [engine.destroy_weights_update_group.remote(_GROUP_NAME) for engine in self._engines]
        dist.destroy_process_group(group)
        ray.wait(answers, num_returns=len(answers), timeout=30.0)

    # -- push -------------------------------------------------------------------------------------------------------

    def update_weights(self) -> None:
        """Push the current weights to all engines as version `weight_version + 1`. Called by every training rank.

        Raises:
            RunError: an engine failed or did not answer in time, or the names do not fit the engines' checkpoint.
        """
        started = time.monotonic()
        if not self._is_source_rank:
            for _ in self._named_tensor_buckets():
                pass
            self.weight_version += 1
            return
        if self._group is None:
            raise RunError("weight push: no engines are connected")
        parts, sent_bytes = self._push()
        self.weight_version += 1
        seconds = time.monotonic() - started
        self._metrics = {
            "perf/update_weights_time": seconds,
            "perf/update_weights_bytes": float(sent_bytes),
            "perf/update_weights_gb_per_s": sent_bytes / seconds / 1e9,
            "perf/update_weights_parts": float(parts),
        }
        logger.debug(
            "weights version %d: %.1f MB in %d parts, %.2f s, %.2f GB/s",
            self.weight_version,
            sent_bytes / 1e6,
            parts,
            seconds,
            sent_bytes / seconds / 1e9,
        )

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of the last push; empty when already taken, and on ranks other than the source rank."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _push(self) -> tuple[int, int]:
        failed = True
        try:
            self._call_all("pause_generation", "abort")
            self._call_all("flush_cache")
            self._call_all("begin_weight_update")
            parts, sent_bytes = self._send_buckets()
            self._call_all("end_weight_update")
            self._set_and_check_version(str(self.weight_version + 1))
            failed = False
        finally:
            if failed:
                self._call_all_quietly("end_weight_update")
                self._call_all_quietly("continue_generation")
        self._call_all("continue_generation")
        return parts, sent_bytes

    def _send_buckets(self) -> tuple[int, int]:
        names = PushedNames(self._expected_names)
        parts, sent_bytes = 0, 0
        try:
            for named_tensors in self._named_tensor_buckets():
                if not named_tensors:
                    continue
                names.check_bucket(name for name, _ in named_tensors)
                bucket = self._flattener.flatten(named_tensors)
                self._finish_bucket()
                self._start_bucket(bucket)
                parts, sent_bytes = parts + 1, sent_bytes + bucket.nbytes
        finally:
            self._finish_bucket()
        names.check_complete()
        return parts, sent_bytes

    def _start_bucket(self, bucket: FlatBucket) -> None:
        answers = [
            engine.update_weights_from_distributed.remote(
                bucket.names, bucket.dtypes, bucket.shapes, _GROUP_NAME, None, "flattened_bucket", self._timeout
            )
            for engine in self._engines
        ]
        self._in_flight = (answers, _Background(lambda: self._broadcast(bucket.buffer), "weight broadcast"))

    def _finish_bucket(self) -> None:
        """Wait for the bucket in flight, if there is one."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            self._finish(*in_flight, "sending weights")
        except BaseException:
            self._abandon_group(in_flight[1])
            raise

    def _abandon_group(self, broadcast: _Background) -> None:
        """Close our side after a failure, so that engines that still receive get an error instead of waiting on.

        Not possible while our own broadcast hangs; then the engines wait for their time limit. In both cases engines
        have to be connected again before the next push.
        """
        import torch.distributed as dist

        group, self._group = self._group, None
        if broadcast.ended_within(_AFTER_FAILURE_SECONDS):
            dist.destroy_process_group(group)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        import torch.distributed as dist

        accelerator = get_accelerator()
        # The default device belongs to a thread, and this is a new one.
        accelerator.set_device(buffer.device.index or 0)
        dist.broadcast(buffer, src=0, group=self._group)
        accelerator.synchronize()

    # -- engines ----------------------------------------------------------------------------------------------------

    def _call_all(self, method: str, *arguments: Any, timeout: float | None = None) -> list[Any]:
        from slime.observability.waiting import wait_for_all

        answers = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return wait_for_all(answers, f"weight push, {method} of the engines", timeout or self._control_timeout)

    def _set_and_check_version(self, version: str) -> None:
        self._call_all("set_weight_version", version)
        reported = self._call_all("get_weight_version")
        wrong = {rank: found for rank, found in enumerate(reported) if found != version}
        if wrong:
            raise RunError(f"weight push: engines report another version than {version} (engine: version): {wrong}")

    def _call_all_quietly(self, method: str) -> None:
        """For use after a failure, whose error must stay the one that is reported."""
        try:
            self._call_all(method, timeout=_AFTER_FAILURE_SECONDS)
        except RunError as error:
            logger.warning("after the failed weight push: %s", error)

    def _finish(self, answers: list[Any], collective: _Background, name: str) -> None:
        """Wait for the HTTP half and the collective half, which have one time limit; the first error of either ends the wait.

        Raises:
            RunError: one of them failed, or did not end in time.
        """
        from slime.observability.waiting import wait_for_all

        flag, deadline = "--distributed-timeout-minutes", time.monotonic() + self._timeout
        wait_for_all(answers, name, self._timeout, on_poll=collective.raise_error, flag=flag)
        if not collective.ended_within(max(0.0, deadline - time.monotonic())):
            raise RunError(f"{name}: the collective did not end within {self._timeout:.0f} s ({flag})")
        collective.raise_error()


class _Background:
    """A function on a daemon thread: one that never returns (a collective without peers) cannot hold the process."""

    def __init__(self, function: Callable[[], Any], name: str):
        self.result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self.result = function()
        except BaseException as error:
            # Without its traceback, whose frames would keep a failed process group (and its connections) alive.
            self._error = error.with_traceback(None)

    def raise_error(self) -> None:
        """Raise what the function raised, if it did."""
        if self._error is not None:
            raise RunError(f"{self._thread.name} failed: {self._error}") from self._error

    def ended_within(self, timeout: float) -> bool:
        """Wait for the end, at most `timeout` seconds, whatever the outcome."""
        self._thread.join(timeout)
        return not self._thread.is_alive()
