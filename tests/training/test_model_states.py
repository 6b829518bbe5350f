import pytest
import torch

from slime.training.model_states import ModelStates
from slime.utils.errors import RunError


def make():
    live = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    return live, ModelStates(lambda: live.items())


def test_block_swaps_weights_in_and_back():
    live, states = make()
    states.capture("ref")
    live["w"].add_(10)
    with states("ref"):
        assert states.active == "ref" and live["w"].tolist() == [1, 2]
    assert states.active == "actor" and live["w"].tolist() == [11, 12]


def test_weights_are_back_after_an_error():
    live, states = make()
    states.capture("ref")
    live["b"].zero_()
    with pytest.raises(ZeroDivisionError), states("ref"):
        raise ZeroDivisionError
    assert states.active == "actor" and live["b"].tolist() == [0]


def test_s12_wrong_active_state_is_refused():
    _, states = make()
    states.capture("ref")
    with states("ref"), pytest.raises(RunError, match="holds the state 'ref', not 'actor'"):
        states.require_active("actor")


def test_nested_blocks_return_to_the_outer_state():
    live, states = make()
    states.capture("ref")
    live["w"].zero_()
    states.capture("old")
    live["w"].fill_(5)
    with states("ref"):
        with states("old"):
            assert live["w"].tolist() == [0, 0]
        assert live["w"].tolist() == [1, 2]
    assert live["w"].tolist() == [5, 5]


def test_unknown_state_names_the_known_ones():
    _, states = make()
    with pytest.raises(RunError, match="no model state 'teacher'; known: actor"), states("teacher"):
        pass


def test_capture_replaces():
    live, states = make()
    assert "ref" not in states
    states.capture("ref")
    live["b"].fill_(9)
    states.capture("ref")
    live["b"].zero_()
    assert "ref" in states and "old" not in states
    with states("ref"):
        assert live["b"].tolist() == [9]
