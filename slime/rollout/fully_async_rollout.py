"""A rollout function whose generation never stops: `generate_rollout_fully_async`, for `--rollout-function-path`.

A worker keeps as many groups in flight as the engines can take, also while no rollout asks for any. A rollout takes the oldest
finished groups; the others wait for the next rollout. So a long answer holds up nothing but its own group.

Every prompt that the worker has drawn is in exactly one place: in flight, in the queue, with a rollout, dropped by the dynamic
filter, or back in the data source. Every saved state of the data holds what is in flight and what is in the queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections import deque
from typing import Any

from slime.rollout.attempts import as_finished_group, as_prompts, new_attempt
from slime.rollout.base_types import RolloutFnTrainOutput, first_index, pack_groups
from slime.rollout.draws import current_draws, draw_groups, drawing_ahead, give_back, wait_for_source
from slime.rollout.failures import FailureTally, failed_samples
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import cancelled_error, is_aborted, start_group
from slime.rollout.generation_call import GenerationCall, current_call
from slime.rollout.group_ledger import GroupLedger
from slime.rollout.sglang_rollout import REPORT_AFTER_S
from slime.rollout.staleness import is_too_old
from slime.rollout.user_functions import naming_makers, run_in_daemon_thread
from slime.utils.async_utils import run
from slime.utils.errors import UserError
from slime.utils.http_utils import generation_concurrency
from slime.utils.misc import SingletonMeta

logger = logging.getLogger(__name__)

_WORKER = "the generation that never stops"


def generate_rollout_fully_async(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The next `rollout_batch_size` finished groups, by the index of their first sample; starts the worker the first time.

    Raises:
        UserError: it was asked to evaluate, or the data source ran dry.
        UserError, RunError: what ended the worker.
    """
    if evaluation:
        raise UserError(
            "slime.rollout.fully_async_rollout does not evaluate; give a function that does, such as "
            "--eval-function-path slime.rollout.sglang_rollout.generate_rollout"
        )
    return run(_rollout(args, rollout_id, data_source))


