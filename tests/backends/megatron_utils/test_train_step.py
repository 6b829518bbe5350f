"""One optimizer step of GRPO: against loops over transformers in float64, and the same for every parallel layout."""

import copy
import math
from types import SimpleNamespace

import pytest

from tests.support.distributed import run_distributed
from tests.support.grpo_batch import make_samples, objective_args, old_and_reference, plain_loss
from tests.support.tiny_model import tiny_args, write_tiny_model

LAYOUTS = {
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}
ADVANTAGES = [0.9, -0.4, 0.3, 0.3, 1.1, -1.2, 0.5, -0.7, 0.2]


def make_args(hf_dir, **overrides) -> SimpleNamespace:
    dp = overrides.pop("data_parallel_size", 1)
    model = vars(tiny_args(hf_dir, **overrides))
    return SimpleNamespace(**{**model, **vars(objective_args()), "data_parallel_size": dp, **overrides})


def shard_of(args, data_rank):
    """This rank's tensors of the batch, old and reference log-probs included."""
    import torch

    from slime.scheduling.dp_schedule import schedule_from_args
    from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors

    samples = make_samples(args.vocab_size)
    batch = build_train_batch(samples, ADVANTAGES, ADVANTAGES)
    schedule = schedule_from_args(
        args, {"dp_size": args.data_parallel_size, "cp_size": 1}, batch["total_lengths"].tolist(),
        global_batch_size=args.global_batch_size, rollout_indices=batch["rollout_ids"].tolist(),
    )  # fmt: skip
    data = to_tensors(split_for_data_parallel(batch, schedule)[data_rank], torch.device("cpu"))
    old, reference = old_and_reference(samples)
    data["log_probs"] = [torch.from_numpy(old[i]) for i in data["partition"]]
    data["ref_log_probs"] = [torch.from_numpy(reference[i]) for i in data["partition"]]
    return data


def train_worker(cases):
    """Per case: metrics of one step, gradients (without distributed optimizer), forward log-probs by sample."""
    from tests.support.megatron_worker import hf_gradients, load_model

    results = {}
    for name, args in cases.items():
        chunks = load_model(args)
        from megatron.core import parallel_state

        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler
        from slime.backends.megatron_utils.train_step import forward_log_probs, train_one_step
        from slime.training.advantages import compute_advantages_and_returns
        from slime.training.data_metrics import rollout_data_metrics

        optimizer, scheduler = build_optimizer_and_scheduler(args, chunks)
        data = shard_of(args, parallel_state.get_data_parallel_rank())
        compute_advantages_and_returns(args, data)
        forward = forward_log_probs(args, chunks, data, with_entropy=True)
        by_sample = {i: lp.tolist() for i, lp in zip(data["sample_indices"], forward["log_probs"], strict=True)}
        data_metrics = rollout_data_metrics(args, data, parallel_state.get_data_parallel_group())
        metrics = train_one_step(args, chunks, optimizer, scheduler, data, 0, 0)
        gradients = None if args.use_distributed_optimizer else hf_gradients(args, chunks)
        results[name] = (metrics, gradients, by_sample, data_metrics)
    return results


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=True)
    return directory


@pytest.fixture(scope="module")
def one_rank(hf_dir):
    cases = {
        "rollout": make_args(hf_dir, use_distributed_optimizer=False),
        "token": make_args(hf_dir, use_distributed_optimizer=False, calculate_per_token_loss=True),
        "distributed": make_args(hf_dir),
        "one_batch": make_args(hf_dir, use_distributed_optimizer=False, max_tokens_per_gpu=1000),
        "zeros": make_args(hf_dir, log_num_zeros_in_grad=True),
    }
    return run_distributed(train_worker, 1, (cases,))[0]


@pytest.fixture(scope="module")
def two_ranks(hf_dir):
    cases = {}
    for name, layout in LAYOUTS.items():
        cases[f"{name}/rollout"] = make_args(hf_dir, use_distributed_optimizer=False, **layout)
        cases[f"{name}/token"] = make_args(
            hf_dir, use_distributed_optimizer=False, calculate_per_token_loss=True, **layout
        )
    cases["dp2/distributed"] = make_args(hf_dir, data_parallel_size=2)
    overlap = {"data_parallel_size": 2, "overlap_grad_reduce": True, "ddp_bucket_size": 2000}
    cases["dp2/overlap"] = make_args(hf_dir, use_distributed_optimizer=False, **overlap)
    cases["dp2/overlap-distributed"] = make_args(hf_dir, **overlap)
    return run_distributed(train_worker, 2, (cases,), timeout=240)


