"""The text of whole plans. `python tests/plan/test_golden.py` writes it anew; look at the difference."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from slime.arguments import parse_args
from slime.plan import make_plan, render
from tests.support.tables.plans import SMALL, TWO_NODES

DATA = Path(__file__).parent / "data"
_AHEAD = "--async-buffer-size 3 --update-weights-interval 2"
_NEVER_STOPS = (
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async "
    "--eval-function-path slime.rollout.sglang_rollout.generate_rollout"
)
_RELEASED = (
    "--release-train --save /nowhere/saved --update-weight-transport disk --update-weight-disk-dir /nowhere/pushed"
)
_OWN_ENGINES = "--rollout-num-gpus 2 --rollout-num-gpus-per-engine 2"
GOLDENS = {
    "small": SMALL,
    "two_nodes": TWO_NODES,
    "asynchronous": f"{SMALL} {_AHEAD}",
    "never_stops": f"{SMALL} {_NEVER_STOPS}",
    "mixed": f"{SMALL.replace(_OWN_ENGINES, '--rollout-num-gpus-per-engine 2')} --colocate --rollout-num-gpus 6",
    "external": f"{SMALL.replace(_OWN_ENGINES, '')} --rollout-external-engine-addrs 10.0.0.2:30000",
    "release_train": f"{TWO_NODES} {_RELEASED}",
}
ASYNCHRONOUS = {"asynchronous", "never_stops"}


def rendered(name):
    return render(make_plan(parse_args(argv=GOLDENS[name].split(), asynchronous=name in ASYNCHRONOUS)))


@pytest.mark.parametrize("name", GOLDENS)
def test_text_of_the_plan(name, monkeypatch):
    # A machine with GPUs would not be told what is assumed here.
    monkeypatch.setattr("slime.plan.gpus_on_this_machine", lambda: 0)
    text = rendered(name)
    assert text.splitlines() == (DATA / f"{name}.txt").read_text().splitlines()
    assert max(map(len, text.splitlines())) <= 120 and text.isascii() and "topsecret" not in text


if __name__ == "__main__":
    for name in GOLDENS:
        (DATA / f"{name}.txt").write_text(rendered(name) + "\n")
