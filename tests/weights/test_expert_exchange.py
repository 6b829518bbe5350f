"""Who sends which expert to whom, in which round, and that it arrives; engine ranks and training ranks in all proportions."""

import random
from types import SimpleNamespace

import pytest
import torch

from slime.weights.expert_exchange import ExpertExchange, experts_go_directly, plan_rounds
from tests.support.processes.distributed import run_distributed

EXPERTS = 8


def filled(rounds, sizes):
    """By round, the bytes that each rank has of it: its own and what arrives, and what it packs, once for each selection."""
    found = []
    for of_round in rounds:
        counts, selections = {}, {}
        for name, sources in of_round.sources.items():
            for host, source in sources.items():
                counts[host] = counts.get(host, 0) + sizes[name]
                if host != source:
                    selections.setdefault((source, host), []).append(name)
        for source in {source for source, _ in selections}:
            for names in {tuple(names) for (sender, _), names in selections.items() if sender == source}:
                counts[source] = counts.get(source, 0) + sum(sizes[name] for name in names)
        found.append(counts)
    return found


def test_a_rank_that_needs_what_it_has_gets_it_from_itself_and_others_from_whoever_has_sent_least():
    holders, hosts = {"a": [0, 2], "b": [0, 2], "c": [1]}, {"a": [0, 1], "b": [1], "c": [1]}
    (only,) = plan_rounds({"a": 1, "b": 1, "c": 1}, holders, hosts, 9, 9)
    assert only.sources == {"a": {0: 0, 1: 0}, "b": {1: 2}, "c": {1: 1}}


def test_a_tensor_takes_the_first_round_in_which_all_its_ranks_have_room():
    sizes = {"large": 6, "larger": 7, "small": 4, "smaller": 3, "elsewhere": 10}
    at = {**dict.fromkeys(sizes, [0]), "elsewhere": [1]}
    rounds = plan_rounds(sizes, at, at, 10, 10)
    assert [list(of_round.sources) for of_round in rounds] == [["large", "small", "elsewhere"], ["larger", "smaller"]]
    assert filled(rounds, sizes) == [{0: 10, 1: 10}, {0: 10}]
    # Whoever sends has it, too.
    assert len(plan_rounds({"a": 6, "b": 6}, {"a": [0], "b": [0]}, {"a": [1], "b": [2]}, 10, 10)) == 2


def test_what_no_bucket_has_room_for_is_refused():
    with pytest.raises(
        ValueError, match="expert 5 .*11 bytes, which exceeds update_weight_buffer_size.*buffer-size 11"
    ):
        plan_rounds({"expert 5": 11}, {"expert 5": [0]}, {"expert 5": [0]}, 10, 10)
    # Where buckets are smaller than the flag says, it has one of its own.
    two = {"expert 5": [0], "expert 6": [0]}
    assert len(plan_rounds({"expert 5": 11, "expert 6": 1}, two, two, 10, 11)) == 2


