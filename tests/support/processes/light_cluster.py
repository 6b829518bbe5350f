"""A program that places modes of a run on the Ray cluster at RAY_ADDRESS with the code of a run. Light actors replace ranks and
engines: they report where they are, and import no torch.

    python -m tests.support.processes.light_cluster '{"colocated": ["--colocate", …], …}'

It prints one line of JSON: by mode, the placement of the plan and the one found.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray

from slime.arguments.checkpoints import WeightSource
from slime.plan import make_plan
from slime.ray.cluster import plan_cluster, ray_cluster
from slime.ray.placement_group import _train_group, create_placement_groups
from slime.scheduling.device_turns import Holds
from slime.serving import engines as engines_module
from slime.serving.engines import Engines
from slime.serving.fleet import EngineName
from slime.serving.topology import topology_of
from slime.utils.env import actor_environment
from slime.utils.ports import reserve_port, service_host
from slime.utils.run_values import with_run_values
from tests.support.tables.plans import SMALL, planned

_SECONDS = 300
_FIRST_PORT = 24000


def _here() -> list[Any]:
    """Returns the Ray node of this process, and the address that its servers would announce, with a free port."""
    with reserve_port(service_host(), _FIRST_PORT) as port:
        return [ray.util.get_node_ip_address(), port.host, port.port]


class LightRank:
    """Replaces a training rank."""

    def __init__(self, args: Any, rank: int, world_size: int, device: int) -> None:
        self._place = {"rank": rank, "device": device}

    def rendezvous_address(self) -> str:
        return service_host()

    def init(self, rendezvous: str) -> dict[str, Any]:
        return {**self._place, "node": _here()[0], "rendezvous": rendezvous}

    def dispose(self) -> None:
        """Nothing is held."""


class LightEngine:
    """Replaces an engine, or a part of one."""

    def __init__(self, args: Any, rank: int, log_dir: str, role: str = "regular", threads: int | None = None) -> None:
        self._rank = rank

    def init(self, base_gpu_id: int) -> list[dict[str, Any]]:
        node, host, _ = _here()
        return [{"engine": self._rank, "device": base_gpu_id, "node": node, "host": host}]

    def init_over_nodes(self, base_gpu_ids: list[int], helpers: list[Any]) -> list[dict[str, Any]]:
        others = [helper.init.remote(base_gpu_id=gpu) for helper, gpu in zip(helpers, base_gpu_ids[1:], strict=True)]
        return [*self.init(base_gpu_ids[0]), *(part for other in others for part in ray.get(other, timeout=_SECONDS))]

    def shutdown(self) -> None:
        """Nothing is held."""


class LightExternalEngine(LightEngine):
    """Replaces the process that speaks to an external engine."""

    def __init__(self, args: Any, rank: int, log_dir: str, info: Any) -> None:
        super().__init__(args, rank, log_dir)
        self._url = info.url

    def init(self) -> list[dict[str, Any]]:
        return [{"engine": self._rank, "url": self._url, "node": _here()[0]}]


def place(args: argparse.Namespace) -> dict[str, Any]:
    """Place the run, then end it."""
    nodes = make_plan(args).placement.nodes
    if args.rollout_external_engine_addrs:
        infos = [
            SimpleNamespace(url=url, num_gpus=1, worker_type="regular") for url in args.rollout_external_engine_addrs
        ]
        args = with_run_values(args, rollout_external_engine_infos=infos)
    # The model does not exist, so the plan found no initial weights.
    args = argparse.Namespace(**{**vars(args), "initial_weights": WeightSource("hf", args.hf_checkpoint)})
    parts = create_placement_groups(args)
    group = _train_group(args, parts["actor"], LightRank)
    topology = topology_of(args, parts["rollout"].places)
    engines = Engines(args, parts["rollout"].group, topology, Path("/nowhere"), actor_environment())
    starting = [engines.start(EngineName(engine.engine_id)) for engine in topology.engines]
    group.start()
    ranks = ray.get(group.starting, timeout=_SECONDS)
    if args.release_train:
        group.hold(Holds.NOTHING)
        group.start()
        assert ray.get(group.starting, timeout=_SECONDS) == ranks
    found = {
        "plan": [(gpu.gpu, gpu.rank, gpu.engine) for node in nodes for gpu in node.gpus],
        "ranks": ranks,
        "engines": ray.get(starting, timeout=_SECONDS),
        "driver": ray.util.get_node_ip_address(),
    }
    engines.stop()
    group.dispose()
    ray.util.remove_placement_group(parts["actor"].group)
    return found


def main(modes: dict[str, list[str]]) -> None:
    engines_module.EngineActor, engines_module.ExternalEngineActor = LightEngine, LightExternalEngine
    parsed = {mode: planned(SMALL, *words) for mode, words in modes.items()}
    # The modes take turns in one session, so that the next mode uses Ray's processes again.
    with ray_cluster(max(parsed.values(), key=lambda args: plan_cluster(args).gpus)):
        print(json.dumps({mode: place(args) for mode, args in parsed.items()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
