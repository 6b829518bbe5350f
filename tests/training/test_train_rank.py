"""What a rank does around its optimizer steps and reports of them, and how long it waits for others; without a model."""

import collections
import contextlib
import gc
import os
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from slime.observability.logging_utils import drain_outbox, log
from slime.observability.timer import Timer
from slime.scheduling.device_turns import Holds
from slime.training import actor_rank, train_rank
from slime.training.model_states import ModelStates
from slime.training.rollout_data import RolloutData
from slime.training.train_rank import TrainRank
from slime.utils.device import Accelerator
from slime.utils.errors import RunError
from slime.utils.ports import interface_of
from slime.utils.weight_transports import WEIGHT_TRANSPORTS
from slime.weights.source import WeightSource
from slime.weights.transports import EnginesFailed, Transport, transport_of
from tests.support.models.tiny_shape import TINY_SHAPE
from tests.support.processes.distributed import run_distributed


def test_a_rollout_that_is_cut_for_other_ranks_is_refused(monkeypatch):
    """The number of ranks is that of their group, whatever came."""
    rank = make_rank()
    rank.backend = SimpleNamespace(groups=SimpleNamespace(data_rank=0, sample_group="two ranks", cp=None))
    monkeypatch.setattr(train_rank.dist, "get_world_size", {"two ranks": 2}.__getitem__)
    rank.device = "cpu"
    with pytest.raises(ValueError, match="is cut into 3 shards, and there are 2 data-parallel ranks"):
        rank._fetch([None] * 3)


def awake(rank_class: type[TrainRank]) -> TrainRank:
    """A rank that was not made, and holds all of its memory."""
    rank = rank_class.__new__(rank_class)
    rank.memory = SimpleNamespace(holds=Holds.ALL)
    return rank


def make_rank() -> TrainRank:
    rank = awake(TrainRank)
    rank.args = SimpleNamespace(
        num_steps_per_rollout=2, reset_optimizer_states=False, use_pytorch_profiler=False, record_memory_history=False,
        ci_test=False, ci_save_grad_norm=None, ci_load_grad_norm=None, rollout_data_transport="object-store",
    )  # fmt: skip
    rank.rank, rank.backend = 0, SimpleNamespace(broadcast=lambda value: value)
    rank._not_handed_over = []
    drain_outbox()
    return rank


@pytest.mark.parametrize("asynchronous, steps", [(False, ["cores", "place"]), (True, ["place"])])
def test_ranks_meet_on_the_way_to_engines_of_others(monkeypatch, asynchronous, steps):
    """On the interface of the address that the rank announces, which is that of its node where there are several. Its cores are
    one thread's before Gloo has any, unless engines need them at the same time."""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(train_rank, "load_plug_ins", lambda *arguments: None)
    monkeypatch.setattr(train_rank, "service_host", lambda clients: {("http://a:1",): "127.0.0.7"}[tuple(clients)])
    rank, met, done = make_rank(), [], []
    rank.args.rollout_external_engine_infos, rank.args.asynchronous = (SimpleNamespace(url="http://a:1"),), asynchronous
    rank.world_size, rank.local_rank = 4, 0

    def place():
        done.append("place")
        met.append((environment["MASTER_ADDR"], environment["GLOO_SOCKET_IFNAME"], gc.isenabled()))

    monkeypatch.setattr(Accelerator, "compute_in_this_thread", lambda accelerator: done.append("cores"))
    rank.backend = SimpleNamespace(place=place)
    rank._join(("127.0.0.2", 7))
    # Nor does it look through what its backend imports there.
    assert met == [("127.0.0.2", interface_of("127.0.0.1"), False)] and gc.isenabled()
    assert done == steps


@pytest.mark.parametrize("failing, expected", [(0, {}), (1, {6: 0.0}), (2, {6: 0.0, 7: 1.0}), (3, {6: 0.0, 7: 1.5})])
def test_a_step_that_fails_leaves_the_metrics_of_those_before_it(monkeypatch, failing, expected):
    def step(*arguments, **options):
        if arguments[4] == failing:
            raise RuntimeError("not finite")
        return {"loss": float(arguments[4])}

    monkeypatch.setattr(train_rank, "train_one_step", step)
    rank = make_rank()
    with pytest.raises(RuntimeError, match="not finite"), rank._collected() as logged:
        rank._train_steps(3, {"num_microbatches": [1] * 4}, logged)
    assert {metrics["train/step"]: metrics["train/loss"] for metrics, _ in rank.take_logged()} == expected


