"""Bounds for the difference between two float32 computations of the same sum, from the terms of the sum.

Layouts and processors add terms in different orders, and each order rounds differently: by up to rounding unit × number of
terms × mean absolute term, even if the terms cancel and little is left of the sum. A comparison allows that much, beside a
relative difference of the number itself. The terms come from the columns that a run trained on: those of `ppo_kl`, for example,
are the old and the new log-prob of every trained token, each with its weight in the mean. A bound belongs to one optimizer
step: the samples of other steps are no part of its sums and would give another bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

ROUNDING_UNIT = float(np.finfo(np.float32).eps)
RELATIVE = 1e-5
# Metrics of differences of log-probs; their terms are the log-probs themselves. The old log-probs stand for the new ones:
# `assert_equal_metrics` checks that they are about as large.
DIFFERENCES = {
    "ppo_kl": ("log_probs", "log_probs"),
    "kl": ("log_probs", "ref_log_probs"),
    "kl_loss": ("log_probs", "ref_log_probs"),
    "opd_reverse_kl": ("log_probs", "teacher_log_probs"),
    "train_rollout_logprob_abs_diff": ("log_probs", "rollout_log_probs"),
}
# Columns of a critic in which a small number may be the difference of two values.
MADE_FROM_VALUES = ("advantages", "returns")


def bound(terms: Any) -> float:
    """Rounding unit × number of terms × mean absolute term, for an array of terms."""
    terms = np.abs(np.asarray(terms, dtype=np.float64))
    assert np.isfinite(terms).all(), "a bound made of terms that are not finite would allow everything"
    return ROUNDING_UNIT * terms.size * float(terms.mean()) if terms.size else 0.0


def bounds_of_step(args: argparse.Namespace, data: Mapping[str, Any], step: int) -> dict[str, float]:
    """By how much metrics of an optimizer step may differ between two layouts, by name. Metrics whose terms do not cancel have
    no entry.

    Args:
        data: the data of one rank that has all samples; samples of other steps than `step` are left out.
    """
    counts = data["num_microbatches"]
    first = sum(counts[:step])
    positions = [i for batch in data["micro_batch_indices"][first : first + counts[step]] for i in batch]
    terms = _terms(args, data, positions, data["global_batch_sizes"][step])
    return {name: bound(of_metric) for name, of_metric in terms.items()}


def bounds_of_rollout(args: argparse.Namespace, data: Mapping[str, Any]) -> dict[str, float]:
    """`bounds_of_step` for the metrics of a rollout's data."""
    terms = _terms(args, data, range(len(data["loss_masks"])), sum(data["global_batch_sizes"]))
    return {name: bound(of_metric) for name, of_metric in terms.items()}


def assert_equal_metrics(
    found: Mapping[Any, float],
    expected: Mapping[Any, float],
    bounds: Mapping[Any, float],
    relative: float = RELATIVE,
    *,
    masked: bool = False,
) -> None:
    """Both have the same names, and all numbers are finite and within `relative` of the expected ones or within their bounds.

    Args:
        found, expected: metrics of one optimizer step by name, or of several by (name, step).
        bounds: bounds by the same names, each made from the samples of its step.
        masked: new log-probs are normalised over the tokens that top-p kept, and old ones over all tokens.
    """
    assert expected and all(map(math.isfinite, bounds.values()))
    for name, value in expected.items():
        if "ppo_kl" in (name, name[0]) and bounds.get(name):
            _assert_new_are_about_as_large_as_old(name, value, bounds[name], masked=masked)
    near = {name: pytest.approx(value, rel=relative, abs=bounds.get(name, 0.0)) for name, value in expected.items()}
    # The names are part of the message for runs in which pytest does not explain asserts.
    apart = [name for name in {**near, **found} if found.get(name) != near.get(name)]
    assert found == near, "; ".join(f"{name}: {found.get(name)}, not {near.get(name)}" for name in apart)


def _assert_new_are_about_as_large_as_old(name: Any, ppo_kl: float, bound_of_it: float, *, masked: bool) -> None:
    """Check that old log-probs may stand for new ones as terms of a bound.

    Let o and n be the mean absolute values of old and new log-probs. All log-probs are at most 0, so `ppo_kl`, the mean of
    old − new, is n − o. The bound is rounding unit × 2·o; with the new log-probs it would be rounding unit × (o + n), and o + n
    is 2·o + ppo_kl. If |ppo_kl| < o/2, the bound is between 4/5 and 4/3 of that. With `masked`, new log-probs are normalised
    over fewer tokens and so closer to 0; the bound is then less than twice as wide, since n is not below 0.
    """
    half = bound_of_it / ROUNDING_UNIT / 4
    assert ppo_kl < half and (masked or ppo_kl > -half), f"{name}: the new log-probs have left the old ones"


