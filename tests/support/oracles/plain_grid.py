"""The batches of `objective_grid`, and the expected results of its objectives, by transformers and loops in float64."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.oracles.plain_mis import plain_step
from tests.support.oracles.plain_objective import PlainSample, PlainStep, policy_step, set_advantages, value_step
from tests.support.oracles.rounding import assert_equal_metrics, assert_equal_rows, terms_of_value
from tests.support.processes.objective_grid import (
    CONSTANT_LENGTH,
    CRITIC_OBJECTIVES,
    FULL,
    HIDDEN,
    LAYERS,
    OBJECTIVES,
    SPARSE,
    STEPS,
    VOCABULARY,
    grid_args,
    of_step,
)

SHAPES = {"full": FULL, "sparse": SPARSE}
# Objectives whose advantages are made from the values that the critic has just computed.
OF_OWN_VALUES = ("value", "value per token")
# Objectives with the sets of tokens that an engine kept: the loops do not compute these.
WITHOUT_LOOPS = ("top-p",)


class PlainGrid:
    """The model of `hf_dir` in float64.

    Attributes:
        batches: the samples. Log-probs of old policy, reference, teacher and engine lie around those of the model. One token of
            the full batch is nearly certain for the engine and unlikely for the policy.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64)
        self.head = torch.linspace(-0.1, 0.2, HIDDEN).double().requires_grad_()
        self._outputs: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        generator = random.Random(7)
        self.batches = {name: [self._sample(generator, *row) for row in rows] for name, rows in SHAPES.items()}
        self.batches["full"][9].roll[0] = self.batches["full"][9].old[0] + 10

    def logits(self, sample: PlainSample) -> torch.Tensor:
        """The model's logits [tokens, vocabulary]."""
        return self._of_model(sample)[0]

    def values(self, sample: PlainSample) -> torch.Tensor:
        """The critic's outputs [tokens]."""
        return self._of_model(sample)[1]

    def log_probs(self, sample: PlainSample, temperature: float = 0.7) -> list[float]:
        rows = torch.log_softmax(self.logits(sample).detach() / temperature, -1)
        return [float(rows[i - 1, sample.tokens[i]]) for i in range(sample.prompt, len(sample.tokens))]

    def _of_model(self, sample: PlainSample) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = tuple(sample.tokens)
        if tokens not in self._outputs:
            hidden = self.model.model(torch.tensor([tokens])).last_hidden_state[0]
            self._outputs[tokens] = (self.model.lm_head(hidden), hidden @ self.head)
        return self._outputs[tokens]

    def prepared(self, objective: str, batch: str, args: SimpleNamespace) -> list[PlainSample]:
        """The samples of the batch with the advantages of the objective."""
        samples = copy.deepcopy(self.batches[batch])
        for sample in samples:
            if objective == "first step":
                sample.old = self.log_probs(sample)
            if objective in OF_OWN_VALUES:
                first, last = sample.prompt - 1, len(sample.tokens) - 1
                sample.values = self.values(sample)[first:last].tolist()
        set_advantages(args, samples)
        return samples

    def steps(self, objective: str, batch: str, args: SimpleNamespace) -> list[PlainStep]:
        """Loss and metrics of each optimizer step; the gradient norm is among the metrics."""
        samples, size = self.prepared(objective, batch, args), args.global_batch_size
        steps = []
        for first in range(0, 1 + max(s.execution for s in samples), size):
            part = [s for s in samples if first <= s.execution < first + size]
            step = self._step(objective, args, part)
            norm = self._gradient_norm(step.loss)
            steps.append(PlainStep(step.loss.detach(), {**step.metrics, "grad_norm": norm}))
        return steps

    def _gradient_norm(self, loss: torch.Tensor) -> float:
        if not loss.requires_grad:
            return 0.0  # every token is clipped
        parameters = [*self.model.parameters(), self.head]
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients if gradient is not None))

    def _step(self, objective: str, args: SimpleNamespace, samples: list[PlainSample]) -> PlainStep:
        size = args.global_batch_size
        if objective.startswith("value"):
            return value_step(args, samples, [self.values(s) for s in samples], size)
        logits = [self.logits(s) for s in samples]
        if objective.startswith("sft"):
            return _sft_step(args, samples, logits)
        if objective == "constant length":
            return policy_step(args, samples, logits, size, reweigh=lambda s, t, weight: (1 / CONSTANT_LENGTH, weight))
        if objective.startswith("masked importance"):
            return policy_step(args, samples, logits, size, reweigh=_mis_reweighing(args, samples))
        weighting = ("icepop" if objective.startswith("icepop") else "truncate") if args.use_tis else None
        step = policy_step(args, samples, logits, size, weighting)
        return PlainStep(step.loss / 2, step.metrics) if objective == "custom loss" else step

    def _sample(self, generator: random.Random, prompt: int, mask: list[int], execution: int) -> PlainSample:
        length = prompt + len(mask)
        tokens = [generator.randrange(VOCABULARY) for _ in range(length)]
        sample = PlainSample(tokens, mask, execution, generator.gauss(0, 1), [], [], [], [], [])
        own = self.log_probs(sample)
        sample.old, sample.ref, sample.teacher = (_around(own, generator, 0.25) for _ in range(3))
        sample.roll = _around(sample.old, generator, 0.25)
        sample.values = _around([0.0] * len(mask), generator, 1.0)
        return sample


