"""What is held at once for a push whose tensors are of several ranks: while experts are made whole, a bucket and no more than
one beside it; on the rank that sends, what the plan counts."""

import concurrent.futures
import functools
import multiprocessing
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.models.tiny_model import tiny_args, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed

EXPERTS = {"expert_model_parallel_size": 2}
WHOLE = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **EXPERTS, "expert_tensor_parallel_size": 1}
CUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, **EXPERTS}
FOUR = {"expert_model_parallel_size": 4}


class HeldBytes(TorchDispatchMode):
    """`peak`: the most bytes of tensors that were made in the block and lived at once. `given`: what was there before.

    Above `bound` it first waits for what others hold: a thread of Gloo lets go of tensors a moment after it has said that
    its work is done, and what the block itself holds stays while it waits here.
    """

    def __init__(self, given, bound):
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self._bound = bound
        self._made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        deadline = time.monotonic() + 5
        while (held := self._held()) > max(self._bound, self.peak) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.peak = max(self.peak, held)
        return result

    def _held(self):
        self._made = {key: held for key, held in self._made.items() if not held[0].expired()}
        return sum(size for _, size in self._made.values())


def bound_of(flags, size, expert):
    """A bucket, a gather (and its parts, which are put together), and the tensor that is taken out of it."""
    cut = flags.get("expert_tensor_parallel_size", flags.get("tensor_model_parallel_size", 1)) > 1
    return size + max(size, expert) * (2 if cut else 1) + expert


def push(root, layouts, sizes, expert):
    """By layout and size of a bucket: the weights in buckets, and the most bytes that were held for experts."""
    from slime.backends.megatron_utils import hf_conversion
    from slime.weights.buckets import split_into_buckets
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for layout, flags in layouts.items():
        for size in sizes:
            args = tiny_args(root, **flags, update_weight_buffer_size=size)
            chunks = megatron.load_model(args)
            names = {name for name in hf_conversion.names_of_stage(args, chunks) if ".experts." in name}
            tensors = hf_conversion.iter_stage_named_tensors(args, chunks, names)
            weights = {}
            given = (parameter for chunk in chunks for parameter in chunk.parameters())
            with HeldBytes(given, bound_of(flags, size, expert)) as held:
                for bucket in split_into_buckets(tensors, size):
                    # As arrays of others, which are not counted.
                    weights.update((name, tensor.numpy().copy()) for name, tensor in bucket)
                    del bucket
            found[layout, size] = weights, held.peak
    return found


def assert_bounded(root, ranks, layouts, sizes, expert):
    stored = {name: tensor for name, tensor in load_file(root / "model.safetensors").items() if ".experts." in name}
    for layout, flags in layouts.items():
        for size in sizes:
            for weights, peak in (rank[layout, size] for rank in ranks):
                assert weights.keys() == stored.keys(), (layout, size)
                assert all((weights[name] == tensor.numpy()).all() for name, tensor in stored.items()), (layout, size)
                assert peak <= bound_of(flags, size, expert), (layout, size, peak)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A model with 4 experts, and the bytes of one expert's gates and ups."""
    root = tmp_path_factory.mktemp("hf") / "qwen3_moe"
    write_tiny_mixture(root, "qwen3_moe", vocab_size=128)
    stored = load_file(root / "model.safetensors")
    return root, 2 * stored["model.layers.0.mlp.experts.0.up_proj.weight"].nbytes


