"""Log-probs and entropy of given tokens from vocabulary-parallel logits, fused and in row chunks.

Tensor names carry their dimensions: T rows of the logits, R of them that are computed, V vocabulary entries of this rank, C of
the R rows in one chunk.

Invariants
- The only full-size tensor made here is the gradient, one buffer in the logits' own dtype. Forward keeps the logits that the
  model made anyway and a few numbers per row; float32 exists for one chunk of rows at a time (float64 for float64 logits).
- A softmax is e^{x − max} / Σ, with Σ of all ranks. Every rank sums around its own maximum while a chunk is in the cache; the
  sums are moved to the common maximum and combined in float64, so a vocabulary cut into ranks gives what one rank gives, to
  float32 rounding.
- Rows that nobody asks for are neither read nor computed; their gradient is 0.
- Where the device has a compiler, sums and gradient are one kernel each (`sums_of_rows`, `gradient_of_rows`), and no float32 of
  a row is written. The chunks are what these are held against, and what is left without a compiler, with deterministic
  algorithms, for the gradient of kept sets, and with a chunk size that somebody chose.
- Two collectives of a few numbers per token, however large the vocabulary; none in backward.
- With a keep set the log-probs are those of the softmax over the kept tokens; the entropy stays that of the whole softmax.

`for_row_chunks` works on the rows of a large tensor, chunk by chunk, with one chunk per thread at a time on a CPU. An operation
that PyTorch spreads over threads ends with a barrier. Many short operations on a chunk that fits into a cache would mostly wait
there, above all where other processes want the same cores. So each thread takes whole chunks: operations of a worker thread do
not spread, and nothing waits until all rows are done.
- A chunk is computed by the same operations whoever does it, so results do not depend on the number of threads. Only where one
  thread is enough (`MIN_ELEMENTS`, or a single chunk) PyTorch may cut the sum of a long row by that number.
- The number of threads of everybody else stays as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.estimates.training_memory import ACCELERATOR_CHUNK_BYTES, ONE_THREAD_CHUNK_BYTES
from slime.training.keep_set import KeepSet, KeptTokens
from slime.training.packed_stream import Rows
from slime.utils.device import fused, get_accelerator, set_threads_of_later_threads

# Stands for −inf where a logit is multiplied by its probability 0: its exponential is 0 and it overflows under no gradient.
IMPOSSIBLE = -1e20


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: torch.Tensor | KeptTokens | None = None,
    with_entropy_grad: bool = True,
    *,
    temperature: float = 1.0,
    rows: Rows | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits: [T, V], any floating dtype, on the r-th of n ranks of `tp_group` the entries r·V … (r+1)·V − 1 of the vocabulary
    (None: all of it). rows: the R rows that are asked for (None: all T); of the others nothing is read, and their gradient is
    0. tokens: [R], integer, ids in the whole vocabulary. Every rank gets the same results, float32 [R] (float64 for float64
    logits); the entropy is None unless asked for, and a constant unless `with_entropy_grad`. Logits of −inf are impossible
    tokens. chunk_size: rows per float32 chunk; 0 or less: by device, well under 256 MiB.
    log_prob_keep_mask: what top-p sampling kept of each of the R rows, either bool [R, V] over this rank's entries, or
    `KeptTokens` of the whole vocabulary, which takes far less memory. Log-probs are renormalised over the kept tokens and the
    sampled one.
    Raises ValueError for shapes that do not fit and for a temperature that is not positive.
    """
    if rows is None:
        rows = Rows.at([range(len(logits))], logits.device)
    if logits.dim() != 2 or tokens.shape != rows.index.shape:
        raise ValueError(
            f"logits [T, V] and a token for each of {len(rows.index)} rows expected, got {tuple(logits.shape)} and "
            f"{tuple(tokens.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    keep = None
    if log_prob_keep_mask is not None:
        keep = KeepSet(log_prob_keep_mask, tokens, _first_id(logits, tp_group), logits.shape[1])
    return _LogProbsAndEntropy.apply(
        logits, tokens, rows, tp_group, keep, with_entropy, with_entropy and with_entropy_grad, chunk_size, temperature
    )


@torch.no_grad()
def log_sums(
    logits: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    chunk_size: int = -1,
    *,
    temperature: float = 1.0,
    rows: Rows,
) -> torch.Tensor:
    """log Σ e^{logits / temperature} over the whole vocabulary, float64 [R], the same on every rank: what the log-probs of any
    token of these rows are relative to. Arguments as of `calculate_log_probs_and_entropy`; without gradient.
    """
    _, sums = _exponential_sums(
        _Chunks(logits, rows, chunk_size, temperature), torch.zeros_like(rows.index), with_entropy=False
    )
    _, sums, _ = _over_all_ranks(sums.max, sums, None, tp_group)
    return sums.max + sums.sum.log()


class _LogProbsAndEntropy(torch.autograd.Function):
    """With p = softmax(x), x = logits / τ: ∂lp/∂x_j = 1[j = token] − p_j and ∂H/∂x_j = −p_j·(log p_j + H).

    With a keep set, the p of ∂lp is the softmax over the kept tokens, and 0 elsewhere.
    """

    @staticmethod
    def forward(ctx, logits_TV, tokens_R, rows, tp_group, keep, with_entropy, entropy_grad, chunk_size, temperature):
        chunks = _Chunks(logits_TV, rows, chunk_size, temperature)
        columns_R, is_here_R = _local_columns(logits_TV, tokens_R, tp_group)
        whole = kept = None
        # The target comes from where the sums come from that it is compared with: a logit that is rounded in two ways differs
        # from itself, and its log-prob may be above 0.
        if with_entropy or keep is None:
            target_R, whole = _exponential_sums(chunks, columns_R, with_entropy)
        if keep is not None:
            target_R = _target(chunks, columns_R, torch.float64)
            kept = _RowSums(*keep.exponential_sums(logits_TV, rows.index, temperature))
        target_R = target_R.double().masked_fill(~is_here_R, -torch.inf)
        target_R, whole, kept = _over_all_ranks(target_R, whole, kept, tp_group)

        if kept is None:
            log_sum_R = whole.max + whole.sum.log()
        else:
            log_sum_R = torch.logaddexp(kept.max + kept.sum.log(), target_R)
        # A token outside the whole vocabulary has no rank to bring its logit: wrong aloud, not in silence.
        log_probs_R = (target_R - log_sum_R).masked_fill(target_R == -torch.inf, -torch.inf)
        entropy_R = whole.sum.log() - whole.weighted / whole.sum if with_entropy else None

        max_R, sum_R = (None, None) if whole is None else (whole.max, whole.sum)
        kept_entropy_R = entropy_R if entropy_grad else None
        ctx.save_for_backward(logits_TV, columns_R, is_here_R, log_probs_R, log_sum_R, max_R, sum_R, kept_entropy_R)
        ctx.keep, ctx.rows, ctx.chunk_size, ctx.temperature = keep, rows, chunk_size, temperature
        ctx.set_materialize_grads(False)
        if entropy_R is not None:
            entropy_R = entropy_R.to(chunks.work_dtype)
            if not entropy_grad:
                ctx.mark_non_differentiable(entropy_R)
        return log_probs_R.to(chunks.work_dtype), entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs_R, grad_entropy_R):
        logits_TV, columns_R, is_here_R, log_probs_R, log_sum_R, max_R, sum_R, entropy_R = ctx.saved_tensors
        keep, rows, temperature = ctx.keep, ctx.rows, ctx.temperature
        chunks = _Chunks(logits_TV, rows, ctx.chunk_size, temperature)
        if grad_log_probs_R is None:
            grad_log_probs_R = torch.zeros_like(log_probs_R)
        grad_lp_R = grad_log_probs_R.double() / temperature
        own_share_R = 1.0 if keep is None else -torch.expm1(log_probs_R)
        target_R = (grad_lp_R * own_share_R * is_here_R).to(chunks.work_dtype)

        def add_parts(out: torch.Tensor, out_rows_C: torch.Tensor, start: int, stop: int) -> None:
            # Not scatter_add_, which copies a 16-bit tensor as a whole, twice.
            out[out_rows_C, columns_R[start:stop]] += target_R[start:stop].to(out.dtype)
            if keep is not None:
                keep.add_gradient(
                    out, out_rows_C, logits_TV, rows.index, log_sum_R, -grad_lp_R, temperature, start, stop
                )

        slope_R = None
        if entropy_R is not None and grad_entropy_R is not None:
            slope_R = -grad_entropy_R.double() / temperature / sum_R
        if keep is not None and slope_R is None:
            grad_TV = torch.zeros_like(logits_TV, memory_format=torch.contiguous_format)
            for start, stop in keep.blocks():
                add_parts(grad_TV, rows.index[start:stop], start, stop)
        else:
            # Σ divides the row factors instead of the row: e^{x − max}·factor/Σ needs no pass over the vocabulary of its own.
            factor_R = -grad_lp_R / sum_R if keep is None else torch.zeros_like(grad_lp_R)
            if slope_R is not None:
                factor_R = factor_R + slope_R * (entropy_R - sum_R.log())
            of_rows = [
                None if value_R is None else value_R.to(chunks.work_dtype) for value_R in (max_R, factor_R, slope_R)
            ]
            grad_TV = None
            if keep is None:
                grad_TV = _by_one_kernel(chunks, gradient_of_rows, rows.index, columns_R, target_R, *of_rows)
            if grad_TV is None:
                grad_TV = _chunked_gradient(chunks, *of_rows, add_parts)
        return grad_TV, None, None, None, None, None, None, None, None


