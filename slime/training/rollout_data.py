"""A training rank's part of a rollout: columns by name, and what a context-parallel rank owns of each.

`RolloutData` is a dict from names to columns, which plug-ins see and write into. It also knows the rank's place in its
context-parallel group. Most columns have one entry per sample; `slime.training.columns` tells what each holds. A column with a
value per response token has only this rank's part of every response, in the zigzag layout. Tokens and masks are whole on every
rank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slime.scheduling.zigzag import local_response_length
from slime.training.columns import Kind, column_of, names_of
from slime.training.context_parallel import (
    NO_CONTEXT_PARALLEL,
    ContextParallel,
    gather_flat_responses,
    gather_responses,
    slice_responses,
)
from slime.training.packed_stream import PackedStream, pack_stream
from slime.utils.errors import UserError
from slime.utils.packed_sample import as_loss_mask

Tensors = list[torch.Tensor]
Reducer = Callable[[torch.Tensor], torch.Tensor]
Metrics = dict[str, torch.Tensor]


class RolloutData(dict[str, Any]):
    """Columns of the samples that this rank has. A copy or a pickle is a plain dict: process groups stay in their process.

    Args:
        columns: those per response token hold this rank's part already; `of_rank` cuts whole ones.
        cp: the rank's place among those that share each sample.
    """

    def __init__(self, columns: Mapping[str, Any] | None = None, cp: ContextParallel = NO_CONTEXT_PARALLEL) -> None:
        super().__init__(columns or {})
        self.cp = cp

    def __reduce__(self) -> tuple[Any, ...]:
        # Files that may hold no code may name OrderedDict, but not `dict`.
        return OrderedDict, (), None, None, iter(self.items())

    @classmethod
    def of_rank(cls, columns: Mapping[str, Any], cp: ContextParallel) -> RolloutData:
        """What the rank has of `columns`, in which every response is whole."""
        data = cls(columns, cp)
        data.update({name: data.own_part(name, rows) for name, rows in columns.items()})
        return data

    def column(self, name: str, needed_by: str) -> Any:
        """The column `name`.

        Raises:
            UserError: there is none; the message says that `needed_by`, a flag, needs it.
        """
        if self.get(name) is None:
            raise UserError(f"{needed_by} needs `{name}`, and the samples of this rollout have none")
        return self[name]

    def flat(self, name: str, needed_by: str = "the loss") -> torch.Tensor:
        """`column`, one that has values per response token, concatenated over samples."""
        return torch.cat(list(self.column(name, needed_by)))

    def local(self, name: str) -> Tensors:
        """This rank's part of every response, of a column that has values per response token."""
        # With one context-parallel rank nothing is cut. A caller's own data may then lack the lengths to cut by.
        is_whole = self.cp.size == 1 and "total_lengths" not in self
        return self[name] if is_whole or column_of(name).kind is Kind.RESPONSE_PART else self.cut(self[name])

    def whole(self, name: str) -> Tensors:
        """The column with whole rows; collective over the context-parallel group where a rank has parts of them."""
        return self.gather(self[name]) if column_of(name).kind is Kind.RESPONSE_PART else self[name]

    def own_part(self, name: str, rows: Any) -> Any:
        """What this rank keeps of `rows`, the column `name` for whole responses."""
        return self.cut(rows) if column_of(name).kind is Kind.RESPONSE_PART else rows

    def with_whole_responses(self) -> RolloutData:
        """The same data with every column whole, as one rank alone has it. Collective over the context-parallel group, whose
        ranks hold the same columns."""
        return RolloutData(
            {**self, **{name: self.whole(name) for name in names_of(Kind.RESPONSE_PART) if name in self}}
        )

    def cut(self, rows: Sequence[Any]) -> list[Any]:
        """This rank's part of each of `rows`, one value per token of the whole response; tensors or lists."""
        return slice_responses(rows, self["total_lengths"], self["response_lengths"], self.cp)

    def gather(self, parts: Sequence[torch.Tensor]) -> Tensors:
        """Whole responses from the parts of all ranks; differentiable, and collective over the context-parallel group."""
        return gather_responses(parts, self["total_lengths"], self["response_lengths"], self.cp)

    def gather_flat(self, parts: torch.Tensor) -> torch.Tensor:
        """`gather` for parts that are concatenated over samples; so are the whole responses that it returns."""
        return gather_flat_responses(parts, self["total_lengths"], self["response_lengths"], self.cp)

    @property
    def local_masks(self) -> Tensors:
        """Per sample the mask of the response tokens that this rank owns."""
        return self.local("loss_masks")

    @property
    def local_lengths(self) -> list[int]:
        """Per sample the number of response tokens that this rank owns."""
        if self.cp.size == 1:
            return list(self["response_lengths"])
        lengths = zip(self["total_lengths"], self["response_lengths"], strict=True)
        return [local_response_length(total, response, self.cp.size, self.cp.rank) for total, response in lengths]

    @property
    def prompt_lengths(self) -> list[int]:
        """Per sample the number of tokens before the response."""
        return [t - r for t, r in zip(self["total_lengths"], self["response_lengths"], strict=True)]

    def take(self, positions: Sequence[int]) -> RolloutData:
        """The samples at `positions`, in that order, without the columns that are not per sample."""
        columns = {name: [rows[i] for i in positions] for name, rows in self.items() if column_of(name).is_per_sample}
        return RolloutData(columns, self.cp)

    def micro_batch(self, positions: Sequence[int], pad_multiple: int) -> MicroBatch:
        """The samples at `positions` with the packed stream of their tokens, whose length is a multiple of `pad_multiple`."""
        rows = self.take(positions)
        stream = pack_stream(rows["tokens"], rows["response_lengths"], pad_multiple, cp=self.cp)
        return MicroBatch({**rows, "positions": list(positions), "stream": stream}, self.cp)


