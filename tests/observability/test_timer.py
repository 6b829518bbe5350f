import pytest

from slime.observability.timer import Timer, inverse_timer, timer, with_defer


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
