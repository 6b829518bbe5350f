"""Engine and trainer give a token different probabilities: how far they are apart, and how to correct for it.

The engine samples tokens from probabilities that are not quite the trainer's. For a trained token let log w = train − rollout,
the difference of its two log-probs.

The first half of this file measures. k1 = −log w and k3 = w − 1 − log w estimate KL(rollout ‖ train) (J. Schulman,
"Approximating KL Divergence", 2020); (Σw)²/(NΣw²) is the effective share of the tokens under weights w. Means are over all
trained tokens of a step. The sums add up over ranks; beside them, the tokens that are furthest apart are found.

The second half corrects, by masked importance sampling: weights are bounded, and tokens or sequences are rejected. By level,
the weight of a token is w itself, that of its whole sequence, e^{Σ log w}, or the geometric one, e^{mean of log w}. Exponents
stop at ±20. Then, in this order: the weight is bounded; a token whose weight, at a level of its own, lies outside the rejection
bounds is rejected; a sequence with one catastrophic token (w below the veto threshold) is rejected whole; weights are divided
by their mean over the optimizer step.

A sequence may be spread over shards (context-parallel ranks), and a step over micro-batches and ranks. So values of more than
one shard are computed in stages, between which the caller adds up:

    sums     = sequence_sums(…)                     per sequence; to be added over the shards of the sequence
    weighted = weight_tokens(settings, …, sums)
    total    = weight_sums(weighted)                to be added over all shards of the step; mean_weight(total) is its mean
    weighted = normalised(weighted, mean)
    extremes = sequence_extremes(weighted)          per sequence; to be minimised over its shards
    metrics  = mis_metrics(weighted, extremes)

Invariants: everything is computed in float64, without gradient; the values at masked tokens play no part, not even NaN; the
weights of a step do not depend on how it is cut into micro-batches and ranks.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slime.algorithms.policy_loss import MAX_EXPONENT
from slime.utils.errors import UserError

_SUMS = ("count", "k1", "k3", "abs", "weight", "weight_square")


@dataclass(frozen=True)
class WorstToken:
    """A trained token and its two log-probs. `sample` is the caller's number of its sample, `position` is in the response."""

    sample: int
    position: int
    train_log_prob: float
    rollout_log_prob: float

    @property
    def difference(self) -> float:
        """|train − rollout|; infinite where that is NaN."""
        difference = abs(self.train_log_prob - self.rollout_log_prob)
        return math.inf if math.isnan(difference) else difference