@pytest.mark.parametrize(
    "came, expected",
    [
        (1, {6: 0.0}),
        (2, {6: 0.0, 7: 1.0}),
        # Rollout 4 begins at 8: the steps that were not announced share the last number before it.
        (4, {6: 0.0, 7: 2.0}),
    ],
)
def test_the_steps_of_a_rollout_stay_before_those_of_the_next(monkeypatch, caplog, came, expected):
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: {"loss": float(arguments[4])})
    logged = []
    make_rank()._train_steps(3, {"num_microbatches": [1] * came}, logged)
    assert {metrics["train/step"]: metrics["train/loss"] for metrics, _ in logged} == expected
    assert len(logged) == len(expected)
    assert ("brings 4 optimizer steps instead of 2" in caplog.text) == (came == 4)


@pytest.mark.parametrize("check, value", [("ci_test", True), ("ci_save_grad_norm", "a"), ("ci_load_grad_norm", "a")])
def test_steps_that_nobody_would_look_at_end_a_test_run_before_they_are_taken(monkeypatch, check, value):
    taken, rank, logged = [], make_rank(), []
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: taken.append(arguments[4]) or {})
    setattr(rank.args, check, value)
    rank._train_steps(3, {"num_microbatches": [1] * 2}, logged)
    flag = f"--{check.replace('_', '-')}"
    with pytest.raises(
        RunError, match=f"rollout 3 brings 3 optimizer steps instead of 2, and {flag} looks at .* of 2 only"
    ):
        rank._train_steps(3, {"num_microbatches": [1] * 3}, logged)
    assert taken == [0, 1] and len(logged) == 2


@pytest.mark.parametrize("asked, behind", [(True, ["reset"]), (False, [])])
def test_an_optimizer_forgets_behind_all_steps_of_a_rollout(monkeypatch, asked, behind):
    """Not between them."""
    events, rank = [], make_rank()
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: events.append(arguments[4]) or {})
    rank.args.reset_optimizer_states = asked
    rank.backend = SimpleNamespace(reset_optimizer=lambda: events.append("reset"))
    for rollout_id in (3, 4):
        rank._train_steps(rollout_id, {"num_microbatches": [1] * 2}, [])
    assert events == [0, 1, *behind] * 2


def preparing_actor(monkeypatch, **flags) -> actor_rank.ActorRank:
    """An actor that needs no log-probs before its steps."""
    monkeypatch.setattr(actor_rank, "needs_log_prob_pass", lambda args, steps: False)
    rank = awake(actor_rank.ActorRank)
    rank.states = ModelStates(list)
    rank.args = SimpleNamespace(**{
        "compute_advantages_and_returns": False, "use_critic": False, "loss_type": "policy_loss",
        "rollout_data_postprocess_path": None, "get_mismatch_metrics": False, **flags,
    })  # fmt: skip
    return rank


@pytest.mark.parametrize(
    "asked, critic, loss, times",
    [
        (True, False, "policy_loss", 1),
        (False, False, "policy_loss", 0),
        (True, False, "custom_loss", 1),
        (True, False, "sft_loss", 0),
        # The critic learns their returns.
        (True, True, "sft_loss", 1),
    ],
)
def test_advantages_are_computed_where_somebody_learns_from_them(monkeypatch, asked, critic, loss, times):
    rank = preparing_actor(monkeypatch, compute_advantages_and_returns=asked, use_critic=critic, loss_type=loss)
    data, logged, computed = {"num_microbatches": [1]}, [], []
    rank._compute_advantages = lambda *given: computed.append(given)
    rank._prepare(3, data, logged)
    assert computed == [(3, data, logged)] * times


def leaves_data_alone(args, rollout_id, rollout_data): ...


def test_edited_masks_are_counted_by_ranks_that_together_have_each_sample_once(monkeypatch):
    """Those of a context-parallel group have the same samples. In both models."""
    counted = []
    groups = SimpleNamespace(
        sample_group="samples", token_group="tokens", host_token_group="tokens", is_last_stage=False
    )
    for module in (actor_rank, train_rank):
        monkeypatch.setattr(module, "refresh_mask_sums", lambda data, group, *before: counted.append(group) or True)
    monkeypatch.setattr(train_rank, "fetch_column", lambda *arguments: [])
    actor = preparing_actor(monkeypatch, rollout_data_postprocess_path=f"{__file__}:leaves_data_alone")
    actor.backend = SimpleNamespace(groups=groups)
    assert actor._prepare(3, RolloutData({"num_microbatches": [1], "loss_masks": [], "response_lengths": []}), [])
    critic = make_critic(monkeypatch, failing=None)
    critic.args.http_control_timeout, critic.backend.groups = 1.0, groups
    critic.values(3, [])
    critic.train(3, [SimpleNamespace(boxes={"loss_masks": None})])
    assert counted == ["samples", "samples"]


