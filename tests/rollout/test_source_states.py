"""What a source has for saving, a state or methods that save and load, is written and read for it."""

import copy
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from slime.rollout.data_source_files import DrawnAhead, state_directory, write_drawn_ahead
from slime.rollout.draws import DataSourceSnapshots, draw_groups
from slime.utils.errors import RunError, UserError
from tests.support.models.data_sources import make_args


class Cursor:
    """A source with a state but no save or load."""

    def __init__(self):
        self.state = {"position": [0], "weights": np.zeros(2, np.float32)}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class OnlySaves:
    """A source that only knows save and load."""

    def __init__(self):
        self.calls = []

    def save(self, rollout_id):
        self.calls.append(("save", rollout_id))

    def load(self, rollout_id):
        self.calls.append(("load", rollout_id))


@pytest.fixture
def args(tmp_path):
    return make_args(save=str(tmp_path), load=str(tmp_path), fresh_data_state=False)


def test_a_state_alone_is_written_and_read_for_the_source(args):
    source = Cursor()
    states = DataSourceSnapshots(args, source)
    for rollout_id in range(3):
        source.state["position"][0] = 10 * rollout_id
        states.remember(rollout_id)
    source.state["position"][0] = 99
    states.save(1)
    states.remember(7)
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
        states = DataSourceSnapshots(args, source)
        states.remember(0)
        states.save(0)


def test_a_state_that_was_not_taken_is_an_error_and_not_the_present_one(args):
    states = DataSourceSnapshots(args, Cursor())
    for rollout_id in range(20):
        states.remember(rollout_id)
    states.save(0)
    states.save(19)
    with pytest.raises(
        RunError, match="the data state after rollout 20 cannot be saved: none was taken when its prompts"
    ):
        states.save(20)


def test_save_and_load_alone_are_called_with_the_rollout(args):
    source = OnlySaves()
    states = DataSourceSnapshots(args, source)
    states.remember(2)
    states.save(2)
    states.load(2)
    assert source.calls == [("save", 2), ("load", 2)]


def test_both_kinds_prefer_the_state(args):
    class Both(Cursor, OnlySaves):
        def __init__(self):
            Cursor.__init__(self)
            OnlySaves.__init__(self)

    source = Both()
    states = DataSourceSnapshots(args, source)
    states.remember(0)
    states.save(0)
    states.load(0)
    assert source.calls == [] and source.state["position"] == [0]


def test_a_source_that_stands_before_another_is_asked_for_its_own_state(args):
    class Before(Cursor):
        inner = OnlySaves()

        def __getattr__(self, name):
            return getattr(self.inner, name)

    source = Before()
    states = DataSourceSnapshots(args, source)
    states.remember(0)
    states.save(0)
    states.load(0)
    assert source.inner.calls == [] and source.state["position"] == [0]


@pytest.mark.parametrize(("name", "content"), [("state.json", b"{"), ("state.json", b"\xff"), ("state.json", b"[]"),
                                               ("arrays.safetensors", b"\x10"), ("arrays.safetensors", None)])  # fmt: skip
@pytest.mark.parametrize("part", ["state", "drawn ahead"])
def test_a_damaged_state_names_the_flag_that_leaves_it(args, caplog, name, content, part):
    states = DataSourceSnapshots(args, Cursor())
    states.remember(0)
    states.save(0)
    directory = state_directory(args.save, 0)
    if part != "state":
        array = {"array": np.ones(3, np.float32)}
        write_drawn_ahead(directory, DrawnAhead(entries=[array]))
        directory /= "drawn_ahead"
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    source = Cursor()
    with pytest.raises(UserError, match=f"{directory}: .*--fresh-data-state"):
        DataSourceSnapshots(args, source).load(0)
    args.fresh_data_state, before = True, copy.deepcopy(Cursor().state["position"])
    DataSourceSnapshots(args, source).load(0)
    assert source.state["position"] == before and str(directory) in caplog.text


def test_a_source_that_cannot_be_restored_is_named(args):
    with pytest.raises(UserError, match=r"--data-source-path my.Source: object has no load\(rollout_id\)"):
        DataSourceSnapshots(args, object()).load(4)
    args.fresh_data_state = True
    DataSourceSnapshots(args, object()).load(4)


def test_a_flag_for_missing_states_leaves_one_of_another_program_that_cannot_be_read(args, caplog):
    directory = Path(args.load) / "rollout"
    directory.mkdir()
    (directory / "global_dataset_state_dict_0.pt").write_bytes(b"no archive")
    source = Cursor()
    with pytest.raises(UserError, match="global_dataset_state_dict_0.pt: cannot be read .*--fresh-data-state"):
        DataSourceSnapshots(args, source).load(0)
    args.fresh_data_state = True
    DataSourceSnapshots(args, source).load(0)
    assert source.state["position"] == [0] and "the data starts from zero" in caplog.text


@pytest.mark.parametrize("source_class", [Cursor, OnlySaves])
def test_a_state_does_not_wait_for_ever_for_a_source_that_hangs(args, source_class):
    """The rollout that is to be saved has ended, and later ones draw already."""
    args.http_request_timeout, returns, hangs, told = 0.2, threading.Event(), threading.Event(), []

    class Hanging(source_class):
        def get_samples(self, n):
            hangs.set()
            returns.wait(60)
            return []

    source = Hanging()
    states = DataSourceSnapshots(args, source)
    drawing = threading.Thread(target=draw_groups, args=(args, source, 1, 1), daemon=True)
    drawing.start()
    assert hangs.wait(60)

    def save():
        with pytest.raises(UserError) as error:
            states.remember(0)
            states.save(0)
        told.append(str(error.value))

    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    saving.join(30)
    returns.set()
    drawing.join(60)
    assert told and re.fullmatch(
        "--data-source-path my.Source: get_samples or add_samples, which another rollout has called, did not return within "
        "--http-request-timeout 0.2 s",
        told[0],
    )
