"""What happens on a fake device is taken down. The meta device stands for it: fake tensors of CUDA need a library."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slime.rehearsal.recorder import Recorder, place_of, placeholders

KIB = 1024


@contextlib.contextmanager
def recording(monkeypatch):
    recorder = Recorder("meta")
    for (owner, name), method in placeholders(recorder).items():
        monkeypatch.setattr(owner, name, method)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield recorder


def floats(count: int, *columns: int) -> torch.Tensor:
    return torch.empty(count, *columns, device="meta")


def test_peak_is_the_most_that_lived_at_once(monkeypatch):
    with recording(monkeypatch) as recorder:
        with recorder.during("load"):
            weight = floats(256)
        with recorder.during("step"):
            one = floats(512)
            view = one.view(2, 256)[0]
            del one
            # 2 KiB live by their view still; 4 KiB come and go before 3 KiB come.
            two = floats(1024)
            del two
            three = floats(256, 3)
            del view, three
        peaks = recorder.peaks({recorder.note_storage(weight): "weights"}, columns=3)
    assert peaks["load"] == {"weights": KIB}
    assert peaks["step"] == {"weights": KIB, "activations": 6 * KIB}


def test_a_save_takes_memory_on_both_sides(monkeypatch):
    with recording(monkeypatch) as recorder:
        with recorder.during("step"):
            before = torch.zeros(512)
        with recorder.during("save"):
            before.view(2, 256)
            one = floats(256).cpu()
            view = one[:128]
            two = torch.zeros(512)
            del one, two
            three = torch.zeros(256)
            gathered = floats(512)
            del three, view, gathered
        peaks = recorder.peaks({}, columns=0)
        del before
    assert recorder.host_peak == 3 * KIB
    assert peaks["save"] == {"save": 2 * KIB}


def test_logits_are_known_by_their_width_and_a_push_by_its_phase(monkeypatch):
    with recording(monkeypatch) as recorder:
        with recorder.during("step"):
            logits = floats(128, 8)
            logits = logits * 2.0
        with recorder.during("push"):
            gathered = floats(256)
        peaks = recorder.peaks({}, columns=8)
        del logits, gathered
    assert peaks["step"] == {"logits": 8 * KIB}
    assert peaks["push"] == {"logits": 4 * KIB, "push": KIB}


def test_gradients_of_a_graph_are_freed_as_it_is_walked(monkeypatch):
    with recording(monkeypatch) as recorder, recorder.during("step"):
        weight = floats(256).requires_grad_()
        loss = (weight * 2.0).exp().sum()
        loss.backward()
        del loss
        peaks = recorder.peaks({}, columns=0)
    # The weight and two tensors of its size, never three: what exp keeps goes before the last gradient comes. Loss and its
    # gradient are numbers of 4 bytes.
    assert peaks["step"]["activations"] == 3 * KIB + 8


def test_every_way_to_a_value_is_a_wait(monkeypatch):
    with recording(monkeypatch) as recorder, recorder.during("step"):
        values = floats(4)
        assert values.sum().item() == 1.0
        assert bool(values.any()) is True
        assert float(values[0]) == 1.0
        assert values.tolist() == [0.0] * 4
        values.cpu()
        torch.zeros(4).to("meta")
        values.to("cpu", non_blocking=True)
        values.copy_(torch.zeros(4), non_blocking=True)
        # What is on the host is known there.
        assert torch.zeros(4).sum().item() == 1.0 and torch.tensor(7).item() == 7
    waits = {}
    for what, count in recorder.waits["step"].items():
        waits[what.partition(" at ")[0]] = waits.get(what.partition(" at ")[0], 0) + count
    assert waits == {"a value": 3, "values": 1, "a copy to the host": 1, "a copy to the device": 1}


def test_an_index_of_booleans_waits_for_their_number_and_takes_all(monkeypatch):
    with recording(monkeypatch) as recorder:
        values = floats(6, 2)
        mask = values[:, 0] > 0
        assert values[mask].shape == (6, 2) and mask.nonzero().shape == (6, 1)
        assert torch.masked_select(values, mask[:, None]).shape == (12,)
        filled = values.clone()
        # A number of the host is filled in without counting.
        filled.index_put_((mask,), torch.tensor(0.0))
        waits = sum(recorder.waits["start"].values())
        filled[mask] = values[mask]
    assert waits == 3
    assert sum(recorder.data_dependent.values()) == 4 and filled.shape == (6, 2)
    assert sum(recorder.waits["start"].values()) == 5


def test_views_launch_nothing(monkeypatch):
    with recording(monkeypatch) as recorder, recorder.during("step"):
        values = floats(4, 4)
        before = recorder.operations["step"]
        values.view(16)[2:].t()
        assert recorder.operations["step"] == before
        values.add_(1.0)
        values + values
        torch.ones(3) + 1.0
        assert recorder.operations["step"] == before + 2


@pytest.mark.parametrize(
    ("filename", "place"),
    [
        ("/home/me/slime/slime/training/loss.py", "slime/training/loss.py:7"),
        ("/v/lib/site-packages/megatron/core/utils.py", "megatron/core/utils.py:7"),
        ("/v/lib/site-packages/torch/nn/modules/module.py", None),
        ("/home/me/slime/slime/rehearsal/recorder.py", None),
        ("/usr/lib/python3.11/contextlib.py", None),
    ],
)
def test_places_are_lines_that_somebody_can_change(filename, place):
    assert place_of(filename, 7) == place
