"""What is held at once while experts of several ranks are made whole for a push: a bucket, and no more than one beside it."""

import time

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.models.tiny_model import tiny_args, write_tiny_mixture
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
