"""How many operations a step launches beside those of the model does not grow with its samples.

A recorder counts on the meta device, which stands for a GPU: what makes a tensor there or writes into one is a launch.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slime.rehearsal.fake_device import lift_segments
from slime.rehearsal.recorder import Recorder, placeholders
from slime.training import context_parallel
from slime.training.advantages import compute_advantages_and_returns
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.loss import loss_function
from slime.training.rollout_data import RolloutData
from tests.support.models.objective_step import VOCABULARY, case_args, make_samples, rollout_data
from tests.support.processes.objective_grid import CRITIC_OBJECTIVES, OBJECTIVES

# With the largest number of operations of a micro-batch, its share of the advantages and the gradient at its logits included.
COUNTED = {
    "grpo": 235, "gspo": 260, "sequence mask": 265, "gspo with sequence mask, per token": 285, "ppo": 300,
    "reinforce_plus_plus": 285, "reinforce_plus_plus whitened": 315, "reinforce_plus_plus_baseline": 270, "distillation": 250,
    "icepop, per token": 276, "value": 190,
}  # fmt: skip
# Another objective that is counted has all of their operations.
WITHIN_OTHERS = ("grpo", "gspo", "sequence mask", "reinforce_plus_plus")
LAYOUTS = {
    "one rank": NO_CONTEXT_PARALLEL,
    # Ranks that own several pieces of few samples already: what lies in one piece is read in place, by one operation fewer.
    "zigzag": ContextParallel(2, 1, None),
    "all-gather": ContextParallel(2, 0, None, True),
}


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder("meta")
    for (owner, name), method in placeholders(recorder).items():
        monkeypatch.setattr(owner, name, method)
    # Of what a collective does only the shape of its result counts here.
    monkeypatch.setattr(context_parallel.dist, "all_reduce", lambda tensor, *args, **options: None)
    monkeypatch.setattr(context_parallel.dist, "all_gather_into_tensor", lambda *args, **options: None)
    monkeypatch.setattr(context_parallel.dist, "reduce_scatter_tensor", lambda *args, **options: None)
    monkeypatch.setattr(context_parallel.dist, "get_world_size", lambda group=None: 2)
    with torch.library._scoped_library("aten", "IMPL") as library:
        lift_segments(library)
        yield recorder


def launched(recorder, samples, objective, cp):
    """Operations by phase, of a micro-batch of `samples` samples."""
    recorder.operations.clear()
    columns = {
        name: [rows[sample % len(rows)] for sample in range(samples)]
        for name, rows in rollout_data(make_samples()).items()
    }
    role = "critic" if objective in CRITIC_OBJECTIVES else "actor"
    args = case_args(**{**OBJECTIVES, **CRITIC_OBJECTIVES}[objective])
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        with recorder.during("samples"):
            columns = {
                name: [torch.empty_like(row, device="meta") if torch.is_tensor(row) else row for row in rows]
                for name, rows in columns.items()
            }
            data = RolloutData.of_rank(columns, cp)
        with recorder.during("advantages"):
            compute_advantages_and_returns(args, data)
        with recorder.during("stream"):
            batch = data.micro_batch(range(samples), pad_multiple=64)
            batch.stream.predicting_rows  # noqa: B018
        columns = VOCABULARY if role == "actor" else 1
        logits = torch.empty(len(batch.stream.tokens), columns, device="meta").requires_grad_()
        with recorder.during("loss"):
            loss, _ = loss_function(args, batch, logits, None, role=role)
        with recorder.during("gradient"):
            loss.backward()
    return {phase: recorder.operations[phase] for phase in ("advantages", "stream", "loss", "gradient")}


@pytest.mark.parametrize(
    "objective, layout",
    [
        *(
            pytest.param(objective, "one rank", marks=[pytest.mark.slow] if objective in WITHIN_OTHERS else [])
            for objective in COUNTED
        ),
        ("gspo with sequence mask, per token", "zigzag"), ("gspo with sequence mask, per token", "all-gather"),
        ("ppo", "zigzag"), ("ppo", "all-gather"),
    ],
)  # fmt: skip
def test_a_step_launches_as_many_operations_for_any_number_of_samples(recorder, objective, layout):
    few, many = (launched(recorder, samples, objective, LAYOUTS[layout]) for samples in (4, 16))
    assert few == many
    assert layout != "one rank" or sum(many.values()) <= COUNTED[objective]
