"""The rollout manager: one Ray actor that turns prompts into train batches.

It owns the data source and calls the rollout function; serving (router, engines) is `slime.serving`'s. Methods are
asynchronous and run in concurrency groups, so saving and progress are served while generation runs; what blocks runs in
threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from slime.arguments.paths import MANAGER_PLUG_INS, load_plug_ins
from slime.observability.console import evaluation_name, progress_snapshot
from slime.observability.logging_utils import LoggedMetrics, configure_logger, drain_outbox, log
from slime.ray.driver import saves
from slime.scheduling.dp_schedule import DPSchedule
from slime.training.schedule import schedule_from_args, train_parallel_config
from slime.utils.errors import RunError
from slime.utils.misc import Box
from slime.utils.plugin_loader import calling_user_code
from slime.utils.ports import host_for_url

logger = logging.getLogger(__name__)

_ROUTER_FAREWELL_SECONDS = 10.0


@dataclass(frozen=True)
class ServingInfo:
    """What the driver needs to know after the start: engine actors, their GPUs, and the length of an epoch."""

    engines: list[Any]
    gpu_counts: list[int]
    gpu_offsets: list[int]
    rollouts_per_epoch: int | None


@dataclass(frozen=True)
class RolloutResult:
    """A generated rollout: one boxed shard per data-parallel rank (empty without a trainer), and what was logged.

    `critic_shards`: the same samples as a critic's ranks take them; empty without a critic.
    """

    shards: list[Box]
    logged: list[LoggedMetrics]
    critic_shards: list[Box] = field(default_factory=list)


class RolloutManager:
    """Prompts in, train batches out."""

    def __init__(self, args: argparse.Namespace) -> None:
        configure_logger(args.log_level)
        self.args = args
        self.data_source: Any = None
        self._states: Any = None
        self._router: Any = None
        self._engine_group: Any = None

    def __repr__(self) -> str:
        return "manager"

    @ray.method(concurrency_group="control")
    async def start(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> ServingInfo:
        """Start router and engines, and load the data meanwhile."""
        return await asyncio.to_thread(self._start, group, places)

    @ray.method(concurrency_group="control")
    async def load(self, rollout_id: int) -> None:
        """Restore the data state saved after rollout `rollout_id`; nothing for −1."""
        if self._states is not None:
            await asyncio.to_thread(self._states.load, rollout_id)

    @ray.method(concurrency_group="control")
    async def save(self, rollout_id: int) -> None:
        """Write the data state as it was after rollout `rollout_id` had drawn its prompts."""
        if self._states is not None:
            await asyncio.to_thread(self._states.save, rollout_id)

    @ray.method(concurrency_group="control")
    async def progress(self) -> tuple[str, int, int] | None:
        """(description, done, total) of what is being generated."""
        return progress_snapshot()

    @ray.method(concurrency_group="generate")
    async def generate(self, rollout_id: int) -> RolloutResult:
        """Run the rollout function for one step and build the shards of its train batch."""
        return await asyncio.to_thread(self._generate, rollout_id)

    @ray.method(concurrency_group="generate")
    async def evaluate(self, rollout_id: int, *, before: bool = False) -> list[LoggedMetrics]:
        """Evaluate all data sets, `before` training on `rollout_id` or after it, and return what was logged."""
        return await asyncio.to_thread(self._evaluate, rollout_id, before=before)

    @ray.method(concurrency_group="control")
    async def shutdown(self) -> None:
        """Stop the engines and the router that this run started."""
        await asyncio.to_thread(self._shutdown, silent=True)

    # What follows runs in threads and may block.

    def _start(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> ServingInfo:
        args = self.args
        try:
            if args.has_engines:
                self._start_serving(group, places)
            load_plug_ins(args, MANAGER_PLUG_INS)
            if args.load_debug_rollout_data is None:
                self._load_data_source()
            if args.has_engines:
                self._wait_for_serving()
        except BaseException:
            self._shutdown()
            raise
        engines = self._engine_group
        args.rollouts_per_epoch = self._rollouts_per_epoch()
        if args.num_rollout is None and args.rollouts_per_epoch is not None:
            args.num_rollout = args.num_epoch * args.rollouts_per_epoch
        return ServingInfo(
            engines=engines.engines if engines else [],
            gpu_counts=engines.gpu_counts if engines else [],
            gpu_offsets=engines.gpu_offsets if engines else [],
            rollouts_per_epoch=args.rollouts_per_epoch,
        )

    def _start_serving(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> None:
        from slime.serving.engine_group import EngineGroup
        from slime.serving.router import start_router

        # One key per run keeps other users of the machine out. A router that runs already is tried with the key that was
        # given for it, if any: one that has a key refuses others, one without ignores ours.
        key = self.args.router_api_key or secrets.token_urlsafe(32)
        if self.args.sglang_router_ip is None:
            self.args.router_api_key = key
        self._router = start_router(self.args, self.args.log_dir)
        self.args.router_api_key = key
        self.args.sglang_router_ip, self.args.sglang_router_port = host_for_url(self._router.ip), self._router.port
        self._engine_group = EngineGroup(self.args, group, places, self.args.log_dir)
        self._engine_group.start()

    def _wait_for_serving(self) -> None:
        if self._router.process is not None:
            self._router.wait_ready()
        self._engine_group.wait_ready()
        self._engine_group.register(self._router)
        logger.info("%d engines are ready behind the router %s", len(self._engine_group.urls), self._router.url)

    def _load_data_source(self) -> None:
        from slime.rollout.data_source import DataSourceSnapshots, create_data_source

        self.data_source = create_data_source(self.args)
        self._states = DataSourceSnapshots(self.args, self.data_source)

    def _rollouts_per_epoch(self) -> int | None:
        from slime.rollout.data_source_files import prompts_per_epoch

        if self.data_source is None or not self.args.rollout_global_dataset:
            return None
        prompts = prompts_per_epoch(self.args, self.data_source)
        return None if prompts is None else max(1, prompts // self.args.rollout_batch_size)

    def _generate(self, rollout_id: int) -> RolloutResult:
        from slime.observability.rollout_metrics import (
            compute_rollout_metrics,
            compute_rollout_perf_metrics,
            merge_extra_metrics,
        )

        started = time.perf_counter()
        samples, extra_metrics = self._samples_of(rollout_id)
        seconds = time.perf_counter() - started
        self._remember_state(rollout_id)
        if self.args.save_debug_rollout_data is not None:
            from slime.rollout.rollout_dump import save_rollout

            save_rollout(self.args.save_debug_rollout_data, rollout_id, samples)
        shards, critic_shards, dropped = self._build_shards(samples) if self.args.has_trainer else ([], [], 0)
        metrics = merge_extra_metrics({"rollout/dropped_rollouts": dropped}, extra_metrics, "rollout/")
        if not self._logged_by_user(rollout_id, samples, metrics, seconds):
            metrics.update(compute_rollout_metrics(self.args, samples))
            if not self.args.has_trainer:
                metrics["rollout/raw_reward"] = _mean_reward(self.args, samples)
            metrics.update(compute_rollout_perf_metrics(self.args, samples, seconds))
            log(self.args, {**metrics, "rollout/step": rollout_id}, "rollout/step")
        return RolloutResult(shards, drain_outbox(), critic_shards)

    def _remember_state(self, rollout_id: int) -> None:
        """Keep the data state for the checkpoint of `rollout_id`, if one will be written."""
        args = self.args
        if self._states is not None and args.save is not None and args.has_trainer and saves(args, rollout_id):
            self._states.remember(rollout_id)

    def _samples_of(self, rollout_id: int) -> tuple[list[Any], dict[str, Any] | None]:
        """The step's samples, flat, from the rollout function or from a dump."""
        from slime.ray.rollout_validation import flatten_rollout_output
        from slime.rollout.base_types import call_rollout_fn
        from slime.utils.plugin_loader import load_function

        args = self.args
        if args.load_debug_rollout_data is not None:
            from slime.rollout.rollout_dump import load_rollout

            fraction = args.load_debug_rollout_data_subsample
            return load_rollout(args.load_debug_rollout_data, rollout_id, fraction), None
        flag, path = "--rollout-function-path", args.rollout_function_path
        function = load_function(path, flag=flag)
        with _calling(flag, path, f"rollout {rollout_id}"):
            output = call_rollout_fn(function, args, rollout_id, self.data_source, evaluation=False)
        if args.rollout_sample_filter_path is not None:
            flag, path = "--rollout-sample-filter-path", args.rollout_sample_filter_path
            sample_filter = load_function(path, flag=flag)
            with _calling(flag, path, f"rollout {rollout_id}"):
                sample_filter(args, output.samples)
        return flatten_rollout_output(output.samples), output.metrics

    def _build_shards(self, samples: list[Any]) -> tuple[list[Box], list[Box], int]:
        """One boxed object per data-parallel rank of the actor and of the critic, if there is one, and the number of
        rollouts that fit no whole step."""
        from slime.arguments.critic_arguments import critic_args
        from slime.rollout.train_data import convert_samples_to_train_batch
        from slime.training.rollout_batch import split_for_data_parallel

        batch = convert_samples_to_train_batch(self.args, samples)
        schedule = _schedule(self.args, batch)
        shards = [Box(ray.put(shard)) for shard in split_for_data_parallel(batch, schedule)]
        if not self.args.use_critic:
            return shards, [], schedule.dropped
        # A layout or a token budget of its own; else the ranks of both models take the same objects.
        of_critic = _schedule(critic_args(self.args), batch)
        if of_critic == schedule:
            return shards, shards, schedule.dropped
        return shards, [Box(ray.put(shard)) for shard in split_for_data_parallel(batch, of_critic)], schedule.dropped

    def _logged_by_user(self, rollout_id: int, samples: list[Any], metrics: dict[str, Any], seconds: float) -> bool:
        path = self.args.custom_rollout_log_function_path
        if path is None:
            return False
        flag = "--custom-rollout-log-function-path"
        return _call_log_function(flag, path, rollout_id, self.args, samples, metrics, seconds)

    def _evaluate(self, rollout_id: int, *, before: bool) -> list[LoggedMetrics]:
        from slime.observability.rollout_metrics import compute_eval_metrics, merge_extra_metrics
        from slime.rollout.base_types import call_rollout_fn
        from slime.utils.plugin_loader import load_function

        args = self.args
        flag, path = "--eval-function-path", args.eval_function_path
        function = load_function(path, flag=flag)
        with _calling(flag, path, evaluation_name(rollout_id, before=before)):
            output = call_rollout_fn(function, args, rollout_id, self.data_source, evaluation=True)
        if args.save_debug_rollout_data is not None:
            from slime.rollout.rollout_dump import save_rollout

            samples = [
                s for result in output.data.values() for s in [*result["samples"], *(result.get("failed") or [])]
            ]
            name = f"eval_before_{rollout_id}" if before else f"eval_{rollout_id}"
            save_rollout(args.save_debug_rollout_data, name, samples)
        flag, path = "--custom-eval-rollout-log-function-path", args.custom_eval_rollout_log_function_path
        if path is None or not _call_log_function(flag, path, rollout_id, args, output.data, output.metrics):
            metrics = merge_extra_metrics(compute_eval_metrics(args, output.data), output.metrics, "eval/")
            # An evaluation stands at the number of rollouts that its weights were trained on: at the step of the rollout that
            # is generated with the same weights.
            log(args, {**metrics, "eval/step": rollout_id + (not before)}, "eval/step")
        return drain_outbox()

    def _shutdown(self, *, silent: bool = False) -> None:
        if self._router is not None and self._router.process is None:
            self._leave_given_router()
        if silent:
            # What this process would still tell is the end itself: requests lose their engines, groups are given up.
            logging.disable(logging.CRITICAL)
        if self._engine_group is not None:
            self._engine_group.shutdown()
        if self._router is not None:
            self._router.shutdown()

    def _leave_given_router(self) -> None:
        """Take our engines out of a router that goes on without us; before they end, or it would send them requests."""
        if self._engine_group is None or not self._engine_group.urls:
            return
        try:
            self._router.remove_workers(self._engine_group.urls, _ROUTER_FAREWELL_SECONDS)
        except RunError as error:
            logger.warning("our engines may still be registered: %s", error)


def _schedule(args: argparse.Namespace, batch: dict[str, Any]) -> DPSchedule:
    return schedule_from_args(
        args,
        train_parallel_config(args),
        batch["total_lengths"].tolist(),
        global_batch_size=args.global_batch_size,
        rollout_indices=batch["rollout_ids"].tolist(),
    )


def _calling(flag: str, path: str, subject: str) -> contextlib.AbstractContextManager[None]:
    """`calling_user_code` for a plug-in; nothing for our own functions, whose errors speak for themselves."""
    if path.startswith("slime."):
        return contextlib.nullcontext()
    return calling_user_code(flag, path, subject)


def _call_log_function(flag: str, path: str, *arguments: Any) -> bool:
    """Call a user's log function; its failure is reported and never ends the run."""
    from slime.utils.plugin_loader import load_function

    try:
        return bool(load_function(path, flag=flag)(*arguments))
    except Exception:
        logger.exception("%s %s failed; default logging is used", flag, path)
        return False


def _mean_reward(args: argparse.Namespace, samples: Sequence[Any]) -> float:
    from slime.utils.finite_number import finite_number

    values = [finite_number(sample.get_reward_value(args)) for sample in samples]
    rewards = [value for value in values if value is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0
