"""Routing replay: training sends every token to the experts that were chosen for it earlier.

A router that chooses anew may send a token elsewhere than the log-prob pass (or the engine) did, after a small change of the
weights or by rounding alone; the probability ratio then compares two different networks. So each MoE layer of this rank keeps
records of expert ids, and its router asks here instead of taking the top k of its scores. Gates are gathered from the scores
of the moment, so the router still learns.

Where records come from: the log-prob pass (this object records them), or the rollout (a function supplies them, and the
log-prob pass replays them too).

Invariants
- A record belongs to one layer and one micro-batch, which is known by the positions of its samples in the rank's data. It holds
  the rows that this rank's router sees, after context, sequence and pipeline parallelism have cut the stream.
- A model chunk sees the backward passes of its micro-batches in the order of their forward passes. So a forward pass that is
  repeated during backward (activation recomputation) finds its record by first in, first out.
- In training every record is used by one forward pass and, in a layer that recomputes, by one repetition. Anything else is an
  error; then, or at the end, the records are gone.
- Outside of `log_prob_pass` and `training` routers choose freely: a reference, a teacher, a probe never replays.

Choices that the engine made are a column of the train batch: per sample `[len(tokens) − 1, layers, k]`. Rows are positions of
the sample; the engine never runs the last token through the model, so it has none. Layers are all layers of the model, those
without experts included; what stands there is not read. Over the rows of a packed stream a sample has none for its last token,
and padding has none at all. A missing row at position t gets the ids t·k, t·k + 1, … modulo the number of experts: nothing
depends on where these tokens go, but all on one expert they would make that one, and its rank, slow.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from slime.estimates.shape import expert_layers
from slime.training.rollout_data import MicroBatch
from slime.utils.errors import RunError, UserError
from slime.utils.types import Sample

# Takes a micro-batch and the numbers of layers (from 1); gives expert ids [rows of this rank's routers, layers, k] on the host.
ExpertSource = Callable[[MicroBatch, Sequence[int]], torch.Tensor]
TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Stage(enum.StrEnum):
    """What a router that asks is told."""

    FALLTHROUGH = "fallthrough"  # choose freely
    RECORD = "record"  # choose, and remember
    REPLAY_FORWARD = "replay_forward"  # take the record of the micro-batch
    REPLAY_BACKWARD = "replay_backward"  # take the oldest record that a forward pass used


@dataclass
class _Pass:
    """What the layers of a model share."""

    stage: Stage = Stage.FALLTHROUGH
    micro_batch: tuple[int, ...] = ()
    # Whether forward passes leave the records that they take.
    keeps_records: bool = False


@dataclass(eq=False)
class LayerReplay:
    """The records of one MoE layer. Megatron's router calls `get_replay_topk` where it would take the top k.

    `number`: of the layer in the whole model, from 1.
    """

    number: int
    current: _Pass
    records: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    # Used by a forward pass, and not yet by its repetition. Where nothing is repeated they stay until the end.
    awaited: deque[torch.Tensor] = field(default_factory=deque)
    forwards: int = 0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [rows, k] of the chosen experts and their ids (int64, same shape), from the scores [rows, experts] of now.

        Raises:
            RunError: there is no record to replay, or it has other rows.
        """
        stage = self.current.stage
        if stage in (Stage.FALLTHROUGH, Stage.RECORD):
            chosen, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
            if stage is Stage.RECORD:
                self.records[self.current.micro_batch] = _to_host(experts)
            return chosen, experts
        record = self._replayed() if stage is Stage.REPLAY_FORWARD else self._repeated()
        if record.shape != (len(scores), topk):
            raise RunError(
                f"routing replay: layer {self.number} routes {len(scores)} rows to {topk} experts each, but its record of "
                f"the micro-batch has shape {tuple(record.shape)}"
            )
        experts = record.to(scores.device, non_blocking=True).long()
        return scores.gather(1, experts), experts

    def left_over(self) -> str | None:
        """What training did not use, in words."""
        if self.records:
            return f"{len(self.records)} of {len(self.records) + self.forwards} records were not used"
        if self.awaited and len(self.awaited) != self.forwards:
            return f"{len(self.awaited)} of {self.forwards} records were not used again by the recomputed forward"
        return None

    def clear(self) -> None:
        """Forget all records."""
        self.records.clear()
        self.awaited.clear()
        self.forwards = 0

    def _replayed(self) -> torch.Tensor:
        record = self.records.get(self.current.micro_batch)
        if record is None:
            raise RunError(
                f"routing replay: layer {self.number} has no record of the micro-batch with the samples at "
                f"{list(self.current.micro_batch)}; the log-prob pass and training must see the same micro-batches, each once"
            )
        if not self.current.keeps_records:
            del self.records[self.current.micro_batch]
            self.forwards += 1
            self.awaited.append(record)
        return record

    def _repeated(self) -> torch.Tensor:
        if not self.awaited:
            raise RunError(f"routing replay: layer {self.number} has no record left for the recomputed forward")
        return self.awaited.popleft()


