"""What the recipes of the contributors' page promise, checked in a tree in which a recipe was followed."""

import asyncio
import sys
import tempfile
from pathlib import Path


def an_estimator_can_be_asked_for_and_trains(directory: Path) -> None:
    from slime.training.advantages import compute_advantages_and_returns
    from tests.support.models.args import parse
    from tests.support.models.objective_step import case_args, make_logits, make_samples, rollout_data, run_step

    assert parse(directory, "--advantage-estimator", "reinforce").advantage_estimator == "reinforce"
    wide = {"eps_clip": 1.0, "eps_clip_high": 1e9}  # nothing is clipped
    alone = {"kl_loss_coef": 0.0, "entropy_coef": 0.0}
    args = case_args(advantage_estimator="reinforce", kl_coef=0.1, kl_loss_type="k1", **wide, **alone)
    samples = make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    for sample, advantages in zip(samples, data["advantages"], strict=True):
        kl = sum(mask * (old - ref) for mask, old, ref in zip(sample.mask, sample.old, sample.ref, strict=True))
        expected = sample.reward - 0.1 * kl
        for advantage in advantages.tolist():
            assert abs(advantage - expected) < 1e-5, (advantage, expected)
    _, _, gradients = run_step(args, data, make_logits(samples), [range(len(samples))])
    trains = [bool(gradient.any()) for gradient in gradients]
    assert trains == [any(sample.mask) for sample in samples], trains


def a_reward_can_be_asked_for_and_grades(directory: Path) -> None:
    from slime.rollout.rm_hub.grading import async_rm
    from slime.utils.types import Sample
    from tests.support.models.args import parse

    args = parse(directory, "--rm-type", "exact")
    answers = {"Paris": "Paris", " Paris\n": "Paris", "paris": "Paris", "It is Paris": "Paris"}
    samples = [Sample(index=0, prompt="?", response=answer, label=label) for answer, label in answers.items()]
    assert [asyncio.run(async_rm(args, sample)) for sample in samples] == [1, 1, 0, 0]


def a_family_is_loaded_trained_and_exported(directory: Path) -> None:
    from tests.support.models.args import parse
    from tests.support.models.tiny_families import TINY_FAMILIES
    from tests.support.processes.distributed import run_distributed
    from tests.support.processes.family_checks import (
        assert_gives_checkpoint_back,
        assert_like_reference,
        reference,
        run_families,
    )

    model = TINY_FAMILIES["seed_oss"].save(directory / "seed_oss")
    args = parse(directory, "--hf-checkpoint", str(directory / "seed_oss"))
    assert args.add_qkv_bias and not args.qk_layernorm and args.num_layers == 2
    (found,) = run_distributed(run_families, 1, ({None: {"seed_oss": str(directory / "seed_oss")}},))
    assert not isinstance(found[None]["seed_oss"], str), found[None]["seed_oss"]
    assert_gives_checkpoint_back([found[None]["seed_oss"]], directory / "seed_oss")
    assert_like_reference(found[None]["seed_oss"], reference(model, directory / "gradients"))


def check(name: str) -> None:
    """Run the check in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        getattr(sys.modules[__name__], name)(Path(directory))
