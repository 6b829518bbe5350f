import pytest

from slime.observability.timer import Timer, timer


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
