import argparse
import random
import sys
from types import SimpleNamespace

import pytest

from slime.arguments.config_files.serving_config import load_serving_config
from slime.observability import waiting
from slime.ray import placement_group
from slime.ray.cluster import plan_cluster
from slime.ray.driver import RunLength
from slime.ray.placement_group import arrange_bundles, check_engines_fit, engine_sizes, group_sizes, sort_bundles
from slime.utils import bundles as bundles_module
from slime.utils.errors import UserError
from tests.support.models.args import parse, write_config

RUN = {
    "has_trainer": True, "has_engines": True, "rollout_external": False, "colocate": False, "sglang_config": None,
    "prefill_num_servers": None, "hf_checkpoint": "/model", "rollout_num_gpus_per_engine": 1,
    "tensor_model_parallel_size": 1, "num_gpus_per_node": 8, "use_critic": False,
}  # fmt: skip


def test_s8_devices_are_ordered_as_numbers():
    devices = [("10.0.0.2", gpu) for gpu in (10, 2, 1)] + [("10.0.0.10", 0), ("10.0.0.9", 15)]
    ordered = [devices[index] for index in sort_bundles(devices)]
    assert ordered == [("10.0.0.2", 1), ("10.0.0.2", 2), ("10.0.0.2", 10), ("10.0.0.9", 15), ("10.0.0.10", 0)]


def test_host_names_are_resolved_and_unknown_ones_come_last():
    devices = [("no-such-host.invalid", 0), ("localhost", 1), ("126.0.0.1", 0)]
    assert sort_bundles(devices) == [2, 1, 0]


def arranged(free, sizes):
    """The nodes of the run's GPUs, in order; `free`: how many devices of each node Ray gave."""
    devices = [(node, device) for node, count in free.items() for device in range(count)]
    return [devices[index][0] for index in arrange_bundles(devices, [(f"group {size}", size) for size in sizes])]


A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.mark.parametrize(
    "free, sizes, nodes",
    [
        # Whole nodes: as they are sorted.
        ({A: 4, B: 4}, [2, 2, 2, 1, 1], [A] * 4 + [B] * 4),
        # In sorted order the second pair would lie on both.
        ({A: 3, B: 3}, [2, 2, 1, 1], [A, A, B, B, A, B]),
        ({A: 1, B: 4}, [2, 2], [B, B, B, B, A]),
        # Larger than any node: there is no better place.
        ({A: 2, B: 2}, [4], [A, A, B, B]),
        ({A: 2, B: 2}, [], [A, A, B, B]),
        ({A: 1, B: 2, C: 2}, [4, 1], [A, B, B, C, C]),
        # In order the pairs would leave 2 on each.
        ({A: 6, B: 2}, [2, 2, 4], [A, A, B, B, A, A, A, A]),
        ({A: 4, B: 5}, [1, 4, 4], [B, A, A, A, A, B, B, B, B]),
        # The largest do not choose first where all find room in order.
        ({A: 4, B: 4}, [1, 1, 2, 4], [A] * 4 + [B] * 4),
    ],
)
def test_what_belongs_together_lies_on_one_node_where_one_has_room(free, sizes, nodes):
    assert arranged(free, sizes) == nodes


def test_a_group_that_no_node_has_room_for_is_told_with_what_is_left():
    with pytest.raises(
        UserError, match=f"^group 2 needs 2 GPUs of one node, and .* left: 1 on {A}, 1 on {B}; free whole"
    ):
        arranged({A: 3, B: 3}, [2, 2, 2])


def test_the_work_grows_with_the_devices_and_not_with_their_square():
    devices = [(f"10.0.{node // 256}.{node % 256}", device) for node in range(512) for device in range(8)]
    lines, tracer = 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        order = arrange_bundles(devices, [("one", 1)] * 2048 + [("four", 4)] * 512)
    finally:
        sys.settrace(tracer)
    assert order == list(range(4096))
    assert lines < 100 * len(devices)