class _Chunks:
    """The rows that are computed, R of the T of the logits, in chunks of C: where each is, and its logits in the work dtype."""

    def __init__(self, logits_TV: torch.Tensor, rows: Rows, chunk_size: int, temperature: float) -> None:
        self.logits_TV = logits_TV
        self.rows = rows
        self.is_asked_for = chunk_size > 0
        self.rows_per_chunk = chunk_size if self.is_asked_for else _rows_per_chunk(logits_TV)
        self.work_dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        self.temperature = temperature
        self._ends = list(itertools.accumulate(len(part) for part in rows.ranges))

    def __len__(self) -> int:
        return len(self.rows.index)

    def place(self, start: int, stop: int) -> slice | torch.Tensor:
        """Where rows start … stop − 1 stand in the logits: a slice if nothing is between them, else their numbers."""
        part = bisect_right(self._ends, start)
        if stop > self._ends[part]:
            return self.rows.index[start:stop]
        first = self.rows.ranges[part].stop - self._ends[part]
        return slice(first + start, first + stop)

    def scratch(self) -> list[torch.Tensor]:
        """Room for a chunk in the work dtype and, if some are not in one piece, in that of the logits."""
        work_CV = self.logits_TV.new_empty(self._shape, dtype=self.work_dtype)
        if len(self.rows.ranges) < 2 or self.logits_TV.dtype == self.work_dtype:
            return [work_CV, work_CV]
        return [work_CV, self.logits_TV.new_empty(self._shape)]

    @property
    def _shape(self) -> tuple[int, int]:
        return min(self.rows_per_chunk, len(self)), self.logits_TV.shape[1]

    def scaled(self, place: slice | torch.Tensor, work_CV: torch.Tensor, gathered_CV: torch.Tensor) -> torch.Tensor:
        """logits / τ in the work dtype: the logits themselves where that changes nothing, else in `work_CV`."""
        if isinstance(place, slice):
            logits_CV = self.logits_TV[place]
        else:
            logits_CV = torch.index_select(self.logits_TV, 0, place, out=gathered_CV[: len(place)])
        if logits_CV.dtype != work_CV.dtype:
            logits_CV = work_CV.copy_(logits_CV)
        return logits_CV if self.temperature == 1.0 else torch.div(logits_CV, self.temperature, out=work_CV)

    def zero_the_others(self, grad_TV: torch.Tensor) -> None:
        """Write 0 into the rows of a gradient that no chunk writes."""
        stops = [part.stop for part in self.rows.ranges]
        starts = [part.start for part in self.rows.ranges]
        others = [range(*gap) for gap in zip([0, *stops], [*starts, len(grad_TV)], strict=True)]
        if any(others):
            grad_TV.index_fill_(0, Rows.at(others, grad_TV.device).index, 0.0)


