"""The text of two whole plans. `python tests/plan/test_golden.py` writes it anew; look at the difference."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from slime.plan import make_plan, render
from tests.support.tables.plans import SMALL, TWO_NODES, planned

DATA = Path(__file__).parent / "data"
GOLDENS = {"small": SMALL, "two_nodes": TWO_NODES}


@pytest.mark.parametrize("name", GOLDENS)
def test_text_of_the_plan(name, monkeypatch):
    # A machine with GPUs would not be told what is assumed here.
    monkeypatch.setattr("slime.plan.gpus_on_this_machine", lambda: 0)
    text = render(make_plan(planned(GOLDENS[name])))
    assert text.splitlines() == (DATA / f"{name}.txt").read_text().splitlines()
    assert max(map(len, text.splitlines())) <= 120 and text.isascii() and "topsecret" not in text


if __name__ == "__main__":
    for name, command in GOLDENS.items():
        (DATA / f"{name}.txt").write_text(render(make_plan(planned(command))) + "\n")