def test_what_ranks_of_a_context_parallel_group_share_is_counted_once(monkeypatch, caplog):
    """Of four ranks in two such groups. Each knows of its own tokens alone by how much they differ."""
    caplog.set_level("INFO")
    rank = awake(actor_rank.ActorRank)
    groups = SimpleNamespace(
        sample_group="two ranks", token_group="four ranks", host_token_group="four ranks", data_rank=0,
        speaks_for_its_samples=True, cp=SimpleNamespace(size=2),
    )  # fmt: skip
    ranks = {"two ranks": 2, "four ranks": 4}
    monkeypatch.setattr(actor_rank, "all_reduce_sum", lambda of_rank, group: of_rank * ranks[group])
    monkeypatch.setattr(actor_rank.dist, "get_world_size", ranks.__getitem__)
    monkeypatch.setattr(actor_rank, "worst_token_lines", lambda data, decode, group: [f"those of {group}"])
    rank.args, rank.world_size, rank.backend = SimpleNamespace(**TINY_SHAPE), 4, SimpleNamespace(groups=groups)
    rank.tokenizer = SimpleNamespace(decode=None)
    data = {"total_lengths": [4, 10]}
    assert rank._tokens_of_all_ranks(data) == 2 * 14
    assert rank._tflops(data) == pytest.approx((70656 + 180480) / 2 / 1e12)
    rank._tell_worst_tokens(3, data)
    assert caplog.messages == ["rollout 3, tokens with the largest mismatch:\n  those of four ranks"]


def test_what_whitening_tells_is_told_at_a_step_that_trackers_get(monkeypatch):
    """Where they get every second step, of rollouts with two."""
    monkeypatch.setattr(actor_rank, "compute_advantages_and_returns", lambda *arguments: {"whiten_empty": 1.0})
    rank, logged = awake(actor_rank.ActorRank), []
    rank.args = SimpleNamespace(normalize_advantages=True, num_steps_per_rollout=2)
    groups = SimpleNamespace(is_last_stage=True, token_group=None)
    rank.backend = SimpleNamespace(groups=groups, broadcast=lambda metrics: metrics)
    rank._compute_advantages(3, {}, logged)
    assert logged == [({"train/whiten_empty": 1.0, "train/step": 7}, "train/step")]


def test_a_proof_is_told_which_weights_engines_have(monkeypatch):
    """Those of the last push, whatever the rank has trained since."""

    class Enough(Exception): ...

    def expect_proof(args, rollout_id, data, weight_version):
        raise Enough(rollout_id, weight_version)

    nothing = SimpleNamespace(before_rollout=lambda rollout_id: None, after_push=lambda: None, settle=lambda: "chain")
    rank = actor_rank.ActorRank.__new__(actor_rank.ActorRank)
    vars(rank).update(
        args=None, memory=SimpleNamespace(holds=Holds.ALL), state_schedule=nothing, weight_source=nothing, weight_version=3,
        _idle_since=0.0, _fetch=lambda shards: {},
    )  # fmt: skip
    monkeypatch.setattr(actor_rank, "expect_proof", expect_proof)
    rank.weights_pushed(7)
    with pytest.raises(Enough) as told:
        rank._train(2, [], (), [])
    Timer().pop_seconds()
    assert told.value.args == (2, 7)


def test_ranks_go_on_with_the_weights_that_ranks_before_them_pushed():
    """Their version, which checkpoints and proofs tell, and the chain of their files."""
    rank, told = actor_rank.ActorRank.__new__(actor_rank.ActorRank), []
    rank.weight_version = 1

    def open_weight_push():
        rank.weight_source = SimpleNamespace(continue_from=lambda *given: told.append(given))

    rank.open_weight_push = open_weight_push
    rank.continue_weight_pushes(2, "chain")
    assert rank.weight_version == 2 and told == [(2, "chain")]


