"""Functions of the user inside the loss: what they are given, what becomes of their answers, and what is refused."""

import inspect
import math
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.reduction import sum_of_sample_mean
from slime.scheduling.dp_schedule import DPSchedule
from slime.training.advantages import compute_advantages_and_returns
from slime.training.context_parallel import ContextParallel
from slime.training.custom_functions import icepop_function, vanilla_tis_function
from slime.training.loss import loss_function
from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.objective_step import (
    ROLLOUTS,
    VOCABULARY,
    assert_equal_gradients,
    case_args,
    make_logits,
    make_samples,
    rollout_data,
    run_step,
)


def veto_all(
    *, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    return pg_loss * 2, [torch.zeros_like(mask) for mask in loss_masks], {"vetoed": torch.ones_like(pg_loss)}


def keep_first_token(*, pg_loss, loss_masks, **kwargs):
    masks = [mask * (torch.arange(len(mask)) == 0) for mask in loss_masks]
    return pg_loss, masks, {}


@pytest.mark.parametrize("per_token", [False, True])
def test_l14_rejected_tokens_leave_the_loss_but_not_the_metrics(per_token):
    path = f"{__file__}:veto_all"
    args = case_args(use_tis=True, custom_tis_function_path=path, calculate_per_token_loss=per_token)
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    plain_args = case_args(calculate_per_token_loss=per_token)
    _, plain, _ = run_step(plain_args, data, make_logits(make_samples()), [range(6)])
    loss, metrics, gradients = run_step(args, data, make_logits(make_samples()), [range(6)])
    assert loss == 0 and metrics["pg_loss"] == 0
    assert all(not gradient.any() for gradient in gradients)
    # Four executions have a trained token.
    assert metrics["vetoed"] == pytest.approx(1.0 if per_token else 4 / ROLLOUTS)
    for name in ("entropy_loss", "kl_loss", "ppo_kl", "pg_clipfrac", "train_rollout_logprob_abs_diff"):
        assert metrics[name] == pytest.approx(plain[name])


def test_rejection_keeps_the_denominators():
    args = case_args(
        use_tis=True, custom_tis_function_path=f"{__file__}:keep_first_token", use_kl_loss=False, entropy_coef=0.0
    )
    data = rollout_data(make_samples()[:1])
    del data["log_probs"]
    data["advantages"] = [torch.full((5,), 2.0)]
    loss, _, _ = run_step(args, data, make_logits(make_samples()[:1]), [[0]])
    # One of five trained tokens is left, and the sum is still divided by five.
    assert loss == pytest.approx(-2.0 / 5 / ROLLOUTS)


def edit_masks(*, pg_loss, loss_masks, **kwargs):
    for mask in loss_masks:
        mask[1:] = 0
    return pg_loss, loss_masks, {"kept": torch.ones_like(pg_loss)}


def edit_masks_unseen(*, pg_loss, loss_masks, **kwargs):
    """Through memory that torch does not watch."""
    for mask in loss_masks:
        mask.numpy()[1:] = 0
    return pg_loss, loss_masks, {"kept": torch.ones_like(pg_loss)}


def loss_that_edits_masks(args, batch, logits, reduce):
    batch["loss_masks"][0][1:] = 0
    values = logits.new_full((sum(batch.local_lengths),), -2.0)
    return reduce(values), {}


def loss_that_replaces_a_mask(args, batch, logits, reduce):
    reduce(logits.new_zeros(sum(batch.local_lengths)))
    batch["loss_masks"][0] = batch["loss_masks"][0] * (torch.arange(5) == 0)
    return reduce(logits.new_full((sum(batch.local_lengths),), -2.0)), {}


def edit_log_probs(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    for own, engine in zip(train_log_probs, rollout_log_probs, strict=True):
        own.sub_(engine).exp_()
    return pg_loss, loss_masks, {}


def leave_log_probs(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {}


@pytest.mark.parametrize("stored", [True, False])
def test_log_probs_that_a_correction_edits_are_its_own(stored):
    """Without stored ones they are those of the policy that trains."""
    data, results = rollout_data(make_samples()), []
    compute_advantages_and_returns(case_args(), data)
    if not stored:
        del data["log_probs"]
    for function in (leave_log_probs, edit_log_probs):
        path = f"{__file__}:{function.__name__}"
        args = case_args(use_tis=True, custom_tis_function_path=path, kl_loss_type="k3", use_unbiased_kl=True)
        results.append(run_step(args, data, make_logits(make_samples()), [range(6)]))
    (loss, metrics, gradients), edited = results
    assert edited[0] == loss and edited[1] == metrics
    assert all(one.equal(other) for one, other in zip(gradients, edited[2], strict=True))


def tell_log_weights(*, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"log_weight": torch.cat(train_log_probs) - torch.cat(rollout_log_probs)}


def test_a_correction_compares_the_engine_with_the_stored_log_probs_whichever_are_the_old_ones():
    """Where the engine's are the old ones, a function that only measures would else compare these with themselves."""
    samples, path = make_samples(), f"{__file__}:tell_log_weights"
    data = rollout_data(samples)
    compute_advantages_and_returns(case_args(), data)
    trained = [(s.old[t] - s.roll[t]) for s in samples for t in range(len(s.mask)) if s.mask[t]]
    for of_engine in (False, True):
        args = case_args(use_rollout_logprobs=of_engine, custom_tis_function_path=path, calculate_per_token_loss=True)
        _, metrics, _ = run_step(args, data, make_logits(samples), [range(6)])
        assert metrics["log_weight"] == pytest.approx(sum(trained) / len(trained), rel=1e-5)


def losses_of_ranks(args, size):
    """Loss and metrics of a sample with five trained tokens of advantage 2, added up over `size` context-parallel ranks."""
    whole, total = rollout_data(make_samples()[:1]), {}
    whole["advantages"] = [torch.full((5,), 2.0)]
    for rank in range(size):
        columns = {name: column for name, column in whole.items() if name != "log_probs"}
        data = RolloutData.of_rank(columns, ContextParallel(size, rank, None))
        batch = data.micro_batch([0], pad_multiple=4)
        _, metrics = loss_function(args, batch, torch.zeros(len(batch.stream.next_tokens), VOCABULARY), None)
        total = {name: total.get(name, 0.0) + float(value) for name, value in metrics.items()}
        # What comes after it, the loss that is made once more for one, has the masks of the step.
        assert all(mask.sum() == 5 for mask in data["loss_masks"])
    return total


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("function", ["keep_first_token", "edit_masks", "edit_masks_unseen"])
def test_masks_that_a_correction_edits_in_place_reject_tokens(function, size):
    args = case_args(
        use_tis=True, custom_tis_function_path=f"{__file__}:{function}", use_kl_loss=False, entropy_coef=0.5
    )
    total = losses_of_ranks(args, size)
    entropy = math.log(VOCABULARY)
    assert total["pg_loss"] == pytest.approx(-2.0 / 5)
    assert total["loss"] == pytest.approx(-2.0 / 5 - 0.5 * entropy / 5)
    # Metrics speak of all trained tokens.
    assert total["entropy_loss"] == pytest.approx(entropy) and total.get("kept", 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("function", ["loss_that_edits_masks", "loss_that_replaces_a_mask"])
def test_masks_that_a_custom_loss_edits_count(function, per_token, size):
    path = f"{__file__}:{function}"
    args = case_args(loss_type="custom_loss", custom_loss_function_path=path, calculate_per_token_loss=per_token)
    assert losses_of_ranks(args, size)["loss"] == pytest.approx(-2.0 if per_token else -2.0 / 5)


def loss_of_notes(args, batch, logits, sum_of_sample_mean):
    """Every sample counts with what was noted on it."""
    noted = zip(batch["metadata"], batch["response_lengths"], strict=True)
    return sum_of_sample_mean(torch.cat([torch.full((int(length),), of["weight"]) for of, length in noted])), {}


def test_r22_a_custom_loss_reads_what_a_function_noted_on_its_samples():
    samples = [
        Sample(
            index=i, rollout_id=i, tokens=[1, 2, 3, 4, 5], response_length=2 + i % 2, train_metadata={"weight": 10.0**i}
        )
        for i in range(3)
    ]
    batch = build_train_batch(samples, [1.0] * 3, [1.0] * 3)
    # The second rank has two samples, a micro-batch each, and another order.
    shard = split_for_data_parallel(batch, DPSchedule([[0], [2, 1]], [[[0]], [[0], [1]]], [1], [3], 0))[1]
    args = case_args(loss_type="custom_loss", custom_loss_function_path=f"{__file__}:loss_of_notes")
    found = []
    for positions in shard["micro_batch_indices"]:
        micro_batch = to_tensors(shard, "cpu").micro_batch(positions, pad_multiple=4)
        logits = torch.zeros(len(micro_batch.stream.next_tokens), VOCABULARY)
        found.append(float(loss_function(args, micro_batch, logits, None)[0]))
    assert found == pytest.approx([100.0, 10.0])


def wrong_kind(**kwargs):
    return kwargs["pg_loss"]


def wrong_number(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks


def wrong_loss(*, pg_loss, loss_masks, **kwargs):
    return pg_loss.sum(), loss_masks, {}


def wrong_masks(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks[:1], {}


def wrong_metrics(*, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mine": pg_loss.mean()}


def raising(**kwargs):
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    "function, message",
    [
        ("wrong_kind", r"wrong_kind returned Tensor \(25,\); expected \(pg_loss, modified_masks"),
        ("wrong_number", r"wrong_number returned a tuple of 2; expected \(pg_loss, modified_masks"),
        ("wrong_loss", r"wrong_loss returned Tensor \(\) as pg_loss; expected one of shape \(25,\)"),
        ("wrong_masks", r"wrong_masks returned masks of lengths \[5\]; expected one tensor per sample"),
        ("wrong_metrics", r"wrong_metrics returned dict as metrics, mine not of shape \(25,\)"),
        ("raising", r"--custom-tis-function-path .*raising raised KeyError for samples \[0, 1, 2, 3, 4, 5\]"),
    ],
)
def test_a_correction_is_checked(function, message):
    args = case_args(use_tis=True, custom_tis_function_path=f"{__file__}:{function}")
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    with pytest.raises(UserError, match=message):
        run_step(args, data, make_logits(make_samples()), [range(6)])


def constant_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (values * torch.cat(list(loss_masks))).sum() / 10


def mean_by_name(total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, rollout_mask_sums):
    weights = torch.cat([mask / max(total, 1) for mask, total in zip(loss_masks, rollout_mask_sums, strict=True)])
    return lambda values: (values * weights).sum()


def test_a_reducer_may_take_the_sums_of_executions_by_name():
    args, samples = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:mean_by_name"), make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    _, expected, _ = run_step(case_args(), data, make_logits(samples), [range(6)])
    _, metrics, _ = run_step(args, data, make_logits(samples), [range(6)])
    assert metrics["pg_loss"] == pytest.approx(expected["pg_loss"], rel=1e-5)


def vector(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values


def late_error(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: values / loss_masks


def test_the_constant_length_reducer():
    """Dr. GRPO: a token weighs the same in a response of any length; and only the policy-gradient term is touched."""
    args = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:constant_length")
    samples = make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    del data["log_probs"]
    expected = -sum(s.reward * sum(s.mask) for s in samples) / 10 / ROLLOUTS
    _, default, _ = run_step(case_args(), data, make_logits(samples), [range(6)])
    for split in ([range(6)], [[1, 4], [0, 5], [3, 2]]):
        _, metrics, _ = run_step(args, data, make_logits(samples), split)
        assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)
        assert metrics["kl_loss"] == pytest.approx(default["kl_loss"])
    args = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:vector")
    with pytest.raises(UserError, match=r"its reducer returned \(25,\) for 25 tokens; expected a scalar tensor"):
        run_step(args, data, make_logits(samples), [range(6)])
    args = case_args(custom_pg_loss_reducer_function_path=f"{__file__}:late_error")
    with pytest.raises(UserError, match=r"reducer-function-path .*late_error raised TypeError for samples \[0, 1"):
        run_step(args, data, make_logits(samples), [range(6)])


def test_a_reducer_gets_masks_without_what_a_correction_rejects():
    args = case_args(
        use_tis=True, custom_tis_function_path=f"{__file__}:keep_first_token",
        custom_pg_loss_reducer_function_path=f"{__file__}:constant_length",
    )  # fmt: skip
    samples = make_samples()
    data = rollout_data(samples)
    compute_advantages_and_returns(args, data)
    del data["log_probs"]
    _, metrics, _ = run_step(args, data, make_logits(samples), [range(6)])
    expected = -sum(sample.reward * sample.mask[0] for sample in samples) / 10 / ROLLOUTS
    assert metrics["pg_loss"] == pytest.approx(expected, rel=1e-5)


def nothing_left(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    for mask in loss_masks:
        mask.zero_()
    return lambda values: (values * torch.cat(loss_masks)).sum()


@pytest.mark.parametrize(
    "correction", [{}, {"use_tis": True, "custom_tis_function_path": f"{__file__}:keep_first_token"}]
)
def test_masks_that_a_reducer_edits_are_its_own(correction):
    plain, path = case_args(entropy_coef=0.1, **correction), f"{__file__}:nothing_left"
    args = case_args(entropy_coef=0.1, custom_pg_loss_reducer_function_path=path, **correction)
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    loss, expected, _ = run_step(plain, data, make_logits(make_samples()), [range(6)])
    own_loss, metrics, _ = run_step(args, data, make_logits(make_samples()), [range(6)])
    assert metrics["pg_loss"] == 0 != expected["pg_loss"]
    assert own_loss == pytest.approx(loss - expected["pg_loss"], rel=1e-5)
    assert [mask.tolist() for mask in data["loss_masks"]] == [list(sample.mask) for sample in make_samples()]


def test_weights_that_are_only_measured_leave_rejection_switched_on(tmp_path):
    """The settings of masked importance sampling say `use_tis: false`, which stands for the flag too."""
    settings = tmp_path / "mis.yaml"
    settings.write_text(
        "use_tis: false\nuse_rs: true\nrs_level: token\nrs_lower_bound: 0.8\nrs_upper_bound: 1.25\nrs_veto_threshold: null\n"
    )
    path = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    parsed = parse(tmp_path, "--use-tis", "--custom-tis-function-path", path, "--custom-config-path", str(settings))
    assert not parsed.use_tis
    names = ("use_tis", "custom_tis_function_path", "custom_config", *parsed.custom_config)
    changes = {name: vars(parsed)[name] for name in names}
    args = case_args(kl_loss_coef=0.0, entropy_coef=0.0, eps_clip_high=1e6, **changes)
    samples = make_samples()[:1]
    # Of five trained tokens, the engine found the second far more likely than the trainer, and the fourth far less.
    samples[0].roll = [old + shift for old, shift in zip(samples[0].old, (0.0, 2.0, 0.0, -2.0, 0.1), strict=True)]
    data = rollout_data(samples)
    data["advantages"] = [torch.full((5,), 2.0)]
    _, metrics, (gradient,) = run_step(args, data, make_logits(samples), [[0]])
    assert (
        metrics["mis_rs_mask_fraction_low"] == metrics["mis_rs_mask_fraction_high"] == pytest.approx(1 / 5 / ROLLOUTS)
    )
    assert metrics["mis_is_ratio_mean_final"] > 0
    # The row at a position predicts the token behind it; the prompt has three tokens.
    assert [bool(row.any()) for row in gradient[2:7]] == [True, False, True, False, True]


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_l15_weights_of_mean_1_do_not_depend_on_the_packing(level):
    """Masked importance sampling as shipped, with sums over the whole step."""
    from examples.train_infer_mismatch_helper.mis import mis_step_statistics
    from slime.training.context_parallel import NO_CONTEXT_PARALLEL

    path = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
    args = case_args(
        use_tis=True, custom_tis_function_path=path, use_rs=True, tis_level=level, rs_level=level, tis_mode="clip",
        tis_batch_normalize=True, rs_lower_bound=0.7, rs_upper_bound=1.6, calculate_per_token_loss=True,
    )  # fmt: skip
    data = rollout_data(make_samples())
    compute_advantages_and_returns(args, data)
    columns = {"train_log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs", "loss_masks": "loss_masks",
               "total_lengths": "total_lengths", "response_lengths": "response_lengths"}  # fmt: skip
    given = {name: data[column] for name, column in columns.items()}
    sums = mis_step_statistics(args=args, cp=NO_CONTEXT_PARALLEL, **given)
    results = []
    for split in ([range(6)], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 2, 3, 4]]):
        loss, metrics, gradients = run_step(args, data, make_logits(make_samples()), split, step_statistics=sums)
        results.append((loss, metrics, gradients))
    for loss, metrics, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-5)
        assert metrics == pytest.approx(results[0][1], rel=1e-5, abs=1e-7)
        assert_equal_gradients(gradients, [gradient.double() for gradient in results[0][2]])
    _, metrics, _ = results[0]
    rejected = metrics["mis_rs_mask_fraction_low"] + metrics["mis_rs_mask_fraction_high"]
    assert 0 < rejected < 1
    # Over the tokens that are left, the mean is 1.
    assert metrics["mis_is_ratio_mean_final"] == pytest.approx(1 - rejected, rel=1e-5)


TRAIN = [torch.tensor([-1.0, -1.2]), torch.tensor([-0.3])]
ROLLOUT = [torch.tensor([-2.0, -1.0]), torch.tensor([-0.3])]
MASKS = [torch.tensor([1, 1]), torch.tensor([1])]


def correct(function, low=0.0, high=2.0, pg_loss=(1.0, -2.0, 3.0), **changes):
    leaf = torch.tensor(pg_loss, requires_grad=True)
    keywords = {
        "args": SimpleNamespace(tis_clip_low=low, tis_clip=high), "pg_loss": leaf, "train_log_probs": TRAIN,
        "rollout_log_probs": ROLLOUT, "loss_masks": MASKS, "total_lengths": [4, 3], "response_lengths": [2, 1],
        "of_a_later_version": 1, **changes,
    }  # fmt: skip
    loss, masks, metrics = function(**keywords)
    loss.sum().backward()
    return loss.tolist(), masks, metrics, leaf.grad.tolist()


def test_truncated_importance_sampling():
    loss, masks, metrics, gradient = correct(vanilla_tis_function)
    assert loss == pytest.approx([2.0, -2 * 0.818730753, 3.0], rel=1e-6)
    assert gradient == pytest.approx([2.0, 0.818730753, 1.0], rel=1e-6)
    assert all(ours is theirs for ours, theirs in zip(masks, MASKS, strict=True))
    assert {name: values.tolist() for name, values in metrics.items()} == {
        "tis": pytest.approx([2.718281828, 0.818730753, 1.0], rel=1e-6),
        "tis_clipfrac": [1, 0, 0],
        "tis_abs": pytest.approx([1.718281828, 0.181269247, 0.0], rel=1e-6),
    }


def test_icepop():
    loss, _, metrics, gradient = correct(icepop_function, low=0.5)
    assert loss == pytest.approx([0.0, -2 * 0.818730753, 3.0], rel=1e-6)
    assert gradient == pytest.approx([0.0, 0.818730753, 1.0], rel=1e-6)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0]


@pytest.mark.parametrize("function", [vanilla_tis_function, icepop_function])
def test_no_gradient_reaches_the_weights(function):
    train = [row.clone().requires_grad_() for row in TRAIN]
    correct(function, train_log_probs=train)
    assert all(row.grad is None for row in train)


def test_l14_metrics_see_the_tokens_that_were_rejected():
    loss, masks, metrics, _ = correct(icepop_function, low=5.0, high=6.0)
    assert loss == [0.0, 0.0, 0.0]
    fraction = sum_of_sample_mean(metrics["tis_clipfrac"], masks, [2.0, 1.0]) / 2
    assert fraction.item() == 1.0
    mean_weight = sum_of_sample_mean(metrics["tis"], masks, [2.0, 1.0]) / 2
    assert mean_weight.item() == pytest.approx(((math.e + math.exp(-0.2)) / 2 + 1) / 2, rel=1e-6)


def test_a_rejected_token_may_have_an_infinite_loss():
    loss, _, _, gradient = correct(icepop_function, low=0.5, pg_loss=(math.inf, 1.0, 1.0))
    assert loss[0] == 0.0 and gradient[0] == 0.0


def test_a_shard_without_tokens():
    loss, masks, metrics, _ = correct(
        vanilla_tis_function, pg_loss=(), train_log_probs=[], rollout_log_probs=[], loss_masks=[]
    )
    assert loss == [] and masks == [] and metrics["tis"].tolist() == []


def test_log_probs_of_other_tokens_than_the_loss_are_an_error():
    with pytest.raises(ValueError, match=r"\(3,\) losses for \(2,\) .*trainer and \(3,\) of the engine"):
        correct(vanilla_tis_function, train_log_probs=TRAIN[:1])


@pytest.mark.parametrize("function", [vanilla_tis_function, icepop_function])
def test_the_signature_is_that_of_the_plug_in(function):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == [
        "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths"
    ]  # fmt: skip
    assert not [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