def assert_equal_rows(
    found: Mapping[Any, Sequence[float]],
    expected: Mapping[Any, Sequence[float]],
    relative: float = RELATIVE,
    *,
    terms_of_value: int = 1,
) -> None:
    """Both have the same numbers per token, by column and sample. A token's number is at most a sum over its response.

    Args:
        terms_of_value: the number n of terms of a value, before sums over a response (function `terms_of_value`). Terms of both
            signs add up to about √n of their mean size, so the sum of all absolute terms is about √n times a mean value.
            Where the values are among the columns, advantages and returns are made from them and have their rounding too.
    """
    assert expected and found.keys() == expected.keys()
    columns: dict[str, list[float]] = {}
    for (name, _), row in expected.items():
        columns.setdefault(name, []).extend(row)
    means = {name: np.mean(np.abs(values)) if values else 0.0 for name, values in columns.items()}
    for (name, sample), row in expected.items():
        terms = [means[of] for of in DIFFERENCES.get(name, (name,)) if of in means] or [means[name]]
        number = max(len(row), math.isqrt(terms_of_value)) if name == "values" else len(row)
        apart = bound(terms * number)
        if name in MADE_FROM_VALUES and "values" in means:
            apart += bound([means["values"]] * math.isqrt(terms_of_value))
        assert found[name, sample] == pytest.approx(row, rel=relative, abs=apart), (name, sample)


def terms_of_value(hidden: int, layers: int) -> int:
    """The number of terms of a critic's value. It is a sum over the hidden units, and each unit is the sum of the embedding and
    the outputs of attention and feed-forward network of every layer."""
    return hidden * (1 + 2 * layers)


def assert_equal_gradients(
    found: Mapping[str, Any], expected: Mapping[str, Any], tokens: int, relative: float = RELATIVE
) -> None:
    """Both have the same gradients by parameter. An entry is a sum over `tokens`, of terms no larger than the largest entry."""
    assert expected and found.keys() == expected.keys()
    for name, gradient in found.items():
        wanted = np.asarray(expected[name], dtype=np.float64)
        _assert_close(name, gradient, wanted, relative, bound([np.max(np.abs(wanted))] * tokens))


def bound_of_weights(args: argparse.Namespace, gradients: Sequence[float], tokens: int) -> float:
    """By how much weights may differ after some steps of Adam, which divides a gradient by at least its epsilon.

    Args:
        gradients: the mean absolute entry of the gradient of each step.
        tokens: the number of tokens of a step, over which a gradient is a sum.
    """
    absolute = args.lr / args.adam_eps * sum(bound([gradient] * tokens) for gradient in gradients)
    # A step moves a weight by at most the learning rate. Wrongly large gradients must not give a bound near that.
    assert 0 < absolute < 0.01 * args.lr * len(gradients), "the gradients are not those of a small model"
    return absolute


def assert_equal_weights(found: Mapping[str, Any], expected: Mapping[str, Any], absolute: float) -> None:
    """Both have the same weights by name, within `absolute` (from `bound_of_weights`)."""
    assert expected and found.keys() == expected.keys()
    for name, weight in found.items():
        _assert_close(name, weight, expected[name], RELATIVE, absolute)


def _assert_close(name: str, found: Any, expected: Any, relative: float, absolute: float) -> None:
    """Both are arrays of one shape with close values; NaN is close to nothing."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape and math.isfinite(absolute), name
    np.testing.assert_allclose(found, expected, rtol=relative, atol=absolute, equal_nan=False, err_msg=name)


def _terms(
    args: argparse.Namespace, data: Mapping[str, Any], positions: Sequence[int], rollouts: int
) -> dict[str, np.ndarray]:
    """For each metric whose terms cancel, the absolute values of its terms over the trained tokens, weighted as in its mean."""
    masks = [np.asarray(data["loss_masks"][i], dtype=np.float64) for i in positions]
    if args.calculate_per_token_loss:
        weights = [mask / max(sum(m.sum() for m in masks), 1.0) for mask in masks]
    else:
        sums = [max(data["rollout_mask_sums"][i], 1.0) for i in positions]
        weights = [mask / total / rollouts for mask, total in zip(masks, sums, strict=True)]
    weight = np.concatenate([np.zeros(0), *weights])
    trained = weight > 0

    def column(name: str) -> np.ndarray:
        rows = [np.asarray(data[name][i], dtype=np.float64) for i in positions]
        return np.abs(np.concatenate([np.zeros(0), *rows]))[trained]

    def of(*names: str, times: Any = 1.0) -> np.ndarray:
        return np.concatenate([column(name) * weight[trained] * times for name in names])

    has = data.keys().__contains__
    old = "rollout_log_probs" if args.use_rollout_logprobs else "log_probs"
    terms = {name: of(name) for name in ("advantages", "returns", "values") if has(name)}
    differences = {**DIFFERENCES, "ppo_kl": (old, old)}
    terms |= {name: of(*columns) for name, columns in differences.items() if all(map(has, columns))}
    if has("values") and has("returns"):
        terms["value_loss"] = (column("values") + column("returns")) ** 2 * weight[trained]
    if getattr(args, "role", "actor") == "critic":
        return {**terms, "loss": terms["value_loss"]}
    if has("advantages") and has(old):
        # The term is e^{new − old}·A: an error of the exponent is the relative error of the term.
        terms["pg_loss"] = of("advantages", times=1.0 + 2.0 * column(old))
        parts = [terms["pg_loss"], args.entropy_coef * math.log(args.padded_vocab_size) * weight[trained]]
        if args.use_kl_loss and "kl_loss" in terms:
            parts.append(args.kl_loss_coef * terms["kl_loss"])
        terms["loss"] = np.concatenate(parts)
    return terms