@pytest.mark.parametrize("reduction", ["rollout", "token"])
def test_loss_and_gradient_equal_plain_loops(hf_dir, one_rank, reduction):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64)
    args = make_args(hf_dir, calculate_per_token_loss=reduction == "token")
    loss = plain_loss(model, args, make_samples(args.vocab_size), ADVANTAGES)
    loss.backward()
    metrics, gradients, _, _ = one_rank[reduction]
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-5)
    for name, parameter in model.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(gradients[name].double(), parameter.grad, rtol=1e-4, atol=2e-6)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["rollout", "token"])
def test_l13_layouts_give_the_gradients_of_one_rank(one_rank, two_ranks, layout, reduction):
    import torch

    expected_metrics, expected_gradients, _, expected_data = one_rank[reduction]
    for rank in range(2):
        metrics, gradients, _, data_metrics = two_ranks[rank][f"{layout}/{reduction}"]
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)
        assert data_metrics == pytest.approx(expected_data, rel=1e-5, abs=1e-7)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_l13_micro_batches_do_not_change_the_loss(one_rank):
    split, whole = one_rank["rollout"][0], one_rank["one_batch"][0]
    assert split == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_distributed_optimizer_reports_the_same_numbers(one_rank, two_ranks):
    expected = one_rank["rollout"][0]
    for metrics in (one_rank["distributed"][0], two_ranks[0]["dp2/distributed"][0]):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_reductions_behind_the_backward_pass_change_nothing(one_rank, two_ranks):
    """Buckets of 2,000 parameters, several micro-batches: only the last one's backward pass may start reductions."""
    import torch

    expected_metrics, expected_gradients, _, _ = one_rank["rollout"]
    for rank in two_ranks:
        metrics, gradients, _, _ = rank["dp2/overlap"]
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6, msg=name)
        assert rank["dp2/overlap-distributed"][0] == pytest.approx(expected_metrics, rel=1e-5, abs=1e-7)


def test_zeros_in_the_gradient_are_counted_when_asked_for(one_rank):
    metrics = one_rank["zeros"][0]
    assert metrics.pop("num_zeros_in_grad") >= 0
    assert metrics == pytest.approx(one_rank["distributed"][0], rel=1e-6)


def test_forward_pass_scatters_to_samples(hf_dir, one_rank, two_ranks):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32)
    args = make_args(hf_dir)
    merged = {**two_ranks[0]["dp2/rollout"][2], **two_ranks[1]["dp2/rollout"][2]}
    for sample in make_samples(args.vocab_size):
        logits = model(torch.tensor([sample.tokens])).logits[0] / args.rollout_temperature
        log_probs = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
        expected = log_probs[-sample.response_length :].tolist()
        for by_sample in (one_rank["rollout"][2], two_ranks[0]["tp2/rollout"][2], merged):
            assert by_sample[sample.index] == pytest.approx(expected, abs=1e-5)


def nan_worker(args):
    import torch

    from tests.support.megatron_worker import load_model

    chunks = load_model(args)
    from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler
    from slime.backends.megatron_utils.train_step import train_one_step
    from slime.training.advantages import compute_advantages_and_returns
    from slime.utils.errors import RunError

    optimizer, scheduler = build_optimizer_and_scheduler(args, chunks)
    data = shard_of(args, 0)
    compute_advantages_and_returns(args, data)
    data["log_probs"][2] = torch.full_like(data["log_probs"][2], float("nan"))
    try:
        train_one_step(args, chunks, optimizer, scheduler, data, 5, 0)
        message = None
    except RunError as error:
        message = str(error)
    args.check_for_nan_in_loss_and_grad = False
    unchecked = train_one_step(args, chunks, optimizer, scheduler, data, 5, 0)
    return data["sample_indices"][2], message, unchecked["loss"]


def test_nan_loss_stops_and_names_step_and_samples(hf_dir):
    index, message, unchecked = run_distributed(nan_worker, 1, (copy.copy(make_args(hf_dir)),))[0]
    assert "rollout 5, step 0, rank 0: the loss is nan" in message and str(index) in message
    # --no-check-for-nan-in-loss-and-grad
    assert math.isnan(unchecked)
