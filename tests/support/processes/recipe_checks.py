"""Checks that the recipes of the contributors' page keep their promise, in a tree in which a recipe was followed."""

import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


def an_estimator_can_be_asked_for_and_trains(directory: Path) -> None:
    from tests.support.models.args import parse

    assert parse(directory, "--advantage-estimator", "reinforce").advantage_estimator == "reinforce"
    from slime.training.advantages import compute_advantages_and_returns
    from tests.support.models.objective_step import case_args, make_logits, make_samples, rollout_data, run_step

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
    from tests.support.processes.family_checks import (
        assert_gives_checkpoint_back,
        assert_like_reference,
        reference,
        run_families,
    )
    from tests.support.processes.layout_steps import layout_args, train_steps

    model = TINY_FAMILIES["seed_oss"].save(directory / "seed_oss")
    args = parse(directory, "--hf-checkpoint", str(directory / "seed_oss"))
    assert args.add_qkv_bias and not args.qk_layernorm and args.num_layers == 2
    expected = reference(model, directory / "gradients")
    with only_rank():
        found = run_families({None: {"seed_oss": str(directory / "seed_oss")}})
        trained = train_steps({"one": layout_args(directory / "seed_oss")})
    assert not isinstance(found[None]["seed_oss"], str), found[None]["seed_oss"]
    assert_gives_checkpoint_back([found[None]["seed_oss"]], directory / "seed_oss")
    assert_like_reference(found[None]["seed_oss"], expected)
    before, after = trained["one"]["loaded"], trained["one"]["weights"]
    assert all((after[name] != before[name]).any() for name in before), "weights that steps of GRPO leave as they were"


def a_transport_can_be_asked_for_and_carries_a_push(directory: Path) -> None:
    import ray
    import torch

    from slime.plan.placement import plan_sync
    from slime.plan.setup import parallel_layout, shape_of
    from slime.weights.push import WeightPush
    from slime.weights.transports import Receiver
    from tests.support.models.args import parse
    from tests.support.processes.local_ray import start_ray
    from tests.support.processes.served_engines import Trainer
    from tests.support.processes.weight_peers import engine_of, start_peers

    args = parse(directory, "--update-weight-transport", "host-memory", "--update-weight-buffer-size", "16")
    assert plan_sync(args, shape_of(args), None, parallel_layout(args)).transport == "memory of the host"
    tensors = {name: torch.full((4,), float(value)) for value, name in enumerate("abc")}
    start_ray()
    try:
        ranks = start_peers(3)
        engines = [engine_of(ranks[:1]), engine_of(ranks[1:])]
        receivers = [Receiver(0, engines[0], 1, 0), Receiver(1, engines[1], 2, 1)]
        report = WeightPush(args, Trainer(args, tensors, set(tensors))).push(receivers)
        assert (report.version, report.failed) == (1, {})
        for received in ray.get([rank.all_received.remote() for rank in ranks], timeout=60):
            assert received == [([name], {float(value)}) for value, name in enumerate("abc")], received
        assert ray.get([engine.get_weight_version.remote() for engine in engines], timeout=60) == ["1", "1"]
    finally:
        ray.shutdown()


@contextlib.contextmanager
def only_rank() -> Iterator[None]:
    """This process as the only rank of a process group: ranks in processes of their own would import everything once more."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(place, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def check(name: str) -> None:
    """Run the check `name` in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        getattr(sys.modules[__name__], name)(Path(directory))
