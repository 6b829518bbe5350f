"""The example against the plain loops: through the plug-in loader, its YAML file through the parser, and over ranks."""

import argparse
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples.train_infer_mismatch_helper.mis import mis_settings_from_args
from slime.algorithms.mismatch import LEVELS, MisSettings
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel, slice_responses
from slime.training.rollout_data import RolloutData
from slime.training.step_statistics import compute_step_statistics, wants_step_statistics
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from tests.support.models.args import parse
from tests.support.oracles.plain_mis import plain_step
from tests.support.processes.distributed import run_distributed

EXAMPLE = Path(__file__).parents[3] / "examples/train_infer_mismatch_helper"
PATH = f"{EXAMPLE}/mis.py:compute_mis_weights_with_cp"
FLAG = "--custom-tis-function-path"

# Prompts and responses of five samples of one step; the last has a response of one token, sample 3 is masked.
PROMPT_LENGTHS, RESPONSE_LENGTHS = [5, 1, 12, 3, 4], [7, 13, 4, 6, 1]
ROWS = ("log_probs", "rollout_log_probs", "loss_masks")


def make_args(**settings):
    values = {"use_tis": True, "tis_batch_normalize": True, "tis_lower_bound": 0.7, "tis_upper_bound": 1.5, **settings}
    return argparse.Namespace(custom_tis_function_path=PATH, custom_config={}, **values)


