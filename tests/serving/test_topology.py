"""Which engine lives on which devices, and what it is there for."""

from types import SimpleNamespace

import pytest

from slime.scheduling.served_models import ModelServing, ServerGroup
from slime.serving.topology import Device, EngineGroup, EngineSpec, ServedModel, Topology, lay_out, topology_of

DEVICES = [Device(bundle, bundle % 8) for bundle in range(24)]


def group(worker_type, num_gpus, per_engine):
    return ServerGroup(worker_type, num_gpus, per_engine, {})


def ids(engines):
    return [(engine.engine_id, engine.gpu_offset, engine.num_gpus) for engine in engines]


def test_one_model_as_the_flags_describe_it():
    args = SimpleNamespace(
        sglang_config=None, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, prefill_num_servers=None,
        hf_checkpoint="/actor", num_gpus_per_node=8, rollout_external=False, colocate=False, has_trainer=True,
        has_engines=True, world_size=1,
    )  # fmt: skip
    topology = topology_of(args, [(3, 1), (4, 2), (5, 3), (6, 4)])
    (model,) = topology.models
    assert model.update_weights and [group.role for group in model.groups] == ["regular"]
    assert [engine.nodes for engine in topology.engines] == [
        ((Device(3, 1), Device(4, 2)),), ((Device(5, 3), Device(6, 4)),),
    ]  # fmt: skip
    assert ids(topology.engines) == [(0, 0, 2), (1, 2, 2)]
    args.prefill_num_servers = 1
    assert [group.role for group in topology_of(args, [(0, 0)] * 4).models[0].groups] == ["prefill", "decode"]


def test_engines_of_others_have_devices_that_are_none_of_the_runs():
    infos = [SimpleNamespace(num_gpus=size, url=f"http://{size}", worker_type="regular") for size in (1, 4, 2)]
    args = SimpleNamespace(rollout_external=True, rollout_external_engine_infos=infos)
    topology = topology_of(args, [])
    assert ids(topology.engines) == [(0, 0, 1), (1, 1, 4), (2, 5, 2)]
    assert [engine.external for engine in topology.engines] == infos and topology.models[0].update_weights
    assert all(engine.nodes == () for engine in topology.engines)


def test_several_models_have_their_engines_one_after_the_other_and_placeholders_none():
    models = [
        ModelServing(
            "actor", "/actor", True, (group("placeholder", 2, 1), group("prefill", 2, 1), group("decode", 4, 4))
        ),
        ModelServing("reward", "/reward", False, (group("regular", 4, 2),)),
    ]
    topology = lay_out(models, DEVICES, gpus_per_node=8)
    assert ids(topology.engines) == [(0, 2, 1), (1, 3, 1), (2, 4, 4), (3, 8, 2), (4, 10, 2)]
    assert [model.name for model in topology.models] == ["actor", "reward"]
    # What a new server is started with, in the place of a dead one too.
    assert [of.settings for of in topology.models[0].groups] == [*models[0].groups[1:]]
    found = [topology.find(engine_id) for engine_id in range(5)]
    assert [(model.update_weights, group.role) for model, group, _ in found] == [
        (True, "prefill"), (True, "prefill"), (True, "decode"), (False, "regular"), (False, "regular"),
    ]  # fmt: skip
    assert [engine.engine_id for _, _, engine in found] == list(range(5))
    with pytest.raises(KeyError):
        topology.find(5)


def test_to_find_an_engine_takes_no_longer_the_more_there_are():
    class Counted(tuple):
        looks = 0

        def __iter__(self):
            Counted.looks += 1
            return super().__iter__()

    engines = Counted(EngineSpec(number, (), number) for number in range(1000))
    topology = Topology((ServedModel("a", True, (EngineGroup("regular", engines),)),))
    assert [topology.find(number)[2].engine_id for number in range(1000)] == list(range(1000))
    assert Counted.looks == 1


def test_engines_on_devices_of_the_trainer_sleep_and_those_beside_do_not():
    models = [
        ModelServing("a", "/a", True, (group("regular", 4, 2),)),
        ModelServing("b", "/b", False, (group("regular", 2, 1),)),
    ]
    assert [engine.sleeps for engine in lay_out(models, DEVICES, 8).engines] == [True] * 4, (
        "all have devices of their own"
    )
    assert [engine.sleeps for engine in lay_out(models, DEVICES, 8, shared=5).engines] == [True, True, True, False]
    assert [engine.sleeps for engine in lay_out(models, DEVICES, 8, shared=2).engines] == [True, False, False, False]


def bundles(engine):
    return [[device.bundle for device in node] for node in engine.nodes]


def test_an_engine_larger_than_a_node_takes_whole_nodes():
    (engine,) = lay_out([ModelServing("a", "/a", True, (group("regular", 16, 16),))], DEVICES, gpus_per_node=8).engines
    assert bundles(engine) == [list(range(8)), list(range(8, 16))]
    assert engine.num_gpus == 16


def test_an_engine_has_a_part_on_each_node_that_its_gpus_lie_on():
    """Behind a trainer that has half a node; each part begins at a device of its own."""
    groups = (group("regular", 16, 8), group("placeholder", 2, 1), group("regular", 2, 2))
    engines = lay_out([ModelServing("a", "/a", True, groups)], DEVICES[4:], gpus_per_node=8, first_gpu=4).engines
    assert [bundles(engine) for engine in engines] == [
        [[4, 5, 6, 7], [8, 9, 10, 11]], [[12, 13, 14, 15], [16, 17, 18, 19]], [[22, 23]],
    ]  # fmt: skip
    assert [[node[0].device_id for node in engine.nodes] for engine in engines] == [[4, 0], [4, 0], [6]]
    # Weight groups and handles count as if there were no nodes.
    assert ids(engines) == [(0, 0, 8), (1, 8, 8), (2, 18, 2)]


def test_engines_count_their_nodes_from_the_first_gpu_of_the_run():
    args = SimpleNamespace(
        sglang_config=None, rollout_num_gpus=4, rollout_num_gpus_per_engine=2, prefill_num_servers=None,
        hf_checkpoint="/actor", num_gpus_per_node=2, rollout_external=False, colocate=False, has_trainer=True,
        has_engines=True, world_size=1,
    )  # fmt: skip
    places = [(1, 1), (2, 0), (3, 1), (4, 0)]
    assert [bundles(engine) for engine in topology_of(args, places).engines] == [[[1], [2]], [[3], [4]]]
    args.world_size = 2
    assert [bundles(engine) for engine in topology_of(args, places).engines] == [[[1, 2]], [[3, 4]]]
