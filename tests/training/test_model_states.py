"""Sets of weights that take turns, and when those beside the actor's change."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slime.arguments.checkpoints import WeightSource
from slime.observability.timer import Timer
from slime.training.model_states import ModelStates, StateSchedule
from slime.utils.device import Accelerator
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


def test_states_that_take_turns_follow_each_other_and_the_actor_comes_back():
    live, states = make()
    for value, name in ((7, "ref"), (8, "teacher"), (9, "actor")):
        live["w"].fill_(value)
        if name != "actor":
            states.capture(name)
    with states.turns():
        for name, value in (("ref", 7), ("teacher", 8), ("actor", 9), ("ref", 7)):
            with states(name):
                assert (states.active, live["w"].tolist()) == (name, [value, value])
        with pytest.raises(RunError, match="holds the state 'ref', not 'actor'"):
            states.require_active("actor")
    assert (states.active, live["w"].tolist()) == ("actor", [9, 9])
    with pytest.raises(ZeroDivisionError), states.turns(), states("ref"):
        raise ZeroDivisionError
    assert (states.active, live["w"].tolist()) == ("actor", [9, 9])
    with states("ref"), pytest.raises(RunError, match="holds the state 'ref', not 'actor'"), states.turns():
        pass
    live["w"].fill_(10)
    with states("ref"):
        pass
    assert live["w"].tolist() == [10, 10], "outside of turns the actor is put aside each time"


class Copies(TorchDispatchMode):
    """Whether each copy into another tensor is waited for, and the storages that it goes from and to."""

    def __init__(self):
        super().__init__()
        self.waited_for, self.storages = [], []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation is torch.ops.aten.copy_.default:
            self.waited_for.append(True not in arguments[2:])
            self.storages.append(tuple(tensor.untyped_storage().data_ptr() for tensor in arguments[1::-1]))
        return operation(*arguments, **(options or {}))


@pytest.fixture
def buffers(monkeypatch):
    """The pieces of pinned memory that were asked for."""

    class Counting(Accelerator):
        made = []

        def host_buffer(self, size):
            self.made.append(super().host_buffer(size))
            return self.made[-1]

    monkeypatch.setattr("slime.training.model_states.get_accelerator", Counting)
    return Counting.made


def test_a_state_is_one_buffer_and_the_actor_is_put_aside_once(buffers):
    """A copy is between the model and a piece of pinned memory, else the host would wait for it."""
    live, states = make()
    with Copies() as copies:
        for name in ("ref", "teacher"):
            states.capture(name)
        with states.turns():
            for name in ("ref", "teacher", "actor"):
                with states(name):
                    pass
    # w and b have a cache line each.
    assert [buffer.nbytes for buffer in buffers] == [128] * 3
    ref, teacher, actor = (buffer.data_ptr() for buffer in buffers)
    weights = [tensor.data_ptr() for tensor in live.values()]
    into = [(weight, copy) for copy in (ref, teacher, actor) for weight in weights]
    back = [(copy, weight) for copy in (ref, teacher, actor) for weight in weights]
    assert copies.storages == [*into, *back] and not any(copies.waited_for)


def test_states_of_any_dtype_go_to_and_fro_bit_for_bit(buffers):
    numbers = torch.Generator().manual_seed(0)
    shapes = {torch.bfloat16: (3, 5), torch.float32: (), torch.int64: (1,), torch.uint8: (7,), torch.float64: (0, 2)}

    def filled():
        raw = {t: torch.randint(256, (*s, t.itemsize), generator=numbers, dtype=torch.uint8) for t, s in shapes.items()}
        return {dtype: value.view(dtype).reshape(shapes[dtype]) for dtype, value in raw.items()}

    def bits():
        return {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in live.items()}

    live = {str(dtype): tensor for dtype, tensor in filled().items()}
    states = ModelStates(lambda: live.items())
    expected = {"ref": bits()}
    states.capture("ref")
    for dtype, tensor in filled().items():
        live[str(dtype)].copy_(tensor)
    expected["actor"] = bits()
    assert expected["ref"] != expected["actor"]
    for name in ("ref", "actor") * 2:
        with states(name):
            assert bits() == expected[name]
    assert bits() == expected["actor"]
    # 30, 4, 8, 7 and 0 bytes, each from a multiple of 64 on; the buffers are used again.
    assert [buffer.nbytes for buffer in buffers] == [256] * 2


REFERENCE_LOADED, TEACHER_LOADED = 100.0, 200.0


def make_args(**overrides) -> SimpleNamespace:
    values = {
        "use_kl_loss": False, "kl_coef": 0.0, "use_opd": False, "opd_type": None, "keep_old_actor": False,
        "ref_update_interval": None, "update_weights_interval": 1, "has_engines": True, "asynchronous": False,
        "ref_load": "ref", "ref_ckpt_step": None, "opd_teacher_load": "teacher", "opd_teacher_ckpt_step": 7,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **overrides})


class Run:
    """A model of one number, which each rollout trains to `rollout id + 1`; it starts at 0, and nobody loads the actor."""

    def __init__(self, monkeypatch, stored=None, start=0, **overrides) -> None:
        self.args = make_args(**overrides)
        self.weight = torch.full((1,), float(start))
        self.lines = []
        self.states = ModelStates(lambda: [("w", self.weight)])
        self.schedule = StateSchedule(self.args, self.states, self.lines.append)
        self.start = start
        self._stored = stored or {}
        monkeypatch.setattr(
            "slime.training.model_states.source_of_reference", lambda args: WeightSource("hf", args.ref_load)
        )
        monkeypatch.setattr(
            "slime.training.model_states.source_of_teacher",
            lambda args: WeightSource("megatron", args.opd_teacher_load, args.opd_teacher_ckpt_step),
        )
        self.schedule.load(self._load_source, self._load_stored)
        assert self.weight == start, "a parameter that the actor's checkpoint lacks stays as it was drawn"
        self.schedule.start()

    def _load_source(self, source) -> None:
        with pytest.raises(RunError, match="'weights that are being loaded', not 'actor'"):
            self.states.require_active("actor")
        self.weight.fill_({"ref": REFERENCE_LOADED, "teacher": TEACHER_LOADED}[source.path])

    def _load_stored(self, name) -> bool:
        if name in self._stored:
            self.weight.fill_(self._stored[name])
        return name in self._stored

    def held(self, name) -> float:
        with self.states(name):
            return self.weight.item()

    def push(self) -> None:
        if self.args.has_engines:
            self.schedule.after_push()

    def train(self, rollout_id) -> None:
        self.schedule.before_rollout(rollout_id)
        self.trained_with = {name: self.held(name) for name in ("ref", "old_actor") if name in self.states}
        self.weight.fill_(float(rollout_id + 1))
        self.schedule.after_rollout(rollout_id)

    def checkpoint(self) -> dict:
        return {name: self.held(name) for name in self.schedule.stored()}


def test_nothing_is_held_that_no_flag_asks_for(monkeypatch):
    run = Run(monkeypatch)
    run.train(0)
    run.push()
    assert run.checkpoint() == {} and run.lines == []
    assert not any(name in run.states for name in ("ref", "teacher", "old_actor", "rollout_actor"))


@pytest.mark.parametrize("flags", [{"use_kl_loss": True}, {"kl_coef": 0.1}])
def test_the_reference_follows_the_actor_after_every_k_rollouts(monkeypatch, flags):
    run = Run(monkeypatch, ref_update_interval=3, **flags)
    seen = []
    for rollout_id in range(7):
        run.train(rollout_id)
        seen.append(run.trained_with["ref"])
    # Refreshed after rollouts 2 and 5, when the weights are 3 and 6.
    assert seen == [100, 100, 100, 3, 3, 3, 6]
    assert run.lines == ["reference weights: ref (Hugging Face directory)"]


def test_a_refresh_of_the_reference_is_timed(monkeypatch):
    run = Run(monkeypatch, ref_update_interval=2, use_kl_loss=True)
    seen = []
    for rollout_id in range(4):
        Timer().pop_seconds()
        run.train(rollout_id)
        seen.append("ref_model_update" in Timer().pop_seconds())
    assert seen == [False, True, False, True]


def test_a_refreshed_reference_survives_a_resume(monkeypatch):
    run = Run(monkeypatch, use_kl_loss=True, ref_update_interval=2)
    run.train(0)
    assert run.checkpoint() == {}  # still what --ref-load holds
    run.train(1)
    run.train(2)
    assert run.checkpoint() == {"ref": 2}
    resumed = Run(monkeypatch, stored=run.checkpoint(), start=3, use_kl_loss=True, ref_update_interval=2)
    assert resumed.checkpoint() == {"ref": 2}, "the next checkpoint holds it too"
    for each in (run, resumed):
        each.train(3)
        each.train(4)
        assert (each.trained_with["ref"], each.checkpoint()) == (4, {"ref": 4})
    # It is the reference of the run, also when the run no longer refreshes it.
    assert Run(monkeypatch, stored={"ref": 2.0}, start=3, use_kl_loss=True).held("ref") == 2


def test_the_teacher_stays(monkeypatch):
    run = Run(monkeypatch, use_opd=True, opd_type="megatron", use_kl_loss=True, ref_update_interval=1)
    run.train(0)
    assert (run.held("teacher"), run.held("ref"), run.held("actor")) == (TEACHER_LOADED, 1, 1)
    assert run.lines == ["reference weights: ref (Hugging Face directory)", "teacher weights: teacher (checkpoint)"]
    assert "teacher" not in Run(monkeypatch, use_opd=True, opd_type="sglang").states


def test_loading_all_other_states_leaves_the_actor_as_it_was(monkeypatch):
    stored = {"ref": 5.0, "rollout_actor": 6.0}
    flags = {"use_kl_loss": True, "use_opd": True, "opd_type": "megatron", "keep_old_actor": True}
    run = Run(monkeypatch, stored=stored, start=3, **flags)
    expected = {"actor": 3, "ref": 5, "teacher": TEACHER_LOADED, "rollout_actor": 6, "old_actor": 3}
    assert {name: run.held(name) for name in expected} == expected


def test_the_actor_is_back_where_loading_fails(monkeypatch):
    run = Run(monkeypatch, use_kl_loss=True)

    def fail(source):
        run.weight.fill_(7)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.schedule.load(fail, lambda name: False)
    assert (run.weight.item(), run.states.active) == (0, "actor")


@pytest.mark.parametrize("flags", [{"asynchronous": True}, {"update_weights_interval": 2}])
def test_the_actor_is_put_aside_only_where_something_is_loaded(monkeypatch, buffers, flags):
    run = Run(monkeypatch, keep_old_actor=True, **flags)
    assert len(buffers) == sum(name in run.states for name in ("old_actor", "rollout_actor"))


def test_with_a_push_after_every_rollout_the_old_actor_lags_one_push(monkeypatch):
    run = Run(monkeypatch, keep_old_actor=True)
    run.push()
    seen = []
    for rollout_id in range(4):
        run.train(rollout_id)
        seen.append(run.trained_with["old_actor"])
        run.push()
    # old actor ← rollout actor ← actor: rollout 1 trains after the push of weights 1, with those of before it.
    assert seen == [0, 0, 1, 2]
    assert (run.held("rollout_actor"), run.held("old_actor")) == (4, 3)


def test_with_rarer_pushes_the_old_actor_is_what_was_pushed(monkeypatch):
    run = Run(monkeypatch, keep_old_actor=True, update_weights_interval=2)
    run.push()
    seen = []
    for rollout_id in range(5):
        run.train(rollout_id)
        seen.append(run.trained_with["old_actor"])
        if (rollout_id + 1) % 2 == 0:
            run.push()
    assert seen == [0, 0, 2, 2, 4]
    assert "rollout_actor" not in run.states and run.checkpoint() == {}


@pytest.mark.parametrize("asynchronous, has_engines", [(False, True), (False, False), (True, False)])
def test_the_old_actor_survives_a_resume(monkeypatch, asynchronous, has_engines):
    """Also without engines, where nothing is pushed: training on dumps gives the numbers of the run that made them."""
    kind = {"keep_old_actor": True, "asynchronous": asynchronous, "has_engines": has_engines}
    whole = Run(monkeypatch, **kind)
    whole.push()
    seen = []
    for rollout_id in range(5):
        whole.train(rollout_id)
        seen.append(whole.trained_with["old_actor"])
        if rollout_id == 2:
            stored = whole.checkpoint()  # the driver saves before it pushes
        whole.push()
    assert seen == [0, 0, 1, 2, 3] and stored == {"rollout_actor": 2}
    resumed = Run(monkeypatch, stored=stored, start=3, **kind)
    resumed.push()  # before the first rollout is generated
    again = []
    for rollout_id in (3, 4):
        resumed.train(rollout_id)
        again.append(resumed.trained_with["old_actor"])
        resumed.push()
    assert again == seen[3:]


@pytest.mark.parametrize("start", [0, 3])
def test_one_rollout_ahead_the_old_actor_is_what_generated_it(monkeypatch, start):
    """Also in a resumed run, which generates anew what was ahead: engines have the weights of the first push by then."""
    stored = {"rollout_actor": start - 1.0} if start else {}
    run = Run(monkeypatch, stored=stored, start=start, keep_old_actor=True, asynchronous=True)
    run.push()
    engines = run.weight.item()
    generated_by = {start: engines, start + 1: engines}
    for rollout_id in range(start, start + 4):
        # Beside the training of the one before it.
        generated_by.setdefault(rollout_id + 1, engines)
        run.train(rollout_id)
        assert run.trained_with["old_actor"] == generated_by[rollout_id], rollout_id
        run.push()
        engines = run.weight.item()
    assert generated_by == {start: start, **{start + 1 + ahead: start + ahead for ahead in range(4)}}


def test_s12_copies_are_made_of_nothing_but_the_actor(monkeypatch):
    run = Run(monkeypatch, use_kl_loss=True, ref_update_interval=1, keep_old_actor=True)
    with run.states("ref"):
        for change in (run.schedule.after_push, lambda: run.schedule.after_rollout(0)):
            with pytest.raises(RunError, match="holds the state 'ref', not 'actor'"):
                change()
    assert (run.held("ref"), run.held("old_actor"), run.checkpoint()) == (REFERENCE_LOADED, 0, {"rollout_actor": 0})


def test_a_run_without_engines_moves_the_copies_when_a_push_would(monkeypatch):
    run = Run(monkeypatch, keep_old_actor=True, has_engines=False, update_weights_interval=2)
    seen = []
    for rollout_id in range(5):
        run.train(rollout_id)
        seen.append(run.trained_with["old_actor"])
    assert seen == [0, 0, 2, 2, 4]