def test_experts_of_two_ranks_are_gathered_in_the_room_of_a_bucket(mixture):
    root, expert = mixture
    layouts, sizes = {"experts": EXPERTS, "whole": WHOLE}, [expert // 2, expert, 8 * expert]
    ranks = run_distributed(push, 2, (root, layouts, sizes, expert))
    assert_bounded(root, ranks, layouts, sizes, expert)
    assert all(rank[layout, 8 * expert][1] > 3 * expert for rank in ranks for layout in layouts), "of all at once"


@pytest.mark.slow
def test_experts_of_four_ranks_are_gathered_in_the_room_of_a_bucket(mixture):
    root, expert = mixture
    layouts, sizes = {"four": FOUR, "cut": CUT}, [expert // 2, expert, 2 * expert, 3 * expert, 16 * expert]
    ranks = run_distributed(push, 4, (root, layouts, sizes, expert))
    assert_bounded(root, ranks, layouts, sizes, expert)


TENSORS = {"tensor_model_parallel_size": 2}
PLACED = {
    "rollout_external_engine_infos": None, "rollout_external": False, "has_trainer": True, "has_engines": True,
    "world_size": 2, "rollout_num_gpus": 1, "colocate": True, "num_gpus_per_node": 2, "use_critic": False,
}  # fmt: skip


def send(root, flags, size):
    """By transport: the names that an engine in a process of its own received, and the most bytes that this rank held beside
    its model while it sent them or helped."""
    import torch.distributed as dist

    from slime.backends.megatron_utils import hf_conversion
    from slime.observability import waiting
    from slime.weights.buckets import split_into_buckets
    from slime.weights.source import WeightSource
    from slime.weights.transports import Receiver, process_group
    from slime.weights.transports.shared_handles import SharedHandlesTransport
    from tests.support.processes import megatron_worker as megatron
    from tests.support.processes.weight_peers import take

    # The engine's answers are no answers of Ray.
    waiting.wait_for_all = waiting.wait_for_each = lambda answers, *_, **__: [one.result(60) for one in answers]
    process_group._errors_of = lambda answers, seconds: {}
    args = tiny_args(root, **flags, update_weight_buffer_size=size, **PLACED)
    chunks, found = megatron.load_model(args), {}
    names, given = hf_conversion.names_of_stage(args, chunks), [*chunks[0].parameters()]
    for transport in (process_group.ProcessGroupTransport, SharedHandlesTransport):
        sends = dist.get_rank() == 0
        source = WeightSource(
            lambda: split_into_buckets(hf_conversion.iter_stage_named_tensors(args, chunks, names), size),
            transport(args, 0, 1) if sends else None,
        )
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as process:
            orders = ("init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed",
                      "update_weights_from_tensor")  # fmt: skip
            remotes = {
                order: SimpleNamespace(remote=functools.partial(process.submit, take, order)) for order in orders
            }
            source.connect([Receiver(0, SimpleNamespace(**remotes), 1, 0)])
            with HeldBytes(given, 3 * size) as held:
                source.send(1)
            received = set(process.submit(take, "names_received").result(60)) if sends else set()
            source.close()
        found[transport.__name__] = received, held.peak
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model_type, flags, mlp", [("qwen3", TENSORS, "mlp"), ("qwen3_moe", EXPERTS, "mlp.experts.0")])
def test_a_rank_that_sends_holds_two_buckets_and_what_it_gathers(tmp_path, model_type, flags, mlp):
    """Two flat buckets, the gathered tensors of the one that is being filled, and the largest gather with its parts."""
    write = write_tiny_model if model_type == "qwen3" else functools.partial(write_tiny_mixture, model_type=model_type)
    write(tmp_path, layers=8, hidden=64, vocab_size=128)
    stored, size = load_file(tmp_path / "model.safetensors"), 2**18
    # Gates and ups are one parameter; of experts those of both ranks are gathered at once.
    gather = 2 * stored[f"model.layers.0.{mlp}.up_proj.weight"].nbytes * (2 if flags is EXPERTS else 1)
    assert 2 * gather < size < sum(tensor.nbytes for tensor in stored.values()) / 4
    sender, helper = run_distributed(send, 2, (tmp_path, flags, size))
    for way, (names, peak) in sender.items():
        assert names == stored.keys(), way
        assert 2 * size + gather < peak <= 3 * size + 2 * gather, (way, peak)
        assert helper[way][1] <= size + 2 * gather, "a rank that helps has no buffers"
