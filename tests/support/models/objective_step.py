"""One optimizer step over a few awkward samples, from the columns of a rank's data to the gradient of the logits."""

from __future__ import annotations

import random

import torch

from slime.training.loss import loss_function
from slime.training.rollout_data import RolloutData
from tests.support.models.grpo_batch import objective_args
from tests.support.oracles.plain_objective import PlainSample

VOCABULARY = 9
# (prompt length, mask of the response, execution)
SHAPES = (
    (3, [1, 1, 1, 1, 1], 0),
    (2, [1], 1),  # one token
    (4, [1, 0, 0, 1, 1, 0], 2),  # tool tokens, also at the end
    (3, [1, 1, 1], 2),  # sibling of the same execution
    (5, [0, 0, 0], 3),  # fully masked
    (1, [0, 1, 1, 1, 0, 1, 1], 4),
)
ROLLOUTS = 5


def case_args(**changes):
    return objective_args(**{"kl_loss_coef": 0.3, "entropy_coef": 0.02, **changes})


def make_samples(seed=0):
    generator = random.Random(seed)

    def column(length):
        return [-2.2 + 0.4 * generator.gauss(0, 1) for _ in range(length)]

    samples = []
    for prompt, mask, execution in SHAPES:
        tokens = [generator.randrange(VOCABULARY) for _ in range(prompt + len(mask))]
        old, ref, roll, teacher, values = (column(len(mask)) for _ in range(5))
        samples.append(PlainSample(tokens, mask, execution, generator.gauss(0, 1), old, ref, roll, teacher, values))
    return samples


def make_logits(samples, columns=VOCABULARY, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(s.tokens), columns, generator=generator, dtype=torch.float64) for s in samples]


def rollout_data(samples):
    """The samples as a rank's data, before advantages are computed."""
    trained = {}
    for sample in samples:
        trained[sample.execution] = trained.get(sample.execution, 0) + sum(sample.mask)
    columns = {
        "rollout_log_probs": [s.roll for s in samples],
        "log_probs": [s.old for s in samples],
        "ref_log_probs": [s.ref for s in samples],
        "teacher_log_probs": [s.teacher for s in samples],
        "values": [s.values for s in samples],
    }
    data = {
        "tokens": [torch.tensor(s.tokens) for s in samples],
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [len(s.mask) for s in samples],
        "loss_masks": [torch.tensor(s.mask, dtype=torch.int32) for s in samples],
        "rewards": [s.reward for s in samples],
        "rollout_mask_sums": [float(trained[s.execution]) for s in samples],
        "sample_indices": list(range(len(samples))),
        **{name: [torch.tensor(row) for row in rows] for name, rows in columns.items() if all(rows)},
    }
    return RolloutData(data)


def run_step(args, data, logits, split, role="actor", step_statistics=None):
    """(loss, metrics, gradient per sample) of a step over the micro-batches `split`, divided as the trainer does."""
    leaves = [rows.float().requires_grad_() for rows in logits]
    loss, sums = 0.0, {}
    for positions in split:
        batch = data.micro_batch(positions, pad_multiple=4).with_columns(step_statistics=step_statistics)
        padding = torch.zeros(len(batch.stream.tokens) - sum(batch["total_lengths"]), logits[0].shape[1])
        part, metrics = loss_function(
            args, batch, torch.cat([*(leaves[i] for i in positions), padding]), None, role=role
        )
        part.backward()
        loss += float(part.detach())
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    trained = sum(int(mask.sum()) for mask in data["loss_masks"])
    denominator = trained if args.calculate_per_token_loss else ROLLOUTS
    gradients = [leaf.grad / denominator for leaf in leaves]
    return loss / denominator, {name: value / denominator for name, value in sums.items()}, gradients


def plain_gradients(step, leaves):
    step.loss.backward()
    return [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]


def assert_equal_gradients(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-7)
