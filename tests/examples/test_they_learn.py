"""Every example that has a toy task learns it, by the command of its README. Each trains for some minutes."""

import json
import re
from pathlib import Path

import pytest

from tests.support.processes.quickstart import quickstart

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = EXAMPLES.parent / "docs/en/advanced/examples.md"
# How each learned, for the page; the seconds are those of step 4, with evaluations on the way that the test does not make.
CURVES = json.loads(PAGE.with_name("learning-examples.json").read_text())
# For the other steps: the environment, the task, teaching and the report.
OTHER_STEPS_SECONDS = 600
# Held-out accuracy: below the first before, above the second after so many rollouts.
ACCURACIES = {
    "calculator": (0.4, 0.65, 30),
    "coding_agent_rl": (0.4, 0.6, 10),
    "delta_weight_sync": (0.6, 0.8, 30),
    "eval_multi_task": (0.6, 0.8, 30),
    "fan_out": (0.35, 0.5, 15),
    "fully_async": (0.6, 0.7, 30),
    "multi_agent": (0.4, 0.6, 15),
    "on_policy_distillation": (0.6, 0.8, 30),
    "retool": (0.4, 0.7, 15),
    "reward_server": (0.6, 0.8, 30),
    "search-r1": (0.4, 0.8, 15),
}
# Their answers are some pushes old when they are trained.
STALE = {"fully_async"}


def test_every_example_with_a_task_is_here():
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/quickstart.sh")) == sorted(ACCURACIES)


@pytest.mark.parametrize("name", ACCURACIES)
def test_its_readme_has_the_command(name):
    assert f"bash scripts/quickstart.sh --example {name}" in (EXAMPLES / name / "README.md").read_text()


def test_the_page_shows_how_each_learned_and_that_was_enough():
    assert sorted(CURVES) == sorted(ACCURACIES)
    for name, (below, above, rollouts) in ACCURACIES.items():
        curve = CURVES[name]["curves"]["eval/held_out"]
        before, after = curve["0"], curve[str(rollouts)]
        assert before < below and after > above and max(map(int, curve)) == rollouts, name
        assert f"| `{name}` | {before:.3f} | {after:.3f} | {CURVES[name]['seconds']:.0f} |" in PAGE.read_text()
        assert f"[{name}](../../../examples/{name}/README.md)" in PAGE.read_text()


@pytest.mark.learns
@pytest.mark.parametrize("name", ACCURACIES)
def test_it_learns(name, tmp_path):
    output = quickstart(tmp_path, "--example", name, timeout=CURVES[name]["seconds"] + OTHER_STEPS_SECONDS)
    evaluations = re.findall(r"evaluation (?:before|after) rollout \d+: .*?held_out ([\d.]+)", output)
    before, after = map(float, evaluations)
    below, above, rollouts = ACCURACIES[name]
    assert before < below and after > above
    differences = [float(value) for value in re.findall(r"logprob_diff ([\d.e+-]+)", output)]
    assert len(differences) == rollouts and (name in STALE or max(differences) <= 1e-5)