def test_groups_of_a_run_are_those_of_tensor_parallelism_and_engines():
    values = {"world_size": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "tensor_model_parallel_size": 2,
              "num_gpus_per_node": 8}  # fmt: skip
    args = SimpleNamespace(**{**RUN, **values})
    ranks = [("the tensor-parallel group of rank 0", 2), ("the tensor-parallel group of rank 2", 2)]
    assert group_sizes(args, plan_cluster(args).layout) == [*ranks, ("engine 0", 2), ("engine 1", 2)]
    # A node for each part of an engine.
    args.num_gpus_per_node = 1
    assert group_sizes(args, plan_cluster(args).layout)[2:] == [("engine 0", 1)] * 2 + [("engine 1", 1)] * 2
    # Behind half a node of ranks.
    args.num_gpus_per_node, args.world_size = 2, 3
    assert engine_sizes(args, plan_cluster(args).layout) == [("engine 0", 1)] * 2 + [("engine 1", 1)] * 2
    # They share the GPUs.
    args.colocate, args.world_size, args.num_gpus_per_node = True, 4, 1
    assert group_sizes(args, plan_cluster(args).layout) == ranks
    # Two of them have theirs beside.
    args.rollout_num_gpus, args.num_gpus_per_node = 8, 8
    assert group_sizes(args, plan_cluster(args).layout) == [*ranks, ("engine 2", 2), ("engine 3", 2)]
    # One has three of a rank's and three others; another one part on each side of the last rank.
    args.rollout_num_gpus = args.rollout_num_gpus_per_engine = 7
    both = [("engine 0 with the training ranks on its GPUs", 7)]
    assert group_sizes(args, plan_cluster(args).layout) == both
    args.rollout_num_gpus, args.rollout_num_gpus_per_engine = 6, 3
    assert group_sizes(args, plan_cluster(args).layout) == [
        ranks[0],
        ("engine 1 with the training ranks on its GPUs", 4),
    ]
    args.rollout_num_gpus, args.rollout_num_gpus_per_engine, args.num_gpus_per_node = 8, 8, 4
    assert group_sizes(args, plan_cluster(args).layout) == [*ranks, ("engine 0", 4)]


@pytest.mark.parametrize(
    ("actor", "critic", "sizes"), [(2, 4, [4] * 3), (4, 2, [4] * 3), (4, 3, [12]), (2, 2, [2] * 6)]
)
def test_the_ranks_of_a_critic_lie_together_too(tmp_path, actor, critic, sizes):
    """Both models have the same ranks, so what either has in one group is on one node."""
    (tmp_path / "roles.yaml").write_text(f"critic: {{tensor_model_parallel_size: {critic}}}")
    words = f"--advantage-estimator ppo --actor-num-gpus-per-node 12 --tensor-model-parallel-size {actor} --dry-run"
    words += f" --megatron-config-path {tmp_path}/roles.yaml --rollout-batch-size 12"
    write_config(tmp_path / "twelve", num_attention_heads=12, num_key_value_heads=12, intermediate_size=192)
    args = parse(tmp_path, *words.split(), "--hf-checkpoint", str(tmp_path / "twelve"))
    groups = group_sizes(args, plan_cluster(args).layout)
    assert [size for _, size in groups] == [*sizes, 1]
    assert groups[0][0] == "the tensor-parallel group of rank 0"


def test_engines_of_a_file_have_sizes_of_their_own(tmp_path):
    """A GPU that stays free is one too; of an engine that lies on several nodes each has a part."""
    path = tmp_path / "serving.yaml"
    path.write_text(
        "sglang:\n  - name: actor\n    server_groups:\n      - {num_gpus: 4, num_gpus_per_engine: 2}\n"
        "      - {worker_type: placeholder, num_gpus: 2}\n      - {num_gpus: 8, num_gpus_per_engine: 8}\n"
        "      - {num_gpus: 1}\n"
    )
    args = SimpleNamespace(
        **{**RUN, "world_size": 4, "rollout_num_gpus": 15, "num_gpus_per_node": 4, "sglang_config": str(path)}
    )
    args.served_models, _ = load_serving_config(args)
    path.unlink()  # nobody reads it again: it may be on the driver's machine alone
    layout = plan_cluster(args).layout
    free = ("a GPU without an engine", 1)
    small, last = [("engine 0", 2), ("engine 1", 2), free, free], ("engine 3", 1)
    # It begins in the middle of a node.
    engines = [*small, ("engine 2", 2), ("engine 2", 4), ("engine 2", 2), last]
    assert engine_sizes(args, layout) == engines
    ranks = [(f"the tensor-parallel group of rank {rank}", 1) for rank in range(4)]
    assert group_sizes(args, layout) == [*ranks, *engines]
    args.world_size = 2
    assert engine_sizes(args, plan_cluster(args).layout) == [*small, ("engine 2", 4), ("engine 2", 4), last]


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