def test_what_functions_of_a_user_log_is_handed_over_in_order_and_once(monkeypatch):
    """In their own thread too, which has no context: its metrics leave with the work that ends next."""

    def step(*arguments, **options):
        log(None, {"mine/x": arguments[4], "mine/step": 0}, "mine/step")
        thread = threading.Thread(target=log, args=(None, {"mine/late": arguments[4], "mine/step": 0}, "mine/step"))
        thread.start()
        thread.join()
        return {"loss": float(arguments[4])}

    monkeypatch.setattr(train_rank, "train_one_step", step)
    rank = make_rank()
    with rank._collected() as logged:
        rank._train_steps(3, {"num_microbatches": [1] * 2}, logged)
    names = [next(iter(metrics)) for metrics, _ in logged]
    assert names == ["mine/x", "train/loss", "mine/x", "train/loss", "mine/late", "mine/late"]
    assert rank.take_logged() == [], "what was handed over is not told again"


def test_what_functions_log_on_the_last_stage_alone_is_handed_over_by_the_first(monkeypatch):
    of_last_stage = [({"train/loss": 0.5, "mine/x": 2.0, "train/step": 6}, "train/step")]
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: {"loss": 0.5})
    rank = make_rank()
    rank.backend.broadcast = lambda own: of_last_stage
    with rank._collected() as logged:
        rank._train_steps(3, {"num_microbatches": [1]}, logged)
    assert logged == [
        ({"train/loss": 0.5, "train/step": 6}, "train/step"), ({"mine/x": 2.0, "train/step": 6}, "train/step")
    ]  # fmt: skip


def make_critic(monkeypatch, failing) -> train_rank.CriticRank:
    """A critic in which functions of a user's log in both passes, the one of `failing` then fails."""

    def note(name):
        log(None, {f"mine/{name}": 1.0, "mine/step": 0}, "mine/step")
        if name == failing:
            raise RuntimeError("not finite")
        return {}

    monkeypatch.setattr(train_rank, "forward_values", lambda *arguments: note("values"))
    monkeypatch.setattr(train_rank, "train_one_step", lambda *arguments, **options: note("train"))
    rank = awake(train_rank.CriticRank)
    rank.args = SimpleNamespace(num_steps_per_rollout=1, reset_optimizer_states=False)
    groups = SimpleNamespace(is_last_stage=False)
    rank.rank, rank.backend = 0, SimpleNamespace(groups=groups, broadcast=lambda value: value)
    rank._not_handed_over = []
    rank._fetch = lambda shards: {"num_microbatches": [1]}
    drain_outbox()
    return rank


def names_of_users(logged):
    return [name for metrics, _ in logged for name in metrics if name.startswith("mine/") and name != "mine/step"]


def test_what_was_logged_with_the_values_is_handed_over_with_the_training(monkeypatch):
    rank = make_critic(monkeypatch, failing=None)
    for rollout_id in range(2):
        rank.values(rollout_id, [])
        assert names_of_users(rank.train(rollout_id, [])) == ["mine/values", "mine/train"]
        assert rank.take_logged() == [], "what was handed over is not told again"


@pytest.mark.parametrize("failing, expected", [("values", ["values"]), ("train", ["values", "train"])])
def test_what_a_critic_logged_before_it_failed_is_told_once(monkeypatch, failing, expected):
    rank = make_critic(monkeypatch, failing)
    with pytest.raises(RuntimeError, match="not finite"):
        rank.values(0, [])
        rank.train(0, [])
    assert names_of_users(rank.take_logged()) == [f"mine/{name}" for name in expected]


def test_what_a_critic_logged_before_the_actor_failed_is_told(monkeypatch):
    rank = make_critic(monkeypatch, failing=None)
    assert rank.take_logged() == []
    rank.values(0, [])
    assert names_of_users(rank.take_logged()) == ["mine/values"]