async def _rollout(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    return await AsyncRolloutWorker(args, data_source).rollout(rollout_id)


class AsyncRolloutWorker(metaclass=SingletonMeta):
    """Generates without end, on the event loop where it is made. One per process; the first `rollout` starts it.

    Attributes:
        queue: finished groups that no rollout has taken: (the group as it was drawn, the group), oldest first.
        in_flight: tasks of groups, and the groups as they were drawn.
    """

    def __init__(self, args: Any, data_source: Any) -> None:
        self.args = args
        self.data_source = data_source
        self.state = GenerateState(args)
        self.queue: deque[tuple[list[Any], list[Any]]] = deque()
        self.in_flight: dict[asyncio.Task[Any], list[Any]] = {}
        self._ledger = GroupLedger(args, "the groups since the last rollout")
        self._done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        # Notified whenever something changes that a rollout or the worker may wait for.
        self._changed = asyncio.Condition()
        self._error: BaseException | None = None
        self._is_dry = False
        self._tasks: list[asyncio.Task[None]] = []
        self._draws = current_draws()
        self._rollout_id = self._drawn_for_rollout = 0
        # How many groups the rollout that is being collected has taken.
        self._taken = 0

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """Take the groups of a rollout, in turn after those before it."""
        call, target = current_call(), self.args.rollout_batch_size
        self._rollout_id, self._drawn_for_rollout = rollout_id, 0
        if not self._tasks:
            # An empty context: the worker outlives this rollout, and must not work for its call, its metrics or its draws.
            work = (self._top_up_for_ever(), self._judge_for_ever())
            self._tasks = [asyncio.create_task(one, context=contextvars.Context(), name=_WORKER) for one in work]
        taken: list[tuple[list[Any], list[Any]]] = []
        try:
            with call.progress.start(f"rollout {rollout_id}", target * self.args.n_samples_per_prompt) as progress:
                while len(taken) < target:
                    origin, group = await self._oldest(rollout_id, target - len(taken))
                    if is_too_old(self.args, group, call.trained_as):
                        self._ledger.counts["stale_groups"] += 1
                        # Shielded: if this rollout is cancelled while the source takes the group, both must still agree on
                        # who has it.
                        await asyncio.shield(asyncio.create_task(self._return_stale(origin, group)))
                        continue
                    taken.append((origin, group))
                    progress.advance(len(group))
            with naming_makers(self.args):
                await asyncio.to_thread(pack_groups, [group for _, group in taken])
            groups = sorted((group for _, group in taken), key=first_index)
            failures = FailureTally(f"rollout {rollout_id}")
            for group in groups:
                failures.add(group)
            failures.stop_when_most_failed()
        except BaseException:
            self.queue.extendleft(reversed(taken))
            raise
        finally:
            async with self._changed:
                self._taken = 0
                self._changed.notify_all()
        if self._draws is not None:
            # Before they are handed out: from then on they may be changed, and until now a saved state holds them as they are.
            self._draws.taken([origin for origin, _ in taken], rollout_id)
        return RolloutFnTrainOutput(groups, {**self._take_metrics(), "failed_samples": len(failed_samples(groups))})

    async def _oldest(self, rollout_id: int, missing: int) -> tuple[list[Any], list[Any]]:
        """The oldest finished group, as soon as there is one."""
        async with self._changed:
            while not self.queue:
                if self._error is not None:
                    raise self._error
                if self._is_dry and not self.in_flight:
                    raise UserError(
                        f"the data source ran dry in rollout {rollout_id}: {missing} more groups are needed "
                        "(--rollout-batch-size), and none is in flight"
                    )
                try:
                    await asyncio.wait_for(self._changed.wait(), REPORT_AFTER_S)
                except TimeoutError:
                    flying = len(self.in_flight)
                    logger.info("rollout %d: waiting for %d more groups; %d are in flight", rollout_id, missing, flying)
            entry = self.queue.popleft()
            self._taken += 1
            self._changed.notify_all()
            return entry

    # -- the worker -------------------------------------------------------------------------------------------------

    async def _top_up_for_ever(self) -> None:
        with GenerationCall().under_way() as self._call, drawing_ahead(self._draws):
            await self._guarded(self._top_up)

    async def _judge_for_ever(self) -> None:
        await self._guarded(self._judge)

    async def _guarded(self, work: Any) -> None:
        """Do `work` again and again. If it raises, that ends the worker, and the rollout that waits raises the same."""
        while self._error is None:
            try:
                await work()
            except Exception as error:
                await self._fail(error)
            except asyncio.CancelledError:
                # Somebody cancelled the worker. Rollouts have to hear of it, or they would wait for ever.
                await self._fail(cancelled_error(asyncio.current_task()))
                raise

    async def _fail(self, error: BaseException) -> None:
        async with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _room(self) -> int:
        """How many groups may start now: as many as fill the engines, but none while that many finished ones wait.

        With `--max-weight-staleness`, also no more than may still be trained when their turn comes. A group that waits behind w
        whole rollouts gets ⌈w ÷ interval⌉ pushes older meanwhile, and the rollouts in front may be ⌈buffer ÷ interval⌉ old
        themselves.
        """
        args = self.args
        pool = max(1, generation_concurrency(args) // args.n_samples_per_prompt)
        room = pool - len(self.in_flight) if len(self.queue) < pool else 0
        if args.max_weight_staleness is None:
            return room
        interval = args.update_weights_interval
        spare = max(0, args.max_weight_staleness - math.ceil(args.async_buffer_size / interval))
        limit = args.rollout_batch_size * (spare * interval + 1)
        return min(room, limit - len(self.in_flight) - len(self.queue) - self._taken)

    async def _top_up(self) -> None:
        """Wait until there is room, and fill it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._error is not None or (self._room() > 0 and not self._is_dry))
        if self._error is not None:
            return
        self._call.rollout_id = self._rollout_id
        drawing = run_in_daemon_thread(
            draw_groups, self.args, self.data_source, self._room(), self._rollout_id, self._drawn_for_rollout
        )
        groups = await wait_for_source(self.args, drawing, "get_samples")
        self._drawn_for_rollout += len(groups)
        async with self._changed:
            self._is_dry = not groups
            self._changed.notify_all()
        for group in groups:
            self._start(group)

    def _start(self, group: list[Any]) -> None:
        task = start_group(self.args, group, self.state.sampling_params)
        self.in_flight[task] = group
        self._call.pendings.add(task)
        task.add_done_callback(self._done.put_nowait)

    async def _judge(self) -> None:
        """Queue, drop or give back the next group that is done."""
        task = await self._done.get()
        self._call.pendings.discard(task)
        origin, finished = self.in_flight[task], None
        try:
            finished = await self._settle(task, origin)
        finally:
            async with self._changed:
                # Both in one go, so that the group always counts in exactly one place.
                del self.in_flight[task]
                if finished is not None:
                    self.queue.append((origin, finished))
                self._changed.notify_all()

    async def _settle(self, task: asyncio.Task[Any], origin: list[Any]) -> list[Any] | None:
        """The finished group, if the filter keeps it; None where it was dropped or given back."""
        error = cancelled_error(task) if task.cancelled() else task.exception()
        if error is not None:
            # The error ends the run. Its prompts return first, so that none is lost.
            await self._return_to_source(origin, as_prompts(origin))
            raise error
        group = task.result()
        if is_aborted(group):
            await self._return_to_source(origin, self._ledger.unfinished(origin, group, self._rollout_id))
            self._ledger.interrupted(origin)
            return None
        self._ledger.finished(origin, group)
        if await self._ledger.drops_group(group, self._obtainable):
            if self._draws is not None:
                self._draws.taken([origin], None)
            self._ledger.stop_if_a_service_seems_dead()
            return None
        if self._draws is not None:
            # A saved state holds the group as attempts, each with its prompt beside it.
            self._draws.finished(
                origin, lambda: as_finished_group(self.args, origin, [new_attempt(entry) for entry in group])
            )
        return group

    def _obtainable(self) -> float:
        """How many groups can still be had; as long as the source has prompts, any number."""
        return len(self.in_flight) + len(self.queue) if self._is_dry else math.inf

    async def _return_stale(self, origin: list[Any], group: list[Any]) -> None:
        """Give a group that was taken from the queue back to the source; if that fails, it goes back into the queue."""
        self._taken -= 1
        try:
            await self._return_to_source(origin, as_prompts(origin))
        except BaseException:
            self.queue.appendleft((origin, group))
            raise

    async def _return_to_source(self, origin: list[Any], group: list[Any]) -> None:
        giving = run_in_daemon_thread(give_back, self.args, self.data_source, [group], self._rollout_id, [origin])
        await wait_for_source(self.args, giving, "add_samples")
        async with self._changed:
            self._is_dry = False
            self._changed.notify_all()

    def _take_metrics(self) -> dict[str, Any]:
        """What happened since the last rollout, and how much waits."""
        ledger = self._ledger
        metrics = {
            **ledger.drops.collect(),
            "aborted_samples": ledger.counts["aborted_samples"],
            "stale_groups": ledger.counts["stale_groups"],
            "queued_groups": len(self.queue),
            "groups_in_flight": len(self.in_flight),
        }
        ledger.begin_page()
        return metrics