class MicroBatch(RolloutData):
    """Samples that go through the model together: `stream` is the packed stream that their logits belong to, `positions` are
    the samples' places in the rank's data."""

    @property
    def stream(self) -> PackedStream:
        """The packed stream, which stands under its name among the columns too."""
        return self["stream"]

    def with_columns(self, **columns: Any) -> MicroBatch:
        """The batch with these columns added or replaced."""
        return MicroBatch({**self, **columns}, self.cp)


def require_entries(data: RolloutData, where: str) -> None:
    """Check the columns that a user's function left in `data`: micro-batches will take single samples out of them.

    Masks are left to `refresh_mask_sums`, which checks them on all ranks together.

    Args:
        where: flag and path of the function, for the message.

    Raises:
        UserError: a column per sample, also one that the function added, is not a list, tensor or array of that many entries;
            or one per response token is none that `require_tensors` lets through.
    """
    count = len(data["response_lengths"])
    for name, rows in data.items():
        if name == "loss_masks" or not column_of(name).is_per_sample:
            continue
        is_row = isinstance(rows, list | tuple | np.ndarray | torch.Tensor) and getattr(rows, "ndim", 1) > 0
        if not is_row or len(rows) != count:
            found = f"{len(rows)} entries" if is_row else type(rows).__name__
            raise UserError(
                f"{where} left {found} in rollout_data[{name!r}]; expected a list with one entry for each of the {count} "
                "samples of the rank. What is about all of them has no place there"
            )
    for name in filter(data.__contains__, names_of(Kind.RESPONSE_PART)):
        require_tensors(data, name, where)


def require_tensors(data: RolloutData, name: str, where: str) -> None:
    """Check the column `name`, which a user's function set per response token.

    Args:
        where: flag and path of the function, for the message.

    Raises:
        UserError: it is no list with one tensor for each sample, as long as the rank's part of its response.
    """
    lengths, found = data.local_lengths, lengths_of(data.get(name))
    if found != lengths:
        raise UserError(
            f"{where}: rollout_data[{name!r}] must be a list with one tensor of the response's length (its part on this rank) "
            f"per sample; {_first_difference(lengths, found)}"
        )


def lengths_of(tensors: Any) -> list[int | None] | None:
    """The length of each tensor, None for an entry that is no tensor of one dimension; None if `tensors` is no list or
    tuple."""
    if not isinstance(tensors, list | tuple):
        return None
    return [len(tensor) if torch.is_tensor(tensor) and tensor.dim() == 1 else None for tensor in tensors]


def _first_difference(expected: Sequence[int], found: list[int | None] | None) -> str:
    if found is None:
        return "it is not set, or no list"
    if len(found) != len(expected):
        return f"expected {len(expected)} tensors, got {len(found)}"
    row = next(row for row, (wanted, length) in enumerate(zip(expected, found, strict=True)) if wanted != length)
    got = "no tensor of one dimension" if found[row] is None else f"length {found[row]}"
    return f"expected length {expected[row]} in place {row}, got {got}"