@pytest.mark.parametrize("module, name", [(actor_rank, "ActorRank"), (train_rank, "CriticRank")])
@pytest.mark.parametrize("in_background", [False, True])
def test_ranks_wait_for_those_that_write_as_long_as_the_bytes_take(monkeypatch, module, name, in_background):
    events = []

    @contextlib.contextmanager
    def patient_groups(seconds):
        events.append(seconds)
        yield
        events.append("as before")

    monkeypatch.setattr(train_rank, "patient_groups", patient_groups)
    rank = awake(getattr(module, name))
    rank.args = SimpleNamespace(checkpoint_write_timeout=2350.0, save_hf=None, async_save=in_background)
    # Where there is no directory yet, as of a save that cannot begin: the backend says why, on all ranks.
    rank.rank, rank.weight_version = 0, 7
    rank.states = SimpleNamespace(require_active=lambda name: None)
    rank.state_schedule = SimpleNamespace(stored=lambda: ())
    unfinished = SimpleNamespace(
        finish=lambda: events.append("written"), has_ended=lambda: events[-1] == "trained", bytes_on_host=0
    )
    saved = []
    rank.backend = SimpleNamespace(save=lambda *given: saved.append(given) or events.append("begun") or unfinished)
    rank.save(3)
    assert saved == [(3, rank.states, (), 7) if name == "ActorRank" else (3,)]
    if in_background:
        assert not rank.save_has_ended()
        events.append("trained")
        assert rank.save_has_ended()
        rank.finish_save()
    assert [event for event in events if event != "trained"] == [
        2350.0, "begun", "as before", 2350.0, "written", "as before",
    ]  # fmt: skip
    # A driver that was interrupted asks about the same one again.
    events.append("trained")
    assert rank.save_has_ended()
    rank.finish_save()


@pytest.mark.parametrize("replica, gathered", [(0, ["gathered"]), (1, [])])
def test_ranks_wait_for_an_export_as_long_as_the_bytes_take(monkeypatch, replica, gathered):
    """And of the copies of the weights one is gathered."""
    events = []

    @contextlib.contextmanager
    def patient_groups(seconds):
        events.append(seconds)
        yield
        events.append("as before")

    def tensors():
        events.append("gathered")
        yield "a", None

    def write(directory, tensors, source, **of_ranks):
        assert (directory, source, of_ranks["rank"], of_ranks["writes"]) == ("export", "model", 3, replica == 0)
        collections.deque(tensors, maxlen=0)

    monkeypatch.setattr(actor_rank, "patient_groups", patient_groups)
    monkeypatch.setattr("slime.weights.hf_writer.write_hf_checkpoint", write)
    rank = awake(actor_rank.ActorRank)
    rank.args, rank.rank = SimpleNamespace(checkpoint_write_timeout=2350.0, hf_checkpoint="model"), 3
    groups = SimpleNamespace(replica=replica, gives_weights=replica == 0, stage=1)
    rank.backend = SimpleNamespace(stage_tensors=lambda: tensors, groups=groups)
    rank.export_hf("export")
    assert events == [2350.0, *gathered, "as before"]


class LosesAnEngine(Transport):
    def __init__(self):
        pass

    def send(self, bucket):
        raise EnginesFailed({4: "engine 4 hangs"}, certain=True)

    def finish(self):
        raise AssertionError("engines had failed before")


def push_worker():
    """What came of a push by the first of two ranks that make the buckets; and the limits in their gathers, and after it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=45))
    limits = []

    def note():
        limits.append(dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.seconds)

    def buckets():
        for name in "abc":
            tensor = torch.ones(2)
            note()
            dist.all_reduce(tensor)
            yield [(name, tensor)]

    rank = awake(actor_rank.ActorRank)
    rank.args = SimpleNamespace(distributed_timeout_minutes=0.75, update_weight_transport="nccl", colocate=False)
    rank.backend = SimpleNamespace(groups=SimpleNamespace(stage=0, replica=0))
    rank.states = SimpleNamespace(require_active=lambda name: None)
    rank.weight_source = WeightSource(buckets, LosesAnEngine() if dist.get_rank() == 0 else None)
    sent = rank.send_weights(0, 1)
    note()
    dist.destroy_process_group()
    return sent and sent.failed, limits


def test_ranks_that_help_wait_until_the_sender_has_given_an_engine_up():
    sender, helper = run_distributed(push_worker, 2)
    assert sender == ({4: "engine 4 hangs"}, [45] * 4)
    # 45 s until an engine is late, with a bucket or with a larger tensor after it, a minute to be sure which, and one for what
    # else the sender does.
    assert helper == (None, [210] * 3 + [45])


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("colocate", [False, True])
@pytest.mark.parametrize("name", WEIGHT_TRANSPORTS)
def test_no_transport_gives_up_before_its_limit(name, colocate, mode):
    args = SimpleNamespace(update_weight_transport=name, update_weight_mode=mode, colocate=colocate)
    assert transport_of(args).longest_wait(SimpleNamespace(distributed_timeout_minutes=10)) > 600
