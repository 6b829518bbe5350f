"""A small GRPO batch with every awkward case, and its loss written out in loops over float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from slime.utils.types import Sample
from tests.support.models.args import default_args
from tests.support.oracles.rounding import bounds_of_step

# (prompt length, response length, execution id, mask of the response or None)
SHAPES = (
    (3, 5, 0, None),
    (2, 1, 1, None),  # one token
    (4, 6, 2, [1, 1, 0, 0, 1, 1]),  # tool tokens
    (3, 4, 2, None),  # sibling of the same execution
    (5, 3, 3, [0, 0, 0]),  # fully masked
    (2, 7, 4, None),
    (6, 2, 5, None),
    (3, 8, 6, None),
    (2, 2, 7, None),
)
GLOBAL_BATCH_SIZE = 8
ADVANTAGES = [0.9, -0.4, 0.3, 0.3, 1.1, -1.2, 0.5, -0.7, 0.2]
TRAINED_TOKENS = 33


# The arguments of objective, schedule and optimizer that differ from the parser's defaults.
OBJECTIVE = {
    "custom_config": {}, "eps_clip_high": 0.28, "entropy_coef": 0.01, "use_kl_loss": True, "kl_loss_coef": 0.1,
    "kl_loss_type": "k3", "rollout_temperature": 0.7, "data_pad_size_multiplier": 8, "use_dynamic_batch_size": True,
    "max_tokens_per_gpu": 16, "lr": 1e-2, "lr_decay_style": "constant", "weight_decay": 0.1,
    "adam_beta2": 0.98, "clip_grad": 0.0, "num_rollout": 4, "rollout_batch_size": 8,
    "global_batch_size": GLOBAL_BATCH_SIZE,
}  # fmt: skip


def objective_args(**overrides: Any) -> SimpleNamespace:
    """Arguments of the objective and the schedule: the parser's defaults, changed by `OBJECTIVE` and `overrides`."""
    return default_args(**{**OBJECTIVE, **overrides})


def make_samples(vocab_size: int) -> list[Sample]:
    """The samples of `SHAPES` with random tokens and rewards, the same at every call."""
    generator = np.random.default_rng(3)
    samples = []
    for index, (prompt, response, execution, mask) in enumerate(SHAPES):
        sample = Sample(index=index, group_index=index // 4, rollout_id=execution, prompt="p")
        sample.tokens = generator.integers(0, vocab_size, prompt + response).tolist()
        sample.response_length = response
        sample.loss_mask = mask
        sample.rollout_log_probs = (-2 * generator.random(response)).tolist()
        sample.reward = float(generator.random())
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    return samples


def old_and_reference(samples: list[Sample]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Made-up old and reference log-probs, near those of a random model."""
    generator = np.random.default_rng(4)
    old = [-4.9 + 0.5 * generator.standard_normal(s.response_length).astype(np.float32) for s in samples]
    reference = [-4.9 + 0.5 * generator.standard_normal(s.response_length).astype(np.float32) for s in samples]
    return old, reference


def bounds_of_batch(**objective: Any) -> dict[str, float]:
    """By how much metrics of a step on this batch, or of its data, may differ; see `tests.support.oracles.rounding`."""
    samples = make_samples(2)
    old, reference = old_and_reference(samples)
    masks = [s.loss_mask or [1] * s.response_length for s in samples]
    trained = [sum(sum(m) for m, o in zip(masks, SHAPES, strict=True) if o[2] == row[2]) for row in SHAPES]
    data = {
        "loss_masks": masks, "rollout_mask_sums": trained, "log_probs": old, "ref_log_probs": reference,
        "rollout_log_probs": [s.rollout_log_probs for s in samples],
        "advantages": [[a] * len(mask) for a, mask in zip(ADVANTAGES, masks, strict=True)],
        "num_microbatches": [1], "micro_batch_indices": [list(range(len(samples)))], "global_batch_sizes": [GLOBAL_BATCH_SIZE],
    }  # fmt: skip
    return bounds_of_step(objective_args(**{"padded_vocab_size": 144, **objective}), data, 0)


def plain_loss(model: Any, args: SimpleNamespace, samples: list[Sample], advantages: list[float]) -> Any:
    """The objective of one step by loops over samples and tokens; `model` is a transformers model in float64."""
    import torch

    old, reference = old_and_reference(samples)
    masks = [s.loss_mask or [1] * s.response_length for s in samples]
    trained = {}
    for sample, mask in zip(samples, masks, strict=True):
        trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sum(mask)
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        logits = model(torch.tensor([sample.tokens])).logits[0].double() / args.rollout_temperature
        for t in range(sample.response_length):
            if not masks[i][t]:
                continue
            row = len(sample.tokens) - sample.response_length + t - 1
            distribution = torch.log_softmax(logits[row], -1)
            log_prob = distribution[sample.tokens[row + 1]]
            entropy = -(distribution.exp() * distribution).sum()
            ratio = torch.exp(log_prob - float(old[i][t]))
            clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
            value = torch.maximum(-ratio * advantages[i], -clipped * advantages[i]) - args.entropy_coef * entropy
            distance = log_prob - float(reference[i][t])
            value = value + args.kl_loss_coef * (torch.exp(-distance) - 1 + distance)
            total = total + (value if args.calculate_per_token_loss else value / max(trained[sample.rollout_id], 1))
    denominator = sum(map(sum, masks)) if args.calculate_per_token_loss else GLOBAL_BATCH_SIZE
    return total / denominator


def normalised(rewards: list[float], groups: list[int]) -> list[float]:
    """Rewards minus the mean of their group, without scaling; every execution must have one sample."""
    means = {g: sum(r for r, h in zip(rewards, groups, strict=True) if h == g) / groups.count(g) for g in set(groups)}
    return [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]


def is_close(left: float, right: float, relative: float) -> bool:
    return math.isclose(left, right, rel_tol=relative, abs_tol=relative)
