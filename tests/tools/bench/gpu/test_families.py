from types import SimpleNamespace

import torch

from tests.support.models.tiny_families import VOCABULARY
from tests.support.processes import family_checks
from tools.bench.gpu import families


def row(monkeypatch, tmp_path, logits=0.0, gradient=0.0, chosen=True, sent=None):
    """What is said of a family that is off by these."""
    weights, experts = {"w": torch.tensor([2.0, -4.0])}, torch.tensor([[True, False]])
    expected = family_checks.Expected(torch.zeros(3, VOCABULARY), [experts], weights)
    found = SimpleNamespace(
        logits=torch.full((3, VOCABULARY + 5), logits), chosen=[experts if chosen else ~experts],
        gradients={"w": weights["w"] + gradient},
    )  # fmt: skip
    monkeypatch.setattr(families, "TINY_FAMILIES", {"x": SimpleNamespace(save=lambda directory: None)})
    monkeypatch.setattr(family_checks, "run_families", lambda directories: {None: {"x": sent or found}})
    monkeypatch.setattr(family_checks, "reference", lambda model, directory: expected)
    monkeypatch.setattr(family_checks, "assert_gives_checkpoint_back", lambda stages, directory: None)
    return families.row_of("x", tmp_path)


def test_distances_are_told_and_judged(monkeypatch, tmp_path):
    found = row(monkeypatch, tmp_path / "1", logits=9e-5, gradient=2e-3)
    assert found["agrees"] and found["logits"] == float(torch.tensor(9e-5)) and abs(found["gradients"] - 5e-4) < 1e-6


def test_each_of_them_can_be_wrong(monkeypatch, tmp_path):
    for number, wrong in enumerate(({"logits": 2e-4}, {"gradient": 5e-3}, {"chosen": False})):
        assert not row(monkeypatch, tmp_path / str(number), **wrong)["agrees"]


def test_what_stops_a_family_is_told(monkeypatch, tmp_path):
    found = row(monkeypatch, tmp_path, sent="Traceback …\nNameError: no such kernel\n")
    assert found == {"family": "x", "agrees": False, "what stopped it": "NameError: no such kernel"}
