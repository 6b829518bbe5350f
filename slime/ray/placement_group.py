"""Where the parts of a run go, and their start: one Ray placement group for all devices, with a training and an engine part.

Each bundle is one device. Bundles are ordered by node address and then by device id, both as numbers, so that neighbouring
ranks share a node, and device 10 comes after device 2. What has to lie on one node does: a tensor-parallel group, an engine,
or the part of an engine that one node is to have.

`create_rollout_manager` and `create_training_models` start what is placed. A run with a critic trains by `ActorCritic`: two
models, each a `TrainGroup`, take turns on the same devices.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import ipaddress
import math
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group

from slime.arguments.config_files.role_config import critic_args
from slime.arguments.config_files.serving_config import served_groups
from slime.arguments.sizes import GpuRanges
from slime.observability.console import StartupClock
from slime.observability.waiting import wait_for, wait_for_all
from slime.plan.placement import has_critic, sleeping_sides
from slime.ray.cluster import plan_cluster
from slime.ray.driver import RolloutResult, StartedRun
from slime.ray.rollout_manager import RolloutClient
from slime.ray.train_group import EndingTrainGroup, Report, TrainGroup
from slime.scheduling.device_turns import Holds
from slime.scheduling.served_models import node_parts
from slime.utils import env
from slime.utils.bundles import are_consecutive, locate_bundles
from slime.utils.errors import RunError, UserError
from slime.utils.run_values import with_run_values

_CRITIC_RANK = "slime.training.train_rank.CriticRank"
_PLACEMENT_DEADLINE_SECONDS = 1800.0
_PLACEMENT_REPORT_SECONDS = 30.0


@dataclass(frozen=True)
class Bundles:
    """A run of devices: the placement group, and (bundle index, device id) of each in order."""

    group: PlacementGroup | None
    places: tuple[tuple[int, int], ...]


def create_placement_groups(args: argparse.Namespace) -> dict[str, Bundles]:
    """Reserve the run's devices. Returns the parts `actor` and `rollout`; a part without devices has no group."""
    plan = plan_cluster(args)
    if plan.gpus == 0:
        return {"actor": Bundles(None, ()), "rollout": Bundles(None, ())}

    def missing(_: list[int]) -> str:
        registered, free = (known.get("GPU", 0) for known in (ray.cluster_resources(), ray.available_resources()))
        return f"{plan.gpus} GPUs; the cluster has {registered:g}, of which {free:g} are free"

    group = placement_group([{"GPU": 1, "CPU": 1}] * plan.gpus, strategy="PACK")
    wait_for(
        group.ready(),
        "placement of the run's devices",
        _PLACEMENT_DEADLINE_SECONDS,
        pending=missing,
        report_s=_PLACEMENT_REPORT_SECONDS,
    )
    if env.ray_address() is None:
        # Ray was started for this run, with its devices and no others. Any numbering of the bundles is right then, as long as
        # no device is used twice, and asking each bundle would cost a process that the engines wait for.
        devices = [(ray.util.get_node_ip_address(), device) for device in range(plan.gpus)]
    else:
        devices = locate_bundles(group)
    StartupClock().mark("placement")
    layout = plan.layout
    order = arrange_bundles(devices, group_sizes(args, layout))
    engines = slice(layout.first_rollout_gpu, layout.first_rollout_gpu + layout.rollout_gpus)
    check_engines_fit([devices[index] for index in order[engines]], engine_sizes(args, layout))
    places = tuple((index, devices[index][1]) for index in order)
    actor, rollout = places[: layout.actor_gpus], places[engines]
    return {
        "actor": Bundles(group if actor else None, actor),
        "rollout": Bundles(group if rollout else None, rollout),
    }


def create_rollout_manager(args: argparse.Namespace, pg: Bundles) -> RolloutClient:
    """Start the rollout manager; it starts router and engines. Returns at once: `wait_ready()` joins."""
    return RolloutClient(args, pg.group, pg.places)


