"""How far the engine's log-probs are from the trainer's: sums that add up over ranks, and the worst tokens.

With log w = train − rollout of a trained token, k1 = −log w and k3 = w − 1 − log w estimate KL(rollout ‖ train) (J. Schulman,
"Approximating KL Divergence", 2020); (Σw)²/(NΣw²) is the effective share of the tokens under weights w. Means are over all
trained tokens of a step. Everything is float64; what masked tokens hold plays no part.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from slime.algorithms.ratios import MAX_EXPONENT

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
        """|train − rollout|; infinite where it is no number."""
        difference = abs(self.train_log_prob - self.rollout_log_prob)
        return math.inf if math.isnan(difference) else difference


def mismatch_sums(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a shard contributes: float64 sums [6], to be added over ranks, and the largest difference [1], to be maximised.

    All arguments flat over the same tokens, of any number. Weights stop at e^80.
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
    found: list[WorstToken] = []
    columns = zip(samples, train_log_probs, rollout_log_probs, loss_masks, strict=True)
    for row, (sample, train, rollout, mask) in enumerate(columns):
        trained = mask.to(train.device).nonzero()[:, 0]
        train, rollout = train.detach().double()[trained], rollout.detach().double()[trained]
        difference = (train - rollout).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        top = difference.topk(min(count, len(difference))).indices
        places = trained[top] if positions is None else positions[row].to(trained.device)[trained[top]]
        values = zip(places.tolist(), train[top].tolist(), rollout[top].tolist(), strict=True)
        found += [WorstToken(int(sample), *value) for value in values]
    return merge_worst_tokens([found], count)


def merge_worst_tokens(shards: Iterable[Iterable[WorstToken]], count: int) -> list[WorstToken]:
    """The `count` worst of all shards, worst first; equal ones by sample and position."""
    everything = (token for shard in shards for token in shard)
    return heapq.nsmallest(count, everything, key=lambda token: (-token.difference, token.sample, token.position))