def test_what_several_ranks_are_sent_is_packed_once_where_they_are_sent_the_same():
    hosts, holders = {"a": [1, 2, 3], "b": [1, 2, 3]}, {"a": [0], "b": [0]}
    rounds = plan_rounds({"a": 4, "b": 4}, holders, hosts, 8, 8)
    assert filled(rounds, {"a": 4, "b": 4}) == [{0: 8, 1: 8, 2: 8, 3: 8}]
    # Rank 2 alone would be sent both: three selections, and twice the memory of each.
    assert len(plan_rounds({"a": 4, "b": 4}, holders, {"a": [1, 2], "b": [2, 3]}, 8, 8)) == 2
    assert len(plan_rounds({"a": 4, "b": 4}, holders, {"a": [1], "b": [2, 3]}, 8, 8)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_stays_below_the_bucket_and_everything_is_sent_once(seed):
    draws = random.Random(seed)
    ranks, limit = range(draws.randint(1, 6)), draws.randint(20, 60)
    names = [f"tensor {number}" for number in range(draws.randint(1, 60))]
    sizes = {name: draws.randint(1, 20) for name in names}
    holders = {name: draws.sample(ranks, draws.randint(1, len(ranks))) for name in names}
    hosts = {name: draws.sample(ranks, draws.randint(1, len(ranks))) for name in names}
    rounds = plan_rounds(sizes, holders, hosts, limit, limit)
    assert sorted(name for of_round in rounds for name in of_round.sources) == sorted(names)
    for of_round in rounds:
        for name, sources in of_round.sources.items():
            assert sorted(sources) == sorted(hosts[name]) and set(sources.values()) <= set(holders[name])
            assert all(source == host for host, source in sources.items() if host in holders[name])
    for of_round, counts in zip(rounds, filled(rounds, sizes), strict=True):
        for rank, size in counts.items():
            taking_part = [own for own in of_round.sources.values() if rank in {*own, *own.values()}]
            assert size <= limit or len(taking_part) == 1


ARGS = SimpleNamespace(
    update_weight_transport="nccl", update_weight_mode="full", colocate=True, has_trainer=True, has_engines=True,
    rollout_external=False, world_size=4, rollout_num_gpus=4, rollout_num_gpus_per_engine=4, actor_num_nodes=2,
    num_gpus_per_node=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1, tensor_model_parallel_size=2,
    pipeline_model_parallel_size=1, sglang_config=None, sglang_ep_size=4, num_experts=EXPERTS,
    update_weight_buffer_size=2**29,
)  # fmt: skip


def with_flags(**flags):
    return SimpleNamespace(**{**vars(ARGS), **flags})


@pytest.mark.parametrize(
    ("flags", "direct"),
    [
        ({}, True),
        ({"rollout_num_gpus_per_engine": 2, "sglang_ep_size": 2}, True),
        ({"sglang_init_expert_location": "trivial", "sglang_ep_num_redundant_experts": 0}, True),
        # The memory of one rank serves all.
        ({"actor_num_nodes": 1, "num_gpus_per_node": 4}, False),
        ({"colocate": False}, False),
        ({"update_weight_transport": "disk"}, False),
        # Engine ranks share experts, or have others than those of their place.
        ({"sglang_ep_size": 2}, False),
        ({"sglang_ep_size": None}, False),
        ({"sglang_ep_num_redundant_experts": 2}, False),
        ({"sglang_enable_eplb": True}, False),
        ({"sglang_init_expert_location": "/places.json"}, False),
        ({"sglang_config": "/serving.yaml"}, False),
        ({"num_experts": 6}, False),
        # Training ranks share experts, or have not all layers, or each has all of them.
        ({"expert_tensor_parallel_size": None}, False),
        ({"pipeline_model_parallel_size": 2}, False),
        ({"expert_model_parallel_size": 1}, False),
        # Engines beside the training ranks.
        ({"rollout_num_gpus": 8}, False),
    ],
)
def test_experts_go_directly_where_each_device_wants_whole_ones(flags, direct):
    assert experts_go_directly(with_flags(**flags), shares_host_memory=True) is direct


def test_experts_go_directly_on_one_node_where_devices_have_memory_of_their_own():
    args = with_flags(actor_num_nodes=1, num_gpus_per_node=4)
    assert experts_go_directly(args, shares_host_memory=False)


def tensors_of(expert):
    """Of two layers, in two dtypes."""
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}": torch.full((3, 5), 10 * expert + layer, dtype=dtype)
        for layer in range(2)
        for name, dtype in (("up_proj.weight", torch.float32), ("down_proj.weight", torch.bfloat16))
    }


def halved(named_tensors):
    """Stands for a quantiser: two tensors of one, the first of which is of eight bits."""
    for name, tensor in named_tensors:
        yield name, (tensor / 2).to(torch.float8_e4m3fn)
        yield f"{name}_scale", tensor.new_full((1,), 2.0, dtype=torch.float64)


def exchange(expert_ranks, engine_size, max_bytes, quantised):
    """By walk, of two: the names of all rounds, what they gave this rank, its largest, and the bytes of all."""
    import torch.distributed as dist

    from slime.utils.process_groups import init_gloo_group

    dist.init_process_group("gloo")
    init_gloo_group()
    rank, each = dist.get_rank() % expert_ranks, EXPERTS // expert_ranks
    own = {}
    for expert in range(rank * each, (rank + 1) * each):
        own.update(tensors_of(expert))
    args = with_flags(rollout_num_gpus_per_engine=engine_size, sglang_ep_size=engine_size)
    walk = ExpertExchange(args, lambda: own, halved if quantised else iter, max_bytes)
    return [
        (
            [name for bucket in buckets for name in bucket.names],
            {name: tensor.double() for bucket in buckets for name, tensor in bucket},
            max(sum(tensor.nbytes for _, tensor in bucket) for bucket in buckets),
            sum(bucket.num_bytes for bucket in buckets),
        )
        for buckets in (list(walk.buckets()) for _ in range(2))
    ]


@pytest.mark.parametrize(
    ("expert_ranks", "engine_size", "quantised"), [(4, 4, False), (2, 4, False), (4, 2, False), (2, 4, True)]
)
def test_every_rank_gets_the_experts_that_its_engine_rank_hosts_and_no_others(expert_ranks, engine_size, quantised):
    """Four training ranks: of four, or twice of two, parts of the experts; and one engine, or two."""
    max_bytes = 128
    ranks = run_distributed(exchange, 4, (expert_ranks, engine_size, max_bytes, quantised))
    everything = {name: tensor for expert in range(EXPERTS) for name, tensor in tensors_of(expert).items()}
    if quantised:
        everything = dict(halved(everything.items()))
    for rank, walks in enumerate(ranks):
        each, place = EXPERTS // engine_size, rank % engine_size
        wanted = {
            name: tensor.double()
            for name, tensor in everything.items()
            if place * each <= int(name.split(".experts.")[1].split(".")[0]) < (place + 1) * each
        }
        for names, found, largest, num_bytes in walks:
            assert sorted(names) == sorted(everything), "the source checks the names of all"
            assert num_bytes == sum(tensor.nbytes for tensor in everything.values())
            assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
            assert largest <= max_bytes
