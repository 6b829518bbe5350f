import pytest

from slime.observability.timer import PeakMemory, Timer, inverse_timer, phase, timer, with_defer
from slime.utils.device import Accelerator


def test_phases_add_up_and_are_read_once():
    Timer().pop_seconds()
    Timer().add("train", 1.5)
    Timer().add("train", 0.5)
    Timer().add("save", 2.0)
    assert Timer().pop_seconds() == {"train": 2.0, "save": 2.0}
    assert Timer().pop_seconds() == {}


def test_a_phase_that_raises_is_counted():
    Timer().pop_seconds()
    with pytest.raises(ZeroDivisionError), timer("train"):
        raise ZeroDivisionError
    assert Timer().pop_seconds()["train"] >= 0


def test_a_part_of_a_phase_may_be_left_out(monkeypatch):
    Timer().pop_seconds()
    now = iter((0.0, 2.0, 5.0, 6.0))
    monkeypatch.setattr("slime.observability.timer.time.perf_counter", lambda: next(now))
    with timer("train"), inverse_timer("train"):
        pass
    assert Timer().pop_seconds() == {"train": 3.0}


class CountingAccelerator(Accelerator):
    """A device with a counter of its peak, as CUDA has."""

    def __init__(self):
        self.now = self.peak = 0

    def allocate(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)

    def peak_memory_allocated(self):
        return self.peak

    def reset_peak_memory(self):
        self.peak = self.now


def test_every_phase_has_its_own_peak_of_memory(monkeypatch):
    device = CountingAccelerator()
    monkeypatch.setattr("slime.observability.timer.get_accelerator", lambda: device)
    PeakMemory().pop_bytes()
    Timer().pop_seconds()
    device.allocate(100)
    device.allocate(-90)
    with phase("train"):
        device.allocate(30)
        device.allocate(-30)
        with phase("log_probs"):
            device.allocate(5)
        with pytest.raises(ZeroDivisionError), phase("actor_train"):
            device.allocate(20)
            raise ZeroDivisionError
    with phase("log_probs"):
        device.allocate(-25)
    # The peak of all of `train` was before the first phase within.
    assert PeakMemory().pop_bytes() == {"train": 40, "log_probs": 35, "actor_train": 35}
    assert PeakMemory().pop_bytes() == {}
    assert Timer().pop_seconds().keys() == {"train", "log_probs", "actor_train"}


def test_a_device_that_counts_no_peak_tells_none(monkeypatch):
    monkeypatch.setattr("slime.observability.timer.get_accelerator", Accelerator)
    PeakMemory().pop_bytes()
    with phase("train"):
        pass
    assert PeakMemory().pop_bytes() == {}


def test_what_is_deferred_is_called_whatever_happens():
    calls = []

    @with_defer(lambda: calls.append("deferred"))
    def divide(a, b):
        calls.append("divided")
        return a / b

    assert divide(4, 2) == 2 and divide.__name__ == "divide"
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert calls == ["divided", "deferred"] * 2