class _RowSums(NamedTuple):
    """Of every row, float64 [R]: a maximum, Σ e^{x − max} and, for the entropy, Σ (x − max)·e^{x − max}."""

    max: torch.Tensor
    sum: torch.Tensor
    weighted: torch.Tensor | None = None

    def around(self, new_max_R: torch.Tensor) -> _RowSums:
        """The same sums with another maximum."""
        shift_R = self.max - new_max_R
        scale_R = shift_R.exp()
        weighted_R = None if self.weighted is None else scale_R * (self.weighted + shift_R * self.sum)
        return _RowSums(new_max_R, scale_R * self.sum, weighted_R)


def _over_all_ranks(
    target_R: torch.Tensor, whole: _RowSums | None, kept: _RowSums | None, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _RowSums | None, _RowSums | None]:
    """The targets and sums of the whole vocabulary on every rank, in two collectives."""
    if tp_group is None or dist.get_world_size(tp_group) == 1 or len(target_R) == 0:
        return target_R, whole, kept
    parts = [sums for sums in (whole, kept) if sums is not None]
    maxima = torch.stack([target_R, *(sums.max for sums in parts)])
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=tp_group)
    parts = [sums.around(new_max_R) for sums, new_max_R in zip(parts, maxima[1:], strict=True)]
    addends = torch.stack([value_R for sums in parts for value_R in sums[1:] if value_R is not None])
    dist.all_reduce(addends, group=tp_group)
    rows = iter(addends)
    parts = [
        _RowSums(sums.max, *(next(rows) if value_R is not None else None for value_R in sums[1:])) for sums in parts
    ]
    remaining = iter(parts)
    return maxima[0], *(None if sums is None else next(remaining) for sums in (whole, kept))


