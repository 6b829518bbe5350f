"""Values are shown as a command line would have them."""

import argparse
import shlex

import pytest

from slime.arguments.origins import Origin
from slime.arguments.parser import build_parser
from slime.plan import make_plan, render
from slime.plan.text import plan_values
from tests.support.tables.plans import SMALL, planned


def typed(*words: str) -> list[str]:
    return [f"{value.flag} {value.typed}".rstrip() for value in make_plan(planned(SMALL, *words)).values]


def test_switches_and_historical_spellings():
    lines = typed()
    assert {"--disable-bias-linear", "--norm-epsilon 1e-06", "--no-offload-train", "--sequence-parallel"} <= set(lines)
    assert not any(line.endswith(("True", "False")) for line in lines)


@pytest.mark.parametrize(
    "words",
    [
        ["--train-env-vars", '{"A": "it\'s", "B": "two words"}'],
        ["--eval-prompt-data", "aime", "/nowhere/a b.jsonl", "math", "/nowhere/c.jsonl"],
        ["--rollout-stop", "</s>", "\\n"],
        ["--rollout-sample-hook-path", "a.b", "--rollout-sample-hook-path", "c.d"],
    ],
)
def test_lists_and_json_are_whole_and_can_be_pasted(words):
    parser = build_parser()
    given, _ = parser.parse_known_args(words)
    untyped, _ = parser.parse_known_args([])
    changed = [name for name, value in vars(given).items() if value != getattr(untyped, name)]
    args = argparse.Namespace(**vars(given), origins=dict.fromkeys(changed, Origin.COMMAND_LINE))
    pasted = [word for value in plan_values(args, parser) for word in shlex.split(f"{value.flag} {value.typed}")]
    again, _ = parser.parse_known_args(pasted)
    assert pasted == words and vars(again) == vars(given)


def test_layer_patterns_are_short():
    args = planned(SMALL)
    args.moe_layer_freq, args.origins["moe_layer_freq"] = [0] * 3 + [1] * 58, Origin.COMMAND_LINE
    found = {value.flag: value.typed for value in plan_values(args, build_parser())}
    assert found["--moe-layer-freq"] == "'[0]*3+[1]*58'"


def test_nothing_is_cut():
    path = "/nowhere/" + "long/" * 30 + "model"
    assert path in render(make_plan(planned(SMALL, "--save", path)))


def test_what_an_engine_takes_is_told_of_every_stage():
    """The model's head is its embedding, which both stages have then; the second one has a norm more."""
    one, two = (make_plan(planned(SMALL, "--sglang-pp-size", size)) for size in ("1", "2"))
    assert two.memory.serving.stage == 1 and two.memory.serving.total == two.memory.serving.stage_totals[1]
    first, second = (f"{total / 2**30:.2f}" for total in two.memory.serving.stage_totals)
    assert "engine, per GPU, pipeline stage 1 of 0-1 " in render(two)
    assert f"peak by pipeline stage, GiB: 0: {first}, 1: {second}\n" in render(two)
    assert "engine, per GPU  " in render(one) and "peak by pipeline stage" not in render(one)
