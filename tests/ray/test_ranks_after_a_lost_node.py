"""Ranks that end and are created again, in a cluster that loses a node meanwhile."""

import argparse

import pytest

from slime.arguments.checkpoints import WeightSource
from slime.ray.train_group import EndingTrainGroup, TrainGroup
from slime.scheduling.device_turns import Holds
from slime.utils import bundles

FLAGS = {
    "colocate": False, "train_start_timeout": 7.0, "initial_weights": WeightSource("random"), "ref_load": None,
    "ref_ckpt_step": None, "opd_teacher_load": None, "opd_teacher_ckpt_step": None,
}  # fmt: skip


class Cluster:
    """Stands for Ray: the node of each bundle, its device there, and what was asked."""

    def __init__(self, monkeypatch, address="auto"):
        self.places = {3: ("a", 0), 4: ("a", 1), 9: ("a", 2)}
        self.asked, self.started = [], []
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if address is not None:
            monkeypatch.setenv("RAY_ADDRESS", address)
        nodes = lambda group: {index: node for index, (node, _) in self.places.items()}  # noqa: E731
        monkeypatch.setattr(bundles, "nodes_of_bundles", nodes)
        monkeypatch.setattr(bundles, "locate_bundles", self.locate)
        monkeypatch.setattr(TrainGroup, "create", lambda group: self.started.append(list(group._places)))
        monkeypatch.setattr(EndingTrainGroup, "open_weight_push", lambda group: None)

    def locate(self, group, indices, seconds):
        self.asked.append((group, list(indices), seconds))
        # Ray has a place for a bundle when it can be asked.
        self.places = {index: (node or "c", device) for index, (node, device) in self.places.items()}
        return [self.places[index] for index in indices]


@pytest.mark.parametrize("node", ["b", ""])
def test_ranks_start_again_on_the_devices_that_their_bundles_are_by_then(monkeypatch, node):
    """With the ids of the lost node two ranks may meet on one device, or on one of somebody else."""
    cluster = Cluster(monkeypatch)
    group = EndingTrainGroup(argparse.Namespace(**FLAGS), "group", [(3, 0), (4, 1)])
    vars(group)["_threads"] = [8, 8]
    group.hold(Holds.ALL)
    assert cluster.started == [[(3, 0), (4, 1)]] and cluster.asked == [] and group._threads == [8, 8]
    cluster.places[4] = (node, 5)
    group.hold(Holds.ALL)
    assert cluster.started[1] == [(3, 0), (4, 5)] and cluster.asked == [("group", [3, 4], 7.0)]
    assert "_threads" not in vars(group), "the ranks share the cores of other nodes"
    # Nothing has moved since.
    group.hold(Holds.ALL)
    assert cluster.started[2] == [(3, 0), (4, 5)] and len(cluster.asked) == 1


def test_nobody_asks_where_bundles_are_that_did_not_move_or_on_the_one_machine_of_a_run(monkeypatch):
    for address in ("auto", None):
        cluster = Cluster(monkeypatch, address)
        group = EndingTrainGroup(argparse.Namespace(**FLAGS), "group", [(3, 0), (4, 1)])
        # That of an engine.
        cluster.places[9] = ("b", 0)
        if address is None:
            cluster.places[4] = ("b", 5)
        group.hold(Holds.ALL)
        assert cluster.started == [[(3, 0), (4, 1)]] and cluster.asked == []