def _around(values: list[float], generator: random.Random, spread: float) -> list[float]:
    # The trainer gets float32 values.
    return [float(torch.tensor(value + spread * generator.gauss(0, 1))) for value in values]


def _sft_step(args: SimpleNamespace, samples: list[PlainSample], logits: list[torch.Tensor]) -> PlainStep:
    trained: dict[int, int] = {}
    for sample in samples:
        trained[sample.execution] = trained.get(sample.execution, 0) + sum(sample.mask)
    loss = torch.zeros((), dtype=torch.float64)
    for sample, rows in zip(samples, logits, strict=True):
        for t, counts in enumerate(sample.mask):
            row = torch.log_softmax(rows[sample.prompt + t - 1], -1)
            weight = 1.0 if args.calculate_per_token_loss else 1.0 / max(trained[sample.execution], 1)
            loss = loss - counts * weight * row[sample.tokens[sample.prompt + t]]
    return PlainStep(loss / (sum(trained.values()) if args.calculate_per_token_loss else args.global_batch_size), {})


def _mis_reweighing(args: SimpleNamespace, samples: list[PlainSample]) -> Any:
    from examples.train_infer_mismatch_helper.mis import mis_settings_from_args

    columns = ([s.old for s in samples], [s.roll for s in samples], [s.mask for s in samples])
    factors, masks, _ = plain_step(mis_settings_from_args(args), *columns)
    places = {id(sample): i for i, sample in enumerate(samples)}

    def reweigh(sample: PlainSample, t: int, weight: float) -> tuple[float, float]:
        i = places[id(sample)]
        return weight * factors[i][t], weight * masks[i][t]

    return reweigh


def assert_like_loops(
    hf_dir: str, plain: PlainGrid, objective: str, found: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """The results of training on one rank, `found` by (objective, batch), are those of loops in float64."""
    for batch in STEPS:
        changes = {**OBJECTIVES, **CRITIC_OBJECTIVES}[objective]
        args = grid_args(hf_dir, batch, **{"value_clip": 0.05, **changes})
        steps = plain.steps(objective, batch, args)
        assert len(steps) == STEPS[batch]
        result = found[objective, batch]
        for number, step in enumerate(steps):
            metrics, bounds = of_step(result["train"], number), of_step(result["bounds"]["train"], number)
            expected = {**step.metrics, "loss": float(step.loss)}
            assert_equal_metrics({name: metrics.get(name) for name in expected}, expected, bounds)
        if objective.startswith("sft"):
            continue
        names = ("advantages", "returns", *(["values"] if objective in OF_OWN_VALUES else []))
        samples = enumerate(plain.prepared(objective, batch, args))
        expected = {(name, i): getattr(sample, name) for i, sample in samples for name in names}
        found_rows = {key: result["columns"][key] for key in expected}
        assert_equal_rows(found_rows, expected, terms_of_value=terms_of_value(HIDDEN, LAYERS))