def put_beside_tokens(data: RolloutData) -> None:
    """Make what a user's function left per response token float32 tensors on the device of the tokens, where the loss is: the
    function may have computed on the host, or in the type of its rewards. A column of such tensors stays the same list. The
    columns are those that `require_entries` lets through."""
    device = data["tokens"][0].device if data.get("tokens") else None
    for name in names_of(Kind.RESPONSE_PART) if device is not None else ():
        rows = data.get(name, ())
        kinds = {(row.device, row.dtype) for row in rows}
        if kinds <= {(device, torch.float32)}:
            continue
        # Rows of one kind, usually all of them, are copied in one piece.
        pieces = [rows] if len(kinds) == 1 else [[row] for row in rows]
        moved = [(torch.cat(list(piece)).to(device, torch.float32), [len(row) for row in piece]) for piece in pieces]
        data[name] = [part for flat, lengths in moved for part in flat.split(lengths)]


def refresh_mask_sums(
    data: RolloutData, data_group: dist.ProcessGroup, before: Sequence[torch.Tensor] | None = None
) -> bool:
    """Compute `rollout_mask_sums` again, if masks were edited on any rank: trained tokens per execution, over all ranks.

    Masks of any kind become int32 tensors on the device of the tokens. Collective over `data_group`.

    Args:
        before: the masks as they were; None: they are known to be edited.

    Returns:
        Whether they were edited. Else the sums stay as they are: a user's function may have made them.

    Raises:
        UserError: on any rank a mask holds something else than 1 and 0, is no row of numbers or of another length than its
            response, or there are more or fewer masks than samples; on all ranks.
    """
    masks, local, failure, are_edited = [], [], None, True
    try:
        masks, are_edited = _checked_masks(data, before)
        local = list(zip(data["rollout_ids"], (int(mask.sum()) for mask in masks), strict=True))
    except UserError as error:
        failure = str(error)
    gathered: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(gathered, (local, failure, are_edited), group=data_group)
    for _, message, _ in gathered:
        if message is not None:
            raise UserError(message)
    if not are_edited:
        data["loss_masks"] = list(before or ())
    elif masks:
        flat = torch.from_numpy(np.concatenate(masks)).to(data["tokens"][0].device)
        data["loss_masks"] = list(flat.split([len(mask) for mask in masks]))
    if not any(on_rank for *_, on_rank in gathered):
        return False
    totals: dict[int, int] = {}
    for rollout_id, mask_sum in (pair for part, *_ in gathered for pair in part):
        totals[rollout_id] = totals.get(rollout_id, 0) + mask_sum
    data["rollout_mask_sums"] = [float(totals[rollout_id]) for rollout_id in data["rollout_ids"]]
    return True


def _checked_masks(data: RolloutData, before: Sequence[torch.Tensor] | None) -> tuple[list[np.ndarray], bool]:
    """(The masks, whether they are others than `before`)."""
    flag = "--rollout-data-postprocess-path"
    masks, samples = data.get("loss_masks"), data["sample_indices"]
    if not isinstance(masks, Sequence) or len(masks) != len(samples):
        found = f"{len(masks)} masks" if isinstance(masks, Sequence) else type(masks).__name__
        raise UserError(f"{flag}: `loss_masks` must be a list of one mask per sample, {len(samples)} here, not {found}")
    names = [f"{flag}: sample {sample}: `loss_masks`" for sample in samples]
    rows = [_as_mask(*given) for given in zip(names, masks, data["response_lengths"], strict=True)]
    # Both together, so that the device is waited for once.
    arrays = _on_host([*rows, *(before or ())])
    found, were = arrays[: len(rows)], arrays[len(rows) :]
    masks = [as_loss_mask(row, name) for row, name in zip(found, names, strict=True)]
    return masks, before is None or not all(map(np.array_equal, masks, were))


def _as_mask(name: str, mask: Any, length: int) -> torch.Tensor:
    try:
        row = torch.as_tensor(mask).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{name} is no row of numbers ({error})") from error
    if row.shape != (length,):
        raise UserError(f"{name} has the shape {list(row.shape)}; the response has {length} tokens")
    return row


def _on_host(rows: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """The rows as arrays. Rows of one device and dtype, usually all of them, are copied to the host in one piece."""
    arrays: list[Any] = [None] * len(rows)
    for kind in {(row.device, row.dtype) for row in rows}:
        positions = [position for position, row in enumerate(rows) if (row.device, row.dtype) == kind]
        flat = torch.cat([rows[position] for position in positions]).cpu()
        # Numpy knows no bfloat16.
        flat = flat.double() if flat.is_floating_point() else flat
        for position, part in zip(positions, flat.split([len(rows[p]) for p in positions]), strict=True):
            arrays[position] = part.numpy()
    return arrays