class RoutingReplay:
    """Routing replay of one model on one rank.

    Args:
        layer_numbers: per model chunk (virtual stage) the numbers of its MoE layers, from 1 over the whole model.
        source: gives the expert ids where they come with the rollout; None: the log-prob pass records them.

    Attributes:
        layers: per model chunk what the routers of its MoE layers ask, in the order of `layer_numbers`.
    """

    def __init__(self, layer_numbers: Sequence[Sequence[int]] = (), source: ExpertSource | None = None) -> None:
        self._pass = _Pass()
        self._source = source
        # None: routers choose freely. Else the stages of a forward pass and of what follows it.
        self._stages: tuple[Stage, Stage] | None = None
        self.layers = [[LayerReplay(number, self._pass) for number in numbers] for numbers in layer_numbers]
        if self.layers:
            os.environ["ENABLE_ROUTING_REPLAY"] = "1"
            self._enter(Stage.FALLTHROUGH)

    @contextlib.contextmanager
    def log_prob_pass(self) -> Iterator[None]:
        """The actor's log-prob pass: records what `training` will replay, or replays what the rollout brought."""
        records = self._source is None
        self.clear()
        try:
            with self._staged(Stage.RECORD if records else Stage.REPLAY_FORWARD, Stage.FALLTHROUGH):
                yield
            if not records:
                self._require_used()
                self.clear()
        except BaseException:
            self.clear()
            raise

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """All optimizer steps of a rollout.

        Raises:
            RunError: at the end there are records that were not used.
        """
        try:
            with self._staged(Stage.REPLAY_FORWARD, Stage.REPLAY_BACKWARD):
                yield
            self._require_used()
        finally:
            self.clear()

    @contextlib.contextmanager
    def keeping_records(self) -> Iterator[None]:
        """A pass before a step, over its micro-batches, that takes the records of the step and leaves them."""
        self._pass.keeps_records = True
        try:
            yield
        finally:
            self._pass.keeps_records = False

    def forward(self, chunk: int, batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """The forward pass of the micro-batch `batch` through the model chunk with this index. If it is made in parts, each of
        them may enter the context.

        Args:
            batch: `batch["positions"]` has the place of each sample in the rank's data.
        """
        if self._stages is None or not self.layers:
            return contextlib.nullcontext()
        positions = tuple(batch["positions"])
        layers = self.layers[chunk]
        if self._source is not None and layers:
            experts = self._source(batch, [layer.number for layer in layers])
            for index, layer in enumerate(layers):
                layer.records[positions] = experts[:, index]
        return _Forward(self, positions, *self._stages)

    def clear(self) -> None:
        """Forget all records."""
        for layer in self._all_layers():
            layer.clear()

    @contextlib.contextmanager
    def _staged(self, during: Stage, afterwards: Stage) -> Iterator[None]:
        self._stages = during, afterwards
        try:
            yield
        finally:
            self._stages = None
            if self.layers:
                self._enter(Stage.FALLTHROUGH)

    def _enter(self, stage: Stage) -> None:
        self._pass.stage = stage
        os.environ["ROUTING_REPLAY_STAGE"] = stage.value

    def _require_used(self) -> None:
        found = [(layer.number, words) for layer in self._all_layers() if (words := layer.left_over())]
        if found:
            number, words = found[0]
            others = f" (and {len(found) - 1} more layers)" if len(found) > 1 else ""
            raise RunError(f"routing replay: layer {number}: {words}{others}")

    def _all_layers(self) -> Iterator[LayerReplay]:
        for layers in self.layers:
            yield from layers


@dataclass(frozen=True, eq=False)
class _Forward(contextlib.AbstractContextManager[None]):
    """Tells routers about the pass of a micro-batch; it can be entered several times, one after the other."""

    replay: RoutingReplay
    micro_batch: tuple[int, ...]
    during: Stage
    afterwards: Stage

    def __enter__(self) -> None:
        self.replay._pass.micro_batch = self.micro_batch
        self.replay._enter(self.during)

    def __exit__(self, *_: object) -> None:
        self.replay._enter(self.afterwards)


def _to_host(experts: torch.Tensor) -> torch.Tensor:
    """A copy of the ids in host memory, two bytes each. From a GPU it is under way: read it on the same stream."""
    host = torch.empty(experts.shape, dtype=torch.int16, pin_memory=experts.is_cuda)
    return host.copy_(experts.to(torch.int16), non_blocking=True)


ROUTED_EXPERTS = "rollout_routed_experts"


def routed_experts_column(args: argparse.Namespace, samples: Sequence[Sample]) -> list[np.ndarray]:
    """The rows of `samples`; none for one without any that trains nothing, where padding does as well.

    Raises:
        UserError: a sample that trains has none.
    """
    trains = [not s.remove_sample and s.effective_response_length > 0 for s in samples]
    lacking = [
        s.index for s, counts in zip(samples, trains, strict=True) if counts and s.rollout_routed_experts is None
    ]
    if lacking:
        raise UserError(
            f"--use-rollout-routing-replay: {len(lacking)} of {len(samples)} samples have no `{ROUTED_EXPERTS}` (sample "
            f"indices {lacking[:5]}); the function that generates must keep the engine's `routed_experts`"
        )
    nothing = np.empty((0, args.num_layers, args.moe_router_topk), np.int32)
    return [
        nothing if s.rollout_routed_experts is None else np.asarray(s.rollout_routed_experts, np.int32) for s in samples
    ]


def check_routed_experts(args: argparse.Namespace, batch: dict[str, Any]) -> None:
    """Whether the column is there and can be replayed: shape, ids, that every MoE layer was captured, and that a token goes to
    an expert once.

    Rows behind the last trained token may lack or hold anything: nothing depends on them, and no engine runs what a tool said
    at the end of an answer through the model.

    Args:
        batch: the train batch, before it is split.

    Raises:
        UserError: naming the sample, and the layer where one is to blame.
    """
    if ROUTED_EXPERTS not in batch:
        raise UserError(
            "--use-rollout-routing-replay: the train batch of --custom-convert-samples-to-train-data-path has no "
            f"`{ROUTED_EXPERTS}`"
        )
    layers = [i for i, has in enumerate(expert_layers(args.moe_layer_freq, args.num_layers)) if has]
    seen = np.zeros(len(layers), dtype=bool)
    for position, experts in enumerate(batch[ROUTED_EXPERTS]):
        where = f"`{ROUTED_EXPERTS}` of sample {batch['sample_indices'][position]}"
        expected = (len(batch["tokens"][position]) - 1, args.num_layers, args.moe_router_topk)
        lacking = expected[0] - len(experts)
        # The row of a position predicts the next token.
        trains = lacking > 0 and batch["loss_masks"][position][-lacking:].any()
        if experts.shape[1:] != expected[1:] or lacking < 0 or trains:
            raise UserError(
                f"{where} has shape {list(experts.shape)}, but tokens - 1, --num-layers and --moe-router-topk make "
                f"{list(expected)}; only rows behind the last trained token may lack"
            )
        if len(experts) == 0:
            continue
        captured = _captured_layers(experts[:, layers], args.num_experts, where)
        if args.moe_router_topk > 1:
            _require_captured(captured, layers, where)
            needed = expected[0] - _untrained_at_end(batch["loss_masks"][position])
            _require_distinct(experts[:needed, layers], layers, where)
        seen |= captured
    # With one expert per token, all of a short sample can have gone to expert 0.
    _require_captured(seen, layers, f"`{ROUTED_EXPERTS}` of every sample")


def _captured_layers(experts: np.ndarray, num_experts: int, where: str) -> np.ndarray:
    """Per layer, whether any id is not 0."""
    low, high = int(experts.min(initial=0)), int(experts.max(initial=0))
    if low < 0 or high >= num_experts:
        raise UserError(
            f"{where} has the id {low if low < 0 else high}; --num-experts {num_experts} has 0 to {num_experts - 1}"
        )
    return experts.any(axis=(0, 2))


def _untrained_at_end(loss_mask: Sequence[int]) -> int:
    trained = np.flatnonzero(loss_mask)
    return len(loss_mask) - 1 - int(trained[-1]) if len(trained) else len(loss_mask)


def _require_distinct(experts: np.ndarray, layers: Sequence[int], where: str) -> None:
    ordered = np.sort(experts, axis=-1)
    repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if repeated.any():
        row, layer = np.argwhere(repeated)[0]
        raise UserError(
            f"{where} names an expert twice in row {row}, layer {layers[layer] + 1}: {experts[row, layer].tolist()}; a token "
            "goes to different experts. A row of zeros is one that the engine did not capture, or that a function of yours "
            "filled in"
        )


def _require_captured(captured: np.ndarray, layers: Sequence[int], where: str) -> None:
    if not captured.all():
        raise UserError(
            f"{where} is all zero in layer {layers[int(np.argmin(captured))] + 1}, which has experts: the engine did not "
            "capture it (a pipeline stage of the engine may have kept its part to itself, or its kernels choose experts "
            "themselves: --sglang-moe-runner-backend triton has others)"
        )


def experts_of_stream(batch: MicroBatch, layer_numbers: Sequence[int], num_experts: int) -> torch.Tensor:
    """Expert ids [T, layers, k] int16, on the host, for the rows of this rank's part of the batch's stream.

    Args:
        batch: micro-batch with the column, whose tensors are on the host.
        layer_numbers: the layers wanted, from 1.
    """
    stream = batch.stream
    layers = torch.tensor(layer_numbers) - 1
    samples = [sample.index_select(1, layers).to(torch.int16) for sample in batch[ROUTED_EXPERTS]]
    # The last sequence may be padding alone, without a sample.
    samples += [samples[0][:0]] * (len(stream.sequence_lengths) - len(samples))
    # Every sequence comes in its full length, so no row is left to be filled up with zeros.
    return stream.rows_of(
        [_pad(sample, length, num_experts) for sample, length in zip(samples, stream.sequence_lengths, strict=True)]
    )


def _pad(experts: torch.Tensor, length: int, num_experts: int) -> torch.Tensor:
    have, layers, topk = experts.shape
    filler = torch.arange(have * topk, length * topk).remainder(num_experts).view(-1, 1, topk)
    return torch.cat([experts, filler.expand(-1, layers, -1).to(experts.dtype)])