def make_step():
    """Whole responses of the step; sample 1 has a catastrophic token."""
    generator = torch.Generator().manual_seed(3)
    rollout = [-2 * torch.rand(length, generator=generator) for length in RESPONSE_LENGTHS]
    train = [row + 0.5 * torch.randn(len(row), generator=generator) for row in rollout]
    masks = [(torch.rand(length, generator=generator) < 0.8).int() for length in RESPONSE_LENGTHS]
    train[1][4] -= 12.0
    masks[1][4], masks[3], masks[4] = 1, torch.zeros_like(masks[3]), torch.ones_like(masks[4])
    return {"log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}


def rank_data(indices, cp):
    """Columns of a rank that has the samples `indices`."""
    step = {name: [rows[i] for i in indices] for name, rows in make_step().items()}
    responses = [RESPONSE_LENGTHS[i] for i in indices]
    totals = [PROMPT_LENGTHS[i] + RESPONSE_LENGTHS[i] for i in indices]
    for name in ("log_probs", "rollout_log_probs"):
        step[name] = slice_responses(step[name], totals, responses, cp)
    return RolloutData({**step, "total_lengths": totals, "response_lengths": responses}, cp)


def call(args, data, positions, **further):
    """The function on a micro-batch whose loss is 1 at every token, so that the loss is the factor."""
    columns = {name: [column[i] for i in positions] for name, column in data.items()}
    columns["train_log_probs"] = columns.pop("log_probs")
    pg_loss = torch.ones(sum(len(row) for row in columns["train_log_probs"]))
    return load_function(PATH, FLAG)(args=args, pg_loss=pg_loss, **columns, **further, unknown_to_it=1)


def expected_of(args):
    step = make_step()
    rows = [[row.tolist() for row in step[name]] for name in ROWS]
    return plain_step(mis_settings_from_args(args), *rows)


def test_without_ranks_and_without_a_mean():
    args = make_args(tis_batch_normalize=False, use_rs=True, rs_level="token", rs_upper_bound=1.8)
    factors, new_masks, _ = expected_of(args)
    loss, masks, metrics = call(args, rank_data(range(5), NO_CONTEXT_PARALLEL), range(5))
    assert loss.tolist() == pytest.approx(sum(factors, []), abs=1e-6)
    assert [mask.tolist() for mask in masks] == new_masks
    assert all(mask.dtype == torch.int32 for mask in masks)
    assert all(value.shape == loss.shape for value in metrics.values())


def test_rejected_tokens_have_no_loss_even_if_theirs_is_infinite():
    data = rank_data([1], NO_CONTEXT_PARALLEL)
    function = load_function(PATH, FLAG)
    pg_loss = torch.full((RESPONSE_LENGTHS[1],), math.inf, requires_grad=True)
    loss, masks, _ = function(
        args=make_args(tis_batch_normalize=False, use_rs=True), pg_loss=pg_loss, train_log_probs=data["log_probs"],
        rollout_log_probs=data["rollout_log_probs"], loss_masks=data["loss_masks"],
        total_lengths=data["total_lengths"], response_lengths=data["response_lengths"],
    )  # fmt: skip
    assert (loss == 0).all() and not masks[0].any()
    loss.sum().backward()
    assert (pg_loss.grad == 0).all()


def test_without_rejection_the_masks_stay():
    data = rank_data(range(5), NO_CONTEXT_PARALLEL)
    _, masks, _ = call(make_args(tis_batch_normalize=False), data, range(5))
    assert all(new is old for new, old in zip(masks, data["loss_masks"], strict=True))


def test_a_mean_needs_statistics_of_the_step():
    function = load_function(PATH, FLAG)
    assert wants_step_statistics(function, make_args())
    assert not wants_step_statistics(function, make_args(tis_batch_normalize=False))
    assert not wants_step_statistics(function, make_args(use_tis=False))
    with pytest.raises(UserError, match="tis_batch_normalize needs statistics of the whole optimizer step"):
        call(make_args(), rank_data(range(5), NO_CONTEXT_PARALLEL), range(5))


def test_the_configuration_file_is_accepted(tmp_path):
    path = EXAMPLE / "mis.yaml"
    args = parse(tmp_path, FLAG, PATH, "--custom-config-path", str(path), "--dry-run")
    assert mis_settings_from_args(args) == MisSettings(
        use_rs=True,
        tis_lower_bound=0.5,
        rs_level="geometric",
        rs_lower_bound=0.99,
        rs_upper_bound=1.01,
        tis_batch_normalize=True,
    )


# Over ranks: settings, and how the samples of each data-parallel rank fall into micro-batches.
SETTINGS = [
    {"tis_level": level, "use_rs": True, "rs_level": rs_level}
    for level, rs_level in zip(LEVELS, reversed(LEVELS), strict=True)
]
LAYOUTS = {
    "whole": (1, [[[0, 1, 2, 3, 4]]]),
    "data": (1, [[[0], [1, 2]], [[3], [4]]]),
    "context": (2, [[[4, 1], [0, 2, 3]]]),
    "both": (2, [[[2, 0], [4]], [[1], [3]]]),
}


def parallel_worker(cp_size, data_ranks):
    dist.init_process_group("gloo")
    groups = [dist.new_group([d * cp_size + c for c in range(cp_size)]) for d in range(len(data_ranks))]
    data_rank, cp_rank = divmod(dist.get_rank(), cp_size)
    cp = ContextParallel(cp_size, cp_rank, groups[data_rank]) if cp_size > 1 else NO_CONTEXT_PARALLEL
    packing = data_ranks[data_rank]
    samples = [i for batch in packing for i in batch]
    data = rank_data(samples, cp)
    results = []
    for settings in SETTINGS:
        args, found = make_args(**settings), {}
        statistics = compute_step_statistics(load_function(PATH, FLAG), args, data, dist.group.WORLD)
        for batch in packing:
            positions = [samples.index(i) for i in batch]
            loss, masks, metrics = call(args, data, positions, cp=cp, step_statistics=statistics)
            lengths = [len(data["log_probs"][position]) for position in positions]
            flat = {"loss": loss, **metrics}
            for row, i in enumerate(batch):
                per_token = {name: values.split(lengths)[row] for name, values in flat.items()}
                found[i] = (masks[row], per_token)
        results.append(found)
    return results


def gathered(ranks, cp_size):
    """Per setting and sample: masks as every rank has them, and whole responses of every per-token result."""
    whole = [{} for _ in SETTINGS]
    for rank, results in enumerate(ranks):
        for setting, found in enumerate(results):
            for i, (mask, per_token) in found.items():
                masks, values = whole[setting].setdefault(i, ([], {}))
                masks.append(mask)
                cp = ContextParallel(cp_size, rank % cp_size, None)
                places = slice_responses(
                    [torch.arange(RESPONSE_LENGTHS[i])],
                    [PROMPT_LENGTHS[i] + RESPONSE_LENGTHS[i]],
                    [RESPONSE_LENGTHS[i]],
                    cp,
                )[0]
                for name, local in per_token.items():
                    values.setdefault(name, torch.full((RESPONSE_LENGTHS[i],), math.nan))[places] = local
    return whole


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_l15_ranks_and_packings_do_not_change_weights(layout):
    cp_size, data_ranks = LAYOUTS[layout]
    whole = gathered(run_distributed(parallel_worker, cp_size * len(data_ranks), (cp_size, data_ranks)), cp_size)
    for settings, found in zip(SETTINGS, whole, strict=True):
        factors, new_masks, norm = expected_of(make_args(**settings))
        assert 0 < sum(sum(mask) for mask in new_masks) < sum(int(mask.sum()) for mask in make_step()["loss_masks"])
        for i, (masks, values) in found.items():
            assert values["loss"].tolist() == pytest.approx(factors[i], abs=1e-6), (settings, i)
            assert values["mis_batch_norm_factor"].tolist() == pytest.approx([norm] * RESPONSE_LENGTHS[i], abs=1e-6)
            assert all(mask.tolist() == new_masks[i] for mask in masks)
            trained = [f for f, m in zip(factors[i], make_step()["loss_masks"][i].tolist(), strict=True) if m] or [0.0]
            for name, extreme in (("min", min(trained)), ("max", max(trained))):
                assert values[f"mis_is_ratio_{name}_final"].tolist() == pytest.approx(
                    [extreme] * RESPONSE_LENGTHS[i], abs=1e-6
                )
