"""Experts of a Megatron model that reach engine ranks without a gather: each is given those that it hosts, and all else."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.tiny_model import tiny_args, write_tiny_mixture
from tests.support.processes.distributed import run_distributed
from tests.support.processes.opened_buckets import open_bucket

EXPERTS, RANKS = 4, 2
# Ranks on two nodes share no memory of the host, so each gives its own.
FLAGS = {
    "colocate": True, "update_weight_transport": "nccl", "has_trainer": True, "has_engines": True, "rollout_external": False,
    "world_size": RANKS, "actor_num_nodes": RANKS, "num_gpus_per_node": 1, "rollout_num_gpus": RANKS,
    "rollout_num_gpus_per_engine": RANKS, "sglang_ep_size": RANKS, "expert_model_parallel_size": RANKS,
    "expert_tensor_parallel_size": 1, "num_rollout": 0, "rollout_external_engine_infos": None,
}  # fmt: skip


class Engine:
    """Takes orders at once, but for those with a name that `refuses` is part of. `received`: by order and rank, tensors."""

    def __init__(self, refuses=None):
        self.received, self._refuses = [], refuses
        self.update_weights_from_tensor = SimpleNamespace(remote=self._order)

    def _order(self, handles, load_format, timeout, version):
        from slime.utils.errors import RunError

        order = [open_bucket(handle)[1] for handle in handles]
        if self._refuses is not None and any(self._refuses in name for of_rank in order for name in of_rank):
            return RunError("the shape is another")
        self.received.append(order)
        return None


def push(root, layouts, max_bytes, refuses):
    """By layout, what came of a push on this rank: what was sent, what the engine got, and the names that were gathered."""
    import torch.distributed as dist

    from slime.backends.megatron_utils import hf_conversion
    from slime.observability import waiting
    from slime.training.actor_rank import ActorRank
    from slime.weights.source import WeightSource
    from slime.weights.transports import ColocatedTransport, Receiver
    from tests.support.processes import megatron_worker as megatron

    waiting.wait_for_each = lambda refs, name, timeout, **options: refs
    gather, gathered = hf_conversion._gather_experts, []
    hf_conversion._gather_experts = lambda layout, name, *rest: gathered.append(name) or gather(layout, name, *rest)
    found = {}
    for layout, flags in layouts.items():
        gathered.clear()
        args = tiny_args(root, **{**FLAGS, **flags})
        backend, engine = megatron.load_backend(args), Engine(refuses)
        rank = SimpleNamespace(args=args, backend=backend, _tensors_of_checkpoint=backend.stage_tensors)
        transport, sends = ColocatedTransport(args, 0, 1), dist.get_rank() == 0
        walk = WeightSource(ActorRank._buckets(rank, max_bytes, {}), transport, backend.expected_names(), sends)
        walk.connect([Receiver(0, engine, RANKS, 0)])
        sent = walk.send(1)
        dist.barrier()
        walk.close()
        found[layout] = sent, engine.received, list(gathered)
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf") / "qwen3_moe"
    write_tiny_mixture(root, "qwen3_moe", vocab_size=128)
    return root, load_file(root / "model.safetensors")


LAYOUTS = {
    "directly": {},
    "directly, attention cut": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "gathered": {"sglang_ep_size": 1},
}


def test_an_engine_rank_gets_the_experts_that_it_hosts_and_no_others(mixture):
    root, stored = mixture
    max_bytes = 3 * stored["model.layers.0.mlp.experts.0.up_proj.weight"].nbytes
    source, helper = run_distributed(push, RANKS, (root, LAYOUTS, max_bytes, None))
    for layout in LAYOUTS:
        sent, received, gathered = source[layout]
        assert (sent.failed, sent.refusal, sorted(sent.names)) == ({}, None, sorted(stored)), layout
        assert sent.num_bytes == sum(tensor.nbytes for tensor in stored.values())
        assert helper[layout][0] is None and bool(gathered) is (layout == "gathered")
        for rank in range(RANKS):
            got = {name: tensor for order in received for name, tensor in order[rank].items()}
            hosted = {
                name
                for name in stored
                if layout == "gathered" or expert_of(name) is None or expert_of(name) * RANKS // EXPERTS == rank
            }
            assert got.keys() == hosted and all(torch.equal(got[name], stored[name]) for name in hosted), (layout, rank)
        sizes = [tensor.nbytes for name, tensor in stored.items() if ".experts." in name]
        orders = [order for order in received if any(".experts." in name for of_rank in order for name in of_rank)]
        if layout != "gathered":
            # Both ranks get something in each.
            assert len(orders) == -(-len(sizes) // RANKS // 3) and all(all(order) for order in orders)


def expert_of(name):
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


@pytest.mark.parametrize("refuses", ["embed_tokens", ".experts.3."])
def test_an_engine_that_refuses_leaves_no_rank_waiting_for_experts(mixture, refuses):
    """With the first bucket, and among the experts."""
    root, stored = mixture
    max_bytes = stored["model.layers.0.mlp.experts.0.up_proj.weight"].nbytes
    source, helper = run_distributed(push, RANKS, (root, {"directly": {}}, max_bytes, refuses))
    sent, received, _ = source["directly"]
    assert sent.failed == {0: "the shape is another"} and sent.certain
    assert helper["directly"][0] is None
    # What was on its way arrived, and no more.
    arrived = {name for order in received for of_rank in order for name in of_rank}
    assert arrived < set(stored) and any(".experts." in name for name in arrived) is (refuses != "embed_tokens")
