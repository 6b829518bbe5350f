"""A sample as flat arrays, made when its group is accepted.

Turning Python lists into arrays costs more than everything the train batch does afterwards, so it happens once per
sample, off the event loop: from then on the sample itself holds the arrays (`slime.utils.sample_fields`), and packing is
free until a hook reads or replaces a field, of which it gets a list that it may change.

`remove_sample` is not part of the arrays, because filters set it after packing.

`RaggedArray` holds rows of different length as two flat numpy arrays; a train batch is made of them. `get_source` tells
which data set a sample comes from, in a run that mixes several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slime.utils.errors import UserError
from slime.utils.sample_fields import TOKEN_FIELDS, hold_arrays, token_array
from slime.utils.types import Sample


class PackedSample(NamedTuple):
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
    """The arrays of `sample`, which holds them in place of its lists from then on.

    Without a `loss_mask` every response token is trained.

    Raises:
        ValueError: per-token fields do not fit together (`Sample.validate_lengths`), or are not flat lists of numbers, or a
            token is no whole number.
        UserError: the mask has an entry that is neither 1 nor 0.
    """
    sample.validate_lengths()
    arrays: dict[str, np.ndarray | None] = {}
    values = sample.__dict__
    for name, dtype in TOKEN_FIELDS.items():
        array = values.get(name)
        if array is not None and not (type(array) is np.ndarray and array.dtype == dtype and array.ndim == 1):
            if isinstance(array, list):
                hold_arrays(sample)
            array = token_array(sample, name)
            if name == "tokens" and array.dtype.kind == "f" and len(wrong := np.flatnonzero(array != np.floor(array))):
                raise ValueError(f"sample {sample.index}: tokens[{wrong[0]}] is {array[wrong[0]]}, no whole number")
            if name != "loss_mask":
                array = array.astype(dtype, copy=False)
        arrays[name] = array
    if arrays["loss_mask"] is None:
        arrays["loss_mask"] = np.ones(sample.response_length, dtype=np.int32)
    else:
        arrays["loss_mask"] = as_loss_mask(arrays["loss_mask"], f"sample {sample.index}: `loss_mask`")
    return PackedSample(**arrays)


def as_loss_mask(mask: Any, name: str) -> np.ndarray:
    """`mask`, 1 where a token is trained and else 0, as int32 [R].

    Args:
        mask: numbers of any type, or booleans.
        name: of the sample and its field, for the message.

    Raises:
        UserError: an entry is neither 1 nor 0: a mask cannot weigh tokens.
    """
    entries = np.asarray(mask)
    # This settles nearly all masks, in a tenth of the time: the OR of all entries has the bits of any other than 1 and 0.
    if entries.dtype.kind in "iu" and np.bitwise_or.reduce(entries, axis=None) in (0, 1):
        return entries.astype(np.int32, copy=False)
    wrong = np.flatnonzero((entries != 0) & (entries != 1))
    if len(wrong):
        raise UserError(
            f"{name} is {entries[wrong[0]].item()!r} at response token {wrong[0]}; an entry is 1 or 0, trained or not: what "
            "weighs tokens is their advantage (--custom-advantage-function-path)"
        )
    return entries.astype(np.int32, copy=False)


@dataclass(frozen=True, eq=False)
class RaggedArray:
    """Row i is `values[offsets[i] : offsets[i + 1]]`. Rows are views."""

    values: np.ndarray  # [total length, …]
    offsets: np.ndarray  # [rows + 1] int64, first 0, last total length

    @classmethod
    def from_rows(cls, rows: Sequence[np.ndarray], dtype: np.dtype | type) -> RaggedArray:
        """Concatenate `rows` as `dtype`. They have one dimension, or further ones that are equal in all rows."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        values = np.concatenate(rows).astype(dtype, copy=False) if rows else np.empty(0, dtype)
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Length of every row, int64."""
        return np.diff(self.offsets)


# A key of a sample's metadata. If a data source or a user's function sets it, the train batch has a column `source_names`.
SOURCE_NAME = "source_name"


def get_source(sample: Sample) -> str | None:
    """The name of the source in the metadata of `sample`; None if they name none."""
    name = sample.metadata.get(SOURCE_NAME)
    return None if name is None else str(name)
