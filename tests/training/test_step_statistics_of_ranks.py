"""What is asked about a whole step before it begins reaches loss and metrics of every rank, whoever holds which samples."""

import math

import pytest

from tests.support.models.grpo_batch import make_samples, old_and_reference
from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.processes.distributed import run_distributed

LAYOUTS = {"dp2": {"data_parallel_size": 2}, "tp2": {"tensor_model_parallel_size": 2}}


def weighted(*, pg_loss, loss_masks, step_statistics, **kwargs):
    """The loss divided by the mean weight of the step, which the function reports."""
    mean = (step_statistics["sum"] / step_statistics["count"]).float()
    return pg_loss / mean, loss_masks, {"mean": mean.expand_as(pg_loss)}


def weights_of_step(*, args, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    import torch

    count = sum(mask.sum() for mask in loss_masks)
    weights = [
        (torch.exp(train - roll) * mask).sum()
        for train, roll, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True)
    ]
    return {"sum": sum(weights), "count": count}


weighted.step_statistics = weights_of_step


def worker(hf_dir, layouts):
    from tests.support.processes.megatron_worker import load_backend

    mismatch = {"get_mismatch_metrics": True}
    correction = {"use_tis": True, "custom_tis_function_path": f"{__file__}:weighted"}
    results = {}
    for layout, sizes in layouts.items():
        for name, changes in (("plain", {}), ("mismatch", mismatch), ("correction", correction)):
            args = make_args(hf_dir, **sizes, **changes)
            backend = load_backend(args)
            from slime.training.advantages import compute_advantages_and_returns
            from slime.training.train_step import train_one_step

            data = shard_of(args, backend.groups.data_rank)
            compute_advantages_and_returns(args, data)
            results[layout, name] = train_one_step(args, backend, data, 0, 0)
    return results


def test_facts_of_a_step(tmp_path):
    write_tiny_model(tmp_path, tied=True)
    ranks = run_distributed(worker, 2, (tmp_path, LAYOUTS), timeout=240)
    samples = make_samples(300)
    pairs = [
        (float(train), roll)
        for sample, old in zip(samples, old_and_reference(samples)[0], strict=True)
        for train, roll, mask in zip(
            old, sample.rollout_log_probs, sample.loss_mask or [1] * sample.response_length, strict=True
        )
        if mask
    ]
    weights = [math.exp(train - roll) for train, roll in pairs]
    mean = sum(weights) / len(weights)
    for results in ranks:
        for layout in LAYOUTS:
            plain, mismatch, corrected = (results[layout, name] for name in ("plain", "mismatch", "correction"))
            assert {name: mismatch[name] for name in plain} == plain, "the loss does not change"
            assert {name: value for name, value in mismatch.items() if name not in plain} == pytest.approx(
                {
                    "mismatch_k1": sum(roll - train for train, roll in pairs) / len(pairs),
                    "mismatch_k3": sum(w - 1 - math.log(w) for w in weights) / len(pairs),
                    "mismatch_abs": sum(abs(train - roll) for train, roll in pairs) / len(pairs),
                    "mismatch_ess": sum(weights) ** 2 / (len(pairs) * sum(w * w for w in weights)),
                    "mismatch_max_abs": max(abs(train - roll) for train, roll in pairs),
                },
                rel=1e-5,
            )
            assert corrected["pg_loss"] == pytest.approx(plain["pg_loss"] / mean, rel=1e-4)
            assert corrected["kl_loss"] == pytest.approx(plain["kl_loss"], rel=1e-6)
            # The mean over eight executions, one of which has no trained token.
            assert corrected["mean"] == pytest.approx(mean * 7 / 8, rel=1e-5)
