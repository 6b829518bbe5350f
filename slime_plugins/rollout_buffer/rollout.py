"""The run's side: `--rollout-function-path slime_plugins.rollout_buffer.rollout.generate_rollout`.

The first rollout has the service start the generator of `--rollout-task-type`. Each rollout takes whole groups from the
service, oldest first, and makes samples of them. The prompts that were trained on are remembered with the data source, rollout
by rollout. So a run that resumes leaves out just the prompts that its checkpoint was trained on, and gets trajectories of the
weights that it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter
from typing import Any

import numpy as np

from slime.rollout.base_types import RolloutFnTrainOutput, leaves
from slime.rollout.draws import source_turn
from slime.rollout.failures import FailureTally, failed_samples
from slime.rollout.filter_hub.base_types import (
    FILTER_FLAG,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.generate_state import GenerateState, rollout_sampling_params
from slime.rollout.generation_call import current_call
from slime.rollout.user_functions import call_within_request_time
from slime.utils import env
from slime.utils.async_utils import run
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import HttpError, generation_concurrency, post_control
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.ports import host_for_url
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.samples import Group, samples_of

logger = logging.getLogger(__name__)

_URL_FLAG = "--rollout-buffer-url"
# For so many seconds the service itself waits for groups before it answers that there are too few.
_POLL_S = 5.0
# The most groups in one answer. It is a single text in the memory of both sides, and while it is made the service answers
# nobody else.
_MOST_GROUPS = 16
# How often, in seconds, a waiting run says what it waits for.
_TELL_S = 30.0
# The key under which the data source keeps what was trained on, among its user's values.
METADATA_KEY = "rollout_buffer"
# Statuses with which the service refuses the request itself.
_REFUSED = (400, 401, 409, 413, 422)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """`rollout_batch_size` whole groups from the service at `--rollout-buffer-url`.

    The metrics are `buffer/waiting_groups` and `buffer/dropped_groups` of the service, `buffer/{name}` for each number that the
    generator gives about the groups, and those of the dynamic filter.

    Raises:
        UserError: the call is for an evaluation; the service refuses; or the generator failed, or ended too early.
        RunError: the service does not answer, or there were too few groups after `--fetch-trajectory-retry-times` polls; or of
            as many trajectories as a rollout has, most failed.
    """
    if evaluation:
        raise UserError(
            "slime_plugins.rollout_buffer does not evaluate; give a function that does, such as --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout"
        )
    return run(BufferClient(args, data_source).rollout(rollout_id))


class BufferClient(metaclass=SingletonMeta):
    """The requests of this run to the service. One per process, on the event loop of `async_utils`."""

    def __init__(self, args: Any, data_source: Any) -> None:
        if args.rollout_buffer_url is None:
            raise UserError(
                f"{_URL_FLAG} is missing: start `python -m slime_plugins.rollout_buffer` and give {_URL_FLAG} "
                "http://127.0.0.1:8889"
            )
        self.args, self.data_source = args, data_source
        self.run_id = uuid.uuid4().hex
        self.url = args.rollout_buffer_url.rstrip("/")
        key = env.buffer_service_key()
        self._headers = None if key is None else {"Authorization": f"Bearer {key}"}
        self._starting = asyncio.Lock()
        self._started = False
        self._received: list[str] = []
        self._under_way: set[int] = set()
        self._is_last_taken = False
        # How many groups the service had dropped when it was asked last.
        self._dropped = 0
        # How many trajectories had come to the service, and failed, when it handed out groups last.
        self._trajectories = Counter[str]()
        path = args.dynamic_sampling_filter_path
        self._filter = load_function(path, flag=FILTER_FLAG) if path else None
        if args.offload_rollout:
            logger.warning(
                "%s: generators ask the engines while the trainer works, and with --offload-rollout (--colocate) those sleep "
                "then; give engines GPUs of their own, or generators that ask others",
                _URL_FLAG,
            )

    async def rollout(self, rollout_id: int) -> RolloutFnTrainOutput:
        """The groups of a rollout. Several rollouts may be under way at a time."""
        args = self.args
        self._under_way.add(rollout_id)
        try:
            async with self._starting:
                if not self._started:
                    self._forget_from(min(self._under_way))
                    await self._start()
                    self._started = True
            kept, gatherer, metrics = await self._collect(rollout_id)
        finally:
            self._under_way.discard(rollout_id)
        groups = [group.samples for group in kept]
        number = args.rollout_batch_size
        for position, group in enumerate(groups):
            for place, sample in enumerate(group):
                sample.group_index = rollout_id * number + position
                sample.index = sample.group_index * args.n_samples_per_prompt + place
        tally = FailureTally(f"rollout {rollout_id}")
        for group in groups:
            tally.add(group)
        tally.stop_when_most_failed()
        self._is_last_taken |= rollout_id + 1 == args.num_rollout
        if self._is_last_taken and not self._under_way:
            await self._stop()
        return RolloutFnTrainOutput(
            groups, {**gatherer.collect(), **metrics, "failed_samples": len(failed_samples(groups))}
        )

    async def _collect(self, rollout_id: int) -> tuple[list[Group], MetricGatherer, dict[str, float]]:
        """(as many whole groups as a rollout has, all kept by the dynamic filter; the filter's metrics; other metrics)."""
        target, size = self.args.rollout_batch_size, self.args.n_samples_per_prompt
        kept: list[Group] = []
        gatherer, told, counts = MetricGatherer(), _Means(), Counter[str]()
        tally = FailureTally(f"rollout {rollout_id}")
        with current_call().progress.start(f"rollout {rollout_id}", target * size) as progress:
            part = 0
            while len(kept) < target:
                number = min(target - len(kept), _MOST_GROUPS)
                answer = await self._fetch(f"{rollout_id}.{part}", number, len(kept))
                part += 1
                groups = await asyncio.to_thread(samples_of, self.args, answer["groups"], counts)
                for group in groups:
                    tally.add(group.samples)
                    if self._filter is not None and await self._filter_drops(group.samples, target, gatherer):
                        continue
                    kept.append(group)
                    progress.advance(size)
                # Remembered at once, for a service that is started again without its groups: it must not make these again.
                self._remember(rollout_id, [group.instance_id for group in groups])
                told.add(answer["meta_info"], len(groups))
                # A filter drops what failed, and further groups would be asked for without end.
                if len(kept) < target:
                    tally.stop_if_a_service_seems_dead(target * size)
        groups_of_service = answer["status"]["groups"]
        total = groups_of_service["dropped"]
        # A service that was started again without its groups counts from zero.
        before = self._dropped if total >= self._dropped else 0
        self._dropped = total
        metrics = {
            **told.means(),
            **counts,
            "buffer/waiting_groups": groups_of_service["waiting"],
            "buffer/dropped_groups": total - before,
        }
        return kept, gatherer, metrics

    async def _filter_drops(self, samples: list[Sample], target: int, gatherer: MetricGatherer) -> bool:
        # The samples have no index yet, by which `verdict_on_group` would name them.
        called = self.args.dynamic_sampling_filter_path, f"the group of sample {samples[0].metadata['instance_id']}"
        verdict = await call_within_request_time(
            self.args, FILTER_FLAG, *called, call_dynamic_filter, self._filter, self.args, leaves(samples)
        )
        # As if more were always needed than there are: further groups can always be had, so the filter may drop any.
        drop = should_drop_dynamic_filter_output(verdict, remaining_batch_size=target + 1, target_data_size=target)
        if drop:
            gatherer.on_dynamic_filter_drop(verdict.reason)
        return drop

    async def _fetch(self, request_id: str, number: int, kept: int) -> dict[str, Any]:
        """The answer with `number` groups, for a rollout that has `kept`."""
        limit, polls = self.args.fetch_trajectory_retry_times, 0
        tell_at = time.monotonic() + _TELL_S
        body = {"run_id": self.run_id, "request_id": request_id, "num_groups": number, "wait_s": _POLL_S}
        while True:
            told = list(self._received)
            answer = await self._post("/get_rollout_data", {**body, "received": told})
            self._received = [name for name in self._received if name not in told]
            status = answer["status"]
            if answer["groups"]:
                self._received.append(request_id)
                self._trajectories = Counter(status["trajectories"])
                return answer
            rollout, groups = request_id.partition(".")[0], status["groups"]
            needed = self.args.rollout_batch_size
            there = f"{kept + groups['waiting']} of {needed} groups that rollout {rollout} needs are there"
            if status["refused"] is not None:
                there = f"{there} ({status['refused']})"
            generator = f"the generator of --rollout-task-type {self.args.rollout_task_type}"
            if status["failure"] is not None:
                raise UserError(f"{generator} failed: {status['failure']}")
            if status["generator"] == "ended":
                raise UserError(
                    f"{generator} has ended, and {there} "
                    f"({groups['open']} are not full, {groups['dropped']} were dropped); give it more "
                    "prompts or epochs, or the run fewer rollouts"
                )
            self._stop_when_most_failed(Counter(status["trajectories"]), f"{generator} failed, and {there}")
            if status["generator"] in ("lost", "none"):
                logger.warning("%s %s: the service was started again; so is its generator", _URL_FLAG, self.url)
                async with self._starting:
                    await self._start()
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + _TELL_S
                logger.warning(
                    "%s %s: %s (%d are not full, %d were dropped); %s is waited for",
                    _URL_FLAG, self.url, there, groups["open"], groups["dropped"], generator,
                )  # fmt: skip
            polls += 1
            if 0 <= limit <= polls:
                raise RunError(
                    f"{_URL_FLAG} {self.url}: {there} after {polls} polls of {_POLL_S:g} s "
                    "(--fetch-trajectory-retry-times; -1: no limit)"
                )

    def _stop_when_most_failed(self, trajectories: Counter[str], told: str) -> None:
        """Raise RunError if most trajectories failed since groups were handed out last, of as many as a rollout has, or more.

        The service drops their groups, so a run whose reward service is dead would wait for ever.
        """
        if trajectories["sent"] < self._trajectories["sent"]:
            # The generator was started again.
            self._trajectories = Counter()
        sent, failed = (trajectories[name] - self._trajectories[name] for name in ("sent", "failed"))
        if sent >= self.args.rollout_batch_size * self.args.n_samples_per_prompt and 2 * failed > sent:
            raise RunError(
                f"{_URL_FLAG} {self.url}: {failed} of the last {sent} trajectories of {told}; start again what they ask for "
                "and does not answer, a service of rewards or tools say, and then the run"
            )

    async def _start(self) -> None:
        """Have the generator started, unless it works already."""
        await self._post("/start_rollout", start_request(self.args, self.run_id, self._trained_on()))

    async def _stop(self) -> None:
        """Have the generator ended. The last rollout is there, whatever becomes of the service."""
        try:
            await self._post("/stop_rollout", {"run_id": self.run_id})
        except (RunError, UserError) as error:
            logger.warning(
                "the generator of --rollout-task-type %s was not ended: %s", self.args.rollout_task_type, error
            )

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await post_control(self.url + path, body, headers=self._headers)
        except HttpError as error:
            if error.status in _REFUSED:
                raise UserError(f"{_URL_FLAG} {self.url}: {_reason(error)}") from error
            raise RunError(f"{_URL_FLAG} {self.url}: {error}; is the service running?") from error
        if not isinstance(answer, dict) or "status" not in answer:
            raise UserError(f"{_URL_FLAG} {self.url}: {path} answered {answer!r:.200}; is that a rollout buffer?")
        return answer

    # -- what was trained on ------------------------------------------------------------------------------------------

    def _trained_on(self) -> list[str]:
        return [instance for instances in self._metadata().values() for instance in instances]

    def _metadata(self) -> dict[str, list[str]]:
        """Rollout → instances; empty where the source keeps no values of its user."""
        if not hasattr(self.data_source, "get_metadata"):
            return {}
        return self.data_source.get_metadata().get(METADATA_KEY, {})

    def _remember(self, rollout_id: int, instances: list[str]) -> None:
        before = self._metadata()
        self._store({**before, str(rollout_id): [*before.get(str(rollout_id), []), *instances]})

    def _forget_from(self, rollout_id: int) -> None:
        """Forget the prompts of rollouts from `rollout_id` on, which may be in a state that was taken after they were over."""
        self._store({name: instances for name, instances in self._metadata().items() if int(name) < rollout_id})

    def _store(self, metadata: dict[str, list[str]]) -> None:
        if not hasattr(self.data_source, "update_metadata"):
            return
        # Locked, because states are taken in other threads.
        with source_turn:
            self.data_source.update_metadata({METADATA_KEY: metadata})


def start_request(args: Any, run_id: str, skip_instance_ids: list[str]) -> dict[str, Any]:
    """The argument of a generator's `run_rollout(data)`.

    `remote_engine_url` is the router's; None in a run without engines.
    """
    address = args.sglang_router_ip
    prompts = [args.prompt_data] if isinstance(args.prompt_data, str) else list(args.prompt_data or [])
    return {
        "run_id": run_id,
        "task_type": args.rollout_task_type,
        "num_repeat_per_sample": args.n_samples_per_prompt,
        "num_epoch": args.num_epoch,
        "num_process": min(generation_concurrency(args), args.rollout_batch_size * args.n_samples_per_prompt),
        "max_waiting_groups": 2 * args.rollout_batch_size,
        "remote_engine_url": f"http://{host_for_url(address)}:{args.sglang_router_port}" if address else None,
        "remote_engine_api_key": args.router_api_key,
        "remote_buffer_url": args.rollout_buffer_url.rstrip("/"),
        "input_file": prompts[0] if prompts else None,
        "input_files": prompts,
        "input_key": args.input_key,
        "label_key": args.label_key,
        "allow_bad_rows": bool(args.allow_bad_rows),
        "shuffle": bool(args.rollout_shuffle),
        "seed": args.rollout_seed,
        "tokenizer_path": args.hf_checkpoint,
        "trust_remote_code": bool(args.trust_remote_code),
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "max_tokens": args.rollout_max_response_len,
        "context_length": GenerateState(args).context_length(args),
        # Without fault tolerance dead engines do not come back.
        "engine_wait_s": args.http_request_timeout if args.use_fault_tolerance else 0.0,
        "sampling_params": rollout_sampling_params(args),
        "skip_instance_ids": skip_instance_ids,
    }


class _Means:
    """The means, over all groups of a rollout, of the numbers that the generator gives for each answer."""

    def __init__(self) -> None:
        self._sums: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()

    def add(self, meta_info: dict[str, Any], groups: int) -> None:
        """Add the numbers of an answer with so many groups."""
        for name, value in meta_info.items():
            if isinstance(value, int | float | np.number) and not isinstance(value, bool):
                self._sums[f"buffer/{name}"] += float(value) * groups
                self._groups[f"buffer/{name}"] += groups

    def means(self) -> dict[str, float]:
        """The means, by their names in the metrics."""
        return {name: total / self._groups[name] for name, total in self._sums.items()}


def _reason(error: HttpError) -> str:
    try:
        return str(json.loads(error.body)["error"])
    except (ValueError, KeyError, TypeError):
        return str(error)