FOUR_NODES = [(f"127.0.0.{2 + gpu // 8}", gpu % 8) for gpu in range(32)]


@pytest.mark.parametrize(
    "mode, actor, rollout",
    [
        ({}, (0, 16), (16, 32)),
        ({"has_engines": False, "world_size": 32}, (0, 32), (0, 0)),
        ({"has_trainer": False, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 8}, (0, 0), (0, 32)),
        ({"rollout_num_gpus_per_engine": 16}, (0, 16), (16, 32)),
        # Halves of two nodes, and four GPUs that nobody has.
        ({"rollout_num_gpus_per_engine": 8, "world_size": 12, "rollout_num_gpus": 20}, (0, 12), (12, 32)),
        ({"colocate": True, "world_size": 32, "rollout_num_gpus": 32}, (0, 32), (0, 32)),
        # Some engines on the trainer's GPUs, and some beside; and one with GPUs of both kinds.
        ({"colocate": True, "rollout_num_gpus": 32}, (0, 16), (0, 32)),
        (
            {"colocate": True, "world_size": 20, "rollout_num_gpus": 32, "rollout_num_gpus_per_engine": 8},
            (0, 20),
            (0, 32),
        ),
        ({"rollout_external": True, "world_size": 32}, (0, 32), (0, 0)),
    ],
)
def test_every_mode_lies_in_the_order_of_nodes_and_devices(monkeypatch, mode, actor, rollout):
    """On four nodes of eight devices, whatever order Ray gives them in."""
    given = random.Random(0).sample(FOUR_NODES, 32)
    bundles = SimpleNamespace(ready=lambda: "ready")
    nodes = {index: f"id of {node}" for index, (node, _) in enumerate(given)}

    def wait_for_all(refs, *arguments):
        assert len({node for node, _ in refs}) == len(refs), (
            "a node starts a process for each device that is asked at once"
        )
        return refs

    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(placement_group, "placement_group", lambda shape, strategy: bundles)
    monkeypatch.setattr(bundles_module, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    monkeypatch.setattr(placement_group, "wait_for", lambda *arguments, **options: None)
    monkeypatch.setattr(bundles_module, "_locate", lambda group, index: given[index])
    monkeypatch.setattr(bundles_module, "wait_for_all", wait_for_all)
    values = {
        "world_size": 16,
        "rollout_num_gpus": 16,
        "rollout_num_gpus_per_engine": 4,
        "tensor_model_parallel_size": 4,
    }
    placed = placement_group.create_placement_groups(argparse.Namespace(**{**RUN, **values, **mode}))
    for part, (first, last) in {"actor": actor, "rollout": rollout}.items():
        assert [given[bundle] for bundle, _ in placed[part].places] == FOUR_NODES[first:last]
        assert [device for _, device in placed[part].places] == [device for _, device in FOUR_NODES[first:last]]
        assert placed[part].group is (bundles if last else None)


def test_a_wait_for_devices_says_every_30_seconds_how_many_there_are_and_how_many_are_free(monkeypatch, caplog):
    now = [0.0]

    def ten_seconds(refs, **options):
        now[0] += 10.0
        return (refs if now[0] > 130.0 else []), refs

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        placement_group, "placement_group", lambda *shape, **how: SimpleNamespace(ready=lambda: "ready")
    )
    for name, gpus in (("cluster_resources", 8.0), ("available_resources", 1.0)):
        monkeypatch.setattr(placement_group.ray, name, lambda gpus=gpus: {"GPU": gpus})
    monkeypatch.setattr(waiting.ray, "wait", ten_seconds)
    monkeypatch.setattr(waiting.ray, "get", lambda ref, timeout: None)
    monkeypatch.setattr(waiting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(placement_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    args = argparse.Namespace(**{**RUN, "world_size": 2, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2})
    with caplog.at_level("INFO"):
        placement_group.create_placement_groups(args)
    told = "placement of the run's devices: waiting for {} s for 4 GPUs; the cluster has 8, of which 1 are free"
    assert caplog.messages == [told.format(seconds) for seconds in (40, 70, 100, 130)]


def test_a_ray_of_the_run_alone_has_its_devices_and_no_process_is_started_to_ask_for_them(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("a process was started")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        placement_group, "placement_group", lambda shape, strategy: SimpleNamespace(ready=lambda: "ready")
    )
    monkeypatch.setattr(placement_group, "wait_for", lambda *arguments, **options: None)
    monkeypatch.setattr(bundles_module, "_locate", refuse)
    monkeypatch.setattr(placement_group.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    args = argparse.Namespace(**{**RUN, "world_size": 2, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2})
    parts = placement_group.create_placement_groups(args)
    assert [parts[name].places for name in ("actor", "rollout")] == [((0, 0), (1, 1)), ((2, 2), (3, 3))]


@pytest.mark.parametrize("devices", [[("a", 0), ("a", 2)], [("a", 7), ("b", 0)], [("a", 1), ("a", 0)]])
def test_engine_needs_consecutive_devices_of_one_node(devices):
    sizes = [("engine 0", 2), ("engine 1", 2)]
    check_engines_fit([("a", 0), ("a", 1), ("b", 4), ("b", 5)], sizes)
    with pytest.raises(UserError, match="engine 1 would get the devices"):
        check_engines_fit([("a", 4), ("a", 5), *devices], sizes)
    check_engines_fit([("a", 3), *devices], [("engine 0", 1), ("engine 1", 1), ("engine 2", 1)])


@pytest.mark.parametrize(
    ("ranks", "engines", "in_turn", "limit", "flags"),
    [
        (900, 500, False, 900, ["--train-start-timeout"] * 3),
        (300, 500, False, 500, [None, "--train-start-timeout", "--train-start-timeout"]),
        # The ranks begin when the engines are done.
        (300, 500, True, 800, ["--train-start-timeout"] * 3),
    ],
)
def test_the_limit_of_a_start_names_the_flag_that_would_help(monkeypatch, ranks, engines, in_turn, limit, flags):
    """Engines have a limit of their own inside; what is left beyond it are data, and no flag makes them faster."""
    seen = {}
    monkeypatch.setattr(
        placement_group, "wait_for_all", lambda refs, name, limit, **options: seen.update(options, limit=limit)
    )
    client = SimpleNamespace(start_deadline=engines, starting="manager")
    args = SimpleNamespace(train_start_timeout=ranks)
    placement_group._wait_for_start(args, client, None, one_after_the_other=in_turn)
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
@pytest.mark.parametrize("shares", [False, True])
def test_a7_a_started_run_is_returned_and_what_was_parsed_stays(monkeypatch, typed, trains, expected, shares):
    class Group:
        def __init__(self, args, *arguments):
            self.args = args

        def start(self, after):
            events.append("ranks" if after is None else f"ranks after {after}")

        def wait_ready(self):
            return 3

    events = []
    manager = SimpleNamespace(
        wait_ready=lambda: events.append("manager") or RunLength(typed["num_rollout"] or 6, 2),
        load=lambda rollout_id: events.append(rollout_id),
        starting="the manager",
    )
    monkeypatch.setattr(placement_group, "TrainGroup", Group)
    waits = []
    monkeypatch.setattr(
        placement_group, "_wait_for_start", lambda *arguments, one_after_the_other: waits.append(one_after_the_other)
    )
    flags = {"has_trainer": trains, "use_critic": False, "colocate": shares, "has_engines": True, "rollout_external": False,
             "offload_train": False, "release_train": False, "offload_rollout": shares}  # fmt: skip
    args = argparse.Namespace(**flags, **typed)
    bundles = {"actor": placement_group.Bundles(None, ())}
    run = placement_group.create_training_models(args, pgs=bundles, rollout_manager=manager)
    told = (run.actor.args.num_rollout, getattr(run.actor.args, "rollouts_per_epoch", None)) if trains else (None, None)
    assert (*told, run.start_rollout_id) == expected
    assert run.length == RunLength(typed["num_rollout"] or 6, 2) and run.rollout_manager is manager
    assert args == argparse.Namespace(**flags, **typed)
    # Ranks that share devices with engines build their model when these sleep.
    ranks = "ranks after the manager" if shares else "ranks"
    first = ["manager", ranks] if typed["num_rollout"] is None else [ranks]
    assert events == [*(first if trains else []), "manager", run.start_rollout_id - 1]
    assert waits == [shares and trains]
