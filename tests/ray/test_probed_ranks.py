"""When ranks probe their memory, what two models hold for each other meanwhile, and what the driver hears of it."""

import argparse
import time
from types import SimpleNamespace

import pytest
import ray

from slime.arguments.checkpoints import WeightSource
from slime.plan.longest_batch import ProbedMemory
from slime.ray.driver import RunLength, StartedRun, log_probe, probe_memory
from slime.ray.placement_group import ActorCritic
from slime.ray.train_group import TrainGroup
from slime.utils.errors import RunError, UserError
from tests.support.models.args import parse
from tests.support.processes.local_ray import start_ray

FOUND = ProbedMemory(before=2**30, to_come=0, peaks=None, free=2**30, device=2**31)


class Group:
    probes = 0

    def probe_memory(self):
        self.probes += 1


@pytest.mark.parametrize(
    ("typed", "on_gpus", "expected"),
    [(None, True, 1), (None, False, 0), (None, None, 1), (True, False, 1), (False, True, 0)],
)
def test_ranks_probe_on_gpus_unless_it_was_typed(typed, on_gpus, expected):
    group, args = Group(), SimpleNamespace(memory_probe=typed, on_gpus=on_gpus)
    probe_memory(args, StartedRun(None, group, RunLength(4), 0))
    assert group.probes == expected


def test_where_nothing_will_be_trained_nothing_is_probed():
    group, args = Group(), SimpleNamespace(memory_probe=True, on_gpus=True)
    probe_memory(args, StartedRun(None, group, RunLength(4), 4))
    probe_memory(args, StartedRun(None, None, RunLength(4), 0))
    assert group.probes == 0
    # It goes on, and so would its first step be the longest.
    probe_memory(args, StartedRun(None, group, RunLength(4), 3))
    assert group.probes == 1


@pytest.mark.parametrize(
    ("error", "is_told"),
    [(RunError("rank 3 died"), True), (ValueError("no"), True), (UserError("memory ran out"), False)],
)
def test_a_probe_that_fails_otherwise_says_how_a_run_goes_on_without_it(error, is_told, caplog):
    """Memory that ran out says so itself."""

    class Failing(Group):
        def probe_memory(self):
            raise error

    with pytest.raises(type(error), match=str(error)):
        probe_memory(SimpleNamespace(memory_probe=True, on_gpus=True), StartedRun(None, Failing(), RunLength(4), 0))
    assert ("--no-memory-probe" in caplog.text) is is_told


def test_without_a_length_nothing_is_probed(tmp_path, caplog):
    args = parse(tmp_path)
    vars(args).update(use_dynamic_batch_size=False, seq_length=None)
    vars(args).update(dict.fromkeys(("rollout_max_context_len", "rollout_max_prompt_len", "rollout_max_response_len")))
    log_probe(args, lambda batches: pytest.fail("there are none"))
    assert "no memory probe of the actor: no flag says how large a micro-batch may be" in caplog.text


def test_each_of_two_models_leaves_room_for_the_other(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    calls = []

    def call_all(group, method, *arguments):
        calls.append((group.rank_name, method, *arguments[1:]))
        return [FOUND] if method == "probe_memory" else [3, {"training rank": 7, "critic rank": 5}[group.rank_name]]

    monkeypatch.setattr(TrainGroup, "_call_all", call_all)
    args = parse(tmp_path, "--advantage-estimator", "ppo", "--save", str(tmp_path / "run"))
    ActorCritic(args, None, [(0, 0), (1, 1)]).probe_memory()
    assert sorted(calls[:2]) == [
        ("critic rank", "optimizer_bytes_to_come"),
        ("training rank", "optimizer_bytes_to_come"),
    ]
    # The critic's ranks hold what the actor's optimizer takes, of the rank with most, and the other way round.
    assert calls[2:] == [("critic rank", "probe_memory", 7), ("training rank", "probe_memory", 5)]
    begun, found = "memory probe of the {} begins (--no-memory-probe", "memory probe of the {}, "
    said = [message.format(model) for model in ("critic", "actor") for message in (begun, found)]
    lines = [line for line in caplog.messages if line.startswith("memory probe")]
    assert [line.startswith(one) for line, one in zip(lines, said, strict=True)] == [True] * 4


def rank_class() -> type:
    """Of ranks whose processes know no test."""

    class Rank:
        """Its memory does not suffice on rank 1; rank 0 waits for the other, as in a collective."""

        def __init__(self, args, rank, world_size, device):
            self.rank = rank

        def rendezvous_address(self):
            return None

        def init(self, rendezvous):
            return 0

        def probe_memory(self, batches, beside):
            import threading

            from slime.utils.errors import UserError

            if self.rank == 0:
                threading.Event().wait(600)
            raise UserError(f"memory ran out with {batches}")

        def dispose(self):
            pass

    return Rank


def test_a_rank_that_runs_out_alone_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr("slime.ray.train_group.log_probe", lambda args, probe: probe([[(8, 7)]]))
    start_ray(num_cpus=2, num_gpus=2)
    try:
        placement = ray.util.placement_group([{"CPU": 1, "GPU": 1}] * 2)
        args = argparse.Namespace(
            actor_num_gpus_per_node=2, train_env_vars={}, deterministic_mode=False, overlap_moe_expert_parallel_comm=False,
            train_backend="megatron",
            has_trainer=True, has_engines=False,
            colocate=False, train_start_timeout=120.0, role="actor", initial_weights=WeightSource("random"),
            memory_probe=True, on_gpus=False,
        )  # fmt: skip
        group = TrainGroup(args, placement, [(0, 0), (1, 1)], rank_class())
        group.create()
        began = time.monotonic()
        with pytest.raises(UserError, match=r"^memory ran out with \[\[\(8, 7\)\]\]$"):
            probe_memory(args, StartedRun(None, group, RunLength(4), 0))
        # The other would have waited for ten minutes.
        assert time.monotonic() - began < 60
        group.kill()
    finally:
        ray.shutdown()
