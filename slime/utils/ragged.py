"""Rows of different length as two flat numpy arrays: what a train batch is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
