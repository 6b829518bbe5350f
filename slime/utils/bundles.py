"""Which device each bundle of a placement group is.

Ray gives a bundle its place once. Only if its node dies Ray moves it, to a device that is free on another node, which may have
another id there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.observability.waiting import wait_for_all
from slime.utils import env

_LOCATION_SECONDS = 300.0
# The share of a bundle's device that the process takes which looks where the device is; an engine may have most of it.
_SHARE = 0.01


def nodes_of_bundles(group: PlacementGroup) -> dict[int, str]:
    """The id of the node that each bundle is on, by index; of a bundle that Ray has to move it is missing, or empty."""
    return placement_group_table(group)["bundles_to_node_id"]


def locate_bundles(
    group: PlacementGroup, indices: Sequence[int] | None = None, seconds: float = _LOCATION_SECONDS
) -> list[tuple[str, int]]:
    """(node address, device id) of the bundles with these indices, in their order; None: of all. All nodes are asked at the
    same time, each about one bundle after the other, so that one process per node is enough.

    Raises:
        RunError: some have not been found within `seconds`; Ray may have no place for them.
    """
    nodes = nodes_of_bundles(group)
    wanted = sorted(nodes) if indices is None else indices
    places: dict[int, tuple[str, int]] = {}
    on_node: dict[str, list[int]] = {}
    for index in wanted:
        on_node.setdefault(nodes.get(index, ""), []).append(index)
    for turn in itertools.zip_longest(*on_node.values()):
        asked = [index for index in turn if index is not None]
        answers = wait_for_all([_locate(group, index) for index in asked], "location of the devices", seconds)
        places.update(zip(asked, answers, strict=True))
    return [places[index] for index in wanted]


class Whereabouts:
    """Tells when Ray has moved bundles of a placement group since it was last asked."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        self._nodes = nodes_of_bundles(group)

    def moved(self, indices: Sequence[int], seconds: float) -> list[tuple[str, int]] | None:
        """As `locate_bundles`, of which this raises the errors; None if each of the bundles is where it was."""
        nodes = nodes_of_bundles(self._group)
        if all(nodes.get(index) == self._nodes.get(index) for index in indices):
            return None
        found = locate_bundles(self._group, indices, seconds)
        # By now Ray has a place for those that had none.
        self._nodes = nodes_of_bundles(self._group)
        return found


def are_consecutive(devices: Sequence[tuple[str, int]]) -> bool:
    """Whether devices, given as `locate_bundles` gives them, lie on one node and their ids follow each other."""
    node, first = devices[0]
    return list(devices) == [(node, first + offset) for offset in range(len(devices))]


def _locate(group: PlacementGroup, index: int) -> ray.ObjectRef:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    options = {"num_cpus": 0, "num_gpus": _SHARE, "runtime_env": {"env_vars": env.actor_environment()}}
    return _node_and_device.options(scheduling_strategy=strategy, **options).remote()


@ray.remote
def _node_and_device() -> tuple[str, int]:
    device, visible = str(ray.get_gpu_ids()[0]), env.visible_devices()
    # A device id is a position among the devices that processes see, whatever these are called.
    return ray.util.get_node_ip_address(), visible.index(device) if visible and device in visible else int(device)
