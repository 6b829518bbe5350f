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


def operations_on(one: torch.Tensor) -> list[torch.Tensor]:
    """What many kinds of operations give, for arguments that differ in little."""
    whole = torch.ones(6, 4, dtype=torch.int64, device="meta")
    given = [one, whole, one + 1, one.t() + 1, one.bfloat16() + 1, one[1:] + 1, one[:, 1:] + one[:, :3], one + one]
    # 2, 2.0 and True are equal, and of numbers of a tensor each makes another type.
    given += [whole * 2, whole * 2.0, whole * True, whole.float() * 2, torch.full((2,), 1), torch.full((2,), 1.0)]
    given += [
        one.t(),
        one[1:3],
        one[2:4],
        one[:, 1:3],
        one.view(3, 8),
        one.view(torch.int32),
        one.reshape(24),
        one.detach(),
    ]
    # Views of views that begin at different places; the beginnings of the last two count in halves of what those of theirs do.
    given += [one[1:3][:, 1:], one[2:4][:, 1:], one[1:3].view(torch.int16), one[2:4].view(torch.int16)]
    given += [one.t().contiguous(), one.contiguous(), one.t().reshape(24), *one.chunk(3), *one.unbind(1), *one.topk(2)]
    given += [one.add_(1.0), one.mul_(one), one.mul_(given[2]), torch.add(one, 1.0, out=given[2]), given[7].t_()]
    given += [torch.cat([one, one]), torch.cat([one, given[2]], dim=1), one.sum(), one.sum(-1, keepdim=True), one.cpu()]
    given += [
        whole.index_select(0, whole[0]),
        one[whole[0]],
        one[:, whole[0]],
        one.index_copy_(0, whole[:2, 0], given[2][:2]),
    ]
    # It grows to what comes out.
    given += [torch.mul(one, 2.0, out=torch.empty(0, device="meta"))]
    pairs = torch.view_as_complex(one.view(6, 2, 2))
    given += [pairs, pairs.conj(), pairs.conj() * 2, pairs.conj().imag, pairs.real]
    given += [torch.zeros(3), torch.zeros(3, device="meta"), torch.arange(3), torch.arange(3.0)]
    torch.set_default_dtype(torch.bfloat16)
    return [*given, torch.zeros(3), torch.full((2,), 1.0), torch.arange(3.0)]


def looks(tensors: list[torch.Tensor]) -> list[tuple]:
    holders = [tensor.untyped_storage()._cdata for tensor in tensors]
    return [
        (
            tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.is_conj(),
            tensor.is_neg(), tensor.untyped_storage().nbytes(), holders.index(holder),
        )
        for tensor, holder in zip(tensors, holders, strict=True)
    ]  # fmt: skip


def test_what_is_remembered_is_what_torch_would_say(monkeypatch):
    usual = torch.get_default_dtype()
    asking = FakeTensorMode()
    asking.cache_enabled = False
    try:
        with asking:
            expected = looks(operations_on(floats(6, 4)))
        with recording(monkeypatch):
            for _ in range(3):
                torch.set_default_dtype(usual)
                assert looks(operations_on(floats(6, 4))) == expected
    finally:
        torch.set_default_dtype(usual)


def test_torch_is_asked_once_what_an_operation_gives(monkeypatch):
    asked = []
    dispatch = FakeTensorMode.dispatch

    def ask(mode, func, types, args=(), kwargs=None):
        asked.append(str(func))
        return dispatch(mode, func, types, args, kwargs or {})

    monkeypatch.setattr(FakeTensorMode, "dispatch", ask)
    with recording(monkeypatch):
        values = floats(6, 4)
        for _ in range(3):
            (values * 2.0).t().add_(1.0)
            values.topk(2)
            # It may reach beyond its argument, whose storage may be of any size.
            values.as_strided((4,), (2,))
    assert asked == [
        "aten.empty.memory_format",
        "aten.mul.Tensor",
        "aten.t.default",
        "aten.add_.Tensor",
        "aten.topk.default",
        *["aten.as_strided.default"] * 3,
    ]


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
