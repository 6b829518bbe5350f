"""The rollout manager: one Ray actor that turns prompts into train batches.

What it does is done by two: `RolloutPipeline`, for data, and `ServingOwner`, for router and engines. Methods are asynchronous
and run in concurrency groups, so saving and progress are served while generation runs; what blocks runs in threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from slime.arguments.paths import MANAGER_PLUG_INS, load_plug_ins
from slime.observability.logging_utils import LoggedMetrics, configure_logger
from slime.ray.driver import RolloutResult, RunLength
from slime.serving.fleet import EngineName, FleetSnapshot
from slime.serving.owner import ServingOwner
from slime.utils.http_utils import set_engine_supply
from slime.utils.ports import host_for_url
from slime.utils.run_values import with_run_values


class RolloutManager:
    """Prompts in, train batches out."""

    def __init__(self, args: argparse.Namespace) -> None:
        configure_logger(args.log_level)
        self.args = args
        self._pipeline: Any = None
        self._serving: ServingOwner | None = None

    def __repr__(self) -> str:
        return "manager"

    @ray.method(concurrency_group="control")
    async def start(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> RunLength:
        """Start router and engines, and load the data meanwhile, which say how long the run is."""
        return await asyncio.to_thread(self._start, group, places)

    @ray.method(concurrency_group="control")
    async def load(self, rollout_id: int) -> None:
        """Restore the data state saved after rollout `rollout_id`; nothing for −1."""
        if self._pipeline.states is not None:
            await asyncio.to_thread(self._pipeline.states.load, rollout_id)

    @ray.method(concurrency_group="control")
    async def save(self, rollout_id: int) -> None:
        """Write the data state as it was after rollout `rollout_id` had drawn its prompts."""
        if self._pipeline.states is not None:
            await asyncio.to_thread(self._pipeline.states.save, rollout_id)

    @ray.method(concurrency_group="control")
    async def progress(self, name: str) -> tuple[str, int, int] | None:
        """(description, done, total) of what the call with this name generates (`generation_name`, `evaluation_name`)."""
        return self._pipeline.progress(name)

    @ray.method(concurrency_group="generate")
    async def generate(self, rollout_id: int) -> RolloutResult:
        """Run the rollout function for one step and build the shards of its train batch."""
        with self._checked_engines():
            return await asyncio.to_thread(self._pipeline.generate, rollout_id)

    @ray.method(concurrency_group="generate")
    async def evaluate(self, rollout_id: int, *, before: bool = False) -> list[LoggedMetrics]:
        """Evaluate all data sets, `before` training on `rollout_id` or after it, and return what was logged."""
        with self._checked_engines():
            return await asyncio.to_thread(self._pipeline.evaluate, rollout_id, before=before)

    @ray.method(concurrency_group="control")
    async def wait_for_death(self) -> None:
        """Return when `shutdown` is called. Raises RunError when an engine or the router has died that nobody replaces."""
        if self._serving is not None:
            await asyncio.wrap_future(self._serving.ended)

    @ray.method(concurrency_group="control")
    async def begin_push(self) -> FleetSnapshot:
        """The engines that a push goes to; see `ServingOwner`."""
        return await asyncio.to_thread(self._serving.begin_push)

    @ray.method(concurrency_group="control")
    async def begin_push_to_stale(self) -> FleetSnapshot:
        """The engines that lack the weights of the last push; see `ServingOwner`."""
        return self._serving.begin_push_to_stale()

    @ray.method(concurrency_group="control")
    async def lacks_weights(self) -> bool:
        """Whether an engine waits for the weights of a push that it has missed."""
        return self._serving is not None and self._serving.lacks_weights()

    @ray.method(concurrency_group="control")
    async def end_push(self, names: Sequence[EngineName], version: int, failed: Mapping[int, str]) -> None:
        """The push to `names` is over; see `ServingOwner`."""
        await asyncio.to_thread(self._serving.end_push, names, version, failed)

    @ray.method(concurrency_group="control")
    async def shutdown(self) -> None:
        """Stop the engines and the router that this run started."""
        await asyncio.to_thread(self._shutdown, silent=True)

    def _checked_engines(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._serving is None else self._serving.generating()

    # What follows runs in threads and may block.

    def _start(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> RunLength:
        try:
            if self.args.has_engines:
                self._start_serving(group, places)
            load_plug_ins(self.args, MANAGER_PLUG_INS)
            # It needs torch, for which the driver, which knows this class, has no use.
            from slime.ray.rollout_pipeline import RolloutPipeline

            self._pipeline = RolloutPipeline(self.args)
            if self._serving is not None:
                self._serving.wait_ready()
        except BaseException:
            self._shutdown()
            raise
        return self._pipeline.length

    def _start_serving(self, group: PlacementGroup | None, places: Sequence[tuple[int, int]]) -> None:
        self._serving = ServingOwner(self.args, group, places, self.args.log_dir)
        router = self._serving.start()
        host = host_for_url(router.ip)
        self.args = with_run_values(
            self.args,
            router_api_key=self._serving.api_key,
            sglang_router_ip=host,
            sglang_router_port=router.port,
            sglang_model_routers={"default": (host, router.port)},
        )
        if self.args.use_fault_tolerance:
            set_engine_supply(router.url, self._serving)

    def _shutdown(self, *, silent: bool = False) -> None:
        if self._serving is not None:
            self._serving.leave_given_router()
        if silent:
            # What this process would still tell is the end itself: requests lose their engines, groups are given up.
            logging.disable(logging.CRITICAL)
        if self._serving is not None:
            set_engine_supply(f"http://{self.args.sglang_router_ip}:{self.args.sglang_router_port}", None)
            self._serving.shutdown()
