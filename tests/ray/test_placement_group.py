import argparse
from types import SimpleNamespace

import pytest

from slime.ray import placement_group
from slime.ray.cluster import plan_cluster
from slime.ray.driver import RunLength
from slime.ray.placement_group import check_engines_fit, sort_bundles
from slime.utils.errors import UserError


def test_s8_devices_are_ordered_as_numbers():
    devices = [("10.0.0.2", gpu) for gpu in (10, 2, 1)] + [("10.0.0.10", 0), ("10.0.0.9", 15)]
    ordered = [devices[index] for index in sort_bundles(devices)]
    assert ordered == [("10.0.0.2", 1), ("10.0.0.2", 2), ("10.0.0.2", 10), ("10.0.0.9", 15), ("10.0.0.10", 0)]


def test_host_names_are_resolved_and_unknown_ones_come_last():
    devices = [("no-such-host.invalid", 0), ("localhost", 1), ("126.0.0.1", 0)]
    assert sort_bundles(devices) == [2, 1, 0]


def plan(**values):
    defaults = {
        "world_size": 4, "rollout_num_gpus": 2, "has_trainer": True, "has_engines": True, "rollout_external": False,
        "colocate": False,
    }  # fmt: skip
    return plan_cluster(SimpleNamespace(**{**defaults, **values}))


def test_plan_of_every_mode():
    assert (plan().gpus, plan().cpus) == (6, 7)
    assert plan(has_engines=False).gpus == 4
    assert plan(has_trainer=False).gpus == 2


@pytest.mark.parametrize("devices", [[("a", 0), ("a", 2)], [("a", 7), ("b", 0)], [("a", 1), ("a", 0)]])
def test_engine_needs_consecutive_devices_of_one_node(devices):
    check_engines_fit([("a", 0), ("a", 1), ("b", 4), ("b", 5)], 2)
    with pytest.raises(UserError, match="engine 1 would get the devices"):
        check_engines_fit([("a", 4), ("a", 5), *devices], 2)


@pytest.mark.parametrize(
    ("ranks", "engines", "limit", "flags"),
    [
        (900, 500, 900, ["--train-start-timeout"] * 3),
        (300, 500, 500, [None, "--train-start-timeout", "--train-start-timeout"]),
    ],
)
def test_the_limit_of_a_start_names_the_flag_that_would_help(monkeypatch, ranks, engines, limit, flags):
    """Engines have a limit of their own inside; what is left beyond it are data, and no flag makes them faster."""
    seen = {}
    monkeypatch.setattr(
        placement_group, "wait_for_all", lambda refs, name, limit, **options: seen.update(options, limit=limit)
    )
    client = SimpleNamespace(start_deadline=engines, starting="manager")
    placement_group._wait_for_start(SimpleNamespace(train_start_timeout=ranks), client, None)
    late = ([0], [2], [0, 1])  # the manager, a rank, both
    assert (seen["limit"], [seen["flag"](positions) for positions in late]) == (limit, flags)


@pytest.mark.parametrize(
    "typed, trains, expected",
    [
        ({"num_rollout": 7, "start_rollout_id": None}, True, (7, None, 3)),
        ({"num_rollout": 7, "start_rollout_id": 5}, True, (7, None, 5)),
        # Epochs: the ranks are told what the data say.
        ({"num_rollout": None, "start_rollout_id": None}, True, (6, 2, 3)),
        ({"num_rollout": None, "start_rollout_id": None}, False, (None, None, 0)),
    ],
)
def test_a_started_run_is_returned_and_what_was_parsed_stays(monkeypatch, typed, trains, expected):
    class Group:
        def __init__(self, args, *arguments):
            self.args = args

        def start(self):
            events.append("ranks")

        def wait_ready(self):
            return 3

    events = []
    manager = SimpleNamespace(
        wait_ready=lambda: events.append("manager") or RunLength(typed["num_rollout"] or 6, 2),
        load=lambda rollout_id: events.append(rollout_id),
    )
    monkeypatch.setattr(placement_group, "TrainGroup", Group)
    monkeypatch.setattr(placement_group, "_wait_for_start", lambda *arguments: None)
    args = argparse.Namespace(has_trainer=trains, use_critic=False, **typed)
    bundles = {"actor": placement_group.Bundles(None, ())}
    run = placement_group.create_training_models(args, bundles, manager)
    told = (run.actor.args.num_rollout, getattr(run.actor.args, "rollouts_per_epoch", None)) if trains else (None, None)
    assert (*told, run.start_rollout_id) == expected
    assert run.length == RunLength(typed["num_rollout"] or 6, 2) and run.rollout_manager is manager
    assert args == argparse.Namespace(has_trainer=trains, use_critic=False, **typed)
    first = ["manager", "ranks"] if typed["num_rollout"] is None else ["ranks"]
    assert events == [*(first if trains else []), "manager", run.start_rollout_id - 1]
