"""The guard of an optimizer step: a loss or a gradient that is not finite must not reach the weights.

One rank sees such a number, and all ranks have to act on it together: one that stopped alone would leave the others waiting in
a collective. So no rank says anything while a step computes. Each only remembers its losses, and whether the gradient that
comes back to the logits is finite; no number is brought to the host. When the gradients are summed, one all-reduce of two
numbers tells all ranks whether the step is good. Only if it is not, they exchange what they remember, and every rank stops, or
skips the update, with the same message.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from slime.training.metric_reduction import all_reduce_sum
from slime.utils.errors import RunError

logger = logging.getLogger(__name__)

# A message lists so many names of parameters, and counts the others.
_NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class BadMicroBatch:
    """A micro-batch whose loss is not finite or, with a finite loss, whose gradient at the logits is not."""

    samples: tuple[int, ...]
    loss: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What one rank found in a step.

    Attributes:
        parameters: global names of those whose gradient is not finite.
    """

    rank: int
    micro_batches: tuple[BadMicroBatch, ...]
    parameters: tuple[str, ...]


class LossGuard:
    """Watches one optimizer step of one rank.

    Args:
        place: where the step is in the run, for messages.
        stops: whether a bad step ends the run, or is skipped.
        bad_parameters: tells the names of this rank's parameters whose gradient is not finite; called only if the norm is not.
        group: all ranks that train together; None: the world.
    """

    def __init__(
        self,
        place: str,
        stops: bool,
        bad_parameters: Callable[[], Sequence[str]] = tuple,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._place = place
        self._stops = stops
        self._bad_parameters = bad_parameters
        self._group = dist.group.WORLD if group is None else group
        self._samples: list[tuple[int, ...]] = []
        self._losses: list[torch.Tensor] = []
        self._gradients_finite: dict[int, torch.Tensor] = {}

    def watch(self, loss: torch.Tensor, logits: torch.Tensor, samples: Sequence[int]) -> None:
        """Remember a micro-batch, before its backward pass.

        Args:
            loss: scalar.
            logits: what it is computed from; any shape.
            samples: the micro-batch's sample indices.
        """
        index = len(self._losses)
        self._samples.append(tuple(samples))
        self._losses.append(loss.detach())
        if logits.requires_grad and logits.numel():

            def look(gradient: torch.Tensor) -> None:
                # Two numbers instead of a mask of the logits' shape; NaN and infinity go through to them.
                self._gradients_finite[index] = torch.stack(gradient.detach().aminmax()).isfinite().all()

            logits.register_hook(look)

    def accepts(self, grad_norm: float, overflowed: bool = False) -> bool:
        """Whether to update the weights, the same answer on all ranks. Collective.

        Args:
            grad_norm: over all ranks.
            overflowed: the loss scale of float16 was too high; gradients are then not finite in the normal course of things.

        Raises:
            RunError: a bad step, and the guard stops at one; on all ranks, with one message.
        """
        loss_is_bad = bool(self._losses) and not bool(torch.stack(self._losses).isfinite().all())
        gradient_is_bad = not (overflowed or math.isfinite(grad_norm))
        flags = torch.tensor([float(loss_is_bad), float(gradient_is_bad)])
        losses_bad, gradients_bad = (count > 0 for count in all_reduce_sum(flags, self._group).tolist())
        if not (losses_bad or gradients_bad):
            return True
        message = f"{self._place}: {describe(self._reports(gradients_bad), grad_norm)}"
        if self._stops:
            raise RunError(f"{message}. The weights are not saved; --save-debug-train-data shows the samples")
        if dist.get_rank(self._group) == 0:
            logger.warning("%s. No weights are updated in this step", message)
        return False

    def _reports(self, gradients_bad: bool) -> list[Report]:
        """What all ranks found. Collective."""
        found = []
        for index, (samples, loss) in enumerate(zip(self._samples, self._losses, strict=True)):
            value = float(loss)
            if not (math.isfinite(value) and bool(self._gradients_finite.get(index, True))):
                found.append(BadMicroBatch(samples, value))
        parameters = tuple(self._bad_parameters()) if gradients_bad else ()
        own = Report(dist.get_rank(self._group), tuple(found), parameters)
        reports: list[Report] = [own] * dist.get_world_size(self._group)
        dist.all_gather_object(reports, own, group=self._group)
        return reports


def describe(reports: Sequence[Report], grad_norm: float) -> str:
    """What went wrong, in which micro-batches of which ranks; one line.

    Losses come first: a gradient follows from its loss, and one bad gradient spoils the norm of all.
    """
    bad = [(report.rank, batch) for report in reports for batch in report.micro_batches]
    losses = [(rank, batch) for rank, batch in bad if not math.isfinite(batch.loss)]
    if losses:
        values = dict.fromkeys(str(batch.loss) for _, batch in losses)
        return "; ".join(
            f"the loss is {value} {_where([(rank, batch.samples) for rank, batch in losses if str(batch.loss) == value])}"
            for value in values
        )
    norm = f"the gradient norm is {grad_norm}"
    if bad:
        places = _where([(rank, batch.samples) for rank, batch in bad])
        return f"{norm}; losses are finite, but the gradient at the logits is not {places}"
    names = sorted({name for report in reports for name in report.parameters})
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    shown = f"; gradients that are not finite: {', '.join(names[:_NAMES_SHOWN])}{more}" if names else ""
    return f"{norm}; losses and their gradients at the logits are finite, so it arose inside the model{shown}"


def _where(found: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """Micro-batches and the ranks that share them: those of a model-parallel group have the same samples."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, samples in found:
        ranks.setdefault(samples, []).append(rank)
    return ", ".join(
        f"on rank{'s' if len(of_batch) > 1 else ''} {', '.join(map(str, of_batch))} in the micro-batch with samples "
        f"[{_numbers(samples)}]"
        for samples, of_batch in ranks.items()
    )


def _numbers(samples: Sequence[int]) -> str:
    """Ascending, three or more in a row as a range: "3, 7, 10–12"."""
    runs: list[list[int]] = []
    for sample in sorted(samples):
        if runs and sample == runs[-1][-1] + 1:
            runs[-1].append(sample)
        else:
            runs.append([sample])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