def create_training_models(
    args: argparse.Namespace,
    pgs: dict[str, Bundles],
    rollout_manager: RolloutClient,
    actor_cls: type | None = None,
) -> StartedRun:
    """Start the training ranks, if the run trains, beside the engines, wait for both, and restore the data state.

    Args:
        actor_cls: a class of ranks in place of the trainer's own.
    """
    group = None
    # Where ranks and engines share devices, ranks start when the engines sleep: there is no room for both.
    shares = args.has_trainer and args.colocate and sleeping_sides(args).engines
    if args.has_trainer:
        rank_args = args
        if args.num_rollout is None:
            # The learning-rate schedule is as long as the run, and that follows from the size of the data set.
            length = rollout_manager.wait_ready()
            rank_args = with_run_values(args, **dataclasses.asdict(length))
        group = _train_group(rank_args, pgs["actor"], actor_cls)
        group.start(after=rollout_manager.starting if shares else None)
    _wait_for_start(args, rollout_manager, group, one_after_the_other=shares)
    length = rollout_manager.wait_ready()
    found = 0 if group is None else group.wait_ready()
    start = found if args.start_rollout_id is None else args.start_rollout_id
    rollout_manager.load(start - 1)
    StartupClock().mark("engines and ranks")
    return StartedRun(rollout_manager, group, length, start)


def _train_group(args: argparse.Namespace, bundles: Bundles, actor_cls: type | None) -> TrainGroup:
    if has_critic(args):
        return ActorCritic(args, bundles.group, bundles.places, actor_cls)
    group = EndingTrainGroup if args.release_train else TrainGroup
    return group(args, bundles.group, bundles.places, actor_cls)


def _wait_for_start(
    args: argparse.Namespace, rollout_manager: RolloutClient, group: TrainGroup | None, *, one_after_the_other: bool
) -> None:
    """Wait for engines and ranks together, so that whichever fails first ends the run at once.

    Args:
        one_after_the_other: ranks begin when the engines are done, so the limit is the sum of both limits.
    """
    ranks = group.starting if group is not None else []

    def name(positions: list[int]) -> str:
        of_ranks = [position - 1 for position in positions if position]
        parts = ["engines, router and data"] if 0 in positions else []
        return ", ".join([*parts, group.name_starting(of_ranks)] if of_ranks else parts)

    def flag(positions: list[int]) -> str | None:
        # Engines that are late end the run before, by the limit of their own flag. So if no rank is late, data are.
        of_ranks = one_after_the_other or limit == args.train_start_timeout or any(positions)
        return "--train-start-timeout" if of_ranks else None

    limits = (args.train_start_timeout, rollout_manager.start_deadline)
    limit = sum(limits) if one_after_the_other else max(limits)
    wait_for_all([rollout_manager.starting, *ranks], "start of the run", limit, pending=name, flag=flag)


class ActorCritic(TrainGroup):
    """The ranks of a run with a critic. The object itself is the group of the actor, whose flags `args` are. It has the
    critic's group beside it, and its methods call both.

    Both models live on the same devices and take turns. Every rollout has the same order: the critic computes values; the actor
    computes log-probs, advantages and returns, and trains; the critic trains on these returns.
    """

    @functools.cached_property
    def _critic(self) -> _CriticGroup:
        return _CriticGroup(critic_args(self._args), self._group, self._places, _CRITIC_RANK)

    @property
    def starting(self) -> list[ray.ObjectRef]:
        """A reference per rank of both models that is ready when the rank is."""
        return [*super().starting, *self._critic.starting]

    def name_starting(self, positions: Sequence[int]) -> str:
        """What to call the ranks at these positions of `starting`."""
        ranks = len(super().starting)
        actor, critic = [p for p in positions if p < ranks], [p - ranks for p in positions if p >= ranks]
        parts = [super().name_starting(actor)] if actor else []
        return ", ".join([*parts, self._critic.name_starting(critic)] if critic else parts)

    def start(self, after: ray.ObjectRef | None = None) -> None:
        """Start all ranks of both models without waiting for them; they build them when `after` is ready."""
        super().start(after)
        self._critic.start(after)

    def wait_ready(self) -> int:
        """Wait until every rank holds its model. Returns the first rollout id to train.

        Raises:
            RunError: the ranks of a model, or the two models, disagree about it.
        """
        first, of_critic = super().wait_ready(), self._critic.wait_ready()
        if self._critic.resumes and of_critic != first:
            raise RunError(
                f"the actor's checkpoint continues with rollout {first}, the critic's with rollout {of_critic}; load both "
                "from the same iteration"
            )
        return first

    def train(self, rollout_id: int, rollout: RolloutResult, report: Report) -> None:
        """Train both models on a rollout; `report` gets the metrics of each, after an error those before it."""
        self.rollouts_trained += 1
        # What the critic logged with the values it hands over only when it trains: after an error of either it is fetched.
        with self._critic._reporting_errors(report):
            values = self._critic.values(rollout_id, rollout.critic_shards)
            with self._reporting_errors(report):
                results = self._call_all("train_on_values", rollout_id, rollout.shards, values)
        report(results[0][0])
        self._critic.learn(rollout_id, [part for _, part in results if part is not None], report)

    def probe_memory(self, beside: int = 0) -> None:
        """As in every group, for one model after the other; beside each stands what the other's optimizer will take."""
        of_actor, of_critic = self.optimizer_bytes_to_come(), self._critic.optimizer_bytes_to_come()
        self._critic.probe_memory(beside + of_actor)
        super().probe_memory(beside + of_critic)

    def hold(self, holds: Holds) -> None:
        """Have all ranks of both models hold that much of their memory on the devices. While the actor's weights are pushed,
        the critic holds nothing: its weights go nowhere."""
        self._critic.hold(Holds.NOTHING if holds is Holds.WEIGHTS else holds)
        super().hold(holds)

    def save(self, rollout_id: int) -> None:
        """Write the checkpoints of `rollout_id`; `publish` makes them the newest."""
        self._critic.save(rollout_id)
        super().save(rollout_id)

    def save_has_ended(self, limit: float | None = None) -> bool:
        """Whether no rank of either model writes its part of the last `save` any more; `limit` is each model's."""
        return self._critic.save_has_ended(limit) and super().save_has_ended(limit)

    def finish_save(self, limit: float | None = None) -> None:
        """Wait until the checkpoints of the last `save` are written.

        Raises:
            RunError: a rank could not write its part.
        """
        self._critic.finish_save(limit)
        super().finish_save(limit)

    def publish(self, rollout_id: int) -> None:
        """Make the checkpoints of `rollout_id` those that a resume takes.

        The actor's newest checkpoint decides for both models. So the critic's is published before it, and older ones of the
        critic are deleted after it: at any moment the critic has the one that belongs to the actor's newest.
        """
        self._critic.publish(rollout_id)
        super().publish(rollout_id)
        self._critic.forget(rollout_id)

    def dispose(self) -> None:
        """End all ranks of both models; they leave no process and no group behind."""
        self._critic.dispose()
        super().dispose()

    def kill(self) -> None:
        """End all ranks of both models at once."""
        self._critic.kill()
        super().kill()


