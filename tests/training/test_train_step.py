"""One optimizer step of GRPO: against loops over transformers in float64, and the same for every parallel layout."""

import math
import re
from types import SimpleNamespace

import pytest

from tests.support.models.grpo_batch import (
    ADVANTAGES,
    TRAINED_TOKENS,
    bounds_of_batch,
    make_samples,
    objective_args,
    plain_loss,
)
from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.oracles.rounding import assert_equal_gradients, assert_equal_metrics
from tests.support.processes.distributed import run_distributed

LAYOUTS = {
    "dp2": {"data_parallel_size": 2},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


# In the second a loss exchanges log-probs between ranks, one of which may own nothing of a response.
RECOMPUTED = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "entropy_coef": 0.01},
    "context": {"context_parallel_size": 2, "advantage_estimator": "gspo"},
    "gathered context": {"context_parallel_size": 2, "allgather_cp": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def train_worker(cases):
    """Per case: metrics of one step, gradients (without distributed optimizer); on the last stage forward log-probs by sample
    and metrics of the data."""
    from tests.support.processes.megatron_worker import hf_gradients, load_backend

    results = {}
    for name, args in cases.items():
        backend = load_backend(args)
        from slime.training.advantages import compute_advantages_and_returns
        from slime.training.reports import rollout_data_metrics
        from slime.training.train_step import forward_log_probs, train_one_step

        data = shard_of(args, backend.groups.data_rank)
        forward, by_sample, data_metrics = forward_log_probs(args, backend, data, with_entropy=True), {}, {}
        if backend.groups.is_last_stage:
            compute_advantages_and_returns(args, data)
            rows = zip(data["sample_indices"], forward["log_probs"], strict=True)
            by_sample = {i: lp.tolist() for i, lp in rows}
            data_metrics = rollout_data_metrics(args, data, backend.groups.sample_group)
        metrics = train_one_step(args, backend, data, 0, 0)
        gradients = None if args.use_distributed_optimizer else hf_gradients(args, backend.model)
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
        "recomputed": make_args(hf_dir, use_distributed_optimizer=False, recompute_loss_function=True),
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
    for name, layout in RECOMPUTED.items():
        flags = {"use_distributed_optimizer": False, **layout}
        cases[name] = make_args(hf_dir, **flags)
        cases[f"{name}, recomputed"] = make_args(hf_dir, **flags, recompute_loss_function=True)
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
    plain = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Tied to the embedding, whose gradient has both parts.
    plain.pop("lm_head.weight", None)
    assert_equal_gradients(gradients, plain, TRAINED_TOKENS)
    norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reduction", ["rollout", "token"])
def test_l13_layouts_give_the_gradients_of_one_rank(one_rank, two_ranks, layout, reduction):

    expected_metrics, expected_gradients, _, expected_data = one_rank[reduction]
    for rank in range(2):
        metrics, gradients, _, data_metrics = two_ranks[rank][f"{layout}/{reduction}"]
        bounds = bounds_of_batch(calculate_per_token_loss=reduction == "token")
        assert_equal_metrics(metrics, expected_metrics, bounds)
        assert_equal_metrics(data_metrics, expected_data, bounds)
        assert_equal_gradients(gradients, expected_gradients, TRAINED_TOKENS)


@pytest.mark.parametrize("reduction", ["rollout", "token"])
def test_l21_sequence_parallel_gradients_are_summed_once(one_rank, two_ranks, reduction):
    """Norms stand on every tensor-parallel rank, and each sees a part of the tokens only."""
    expected = {name: gradient for name, gradient in one_rank[reduction][1].items() if "norm" in name}
    assert len(expected) == 2 * 4 + 1
    for rank in two_ranks:
        gradients = rank[f"tp2_sp/{reduction}"][1]
        for name, gradient in expected.items():
            assert float(gradients[name].norm()) == pytest.approx(float(gradient.norm()), rel=1e-5), name


def test_l13_micro_batches_do_not_change_the_loss(one_rank):
    split, whole = one_rank["rollout"][0], one_rank["one_batch"][0]
    assert_equal_metrics(split, whole, bounds_of_batch())


def test_distributed_optimizer_reports_the_same_numbers(one_rank, two_ranks):
    expected = one_rank["rollout"][0]
    for metrics in (one_rank["distributed"][0], two_ranks[0]["dp2/distributed"][0]):
        assert_equal_metrics(metrics, expected, bounds_of_batch())


def test_reductions_behind_the_backward_pass_change_nothing(one_rank, two_ranks):
    """Buckets of 2,000 parameters, several micro-batches: only the last one's backward pass may start reductions."""

    expected_metrics, expected_gradients, _, _ = one_rank["rollout"]
    for rank in two_ranks:
        metrics, gradients, _, _ = rank["dp2/overlap"]
        assert_equal_metrics(metrics, expected_metrics, bounds_of_batch())
        assert_equal_gradients(gradients, expected_gradients, TRAINED_TOKENS)
        assert_equal_metrics(rank["dp2/overlap-distributed"][0], expected_metrics, bounds_of_batch())


def test_zeros_in_the_gradient_are_counted_when_asked_for(hf_dir, one_rank):
    metrics, gradients = one_rank["zeros"][0], one_rank["rollout"][1]
    # An export has no rows that pad the vocabulary, which no token trains.
    rows, hidden = gradients["model.embed_tokens.weight"].shape
    padding = (make_args(hf_dir).padded_vocab_size - rows) * hidden
    zeros = padding + sum(int((gradient == 0).sum()) for gradient in gradients.values())
    assert metrics.pop("num_zeros_in_grad") == zeros > 0
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


def nan_gradient_on_rank_1(args, batch, logits, reduce):
    """A finite loss; on rank 1 the gradient of its logits is not: the root of zero."""
    import torch.distributed as dist

    zero = logits.float().sum() * 0
    return (zero.sqrt() if dist.get_rank() == 1 else zero), {}


def bad_step_worker(args):
    """Steps on two ranks, data-parallel or pipeline stages, of which only the second has something that is not finite."""
    import torch.distributed as dist

    from tests.support.processes.megatron_worker import load_backend

    backend = load_backend(args)
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import train_one_step
    from slime.utils.errors import RunError

    rank = dist.get_rank()

    def weights():
        return [parameter.detach().clone() for parameter in backend.model[0].parameters()]

    def step(with_nan=False, **overrides):
        """The metrics or the message; how far the schedule is; whether the weights are as they were."""
        case = SimpleNamespace(**{**vars(args), **overrides})
        data = shard_of(case, backend.groups.data_rank)
        compute_advantages_and_returns(case, data)
        if with_nan and rank == 1:
            data["log_probs"][2] = data["log_probs"][2] * math.nan
        before = weights()
        try:
            result = train_one_step(case, backend, data, 5, 0)
        except RunError as error:
            result = str(error)
        return result, backend.scheduler.num_steps, all(a.equal(b) for a, b in zip(before, weights(), strict=True))

    custom = {"loss_type": "custom_loss", "custom_loss_function_path": f"{__file__}:nan_gradient_on_rank_1"}
    off = {"check_for_nan_in_loss_and_grad": False}
    sample = shard_of(args, args.data_parallel_size - 1)["sample_indices"][2]
    return {
        "sample": sample,
        "stop": step(with_nan=True),
        "skip": step(with_nan=True, **off),
        "stop gradient": step(**custom),
        "skip gradient": step(**custom, **off),
        "good": step(),
        "moments": [group.get("step") for group in backend.optimizer.param_groups if group["params"]],
    }


BAD_STEP_LAYOUTS = {
    "dp2": {"data_parallel_size": 2},
    "dp2_plain": {"data_parallel_size": 2, "use_distributed_optimizer": False},
    "pp2": {"pipeline_model_parallel_size": 2},
}


@pytest.fixture(scope="module", params=BAD_STEP_LAYOUTS)
def bad_steps(request, hf_dir):
    return run_distributed(bad_step_worker, 2, (make_args(hf_dir, **BAD_STEP_LAYOUTS[request.param]),))


def test_a_bad_step_stops_all_ranks_with_one_message(bad_steps):
    zero, one = bad_steps
    message, scheduled, unchanged = zero["stop"]
    assert message == one["stop"][0]
    assert re.match(
        rf"rollout 5, step 0: the loss is nan on rank 1 in the micro-batch with samples \[(.*, )?{zero['sample']}(, .*)?\]\. ",
        message,
    )
    assert zero["stop gradient"][0] == one["stop gradient"][0]
    assert re.match(
        r"rollout 5, step 0: the gradient norm is nan; losses are finite, but the gradient at the logits is not on rank 1 in "
        r"the micro-batch with samples \[.*\]",
        zero["stop gradient"][0],
    )
    for rank in bad_steps:
        for case in ("stop", "stop gradient"):
            assert rank[case][1:] == (0, True)


def test_without_the_check_a_bad_step_is_skipped_and_counted(bad_steps):
    for rank in bad_steps:
        for case in ("skip", "skip gradient"):
            metrics, scheduled, unchanged = rank[case]
            assert metrics["skipped_steps"] == 1 and math.isnan(metrics["grad_norm"])
            assert math.isnan(metrics["loss"]) == (case == "skip")
            assert scheduled == 0 and unchanged, "neither the schedule nor the weights move"
        metrics, scheduled, unchanged = rank["good"]
        assert metrics["skipped_steps"] == 0 and math.isfinite(metrics["grad_norm"])
        assert scheduled == 8 and not unchanged
        assert set(rank["moments"]) == {1}
    assert bad_steps[0]["good"][0] == bad_steps[1]["good"][0]


def assert_same_step(found, expected):
    (metrics, gradients, *_), (of_kept, kept, *_) = found, expected
    assert metrics == of_kept and gradients.keys() == kept.keys()
    assert all(gradients[name].equal(gradient) for name, gradient in kept.items())


def test_a_loss_that_is_recomputed_gives_the_same_bits(one_rank, two_ranks):
    assert_same_step(one_rank["recomputed"], one_rank["rollout"])
    for rank in two_ranks:
        for name in RECOMPUTED:
            assert_same_step(rank[f"{name}, recomputed"], rank[name])


def greedy_loss(args, batch, logits, reduce):
    """Keeps a float32 softmax of all logits for its backward pass."""
    import torch

    calls.append(torch.is_grad_enabled())
    return logits.float().softmax(-1).log().exp().square().sum(), {"entries": logits.new_tensor(logits.numel())}


calls = []


def what_a_loss_keeps(cases):
    """By case: bytes that are kept until the backward pass, beside the logits; the gradient; the metric; whether
    each call of the loss recorded a gradient."""
    import torch

    from slime.training.loss_guard import LossGuard
    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import step_loss
    from tests.training.test_train_step import calls

    torch.distributed.init_process_group("gloo")
    found = {}
    for name, args in cases.items():
        data = RolloutData({
            "tokens": [torch.tensor([1, 2, 3, 4])], "total_lengths": [4], "response_lengths": [2], "rollout_mask_sums": [2.0],
            "sample_indices": [0], "loss_masks": [torch.ones(2)], "advantages": [torch.ones(2)],
        })  # fmt: skip
        batch = data.micro_batch([0], pad_multiple=4)
        logits, kept = torch.linspace(-1, 1, 256).view(4, 64).requires_grad_(), {}

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        calls.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value, metrics = step_loss(args, "actor", None, None, LossGuard("here", True))(batch, logits)
        kept.pop(logits.untyped_storage().data_ptr(), None)
        value.backward()
        found[name] = (sum(kept.values()), logits.grad.tolist(), float(metrics["entries"]), list(calls))
    return found


def test_a_loss_that_is_recomputed_keeps_the_logits_alone():
    custom = {"loss_type": "custom_loss", "custom_loss_function_path": "tests.training.test_train_step.greedy_loss"}
    cases = {
        "kept": objective_args(**custom),
        "recomputed": objective_args(**custom, recompute_loss_function=True),
    }
    (found,) = run_distributed(what_a_loss_keeps, 1, (cases,))
    (kept, gradient, entries, once), (kept_again, same, same_entries, twice) = found["kept"], found["recomputed"]
    assert kept >= 4 * 256 and kept_again == 0
    assert gradient == same and any(map(any, gradient)) and entries == same_entries == 256
    assert (once, twice) == ([True], [False, True])


def gradient_buffers(args):
    """Where the loss wrote the gradient of the logits, and where it was when it came to the model."""
    import torch

    from slime.training import log_probs
    from slime.training.loss_guard import LossGuard
    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import step_loss

    torch.distributed.init_process_group("gloo")
    written, arrived, write = [], [], log_probs._chunked_gradient

    def noted(*arguments):
        gradient = write(*arguments)
        written.append(gradient.data_ptr())
        return gradient

    log_probs._chunked_gradient = noted
    tokens = [torch.tensor([1, 2, 3, 4])]
    data = RolloutData({
        "tokens": tokens, "total_lengths": [4], "response_lengths": [2], "rollout_mask_sums": [2.0], "sample_indices": [0],
        "loss_masks": [torch.ones(2)], "advantages": [torch.ones(2)],
    })  # fmt: skip
    batch = data.micro_batch([0], pad_multiple=4)
    logits = torch.randn(1, 4, 64, requires_grad=True) * 1.0
    logits.register_hook(lambda gradient: arrived.append(gradient.data_ptr()))
    step_loss(args, "actor", None, None, LossGuard("here", True))(batch, logits.squeeze(0))[0].backward()
    return written, arrived


def test_the_gradient_of_the_logits_is_one_buffer():
    ((written, arrived),) = run_distributed(gradient_buffers, 1, (objective_args(use_kl_loss=False),))
    assert written == arrived
