"""Micro-batches of a rank, and the passes over them that only go forward.

Every stage of a pipeline is given the same micro-batches: the first one embeds their tokens, all of them need their positions
and the lengths of their sequences. Results come out on the last stage, one tensor per sample.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from slime.training.backend import Backend, Collect
from slime.training.loss import response_log_probs, response_values
from slime.training.packed_stream import rows_on_rank
from slime.training.rollout_data import MicroBatch, RolloutData


@dataclass(frozen=True)
class MicroBatches:
    """Some micro-batches of a rank's data; each pass over them packs their streams anew.

    Attributes:
        indices: positions in the rank's data, per micro-batch.
        pad_multiple: of which the length of every stream is a multiple.
    """

    data: RolloutData
    indices: Sequence[Sequence[int]]
    pad_multiple: int

    @property
    def samples(self) -> RolloutData:
        """The samples of all micro-batches, one after the other."""
        return self.data.take([position for batch in self.indices for position in batch])

    @property
    def stream_rows(self) -> list[int]:
        """Rows of this rank's stream of every micro-batch, known before it is packed."""
        lengths = [[len(self.data["tokens"][position]) for position in batch] for batch in self.indices]
        return [rows_on_rank(of_batch, self.pad_multiple, self.data.cp) for of_batch in lengths]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[MicroBatch]:
        return (self.data.micro_batch(positions, self.pad_multiple) for positions in self.indices)


def micro_batches(args: argparse.Namespace, data: RolloutData, indices: Sequence[Sequence[int]]) -> MicroBatches:
    """The micro-batches `indices` of a rank's data, padded as the flags say."""
    return MicroBatches(data, indices, args.data_pad_size_multiplier * args.tensor_model_parallel_size)


def forward_log_probs(
    args: argparse.Namespace,
    backend: Backend,
    data: RolloutData,
    *,
    with_entropy: bool,
    temperature: float | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Log-probs of every response token under the live weights, without gradient and without dropout.

    Args:
        temperature: unless set that of the rollout.

    Returns:
        On the last pipeline stage `log_probs` (and `entropy`): one float32 tensor per sample, in the order of the data,
        for the response tokens that this context-parallel rank owns. On other stages nothing.
    """

    def collect(batch: MicroBatch, logits: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        log_probs, entropy = response_log_probs(
            args, batch, logits, backend.groups.tensor_group, with_entropy=with_entropy, temperature=temperature
        )
        split = batch.stream.split
        return {"log_probs": split(log_probs)} | ({} if entropy is None else {"entropy": split(entropy)})

    return forward_per_sample(args, backend, data, collect)


def forward_values(args: argparse.Namespace, backend: Backend, data: RolloutData) -> dict[str, list[torch.Tensor]]:
    """Values of every response token under the live weights of a critic, without gradient and without dropout.

    Returns:
        On the last pipeline stage `values`: one float32 tensor per sample, in the order of the data, for the response tokens
        that this context-parallel rank owns. On other stages nothing.
    """

    def collect(batch: MicroBatch, outputs: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        return {"values": batch.stream.split(response_values(batch.stream, outputs))}

    return forward_per_sample(args, backend, data, collect)


def forward_per_sample(
    args: argparse.Namespace, backend: Backend, data: RolloutData, collect: Collect
) -> dict[str, list[torch.Tensor]]:
    """A pass without gradient and without dropout, which collects tensors per sample.

    Returns:
        On the last pipeline stage the lists of all micro-batches, in the order of the data. On other stages nothing.
    """
    batches = micro_batches(args, data, data["micro_batch_indices"])
    outputs = backend.forward(batches, collect)
    results: dict[str, list[torch.Tensor]] = {}
    for output, positions in zip(outputs, batches.indices if outputs else (), strict=True):
        for name, tensors in output.items():
            column = results.setdefault(name, [torch.empty(0)] * sum(map(len, batches.indices)))
            for position, tensor in zip(positions, tensors, strict=True):
                column[position] = tensor
    return results
