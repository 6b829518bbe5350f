"""From values per token to one number, so that the result does not depend on how samples fell into micro-batches.

Per rollout: each sample contributes its masked sum over the trained tokens of its whole *execution*. Those denominators are
computed once, over the whole rollout (`rollout_mask_sums`), before samples are packed or split; so any cut of the samples into
micro-batches and ranks sums to the same number. Per token: plain masked sums, divided by the token count of the step later.
A masked token contributes nothing, whatever its value (also NaN). Its gradient is 0 here; that a NaN behind it leaves no NaN
in the gradient either is seen to where the loss begins (`slime.training.micro_batch`).
"""

from collections.abc import Sequence

import numpy as np
import torch


def rollout_mask_sums(loss_mask_sums: Sequence[float], rollout_ids: Sequence[int | None]) -> np.ndarray:
    """Trained tokens of the execution that each sample belongs to, float32 [number of samples].

    `loss_mask_sums[i]`: trained tokens of sample i. A sample whose rollout id is None is an execution of its own.
    """
    totals: dict[object, float] = {}
    keys = [
        ("alone", position) if rollout_id is None else rollout_id for position, rollout_id in enumerate(rollout_ids)
    ]
    for key, mask_sum in zip(keys, loss_mask_sums, strict=True):
        totals[key] = totals.get(key, 0) + mask_sum
    return np.array([totals[key] for key in keys], dtype=np.float32)


def sum_of_sample_mean(
    values: torch.Tensor | Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    sample_denominators: Sequence[float] | torch.Tensor,
) -> torch.Tensor:
    """Σ_i (Σ_t x_t·m_t)_i / max(D_i, 1), a float32 scalar with gradient.

    `values`: one tensor [R_i] per sample, or all of them concatenated in the order of `loss_masks`, which are always per
    sample. `sample_denominators` D: one per sample, from `rollout_mask_sums`.
    """
    flat_values = _flat(values)
    mask = _flat(loss_masks).to(flat_values.device, torch.float32)
    lengths = torch.tensor([len(sample_mask) for sample_mask in loss_masks], dtype=torch.int64, device=mask.device)
    denominators = torch.as_tensor(sample_denominators, dtype=torch.float32, device=mask.device).clamp(min=1.0)
    per_token_denominators = torch.repeat_interleave(denominators, lengths, output_size=len(mask))
    return _masked_sum(flat_values, mask / per_token_denominators)


def masked_sum(
    values: torch.Tensor | Sequence[torch.Tensor], loss_masks: torch.Tensor | Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ x·m over all tokens, a float32 scalar with gradient; each argument per sample or concatenated."""
    flat_values = _flat(values)
    return _masked_sum(flat_values, _flat(loss_masks).to(flat_values.device, torch.float32))


def _masked_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if values.shape != weights.shape:
        raise ValueError(f"{tuple(values.shape)} values for {tuple(weights.shape)} mask entries")
    return (values.float().masked_fill(weights == 0, 0.0) * weights).sum()


def _flat(tensors: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(tensors, torch.Tensor):
        return tensors
    return torch.cat(list(tensors)) if len(tensors) else torch.zeros(0)
