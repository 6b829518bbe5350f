"""A sample as flat arrays, made once when its group is accepted.

Turning Python lists into arrays costs more than everything the train batch does afterwards, so it happens once per
sample, off the event loop. The arrays stay valid while the sample holds the same list objects with the same lengths; a
hook that replaces a list (or appends to it) makes `pack_sample` pack again. Changing an entry of a list in place after
packing is not seen: replace the list.

`remove_sample` is not part of the arrays, because filters set it after packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.utils.errors import UserError
from slime.utils.types import Sample

_SOURCE_FIELDS = ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs")


@dataclass(frozen=True, eq=False)
class PackedSample:
    """Per-token fields of one sample; T tokens, the last R of them are the response."""

    tokens: np.ndarray  # [T] int64
    loss_mask: np.ndarray  # [R] int32
    rollout_log_probs: np.ndarray | None  # [R] float32
    teacher_log_probs: np.ndarray | None  # [R] float32

    @property
    def total_length(self) -> int:
        """T, prompt and response tokens."""
        return len(self.tokens)

    @property
    def response_length(self) -> int:
        """R, response tokens."""
        return len(self.loss_mask)


def pack_sample(sample: Sample) -> PackedSample:
    """The arrays of `sample`, stored as `sample.packed` and reused while its lists are the same.

    Without a `loss_mask` every response token is trained.

    Raises:
        ValueError: per-token fields do not fit together (`Sample.validate_lengths`).
        UserError: the mask holds something else than 1 and 0.
    """
    sources = tuple(getattr(sample, name) for name in _SOURCE_FIELDS)
    lengths = (sample.response_length, *(None if source is None else len(source) for source in sources))
    if _is_current(sample, sources, lengths):
        return sample.packed
    sample.validate_lengths()
    if sample.loss_mask is None:
        loss_mask = np.ones(sample.response_length, dtype=np.int32)
    else:
        loss_mask = as_loss_mask(sample.loss_mask, f"sample {sample.index}: `loss_mask`")
    sample.packed = PackedSample(
        tokens=np.asarray(sample.tokens, dtype=np.int64),
        loss_mask=loss_mask,
        rollout_log_probs=_as_float32(sample.rollout_log_probs),
        teacher_log_probs=_as_float32(sample.teacher_log_probs),
    )
    # Holding the lists themselves keeps their identity from being given to new lists.
    sample.packed_sources = (sources, lengths)
    return sample.packed


def as_loss_mask(mask: Any, name: str) -> np.ndarray:
    """`mask`, 1 where a token is trained and else 0, as int32 [R].

    Args:
        mask: numbers of any type, or booleans.
        name: of the sample and its field, for the message.

    Raises:
        UserError: an entry is neither 1 nor 0: a mask cannot weigh tokens.
    """
    entries = np.asarray(mask)
    wrong = np.flatnonzero((entries != 0) & (entries != 1))
    if len(wrong):
        raise UserError(
            f"{name} is {entries[wrong[0]].item()!r} at response token {wrong[0]}; an entry is 1 or 0, trained or not: what "
            "weighs tokens is their advantage (--custom-advantage-function-path)"
        )
    return entries.astype(np.int32)


def _is_current(sample: Sample, sources: tuple[list | None, ...], lengths: tuple[int | None, ...]) -> bool:
    if getattr(sample, "packed", None) is None:
        return False
    packed_sources, packed_lengths = sample.packed_sources
    same_objects = all(source is packed for source, packed in zip(sources, packed_sources, strict=True))
    return same_objects and lengths == packed_lengths


def _as_float32(values: list[float] | None) -> np.ndarray | None:
    return None if values is None else np.asarray(values, dtype=np.float32)
