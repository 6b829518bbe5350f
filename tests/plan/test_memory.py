"""The memory of a critic beside the actor."""

import pytest

from slime.plan import make_plan
from tests.support.plans import SMALL, TWO_NODES, planned

PPO = ("--advantage-estimator", "ppo")
AT_REST = ("weights", "gradients", "optimizer", "data", "overhead")


def training(*words):
    return make_plan(planned(SMALL, *words)).memory.training


def part(plan, name):
    return next((part.bytes for part in plan.parts if part.name == name), 0)


def test_a_critic_adds_what_it_has_while_the_actor_works():
    alone, both = training(), training(*PPO)
    assert part(alone, "critic") == 0
    # The model ties its embeddings: a critic has all of it but an output layer of its own.
    assert part(both, "critic") == sum(part(alone, name) for name in AT_REST)
    assert both.total == alone.total + part(both, "critic") == sum(part.bytes for part in both.parts)
    assert both.host_parts == alone.host_parts == ()


def test_a_critic_has_no_vocabulary_projection():
    actor = training(*PPO, "--untie-embeddings-and-output-weights")
    assert part(actor, "critic") == part(training(*PPO), "critic")
    assert part(actor, "critic") < sum(part(actor, name) for name in AT_REST)


def test_a_critic_that_needs_more_at_work_sets_the_peak(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {max_tokens_per_gpu: 65536}}]\n")
    larger = training(*PPO, "--megatron-config-path", str(path))
    assert part(larger, "critic") > part(training(*PPO), "critic") + 2**30


def test_the_phase_and_a_note_tell_of_it():
    plan = make_plan(planned(SMALL, *PPO))
    phase = next(phase for phase in plan.memory.phases if phase.name == "training")
    assert phase.trainer == plan.memory.training.total and phase.fits is False
    assert any("the critic stays on the GPU while the actor works" in note for note in plan.notes)


@pytest.mark.parametrize("command", [SMALL, TWO_NODES])
def test_plans_without_a_critic_say_nothing_of_one(command):
    plan = make_plan(planned(command))
    assert not any("critic" in note for note in plan.notes)
