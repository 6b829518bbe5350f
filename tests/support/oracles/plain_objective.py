"""Advantages and the policy loss in their plainest form: loops over samples and tokens, Python floats and float64 scalars.

This module shares no code with the trainer, which tests compare with it, and vectorises nothing. Lists per token have one entry
per response token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch


@dataclass
class PlainSample:
    tokens: list[int]
    mask: list[int]
    execution: int
    reward: float
    old: list[float]
    ref: list[float]
    roll: list[float]
    teacher: list[float]
    values: list[float]
    advantages: list[float] = dataclasses.field(default_factory=list)
    returns: list[float] = dataclasses.field(default_factory=list)
    reverse_kl: list[float] = dataclasses.field(default_factory=list)

    @property
    def prompt(self) -> int:
        return len(self.tokens) - len(self.mask)


def kl_estimate(log_prob, base, kind, ratio=1.0):
    d = log_prob - base
    if kind == "k1":
        return ratio * d
    if kind == "k2":
        return ratio * d * d / 2
    k3 = (torch.exp(-d) if torch.is_tensor(d) else math.exp(-d)) - 1 + d
    if kind == "k3":
        return ratio * k3
    value = ratio * k3
    return min(max(value, -10.0), 10.0) if not torch.is_tensor(value) else torch.clamp(value, -10.0, 10.0)


def set_advantages(args: SimpleNamespace, samples: Sequence[PlainSample]) -> None:
    """Fill `advantages`, `returns` and `reverse_kl` of all samples."""
    for sample in samples:
        _estimate(args, sample)
    if args.use_opd:
        for sample in samples:
            for t in range(len(sample.mask)):
                difference = (sample.old[t] - sample.teacher[t]) if sample.mask[t] else 0.0
                sample.reverse_kl.append(difference)
                sample.advantages[t] -= args.opd_kl_coef * difference
    if args.normalize_advantages:
        _whiten(samples)


def _estimate(args: SimpleNamespace, sample: PlainSample) -> None:
    length, mask = len(sample.mask), sample.mask
    trained = [t for t in range(length) if mask[t]]
    kl = [kl_estimate(sample.old[t], sample.ref[t], args.kl_loss_type) for t in range(length)]
    if args.advantage_estimator in ("grpo", "gspo", "cispo"):
        sample.advantages = [sample.reward] * length
        sample.returns = [sample.reward] * length
        return
    if args.advantage_estimator == "reinforce_plus_plus_baseline":
        sample.advantages = [sample.reward - args.kl_coef * kl[t] if mask[t] else 0.0 for t in range(length)]
        sample.returns = list(sample.advantages)
        return
    reward = [-args.kl_coef * kl[t] if mask[t] else 0.0 for t in range(length)]
    if trained:
        reward[trained[-1]] += sample.reward
    steps = range(length) if args.discount_masked_tokens and trained else trained
    advantages = [0.0] * length
    if args.advantage_estimator == "reinforce_plus_plus":
        later = 0.0
        for t in reversed(steps):
            later = reward[t] + args.gamma * later
            advantages[t] = later
        sample.advantages, sample.returns = advantages, list(advantages)
        return
    returns = list(sample.values)
    next_value = next_advantage = 0.0
    for t in reversed(steps):
        delta = reward[t] + args.gamma * next_value - sample.values[t]
        next_advantage = delta + args.gamma * args.lambd * next_advantage
        next_value = sample.values[t]
        advantages[t], returns[t] = next_advantage, next_advantage + sample.values[t]
    sample.advantages, sample.returns = advantages, returns


def _whiten(samples: Sequence[PlainSample]) -> None:
    counted = [a for s in samples for a, m in zip(s.advantages, s.mask, strict=True) if m]
    mean = sum(counted) / len(counted)
    variance = sum((a - mean) ** 2 for a in counted) / (len(counted) - 1)
    for sample in samples:
        if max(counted) == min(counted):
            sample.advantages = [0.0] * len(sample.advantages)
            continue
        sample.advantages = [(a - mean) / math.sqrt(variance + 1e-8) for a in sample.advantages]


@dataclass
class PlainStep:
    """Loss and metrics of a step; metrics by name, all divided by the step's denominator."""

    loss: torch.Tensor
    metrics: dict[str, float]


def policy_step(
    args: SimpleNamespace,
    samples: Sequence[PlainSample],
    logits: Sequence[torch.Tensor],
    global_batch_size: int,
    weighting: str | None = None,
    reweigh: Callable[[PlainSample, int, float], tuple[float, float]] | None = None,
) -> PlainStep:
    """The objective of one optimizer step.

    Args:
        logits: float64 [tokens of the sample, V] per sample, before the temperature.
        weighting: the kind of `use_tis`: "truncate" or "icepop".
        reweigh: takes a sample, a token and the token's weight in all sums; returns its weights in the policy-gradient term and
            in the other terms of the loss. Metrics keep the given weight.
    """
    trained_of = {}
    for sample in samples:
        trained_of[sample.execution] = trained_of.get(sample.execution, 0) + sum(sample.mask)
    sums: dict[str, torch.Tensor] = {}
    total = 0.0
    for sample, rows in zip(samples, logits, strict=True):
        for t, terms in _token_terms(args, sample, rows, weighting):
            assert sample.mask[t]
            weight = 1.0 if args.calculate_per_token_loss else 1.0 / max(trained_of[sample.execution], 1)
            of_policy, of_others = (weight, weight) if reweigh is None else reweigh(sample, t, weight)
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + (of_policy if name == "pg_loss" else weight) * value
            regularised = -args.entropy_coef * terms["entropy_loss"]
            if args.use_kl_loss:
                regularised = regularised + args.kl_loss_coef * terms["kl_loss"]
            total = total + of_policy * terms["pg_loss"] + of_others * regularised
    denominator = sum(sum(s.mask) for s in samples) if args.calculate_per_token_loss else global_batch_size
    means = {name: value / denominator for name, value in sums.items()}
    loss = total / denominator
    return PlainStep(loss, {name: float(torch.as_tensor(value).detach()) for name, value in means.items()})


