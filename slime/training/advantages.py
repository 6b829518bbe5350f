"""Advantages and returns of a rank's samples, set on the rollout data before training.

In order: the KL of the policy against the reference, if it has a weight in the reward; the estimator or the user's function;
distillation; whitening.

Columns with values per token have only this context-parallel rank's part of each response. The end of a part is not the end of
the response, so estimators that discount get whole responses, gathered over the ranks, and their results are cut again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms import advantages as algorithms
from slime.algorithms.advantages import AdvantageInputs
from slime.algorithms.estimators import estimator
from slime.algorithms.kl import approx_kl_of_responses, distilled_advantages
from slime.algorithms.reduction import zero_masked_tokens
from slime.training.metric_reduction import whiten
from slime.training.rollout_data import (
    RolloutData,
    Tensors,
    lengths_of,
    put_beside_tokens,
    require_entries,
    require_tensors,
)
from slime.utils.errors import UserError
from slime.utils.plugin_loader import call_plug_in

_POLICIES = ("log_probs", "ref_log_probs")


def compute_advantages_and_returns(
    args: argparse.Namespace, rollout_data: RolloutData, data_group: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """Set `kl`, `advantages` and `returns` (and with `--use-opd` `opd_reverse_kl`): one float32 tensor per sample.

    Collective over the context-parallel group, and with `--normalize-advantages` over `data_group`, the data- and
    context-parallel ranks (None: the default group, or this process alone).

    Args:
        rollout_data: has `log_probs` (for KL and distillation), `ref_log_probs` (with `kl_coef`), `values` (ppo),
            `teacher_log_probs` (distillation), each this rank's part, and whole `loss_masks`.

    Returns:
        Metrics: `whiten_empty` with whitening, 1 when no rank had a trained token.

    Raises:
        UserError: a column is missing that the arguments need, or a custom function sets tensors of another number or length,
            or changes `loss_masks`.
        ValueError: distillation without the teacher's log-probs.
    """
    rollout_data["kl"] = _reward_kl(args, rollout_data)
    if args.custom_advantage_function_path is not None:
        _call_custom_function(args, rollout_data)
    else:
        rollout_data["advantages"], rollout_data["returns"] = _estimate(args, rollout_data)
    if args.use_opd:
        # A copy, because the returns may be the same list and must stay as they are.
        rollout_data["advantages"] = list(rollout_data["advantages"])
        apply_opd_kl_to_advantages(args, rollout_data, rollout_data["advantages"], rollout_data.get("log_probs"))
    if not args.normalize_advantages:
        return {}
    whitened = whiten(rollout_data["advantages"], rollout_data.local_masks, data_group)
    rollout_data["advantages"] = whitened.values
    return {"whiten_empty": float(whitened.is_empty)}


class _Placeholder(list):
    """The column `kl` as zeros, because it has no weight in the reward; metrics may still tell another one."""


def reported_kl(args: argparse.Namespace, rollout_data: RolloutData) -> tuple[Tensors, torch.Tensor]:
    """(This rank's KL for metrics, whether there is one), whatever weight it has in the reward.

    It is that of the estimator or of the user's function; else it is computed from the log-probs, if those of both policies are
    there. The second value is a boolean scalar on the device of the first, so that nobody has to wait for it alone.
    """
    kl = rollout_data["kl"]
    if not isinstance(kl, _Placeholder):
        return kl, torch.ones((), dtype=torch.bool, device=kl[0].device if len(kl) else None)
    # The user's function may have written into these zeros.
    flat = torch.cat(kl) if kl else torch.zeros(0)
    is_written = flat.any()
    if not kl or any(rollout_data.get(name) is None for name in _POLICIES):
        return kl, is_written
    of_columns = torch.cat(list(_kl_of_columns(args, rollout_data)))
    return torch.where(is_written, flat, of_columns).split([len(tokens) for tokens in kl]), torch.ones_like(is_written)


def apply_opd_kl_to_advantages(
    args: argparse.Namespace,
    rollout_data: RolloutData,
    advantages: Tensors,
    student_log_probs: Sequence[torch.Tensor] | None,
) -> None:
    """Take `opd_kl_coef` times the log-ratio of student and teacher off `advantages`, a list that is changed in place.

    Sets `rollout_data["opd_reverse_kl"]`, that log-ratio per token. Without `loss_masks` all tokens are the student's.

    Raises:
        ValueError: log-probs of student or teacher are missing.
    """
    if student_log_probs is None:
        raise ValueError("distillation needs log_probs, those of the student, and the batch has none")
    masks = rollout_data.local_masks if "loss_masks" in rollout_data else [torch.ones_like(a) for a in advantages]
    distilled, reverse_kl = distilled_advantages(
        advantages, student_log_probs, rollout_data.get("teacher_log_probs"), masks, args.opd_kl_coef
    )
    advantages[:] = distilled
    rollout_data["opd_reverse_kl"] = reverse_kl


def _reward_kl(args: argparse.Namespace, rollout_data: RolloutData) -> Tensors:
    """KL of the policy against the reference per token, 0 at masked ones; zeros where it has no weight in the reward."""
    if args.kl_coef == 0:
        masks = rollout_data["loss_masks"]
        device = masks[0].device if masks else None
        lengths = rollout_data.local_lengths
        return _Placeholder(approx_kl_of_responses(None, None, lengths, args.kl_loss_type, device=device))
    for name in _POLICIES:
        rollout_data.column(name, f"--kl-coef {args.kl_coef}")
    return _kl_of_columns(args, rollout_data)


def _kl_of_columns(args: argparse.Namespace, rollout_data: RolloutData) -> Tensors:
    sides = zero_masked_tokens({name: rollout_data[name] for name in _POLICIES}, rollout_data.local_masks)
    return approx_kl_of_responses(*sides.values(), rollout_data.local_lengths, args.kl_loss_type)


def _estimate(args: argparse.Namespace, rollout_data: RolloutData) -> tuple[Tensors, Tensors]:
    """(advantages, returns) by `--advantage-estimator`."""
    row = estimator(args.advantage_estimator)
    kl, masks, values = rollout_data["kl"], rollout_data["loss_masks"], None
    if row.needs_critic:
        values = rollout_data.column("values", f"--advantage-estimator {row.name}")
    if row.discounts:
        kl, values = rollout_data.gather(kl), values and rollout_data.gather(values)
    else:
        masks = rollout_data.local_masks
    inputs = AdvantageInputs(
        rollout_data["rewards"],
        kl,
        masks,
        values,
        kl_coef=args.kl_coef,
        gamma=args.gamma,
        lambd=args.lambd,
        count_masked_tokens=args.discount_masked_tokens,
    )
    advantages, returns = getattr(algorithms, row.advantages)(inputs)
    if row.discounts:
        are_one = advantages is returns
        advantages = rollout_data.cut(advantages)
        returns = advantages if are_one else rollout_data.cut(returns)
    return advantages, returns


def _call_custom_function(args: argparse.Namespace, rollout_data: RolloutData) -> None:
    path, flag = args.custom_advantage_function_path, "--custom-advantage-function-path"
    samples = len(rollout_data["response_lengths"])
    masks = torch.cat(list(rollout_data["loss_masks"])) if samples else None
    call_plug_in(flag, path, f"{samples} samples", args, rollout_data)
    if masks is not None and not _are_together(rollout_data.get("loss_masks"), masks, rollout_data["response_lengths"]):
        raise UserError(
            f"{flag} {path} changed `loss_masks`: the number of trained tokens, by which the loss is divided, and the other "
            "pipeline stages know nothing of it; edit them in a function for --rollout-data-postprocess-path, which comes next"
        )
    for name in ("advantages", "returns"):
        require_tensors(rollout_data, name, f"{flag} {path}")
    require_entries(rollout_data, f"{flag} {path}")
    put_beside_tokens(rollout_data)


def _are_together(rows: Any, flat: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Whether `rows` are tensors of these lengths which, concatenated, equal `flat`."""
    return lengths_of(rows) == list(lengths) and bool((torch.cat(list(rows)).to(flat.device) == flat).all())
