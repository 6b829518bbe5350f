import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from slime.rehearsal.actor import RehearsedActor
from slime.utils.errors import RunError, UserError
from tools.bench.gpu import measured_rank
from tools.bench.gpu.measured_rank import Case, MeasuredRank, RehearsedStep, make_shape_parser, of_every_case, rehearsed


def test_samples_are_random_numbers(monkeypatch):
    """A rehearsal's samples are zeros."""

    def make_zeros(rank):
        columns = {"tokens": torch.int64, "rollout_log_probs": torch.float32, "loss_masks": torch.int32}
        rank._data = {
            name: list(torch.zeros(300, dtype=dtype).split([100, 200])) for name, dtype in columns.items()
        } | {"rewards": [0.0, 0.0]}

    monkeypatch.setattr(RehearsedActor, "_make_data", make_zeros)
    rank = object.__new__(MeasuredRank)
    rank.device, rank.args = torch.device("cpu"), SimpleNamespace(vocab_size=50)
    rank._make_data()
    tokens = torch.cat(rank._data["tokens"])
    assert tokens.unique().tolist() == list(range(50))
    log_probs = torch.cat(rank._data["rollout_log_probs"])
    assert -2.2 < log_probs.mean() < -1.8 and 0.4 < log_probs.std() < 0.6
    assert torch.cat(rank._data["loss_masks"]).eq(1).all() and rank._data["rewards"] == [-1.0, 1.0]


def test_a_rehearsal_of_another_step_is_refused(tmp_path):
    case = Case("qwen3-0.6B", 2, 8192, tiny=False)
    step = RehearsedStep(case, {"step": {"a value at slime/a.py:1": 2}}, None, {"step": {"weights": 3}})
    file = tmp_path / "rehearsed.json"
    file.write_text(json.dumps([dataclasses.asdict(step)]))
    assert rehearsed(case, file) == step
    for change in ({"tokens": 4096}, {"shape": "qwen3-1.7B"}, {"tiny": True}, {"micro_batches": 8}):
        with pytest.raises(UserError, match=r"rehearsed.json has nothing about .*waits.py --rehearse FILE"):
            rehearsed(dataclasses.replace(case, **change), file)


def test_a_rehearsal_that_stops_costs_no_measurement(monkeypatch):
    def stops(case):
        raise RunError("the rehearsal of rank 0 failed: no such device")

    monkeypatch.setattr(measured_rank, "rehearse", stops)
    step = rehearsed(Case("qwen3-0.6B", 2, 8192, tiny=False), None)
    assert (step.waits, step.peaks, step.why_no_waits) == ({}, {}, "the rehearsal of rank 0 failed: no such device")


def test_a_shape_that_stops_costs_no_other():
    def measure(case):
        if case.shape == "qwen3-0.6B":
            raise torch.OutOfMemoryError("CUDA out of memory.\nSee the documentation")
        return [{"shape": case.name}]

    rows, stopped = of_every_case(make_shape_parser("x").parse_args([]), measure)
    assert rows == [{"shape": "qwen3-1.7B"}]
    assert stopped == ["qwen3-0.6B stopped: OutOfMemoryError: CUDA out of memory."]


def test_phases_are_those_of_a_rehearsal_without_a_save():
    assert list(object.__new__(MeasuredRank).phases()) == [
        "model", "load", "data", "log-probs", "first step", "step", "metrics", "push"
    ]  # fmt: skip
