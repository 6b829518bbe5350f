"""Who is served where, as data: model → group → engine → nodes and devices.

Everything that needs to know follows it: the router that an engine is registered at and as what, the ranks of weight-update
groups, the bundle an engine's actor lives in. The models come from the same rows as the plan of the run.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from slime.arguments.config_files.serving_config import served_models
from slime.arguments.sizes import layout_of
from slime.backends.sglang_utils.external import ExternalEngineInfo
from slime.scheduling.served_models import ModelServing, ServerGroup, node_parts


@dataclass(frozen=True)
class Device:
    """A GPU of the run: its bundle in the placement group, and its id on its node when the run began."""

    bundle: int
    device_id: int


@dataclass(frozen=True)
class EngineSpec:
    """One engine. `nodes`: its devices, node by node; `gpu_offset`: where they begin among the devices of all engines.

    `external`: somebody else started it, on devices that are none of the run's. `sleeps`: where engines give their memory back,
    this one does: the trainer has its devices too, or the engines have devices of their own altogether.
    """

    engine_id: int
    nodes: tuple[tuple[Device, ...], ...]
    gpu_offset: int
    external: ExternalEngineInfo | None = None
    sleeps: bool = True

    @property
    def num_gpus(self) -> int:
        return self.external.num_gpus if self.external else sum(len(devices) for devices in self.nodes)


@dataclass(frozen=True)
class EngineGroup:
    """Equal engines with one `role`, a worker type of `--sglang-config`; `settings`: how the run starts them."""

    role: str
    engines: tuple[EngineSpec, ...]
    settings: ServerGroup | None = None


@dataclass(frozen=True)
class ServedModel:
    """A model behind a router of its own; `update_weights`: its engines get the trainer's weights."""

    name: str
    update_weights: bool
    groups: tuple[EngineGroup, ...]


@dataclass(frozen=True)
class Topology:
    """All that is served in a run. Engine ids count from 0, in the order of models, groups and devices."""

    models: tuple[ServedModel, ...]

    @property
    def engines(self) -> tuple[EngineSpec, ...]:
        return tuple(engine for model in self.models for group in model.groups for engine in group.engines)

    def find(self, engine_id: int) -> tuple[ServedModel, EngineGroup, EngineSpec]:
        """The model and the group that an engine belongs to, and the engine itself; KeyError where there is none."""
        return self._by_id[engine_id]

    @property
    def parts(self) -> dict[int, tuple[str, str]]:
        """By engine id, the name of the model that it serves, and its role in that."""
        return {engine_id: (model.name, group.role) for engine_id, (model, group, _) in self._by_id.items()}

    @functools.cached_property
    def _by_id(self) -> dict[int, tuple[ServedModel, EngineGroup, EngineSpec]]:
        # With `--use-fault-tolerance` each request that fails asks about all engines.
        places = ((model, group) for model in self.models for group in model.groups)
        return {engine.engine_id: (*place, engine) for place in places for engine in place[1].engines}


def topology_of(args: argparse.Namespace, places: Sequence[tuple[int, int]]) -> Topology:
    """What the flags ask for, on `places`: (bundle index, device id) of every GPU for engines, in order."""
    if args.rollout_external:
        return of_external_engines(args.rollout_external_engine_infos)
    layout = layout_of(args)
    shared = layout.actor_gpus if args.colocate else None
    devices = [Device(*place) for place in places]
    return lay_out(served_models(args), devices, args.num_gpus_per_node, layout.first_rollout_gpu, shared)


def lay_out(
    models: Sequence[ModelServing],
    devices: Sequence[Device],
    gpus_per_node: int,
    first_gpu: int = 0,
    shared: int | None = None,
) -> Topology:
    """Give every group its run of `devices`, and every engine of the group its part. A placeholder's stay free.

    An engine has a part on each node that its devices lie on. `first_gpu`: the number of the first device among the GPUs of the
    run. `shared`: so many of the first devices are the trainer's too; None: the trainer is apart.
    """
    found: list[ServedModel] = []
    first = engine_id = 0
    for model in models:
        groups = []
        for group in model.groups:
            engines = []
            for position in range(group.num_engines):
                size = group.num_gpus_per_engine
                offset = first + position * size
                parts = node_parts(first_gpu + offset, size, gpus_per_node)
                ends = list(itertools.accumulate(parts, initial=offset))
                nodes = tuple(tuple(devices[start:end]) for start, end in itertools.pairwise(ends))
                engines.append(EngineSpec(engine_id, nodes, offset, sleeps=shared is None or offset < shared))
                engine_id += 1
            first += group.num_gpus
            if engines:
                groups.append(EngineGroup(group.worker_type, tuple(engines), group))
        found.append(ServedModel(model.name, model.update_weights, tuple(groups)))
    return Topology(tuple(found))


def of_external_engines(infos: Sequence[ExternalEngineInfo]) -> Topology:
    """One model, served by the engines that were found: role by role, those of one in the order of their addresses."""
    ids, offset, groups = itertools.count(), 0, []
    for role in dict.fromkeys(info.worker_type for info in infos):
        engines = []
        for info in infos:
            if info.worker_type == role:
                engines.append(EngineSpec(next(ids), (), offset, info))
                offset += info.num_gpus
        groups.append(EngineGroup(role, tuple(engines)))
    return Topology((ServedModel("default", True, tuple(groups)),))
