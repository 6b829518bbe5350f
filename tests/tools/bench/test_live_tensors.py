import gc

import torch
import torch.utils.checkpoint

from tools.bench.live_tensors import LiveTensors


def test_a_storage_counts_once_until_it_is_freed():
    with LiveTensors() as live:
        a = torch.zeros(1000)
        view, part = a.view(10, 100), a[:5]
        assert live.current == 4000
        b = a + 1
        assert live.current == 8000
        del a
        assert live.current == 8000
        del view, part
        assert live.current == 4000 and live.peak == 8000
        live.reset_peak()
        assert live.peak == 4000
        del b
        gc.collect()
        assert live.current == 0


def test_known_tensors_count_from_the_start_and_meta_tensors_never():
    weight = torch.zeros(100)
    with LiveTensors([weight], keep_shapes=True) as live:
        assert live.current == 400
        torch.empty(10**9, device="meta")
        weight.mul_(2)
        assert live.peak == 400
        kept = weight * 2
        assert live.peak_shapes[("aten.mul.Tensor", (100,), "torch.float32")] == 400
        del kept


def test_what_autograd_keeps_is_counted():
    """tanh keeps its output; its sum's backward makes one gradient of the same size."""
    x = torch.zeros(1000, requires_grad=True)
    with LiveTensors() as live:
        loss = torch.tanh(x * 2).sum()
        assert live.current == 4000 + 4
        loss.backward()
        assert live.peak >= 2 * 4000
        # The saved tensor is released with the backward pass; the gradient stays.
        del loss
        gc.collect()
        assert live.current == 4000


def test_resized_storages_are_counted_anew():
    with LiveTensors() as live:
        a = torch.zeros(100)
        a.untyped_storage().resize_(0)
        a.untyped_storage().resize_(1600)
        a.view(-1)
        assert live.current == 1600