def _token_terms(args: SimpleNamespace, sample: PlainSample, rows: torch.Tensor, weighting: str | None):
    """Yields (t, terms) for every trained token."""
    trained = [t for t in range(len(sample.mask)) if sample.mask[t]]
    old = sample.roll if args.use_rollout_logprobs else sample.old
    log_probs, entropies = {}, {}
    for t in trained:
        row = rows[sample.prompt + t - 1] / args.rollout_temperature
        total = sum(torch.exp(x) for x in row)
        log_probs[t] = row[sample.tokens[sample.prompt + t]] - torch.log(total)
        entropies[t] = -sum((torch.exp(x) / total) * (x - torch.log(total)) for x in row)
    sequence_kl = sum(old[t] - log_probs[t] for t in trained) / max(len(trained), 1)
    for t in trained:
        a, lp = sample.advantages[t], log_probs[t]
        ppo_kl = sequence_kl if args.advantage_estimator == "gspo" else old[t] - lp
        ratio = torch.exp(-ppo_kl)
        low, high = 1 - args.eps_clip, 1 + args.eps_clip_high
        if args.advantage_estimator == "cispo":
            weight = min(max(ratio.item(), low), high)
            loss, clipped = -weight * a * lp, float(weight != ratio.item())
        else:
            bounded = ratio if low <= ratio.item() <= high else _constant(min(max(ratio.item(), low), high))
            first, second = -ratio * a, -bounded * a
            loss, clipped = (second, 1.0) if second.item() > first.item() else (first, 0.0)
            if args.eps_clip_c is not None and a < 0 and -args.eps_clip_c * a < loss.item():
                loss = _constant(-args.eps_clip_c * a)
        terms = {"pg_clipfrac": clipped, "ppo_kl": ppo_kl, "entropy_loss": entropies[t]}
        if args.use_opsm:
            rejected = a < 0 and sequence_kl.item() > args.opsm_delta
            loss = loss * (0.0 if rejected else 1.0)
            terms["opsm_clipfrac"] = float(rejected)
        if weighting is not None:
            loss = loss * _weigh(args, sample, t, weighting, terms)
            terms["ois"] = ratio.item()
        if args.use_kl_loss:
            token_ratio = torch.exp(lp - old[t]) if args.use_unbiased_kl else 1.0
            terms["kl_loss"] = kl_estimate(lp, sample.ref[t], args.kl_loss_type, token_ratio)
        trainer = lp.item() if args.use_rollout_logprobs else sample.old[t]
        terms["train_rollout_logprob_abs_diff"] = abs(trainer - sample.roll[t])
        if args.use_opd:
            terms["opd_reverse_kl"] = sample.reverse_kl[t]
        yield t, {"pg_loss": loss, **terms}


def _constant(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _weigh(args: SimpleNamespace, sample: PlainSample, t: int, weighting: str, terms: dict) -> float:
    weight = math.exp(sample.old[t] - sample.roll[t])
    inside = args.tis_clip_low <= weight <= args.tis_clip
    moved = min(max(weight, args.tis_clip_low), args.tis_clip)
    applied = moved if weighting == "truncate" else weight if inside else 0.0
    terms |= {"tis": weight, "tis_abs": abs(weight - 1), "tis_clipfrac": float(applied != weight)}
    return applied


def value_step(args: SimpleNamespace, samples: Sequence[PlainSample], outputs, global_batch_size: int) -> PlainStep:
    """The critic's objective of one optimizer step; `outputs`: float64 [tokens of the sample] per sample."""
    trained_of = {}
    for sample in samples:
        trained_of[sample.execution] = trained_of.get(sample.execution, 0) + sum(sample.mask)
    total, clipped = torch.zeros((), dtype=torch.float64), 0.0
    for sample, rows in zip(samples, outputs, strict=True):
        for t in range(len(sample.mask)):
            if not sample.mask[t]:
                continue
            value, old, goal = rows[sample.prompt + t - 1], sample.values[t], sample.returns[t]
            change = value.item() - old
            near = value if abs(change) <= args.value_clip else _constant(old + math.copysign(args.value_clip, change))
            first, second = (near - goal) ** 2, (value - goal) ** 2
            weight = 1.0 if args.calculate_per_token_loss else 1.0 / max(trained_of[sample.execution], 1)
            total = total + weight * (first if first.item() > second.item() else second)
            clipped += weight * float(abs(change) > args.value_clip)
    denominator = sum(sum(s.mask) for s in samples) if args.calculate_per_token_loss else global_batch_size
    loss = total / denominator
    return PlainStep(loss, {"value_loss": loss.item(), "value_clipfrac": clipped / denominator})