def _rows_per_chunk(logits_TV: torch.Tensor) -> int:
    chunk_bytes = ONE_THREAD_CHUNK_BYTES if logits_TV.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    return max(chunk_bytes // (4 * max(logits_TV.shape[1], 1)), 1)


def _first_id(logits_TV: torch.Tensor, tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group) * logits_TV.shape[1]


def _local_columns(
    logits_TV: torch.Tensor, tokens_R: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's column on this rank, and whether this rank has it (column 0 stands in where it does not)."""
    columns_R = tokens_R.long() - _first_id(logits_TV, tp_group)
    is_here_R = (columns_R >= 0) & (columns_R < logits_TV.shape[1])
    return columns_R.masked_fill(~is_here_R, 0), is_here_R


def _target(chunks: _Chunks, columns_R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """logit / τ of each row's column, in `dtype` [R]."""
    return chunks.logits_TV[chunks.rows.index, columns_R].to(dtype) / chunks.temperature


def _by_one_kernel(chunks: _Chunks, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` of the logits and the temperature first, in one kernel where this device has a compiler; else None."""
    logits_TV, accelerator = chunks.logits_TV, get_accelerator()
    is_there = logits_TV.device.type == accelerator.current_device().type
    # A compiler makes further kernels for a chunk of one row, which is not worth its time.
    if not is_there or chunks.is_asked_for or len(chunks) < 2:
        return None
    compiled = fused(function, accelerator)
    if compiled is None:
        return None
    temperature = torch.full((), chunks.temperature, dtype=chunks.work_dtype, device=logits_TV.device)
    return compiled(logits_TV, temperature, *arguments)


def sums_of_rows(
    logits_TV: torch.Tensor, temperature: torch.Tensor, rows_R: torch.Tensor, columns_R: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """What `_exponential_sums` computes chunk by chunk, as one expression: each element is read twice and none is written.

    Always with the sum of the entropy: another kernel would add in another order, and the log-probs of a policy would not be
    those that it had when nobody asked for its entropy. The target is divided as its row is: a compiled division rounds in its
    own way.
    """
    target_R = logits_TV[rows_R, columns_R].to(temperature.dtype) / temperature
    scaled_RV = logits_TV.index_select(0, rows_R).to(temperature.dtype) / temperature
    max_R = scaled_RV.amax(dim=1).clamp(min=IMPOSSIBLE)
    shifted_RV = (scaled_RV - max_R[:, None]).clamp(min=IMPOSSIBLE)
    exponential_RV = shifted_RV.exp()
    return target_R, max_R, exponential_RV.sum(dim=1), (shifted_RV * exponential_RV).sum(dim=1)


def gradient_of_rows(
    logits_TV: torch.Tensor,
    temperature: torch.Tensor,
    rows_R: torch.Tensor,
    columns_R: torch.Tensor,
    target_R: torch.Tensor,
    max_R: torch.Tensor,
    factor_R: torch.Tensor,
    slope_R: torch.Tensor | None,
) -> torch.Tensor:
    """The whole gradient, as one expression that reads and writes each element once."""
    # Which of the R rows a row of the logits is, −1 where it is none of them.
    place_T = torch.full((len(logits_TV),), -1, dtype=torch.int64, device=logits_TV.device)
    place_T[rows_R] = torch.arange(len(rows_R), device=logits_TV.device)
    of_T = place_T.clamp(min=0)
    # For a row that nobody asks for, the first asked row is read in its place, because that one is in the cache.
    shifted_TV = logits_TV.index_select(0, rows_R[of_T]).to(temperature.dtype) / temperature - max_R[of_T][:, None]
    if slope_R is None:
        gradient_TV = shifted_TV.exp() * factor_R[of_T][:, None]
    else:
        shifted_TV = shifted_TV.clamp(min=IMPOSSIBLE)
        gradient_TV = shifted_TV.exp() * (shifted_TV * slope_R[of_T][:, None] + factor_R[of_T][:, None])
    is_target_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == columns_R[of_T][:, None]
    gradient_TV = gradient_TV + torch.where(is_target_TV, target_R[of_T][:, None], 0.0)
    return torch.where((place_T >= 0)[:, None], gradient_TV, 0.0).to(logits_TV.dtype)


def _exponential_sums(chunks: _Chunks, columns_R: torch.Tensor, with_entropy: bool) -> tuple[torch.Tensor, _RowSums]:
    """logit / τ of each row's column, and sums over this rank's part of each row around the maximum of that part."""
    of_rows = _by_one_kernel(chunks, sums_of_rows, chunks.rows.index, columns_R)
    if of_rows is not None:
        target_R, *sums = of_rows
        return target_R, _RowSums(*(value_R.double() for value_R in sums[: 3 if with_entropy else 2]))
    device = chunks.logits_TV.device
    max_R = torch.empty(len(chunks), dtype=chunks.work_dtype, device=device)
    sums_2R = torch.zeros(2, len(chunks), dtype=torch.float64, device=device)

    def sum_chunk(
        start: int, stop: int, work_CV: torch.Tensor, gathered_CV: torch.Tensor, exponentials_CV: torch.Tensor
    ) -> None:
        chunk = slice(start, stop)
        max_C, shifted_CV = max_R[chunk], work_CV[: stop - start]
        scaled_CV = chunks.scaled(chunks.place(start, stop), shifted_CV, gathered_CV)
        # A part without a possible token gets a finite maximum: −inf − (−inf) would be NaN.
        torch.amax(scaled_CV, dim=1, out=max_C).clamp_(min=IMPOSSIBLE)
        torch.sub(scaled_CV, max_C[:, None], out=shifted_CV)
        if not with_entropy:
            sums_2R[0, chunk] = shifted_CV.exp_().sum(dim=1)
            return
        shifted_CV.clamp_(min=IMPOSSIBLE)
        exponential_CV = torch.exp(shifted_CV, out=exponentials_CV[: stop - start])
        sums_2R[0, chunk] = exponential_CV.sum(dim=1)
        sums_2R[1, chunk] = shifted_CV.mul_(exponential_CV).sum(dim=1)

    def scratch() -> list[torch.Tensor]:
        work_CV, gathered_CV = chunks.scratch()
        return [work_CV, gathered_CV, torch.empty_like(work_CV) if with_entropy else work_CV]

    for_row_chunks(chunks.rows.index, chunks.logits_TV.shape[1], chunks.rows_per_chunk, sum_chunk, scratch)
    sums = _RowSums(max_R.double(), sums_2R[0], sums_2R[1] if with_entropy else None)
    return _target(chunks, columns_R, chunks.work_dtype), sums


def _chunked_gradient(
    chunks: _Chunks,
    max_R: torch.Tensor,
    factor_R: torch.Tensor,
    slope_R: torch.Tensor | None,
    add_parts: Callable[[torch.Tensor, torch.Tensor, int, int], None],
) -> torch.Tensor:
    """grad = e^s·(factor + slope·s) with s = x − max, and what `add_parts(out, its rows, start, stop)` adds, rounded once."""
    dtype = chunks.work_dtype
    grad_TV = torch.empty_like(chunks.logits_TV, memory_format=torch.contiguous_format)
    chunks.zero_the_others(grad_TV)

    def write_chunk(start: int, stop: int, work_CV: torch.Tensor, gathered_CV: torch.Tensor) -> None:
        chunk, place = slice(start, stop), chunks.place(start, stop)
        work_CV = work_CV[: stop - start]
        if isinstance(place, slice) and grad_TV.dtype == dtype:
            work_CV = grad_TV[place]
        torch.sub(chunks.scaled(place, work_CV, gathered_CV), max_R[chunk, None], out=work_CV)
        if slope_R is None:
            work_CV.exp_().mul_(factor_R[chunk, None])
        else:
            work_CV.clamp_(min=IMPOSSIBLE)
            coefficient_CV = work_CV * slope_R[chunk, None]
            work_CV.exp_().mul_(coefficient_CV.add_(factor_R[chunk, None]))
        add_parts(work_CV, torch.arange(stop - start, device=work_CV.device), start, stop)
        if not isinstance(place, slice):
            rounded_CV = work_CV if dtype == grad_TV.dtype else gathered_CV[: stop - start].copy_(work_CV)
            grad_TV.index_copy_(0, place, rounded_CV)
        elif grad_TV.dtype != dtype:
            grad_TV[place] = work_CV

    for_row_chunks(chunks.rows.index, grad_TV.shape[1], chunks.rows_per_chunk, write_chunk, chunks.scratch)
    return grad_TV


# Below so many elements there is nothing to gain from threads.
MIN_ELEMENTS = 1 << 20
_START_TIMEOUT_SECONDS = 60.0

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def for_row_chunks(
    rows_R: torch.Tensor,
    width: int,
    rows_per_chunk: int,
    compute: Callable[..., None],
    make_scratch: Callable[[], Sequence[torch.Tensor]],
) -> None:
    """Call `compute(start, stop, *scratch)` for ranges of at most `rows_per_chunk` of the rows `rows_R`, `width` elements each,
    that cover them once.

    Calls run side by side, in any order, without gradient; each thread has a scratch of its own. Returns when all have;
    raises what one of them raised.
    """
    row_count = len(rows_R)
    # One iterator for all threads: whoever is free takes the next chunk.
    starts = iter(range(0, row_count, rows_per_chunk))

    def work(scratch: Sequence[torch.Tensor]) -> None:
        for start in starts:
            compute(start, min(start + rows_per_chunk, row_count), *scratch)

    threads = _thread_count(rows_R, width, rows_per_chunk)
    if threads == 1:
        with torch.no_grad():
            work(make_scratch())
        return
    inference = torch.is_inference_mode_enabled()

    def work_in_thread(scratch: Sequence[torch.Tensor]) -> None:
        # Each thread has modes of its own, so those of the caller are entered again here.
        with torch.inference_mode() if inference else contextlib.nullcontext(), torch.no_grad():
            work(scratch)

    pool = _pool(threads)
    futures = [pool.submit(work_in_thread, make_scratch()) for _ in range(threads)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _thread_count(rows_R: torch.Tensor, width: int, rows_per_chunk: int) -> int:
    if rows_R.device.type != "cpu" or len(rows_R) * width < MIN_ELEMENTS:
        return 1
    return max(min(torch.get_num_threads(), -(-len(rows_R) // rows_per_chunk)), 1)


def _pool(threads: int) -> ThreadPoolExecutor:
    # Threads do not survive a fork: a child makes its own.
    key = (os.getpid(), threads)
    with _pools_lock:
        if key not in _pools:
            _pools[key] = _start_pool(threads)
        return _pools[key]


def _start_pool(threads: int) -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="row-chunks")
    all_started = threading.Barrier(threads)

    def start() -> int:
        later = torch.get_num_threads()
        all_started.wait(_START_TIMEOUT_SECONDS)
        torch.set_num_threads(1)
        return later

    later, *_ = [future.result() for future in [pool.submit(start) for _ in range(threads)]]
    # What a thread sets counts for those that begin later, too.
    set_threads_of_later_threads(later)
    return pool
