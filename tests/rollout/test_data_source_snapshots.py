"""Saving and loading sources by the methods that they have."""

from types import SimpleNamespace

import numpy as np
import pytest

from slime.rollout.data_source import DataSourceSnapshots
from slime.utils.errors import UserError


class Cursor:
    """A source with a state but no save or load."""

    def __init__(self):
        self.state = {"position": [0], "weights": np.zeros(2, np.float32)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class OwnPlace:
    """A source that only knows save and load."""

    def __init__(self):
        self.calls = []

    def save(self, rollout_id):
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id):
        self.calls.append(("load", rollout_id))


@pytest.fixture
def args(tmp_path):
    directory = str(tmp_path)
    return SimpleNamespace(data_source_path="my.Source", save=directory, load=directory, fresh_data_state=False)


def test_a_state_alone_is_written_and_read_for_the_source(args):
    source = Cursor()
    states = DataSourceSnapshots(args, source)
    for rollout_id in range(3):
        source.state["position"][0] = 10 * rollout_id
        states.remember(rollout_id)
    source.state["position"][0] = 99
    states.save(1)
    states.save(7)
    restored = Cursor()
    DataSourceSnapshots(args, restored).load(1)
    assert restored.state["position"] == [10], "as it was after rollout 1, though the source went on changing it"
    assert restored.state["weights"].dtype == np.float32
    DataSourceSnapshots(args, restored).load(7)
    assert restored.state["position"] == [99]
    with pytest.raises(UserError, match="no data-source state of rollout 5 .*--fresh-data-state"):
        DataSourceSnapshots(args, restored).load(5)
    DataSourceSnapshots(args, restored).load(-1)


def test_a_state_that_is_not_plain_says_where(args):
    source = Cursor()
    source.state["handle"] = object()
    with pytest.raises(UserError, match=r"state\['handle'\] is a object"):
        DataSourceSnapshots(args, source).save(0)


def test_save_and_load_alone_are_called_with_the_rollout(args):
    source = OwnPlace()
    states = DataSourceSnapshots(args, source)
    states.remember(2)
    states.save(2)
    states.load(2)
    assert source.calls == [("save", 2), ("load", 2)]


def test_both_kinds_prefer_the_state(args):
    class Both(Cursor, OwnPlace):
        def __init__(self):
            Cursor.__init__(self)
            OwnPlace.__init__(self)

    source = Both()
    states = DataSourceSnapshots(args, source)
    states.save(0)
    states.load(0)
    assert source.calls == [] and source.state["position"] == [0]


def test_a_source_that_cannot_be_restored_is_named(args):
    with pytest.raises(UserError, match=r"--data-source-path my.Source: object has no load\(rollout_id\)"):
        DataSourceSnapshots(args, object()).load(4)
    args.fresh_data_state = True
    DataSourceSnapshots(args, object()).load(4)