def mismatch_sums(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A shard's contribution: float64 sums [6], to be added over ranks, and the largest difference [1], to be maximised.

    All arguments are flat, over the same tokens; there may be none. Weights stop at e^80.
    """
    if not train_log_probs.shape == rollout_log_probs.shape == loss_mask.shape:
        raise ValueError(
            f"log-probs and mask of the same tokens expected, got {tuple(train_log_probs.shape)}, "
            f"{tuple(rollout_log_probs.shape)} and {tuple(loss_mask.shape)}"
        )
    trained = loss_mask.to(train_log_probs.device) != 0
    log_weight = torch.where(trained, train_log_probs.detach().double() - rollout_log_probs.detach().double(), 0.0)
    bounded = log_weight.clamp(max=MAX_EXPONENT)
    weight = torch.where(trained, bounded.exp(), 0.0)
    difference = log_weight.abs()
    terms = (
        trained.double(), -log_weight, torch.expm1(bounded) - bounded, difference, weight, weight.square(),
    )  # fmt: skip
    sums = torch.stack([term.sum() for term in terms])
    return sums, torch.cat([difference, difference.new_zeros(1)]).amax(dim=0, keepdim=True)


def mismatch_metrics(sums: torch.Tensor, max_abs: torch.Tensor) -> dict[str, float]:
    """`mismatch_k1`, `_k3`, `_abs`, `_ess` and `_max_abs` from the reduced results of `mismatch_sums`.

    Without any trained token the differences are 0 and the effective share is 1.
    """
    total = dict(zip(_SUMS, sums.tolist(), strict=True))
    count = max(total["count"], 1.0)
    metrics = {f"mismatch_{name}": total[name] / count for name in ("k1", "k3", "abs")}
    square = count * total["weight_square"]
    metrics["mismatch_ess"] = total["weight"] ** 2 / square if square else 1.0
    metrics["mismatch_max_abs"] = float(max_abs)
    return metrics


def worst_tokens(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    samples: Sequence[int],
    count: int,
    positions: Sequence[torch.Tensor] | None = None,
) -> list[WorstToken]:
    """The `count` trained tokens of a shard with the largest |train − rollout|, worst first; fewer if there are fewer.

    Args:
        train_log_probs, rollout_log_probs, loss_masks: one tensor per sample, over the same tokens.
        samples: the number that names each sample, unique over ranks.
        positions: places of those tokens in the response, where they are not 0, 1, … (a part of a response).
    """
    if positions is None:
        positions = [torch.arange(len(mask)) for mask in loss_masks]
    columns = zip(samples, train_log_probs, rollout_log_probs, loss_masks, positions, strict=True)
    # Ties are broken by the number of the sample: rows are brought into that order, and the sort below is stable.
    rows = sorted(columns, key=lambda row: int(row[0]))
    if not rows:
        return []
    numbers, *per_token = zip(*rows, strict=True)
    train, rollout, trained, places = (torch.cat([tokens.detach() for tokens in column]) for column in per_token)
    train, rollout, trained = train.double(), rollout.to(train.device).double(), trained.to(train.device) != 0
    difference = (train - rollout).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    worst = torch.where(trained, difference, -1.0).sort(descending=True, stable=True).indices[:count]
    lengths = torch.tensor([len(tokens) for tokens in per_token[0]])
    sample_of = torch.repeat_interleave(torch.tensor(numbers), lengths, output_size=len(train))
    host = [column.to(train.device, torch.float64, non_blocking=True) for column in (sample_of, places)]
    # All columns in one tensor, so that there is one wait for the device, however many samples there are. Float64 holds the
    # whole numbers exactly.
    found = torch.stack([trained.double(), *host, train, rollout], dim=1)[worst].tolist()
    tokens = [
        WorstToken(int(sample), int(place), *values) for is_trained, sample, place, *values in found if is_trained
    ]
    return merge_worst_tokens([tokens], count)


def merge_worst_tokens(shards: Iterable[Iterable[WorstToken]], count: int) -> list[WorstToken]:
    """The `count` worst tokens of all shards, worst first; equal ones in the order of sample and position."""
    everything = (token for shard in shards for token in shard)
    return heapq.nsmallest(count, everything, key=lambda token: (-token.difference, token.sample, token.position))


LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
_MAX_LOG_WEIGHT = 20.0

# Columns of what `sequence_sums` returns.
_COUNT, _TRAIN, _ROLLOUT, _CATASTROPHIC = range(4)


@dataclass(frozen=True)
class MisSettings:
    """How weights are bounded and tokens rejected; names and defaults are those of the keys in a configuration file.

    use_tis: weights multiply the loss; otherwise they are only measured.
    use_rs: rejection and veto take effect; otherwise they are only measured.
    tis_mode: `truncate` lowers weights above the upper bound to it, `clip` moves weights into both bounds, `mask` sets
        weights outside the bounds to 0.
    tis_lower_bound: None means 1 / tis_upper_bound.
    rs_lower_bound, rs_upper_bound: None means the bounds of tis.
    rs_veto_threshold: None means no veto.
    tis_batch_normalize: weights are divided by their mean over the step, so that they have mean 1.
    """

    use_tis: bool = True
    use_rs: bool = False
    tis_level: str = "token"
    rs_level: str = "token"
    tis_mode: str = "truncate"
    tis_upper_bound: float = 2.0
    tis_lower_bound: float | None = None
    rs_lower_bound: float | None = None
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = 1e-4
    tis_batch_normalize: bool = False

    def __post_init__(self) -> None:
        """Raises UserError if a setting is impossible; the message names it, and a value that works."""
        for name in ("use_tis", "use_rs", "tis_batch_normalize"):
            self._require(name, isinstance(getattr(self, name), bool), "true or false")
        for name, choices in (("tis_level", LEVELS), ("rs_level", LEVELS), ("tis_mode", MODES)):
            self._require(name, getattr(self, name) in choices, f"one of {', '.join(choices)}")
        self._require("tis_upper_bound", _is_positive(self.tis_upper_bound), "a number above 0; 2 is usual")
        for name in ("tis_lower_bound", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold"):
            value = getattr(self, name)
            self._require(name, value is None or _is_positive(value), "a number above 0, or left out")
        for family, (lower, upper) in (("tis", self.tis_bounds), ("rs", self.rs_bounds)):
            if lower > upper:
                raise UserError(
                    f"masked importance sampling: {family}_lower_bound {lower:g} is above {family}_upper_bound {upper:g}; "
                    f"{1 / upper:g} would do"
                )

    @property
    def tis_bounds(self) -> tuple[float, float]:
        lower = 1 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return lower, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        lower, upper = self.tis_bounds
        return (
            lower if self.rs_lower_bound is None else self.rs_lower_bound,
            upper if self.rs_upper_bound is None else self.rs_upper_bound,
        )

    def _require(self, name: str, is_met: bool, what: str) -> None:
        if not is_met:
            raise UserError(f"masked importance sampling: {name} is {getattr(self, name)!r}; expected {what}")


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """Weights of a shard's N tokens, which are those of S sequences one after the other.

    `kept` are the trained tokens that are not rejected; `weights` multiplies their loss. `metrics` are those that need nothing
    from other shards.
    """

    sizes: tuple[int, ...]  # tokens of each sequence
    lengths: torch.Tensor  # the same, [S] int64
    trained: torch.Tensor  # [N] bool
    kept: torch.Tensor  # [N] bool
    weights: torch.Tensor  # [N] float64
    batch_norm_factor: float
    metrics: dict[str, torch.Tensor]  # [N] float64 each

    @property
    def ratios(self) -> torch.Tensor:
        """The factor of every token's loss in the end, [N] float64: 0 for a rejected token."""
        return torch.where(self.kept, self.weights, 0.0)

    def split(self, per_token: torch.Tensor) -> list[torch.Tensor]:
        """One tensor per sequence from a value per token."""
        return list(per_token.split(self.sizes))


def sequence_sums(
    settings: MisSettings,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Float64 [S, 4], over the shard's trained tokens of every sequence: their number, Σ train, Σ rollout, and how many of
    them are catastrophic.

    Each argument has one tensor per sequence, over the same tokens. Raises ValueError for tensors of different lengths.
    """
    train, rollout, trained, lengths = _flat_columns(train_log_probs, rollout_log_probs, loss_masks)
    catastrophic = _is_catastrophic(settings, train - rollout)
    columns = torch.stack([trained.double(), train, rollout, catastrophic.double()], dim=1)
    return _per_sequence(columns, "sum", lengths, 0.0)


def weight_tokens(
    settings: MisSettings,
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    sums: torch.Tensor,
) -> WeightedTokens:
    """Bounded weights and rejections of a shard's tokens, not yet normalised.

    sums: float64 [S, 4], `sequence_sums` of whole sequences, whose other arguments these are.
    """
    train, rollout, trained, lengths = _flat_columns(train_log_probs, rollout_log_probs, loss_masks)
    log_weights = train - rollout
    sequences = torch.arange(len(lengths), device=lengths.device)
    tokens_of = torch.repeat_interleave(sequences, lengths, output_size=len(trained))
    token_sums = sums[tokens_of]

    before = _level_weights(settings.tis_level, log_weights, token_sums)
    after = _bounded(settings, before)
    rejecting = _level_weights(settings.rs_level, log_weights, token_sums)
    lower, upper = settings.rs_bounds
    too_low, too_high = rejecting < lower, rejecting > upper
    catastrophic = token_sums[:, _CATASTROPHIC] > 0
    kept = trained & ~(too_low | too_high | catastrophic) if settings.use_rs else trained
    weights = after if settings.use_tis else torch.ones_like(after)

    metrics = {
        **_divergences(log_weights, token_sums),
        **_bound_fractions(settings, before),
        "tis_weight_before_bound": before,
        "tis_weight_after_bound": after,
        "rs_mask_fraction_low": too_low,
        "rs_mask_fraction_high": too_high,
        "rs_catastrophic_token_fraction": _is_catastrophic(settings, log_weights),
        "rs_catastrophic_seq_fraction": catastrophic,
        "is_ratio_mean_after_tis_rs": torch.where(kept, weights, 0.0),
    }
    return WeightedTokens(tuple(map(len, train_log_probs)), lengths, trained, kept, weights, 1.0, metrics)


def weight_sums(weighted: WeightedTokens) -> torch.Tensor:
    """Σ weight and number of a shard's kept tokens, float64 [2]; add them up over all shards of an optimizer step."""
    return torch.stack([weighted.ratios.sum(), weighted.kept.sum().double()])


def mean_weight(sums: torch.Tensor) -> float:
    """The mean weight of a step from the total of `weight_sums`; 1 where no kept token has a weight."""
    total, count = sums.tolist()
    return total / count if total > 0 else 1.0


def normalised(weighted: WeightedTokens, batch_norm_factor: float) -> WeightedTokens:
    """The same tokens with weights divided by `batch_norm_factor`, the mean weight of their step."""
    return dataclasses.replace(
        weighted, weights=weighted.weights / batch_norm_factor, batch_norm_factor=float(batch_norm_factor)
    )


def sequence_extremes(weighted: WeightedTokens) -> torch.Tensor:
    """Smallest final ratio and minus the largest one over a shard's trained tokens of every sequence, float64 [S, 2].

    Infinite for a shard without trained tokens; the elementwise minimum over shards is that of whole sequences.
    """
    ratios = weighted.ratios
    both = torch.stack([ratios, -ratios], dim=1).masked_fill(~weighted.trained[:, None], math.inf)
    return _per_sequence(both, "min", weighted.lengths, math.inf)


def mis_metrics(weighted: WeightedTokens, extremes: torch.Tensor) -> dict[str, torch.Tensor]:
    """All metrics per token, float32 [N], named `mis_…`, to be reduced with the masks from before the rejection.

    extremes: float64 [S, 2], `sequence_extremes` of whole sequences. A metric of a sequence stands at each of its tokens. The
    names are the same whatever the settings are.
    """
    extremes = extremes.masked_fill(extremes.isinf(), 0.0)
    of_tokens = extremes.repeat_interleave(weighted.lengths, dim=0, output_size=len(weighted.weights))
    smallest, largest = of_tokens.unbind(dim=1)
    metrics = {
        **weighted.metrics,
        "batch_norm_factor": torch.full_like(weighted.weights, weighted.batch_norm_factor),
        "is_ratio_mean_final": weighted.ratios,
        "is_ratio_min_final": smallest,
        "is_ratio_max_final": -largest,
    }
    return {f"mis_{name}": value.float() for name, value in metrics.items()}


def _divergences(log_weights: torch.Tensor, token_sums: torch.Tensor) -> dict[str, torch.Tensor]:
    count = token_sums[:, _COUNT].clamp(min=1.0)
    train, rollout = -token_sums[:, _TRAIN] / count, -token_sums[:, _ROLLOUT] / count
    bounded = log_weights.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT)
    return {
        "training_ppl": train.exp(),
        "training_log_ppl": train,
        "rollout_ppl": rollout.exp(),
        "rollout_log_ppl": rollout,
        "kl": -log_weights,
        "k3_kl": torch.expm1(bounded) - bounded,
        "log_ppl_diff": train - rollout,
        "log_ppl_abs_diff": (train - rollout).abs(),
        "ppl_ratio": (train - rollout).exp(),
        "chi2_token": _level_weights("token", log_weights, token_sums).square() - 1.0,
        "chi2_seq": _level_weights("sequence", log_weights, token_sums).square() - 1.0,
    }


def _bound_fractions(settings: MisSettings, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    lower, upper = settings.tis_bounds
    is_truncated = torch.full_like(weights, settings.tis_mode == "truncate", dtype=torch.bool)
    return {
        "tis_truncate_fraction": is_truncated & (weights > upper),
        "tis_clip_fraction_low": ~is_truncated & (weights < lower),
        "tis_clip_fraction_high": ~is_truncated & (weights > upper),
    }


def _level_weights(level: str, log_weights: torch.Tensor, token_sums: torch.Tensor) -> torch.Tensor:
    """Weight of every token at `level`, [N]."""
    exponents = log_weights
    if level != "token":
        exponents = token_sums[:, _TRAIN] - token_sums[:, _ROLLOUT]
    if level == "geometric":
        exponents = exponents / token_sums[:, _COUNT].clamp(min=1.0)
    return exponents.clamp(-_MAX_LOG_WEIGHT, _MAX_LOG_WEIGHT).exp()


def _bounded(settings: MisSettings, weights: torch.Tensor) -> torch.Tensor:
    lower, upper = settings.tis_bounds
    if settings.tis_mode == "truncate":
        return weights.clamp(max=upper)
    if settings.tis_mode == "clip":
        return weights.clamp(lower, upper)
    return weights.masked_fill((weights < lower) | (weights > upper), 0.0)


def _is_catastrophic(settings: MisSettings, log_weights: torch.Tensor) -> torch.Tensor:
    """Whether w is below the veto threshold. Logarithms are compared, since the weights above stop at e^−20."""
    threshold = settings.rs_veto_threshold
    return log_weights < (-math.inf if threshold is None else math.log(threshold))


def _flat_columns(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both log-probs (float64, 0 where masked) and which tokens are trained, all [N], and the lengths [S]."""
    lengths = [len(train) for train in train_log_probs]
    for name, column in (("rollout log-probs", rollout_log_probs), ("mask entries", loss_masks)):
        others = [len(row) for row in column]
        if others != lengths:
            raise ValueError(f"sequences of {lengths} log-probs of the trainer have {others} {name}")
    device = train_log_probs[0].device if lengths else torch.device("cpu")
    trained = _concatenated(loss_masks, device) != 0
    train, rollout = (
        _concatenated(column, device).masked_fill(~trained, 0.0) for column in (train_log_probs, rollout_log_probs)
    )
    return train, rollout, trained, torch.tensor(lengths, dtype=torch.int64).to(device, non_blocking=True)


def _concatenated(rows: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    flat = torch.cat([row.detach() for row in rows]) if len(rows) else torch.zeros(0)
    return flat.to(device, torch.float64)


def _per_sequence(per_token: torch.Tensor, reduction: str, lengths: torch.Tensor, initial: float) -> torch.Tensor:
    """[S, columns] from [N, columns]. The result has the same bits every time, which scattered sums do not have."""
    if len(lengths) == 0:
        return per_token.new_zeros(0, per_token.shape[1])
    return torch.segment_reduce(per_token, reduction, lengths=lengths, axis=0, initial=initial, unsafe=True)


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
