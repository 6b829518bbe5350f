"""The default rollout function, and the public names of generation.

`generate_rollout` is what `--rollout-function-path` names by default: one step of training rollouts, or an evaluation,
against SGLang engines behind a router.

A step goes from prompts to the chosen groups, and loses nothing on the way. Every group that it takes from the data source ends
in exactly one place: it is kept, dropped by the dynamic filter, or back in the data source (as prompts, as a partial group, or
finished with `--keep-surplus-groups`).
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from slime.rollout.abort import CANCEL_TIMEOUT_S, abort, cancel_tasks
from slime.rollout.attempts import as_finished_group, as_prompts
from slime.rollout.base_types import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    first_index,
    pack_groups,
)
from slime.rollout.draws import draw_groups, give_back, wait_for_source
from slime.rollout.engine_request import get_model_url, router_urls
from slime.rollout.evaluation import eval_rollout
from slime.rollout.failures import failed_samples
from slime.rollout.filter_hub.base_types import FILTER_FLAG
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import (
    cancelled_error,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    is_aborted,
    start_group,
)
from slime.rollout.generation_call import GenerationCall
from slime.rollout.group_ledger import GroupLedger
from slime.rollout.staleness import is_too_old
from slime.rollout.user_functions import (
    call_within_request_time,
    naming_makers,
    run_in_daemon_thread,
    wrong_result_error,
)
from slime.utils.async_utils import run
from slime.utils.errors import RunError, UserError
from slime.utils.plugin_loader import load_function

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "sleep",
]

logger = logging.getLogger(__name__)

REPORT_AFTER_S = 30.0
SLEEP_REPORT_S = 600.0
# So many kept groups are packed in a thread at a time: to reach the thread takes longer than to pack a group whose samples hold
# arrays already.
GROUPS_PER_THREAD = 16
ALL_SAMPLES_FLAG = "--rollout-all-samples-process-path"


async def generate_rollout_async(args: Any, rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
    """One step: `rollout_batch_size` groups, sorted by the index of their first sample.

    Unfinished and surplus groups return to `data_source` through `add_samples`. Its bound method `get_samples` stands for it.

    Raises:
        UserError: the data source ran dry, or a user function raised or returned something unusable.
        RunError: engines or reward services failed.
    """
    source = data_source.__self__ if inspect.ismethod(data_source) else data_source
    return await RolloutStep(args, rollout_id, source).run()


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The synchronous form, for the rollout manager; with `evaluation` all sets of `args.eval_datasets`."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> None:
    """Never returns, so that engines stay up for whoever asks them with the key of `--router-api-key`; logs the addresses of
    their routers.

    It ends when the run is ended.
    """
    while True:
        for name, url in router_urls(args).items():
            logger.info(
                "rollout %d sleeps; model %s is served at %s, for requests with 'Authorization: Bearer KEY', the key of "
                "--router-api-key (without that flag it is one of the run's own)", rollout_id, name, url,
            )  # fmt: skip
        time.sleep(SLEEP_REPORT_S)


class RolloutStep:
    """One step, from prompts to chosen groups; `run` is called once.

    A task generates and grades a group. `origins` has the groups as they were drawn, by their tasks; a group stays in it until
    it is dropped or the data source has taken it back, so that a step that fails can give back all that it has drawn.
    """

    def __init__(self, args: Any, rollout_id: int, data_source: Any) -> None:
        self.args = args
        self.rollout_id = rollout_id
        self.data_source = data_source
        self.state = GenerateState(args)
        self.call = GenerationCall(rollout_id)
        self.target = args.rollout_batch_size
        self.ledger = GroupLedger(args)
        self.counts = self.ledger.counts
        self.kept: list[list[Any]] = []
        # Groups that are not kept are held only for the hook that asks for them.
        self.all_finished: list[list[Any]] | None = [] if args.rollout_all_samples_process_path else None
        self.origins: dict[asyncio.Task[Any], list[Any]] = {}
        self.started_at: dict[asyncio.Task[Any], float] = {}
        self.done: asyncio.Queue[asyncio.Task[Any]] = asyncio.Queue()
        # Kept groups that are not packed yet, and the work of packing the others.
        self.unpacked: list[list[Any]] = []
        self.packing: list[asyncio.Future[Any]] = []
        # What the step waits for when it does not wait for groups: a data source or a function of the user's.
        self.busy_with = ""
        # The last call of the data source, which may be under way.
        self.exchange: asyncio.Future[None] | None = None

    async def run(self) -> RolloutFnTrainOutput:
        """Collect the groups of the step, wind the rest down, and hand out what was chosen."""
        with self.call.under_way():
            reporter = asyncio.create_task(self._report_regularly())
            try:
                samples = self.target * self.args.n_samples_per_prompt
                with self.call.progress.start(f"rollout {self.rollout_id}", samples) as self.progress:
                    while len(self.kept) < self.target:
                        await self._fetch_prompts()
                        await self._judge(await self.done.get())
                await self._wind_down()
                self._pack()
                with naming_makers(self.args):
                    await asyncio.gather(*self.packing)
                return await self._output()
            except BaseException as error:
                await self._give_up(error)
                raise
            finally:
                reporter.cancel()

    async def _fetch_prompts(self) -> None:
        """Draw until the target can be met: `--over-sampling-batch-size` groups at first, later one for each that was lost."""
        while (missing := self.target - self.call.remaining_batch_size) > 0:
            first_draw = self.counts["started"] == 0
            size = self.args.over_sampling_batch_size if first_draw else missing
            await self._exchange("get_samples", self._draw(size))

    async def _exchange(self, method: str, with_source: Coroutine[Any, Any, None]) -> None:
        """Await a call of the data source. It goes on even if the step is cancelled meanwhile: at the end the step must know
        what the source gave or took."""
        self.exchange = asyncio.ensure_future(with_source)
        await wait_for_source(self.args, self.exchange, method)

    async def _draw(self, size: int) -> None:
        with self._busy(f"get_samples of {self.args.data_source_path}"):
            groups = await run_in_daemon_thread(
                draw_groups, self.args, self.data_source, size, self.rollout_id, self.counts["started"]
            )
        if not groups:
            raise UserError(
                f"the data source ran dry in rollout {self.rollout_id}: {self.target} groups are needed "
                f"(--rollout-batch-size), only {self.call.remaining_batch_size} can still be had "
                f"({len(self.kept)} kept, {self.counts['dropped']} dropped by the filter)"
            )
        if self.args.custom_generate_function_path is None:
            self.state.encode_ahead([group[0] for group in groups])
        for group in groups:
            self._start(group)

    def _start(self, group: list[Any]) -> None:
        entries = group
        if is_too_old(self.args, group, self.call.trained_as):
            self.counts["stale_groups"] += 1
            entries = as_prompts(group)
        task = start_group(self.args, entries, self.state.sampling_params)
        self.origins[task] = group
        self.started_at[task] = time.monotonic()
        self.call.pendings.add(task)
        self.call.remaining_batch_size += 1
        self.counts["started"] += 1
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self.call.pendings.discard(task)
        # A task holds its group, so nothing may hold the task longer than it is needed.
        del self.started_at[task]
        self.done.put_nowait(task)

    @contextlib.contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        self.busy_with = what
        try:
            yield
        finally:
            self.busy_with = ""

    async def _report_regularly(self) -> None:
        """Log every 30 s what the step waits for. A task of its own, so that it also tells of a data source that hangs."""
        while True:
            await asyncio.sleep(REPORT_AFTER_S)
            self._report_progress()

    def _report_progress(self) -> None:
        oldest = sorted(self.call.pendings, key=self.started_at.__getitem__)
        names = ", ".join(task.get_name() for task in oldest[:8])
        age = time.monotonic() - self.started_at[oldest[0]] if oldest else 0.0
        dropped = (
            f"; the filter dropped {self.counts['dropped']} ({self.ledger.drops})" if self.counts["dropped"] else ""
        )
        busy = f"; waiting for {self.busy_with}" if self.busy_with else ""
        logger.info(
            "rollout %d: %d of %d groups; waiting for %d more (oldest since %.0f s): %s%s%s",
            self.rollout_id, len(self.kept), self.target, len(oldest), age, names, dropped, busy,
        )  # fmt: skip

    async def _judge(self, task: asyncio.Task[Any]) -> None:
        """Keep, drop or give back the group of a finished task; its exception is raised."""
        if task.cancelled():
            raise cancelled_error(task)
        group = task.result()
        n = self.args.n_samples_per_prompt
        if len(group) != n:
            raise RunError(f"{task.get_name()} came back with {len(group)} entries, expected {n}")
        if is_aborted(group):
            await self._give_back_interrupted(task, group)
            return
        self._count_finished(self.origins[task], group)
        with self._busy(f"{FILTER_FLAG} {self.args.dynamic_sampling_filter_path}"):
            is_dropped = await self.ledger.drops_group(group, lambda: self.call.remaining_batch_size)
        if is_dropped:
            self.call.remaining_batch_size -= 1
            del self.origins[task]
            self.ledger.stop_if_a_service_seems_dead()
            return
        self.kept.append(group)
        self.unpacked.append(group)
        if len(self.unpacked) == GROUPS_PER_THREAD:
            self._pack()
        self.progress.advance(n)

    def _pack(self) -> None:
        groups, self.unpacked = self.unpacked, []
        self.packing.append(asyncio.ensure_future(asyncio.to_thread(pack_groups, groups)))

    def _count_finished(self, origin: list[Any], group: list[Any]) -> None:
        self.ledger.finished(origin, group)
        if self.all_finished is not None:
            self.all_finished.append(group)

    async def _give_back_interrupted(self, task: asyncio.Task[Any], group: list[Any]) -> None:
        """An engine or a custom function interrupted the group although the step goes on: give it back, to be drawn again."""
        origin = self.origins[task]
        self.ledger.interrupted(origin)
        self.call.remaining_batch_size -= 1
        await self._return_to_source({task: self.ledger.unfinished(origin, group, self.rollout_id)})

    async def _wind_down(self) -> None:
        """Abort what still runs; unfinished groups and finished surplus groups return, ordered, to the data source."""
        if self.call.pendings:
            await abort(self.args, self.rollout_id)
        kept = {id(group) for group in self.kept}
        returning = {}
        for task, origin in self.origins.items():
            if not task.done() or task.cancelled() or task.exception() is not None:
                returning[task] = self._after_failed_task(task, origin)
            elif id(task.result()) in kept:
                continue
            elif is_aborted(task.result()):
                returning[task] = self.ledger.unfinished(origin, task.result(), self.rollout_id)
            else:
                returning[task] = self._surplus(origin, task.result())
        await self._return_to_source(returning)

    def _surplus(self, origin: list[Any], group: list[Any]) -> list[Any]:
        """What a finished group beyond the target returns as: itself with `--keep-surplus-groups`, else its prompts."""
        self._count_finished(origin, group)
        self.counts["surplus_groups"] += 1
        return as_finished_group(self.args, origin, group) if self.args.keep_surplus_groups else as_prompts(origin)

    def _after_failed_task(self, task: asyncio.Task[Any], origin: list[Any]) -> list[Any]:
        """The prompts of a group whose task failed or was cancelled while the step was being wound down."""
        self.counts["aborted_samples"] += len(origin)
        if task.done() and not task.cancelled():
            logger.error("%s failed during the abort; its prompts return", task.get_name(), exc_info=task.exception())
        return as_prompts(origin)

    async def _return_to_source(self, groups: dict[asyncio.Task[Any], list[Any]]) -> None:
        """Give the groups of these tasks back to the data source, as what is left of them, in the order of their indices."""
        if groups:
            in_order = sorted(groups.items(), key=lambda item: first_index(item[1]))
            await self._exchange("add_samples", self._give_back(in_order))

    async def _give_back(self, groups: list[tuple[asyncio.Task[Any], list[Any]]]) -> None:
        origins = [self.origins[task] for task, _ in groups]
        with self._busy(f"add_samples of {self.args.data_source_path}"):
            await run_in_daemon_thread(
                give_back, self.args, self.data_source, [group for _, group in groups], self.rollout_id, origins
            )
        for task, _ in groups:
            del self.origins[task]

    async def _give_up(self, error: BaseException) -> None:
        """The step fails: end its tasks, and give all prompts back for whoever goes on with the data source."""
        self.call.aborted = True
        busy = False
        if self.exchange is not None:
            await asyncio.wait([self.exchange], timeout=CANCEL_TIMEOUT_S)
            busy = not self.exchange.done()
        # At debug level: the cancellation follows from the error, which is told anyway.
        await cancel_tasks(set(self.call.pendings), f"rollout {self.rollout_id} failed", level=logging.DEBUG)
        failed = [task for task in self.origins if task.done() and not task.cancelled()]
        others = [task for task in failed if task.exception() is not None and task.exception() is not error]
        if others:
            # One line for all: what ends a step, say a dead service, often ends many of its groups.
            first = others[0]
            logger.error(
                "%d other groups failed as well, %s first: %s", len(others), first.get_name(), first.exception()
            )
        if busy:
            logger.error("the prompts of rollout %d are lost: %s did not return", self.rollout_id, self.busy_with)
            return
        try:
            await self._return_to_source({task: as_prompts(origin) for task, origin in self.origins.items()})
        except Exception:
            # The caller raises the error that ended the step, not this one.
            logger.exception("the prompts of rollout %d could not be given back to the data source", self.rollout_id)

    async def _output(self) -> RolloutFnTrainOutput:
        self.kept.sort(key=first_index)
        self.ledger.failures.stop_when_most_failed()
        await self._process_all_samples()
        reported = ("started", "finished", "dropped", "surplus_groups", "aborted_samples")
        counts = ", ".join(f"{name} {self.counts[name]}" for name in reported)
        # Only at debug level: metrics tell the counts that matter.
        logger.debug("rollout %d, groups: %s", self.rollout_id, counts)
        metrics = {
            **self.ledger.drops.collect(),
            "rollout/surplus_groups": self.counts["surplus_groups"],
            "rollout/aborted_samples": self.counts["aborted_samples"],
            "rollout/failed_samples": len(failed_samples(self.kept)),
        }
        if self.args.max_weight_staleness is not None:
            metrics["rollout/stale_groups"] = self.counts["stale_groups"]
        return RolloutFnTrainOutput(samples=self.kept, metrics=metrics)

    async def _process_all_samples(self) -> None:
        path = self.args.rollout_all_samples_process_path
        if self.all_finished is None:
            return
        self.all_finished.sort(key=first_index)
        called = ALL_SAMPLES_FLAG, path, f"rollout {self.rollout_id}"
        process = load_function(path, flag=ALL_SAMPLES_FLAG)
        given = self.args, self.all_finished, self.data_source
        with self._busy(f"{ALL_SAMPLES_FLAG} {path}"):
            returned = await call_within_request_time(self.args, *called, process, *given)
        if returned is not None and returned is not self.all_finished:
            raise wrong_result_error(*called, returned, "None: what it returns would be used nowhere")