class _CriticGroup(TrainGroup):
    """The critic's ranks."""

    rank_name = "critic rank"

    @property
    def resumes(self) -> bool:
        return self._args.initial_weights.resume

    def values(self, rollout_id: int, shards: list) -> list:
        """The parts of the column `values`."""
        return [part for part in self._call_all("values", rollout_id, shards) if part is not None]

    def learn(self, rollout_id: int, parts: list, report: Report) -> None:
        """Train on the samples of the last `values`, given what the actor's ranks say about them."""
        with self._reporting_errors(report):
            logged = self._call_all("train", rollout_id, parts)[0]
        report(logged)

    def forget(self, rollout_id: int) -> None:
        """Delete the checkpoints up to `rollout_id` that `--keep-last` lets go."""
        self._call_first("forget", rollout_id)


def sort_bundles(devices: list[tuple[str, int]]) -> list[int]:
    """Bundle indices ordered by node address (numeric) and device id (numeric).

    Args:
        devices: (node address or host name, device id) of each bundle.
    """
    return sorted(range(len(devices)), key=lambda index: (_address_key(devices[index][0]), devices[index][1]))


def group_sizes(args: argparse.Namespace, layout: GpuRanges) -> list[tuple[str, int]]:
    """Which ranks and engines have to lie on one node, in the order of the run's GPUs: (name, size).

    The ranks of a tensor-parallel group do, of the actor's and of the critic's, since they exchange activations in every
    layer. Engines on the GPUs of training ranks lie where these lie. One engine may have the last of the ranks' GPUs and some
    behind them: then all of it lies on the node of these ranks.
    """
    tensor = args.tensor_model_parallel_size
    if has_critic(args):
        # The critic has the same ranks. Where neither size divides the other, groups of both overlap in a chain.
        tensor = math.lcm(tensor, critic_args(args).tensor_model_parallel_size)
    sizes = [(f"the tensor-parallel group of rank {first}", tensor) for first in range(0, layout.actor_gpus, tensor)]
    first = layout.first_rollout_gpu
    for name, size in engine_sizes(args, layout):
        shared = layout.actor_gpus - first
        if shared <= 0:
            sizes.append((name, size))
        elif shared < size:
            groups = -(-shared // tensor)
            sizes[-groups:] = [(f"{name} with the training ranks on its GPUs", groups * tensor + size - shared)]
        first += size
    return sizes


def engine_sizes(args: argparse.Namespace, layout: GpuRanges) -> list[tuple[str, int]]:
    """Engines, or the parts of those over several nodes, in the order of the GPUs for engines: (name, size). A GPU that is kept
    free of engines is an entry of its own."""
    sizes: list[tuple[str, int]] = []
    if layout.rollout_gpus == 0:
        return sizes
    engine, first = 0, layout.first_rollout_gpu
    for group in served_groups(args):
        for position in range(group.num_engines):
            start = first + position * group.num_gpus_per_engine
            parts = node_parts(start, group.num_gpus_per_engine, args.num_gpus_per_node)
            sizes += [(f"engine {engine}", part) for part in parts]
            engine += 1
        sizes += [("a GPU without an engine", 1)] * (group.num_gpus if group.num_engines == 0 else 0)
        first += group.num_gpus
    return sizes


def arrange_bundles(devices: list[tuple[str, int]], sizes: Sequence[tuple[str, int]]) -> list[int]:
    """Bundle indices in the order of the run's GPUs: as `sort_bundles`, but no group of `sizes` lies on two nodes.

    Each group in turn takes the first node that has room for all of it. If that leaves a group without room, the largest groups
    choose first; this finds a placement wherever there is one, if each size divides the next larger one. A group that is larger
    than any node takes the first free devices.

    Args:
        devices: (node address or host name, device id) of each bundle.
        sizes: (name, size) of the groups; devices beyond them follow.

    Raises:
        UserError: there is room for a group, but not on one node.
    """
    try:
        return _first_fit(devices, sizes, range(len(sizes)))
    except UserError:
        largest_first = sorted(range(len(sizes)), key=lambda position: -sizes[position][1])
    return _first_fit(devices, sizes, largest_first)


def _first_fit(devices: list[tuple[str, int]], sizes: Sequence[tuple[str, int]], turns: Sequence[int]) -> list[int]:
    """As `arrange_bundles`, with the groups choosing their nodes in the order of `turns`, which are positions in `sizes`."""
    free: dict[str, list[int]] = {}
    for index in sort_bundles(devices):
        free.setdefault(devices[index][0], []).append(index)
    nodes = list(free)
    largest = max(map(len, free.values()), default=0)
    taken: dict[int, list[int]] = {}
    # Nodes only fill up, so one without room for a size is never looked at again for that size.
    first_with_room: Counter[int] = Counter()
    for turn in turns:
        name, size = sizes[turn]
        of_one = 1 if size > largest else size
        at = first_with_room[of_one]
        while at < len(nodes) and len(free[nodes[at]]) < of_one:
            at += 1
        first_with_room[of_one] = at
        if at == len(nodes) and size <= largest:
            shown = ", ".join(f"{len(left)} on {node}" for node, left in free.items() if left)
            raise UserError(
                f"{name} needs {size} GPUs of one node, and Ray has given the run these that are left: {shown}; free whole "
                "nodes, or change --tensor-model-parallel-size or --rollout-num-gpus-per-engine"
            )
        taken[turn] = []
        for node in nodes[at:]:
            wanted = size - len(taken[turn])
            taken[turn] += free[node][:wanted]
            del free[node][:wanted]
            if len(taken[turn]) == size:
                break
    rest = [index for left in free.values() for index in left]
    return [*(index for turn in range(len(sizes)) for index in taken[turn]), *rest]


def check_engines_fit(devices: list[tuple[str, int]], sizes: Sequence[tuple[str, int]]) -> None:
    """Raise UserError unless the devices of every engine or part of one, (name, size), lie on one node with consecutive ids.

    A server is told its first device and counts upwards from there.
    """
    start = 0
    for name, size in sizes:
        run = devices[start : start + size]
        start += size
        if not are_consecutive(run):
            places = ", ".join(f"{address} GPU {device}" for address, device in run)
            raise UserError(
                f"{name} would get the devices {places}, but an engine needs consecutive devices of one node; free the "
                "devices between them, or change the GPUs of an engine (--rollout-num-gpus-per-engine, or num_gpus_per_engine "
                "in --sglang-config) or the number of training ranks"
            )


def _address_key(address: str) -> tuple[int, Any]:
    """Numeric order of addresses; host names are resolved, unresolvable ones follow in the order of their letters."""
    try:
        resolved = ipaddress.ip_address(address)
    except ValueError:
        try:
            resolved = ipaddress.ip_address(socket.gethostbyname(address))
        except OSError:
            return (2, address)
    return (0 if resolved.version == 4 else 1, int(resolved))
