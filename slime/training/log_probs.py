"""Log-probs and entropy of given tokens from vocabulary-parallel logits, fused and in row chunks.

Tensor names carry their dimensions: T tokens, V vocabulary entries of this rank, C rows of one chunk.

Invariants
- The only full-size tensor made here is the gradient, one buffer in the logits' own dtype. Forward keeps the logits that the
  model made anyway and a few numbers per row; float32 exists for one chunk of rows at a time (float64 for float64 logits).
- A softmax is e^{x − max} / Σ, with Σ of all ranks. Every rank sums around its own maximum while a chunk is in the cache; the
  sums are moved to the common maximum and combined in float64, so a vocabulary cut into ranks gives what one rank gives, to
  float32 rounding.
- Two collectives of a few numbers per token, however large the vocabulary; none in backward.
- With a keep set the log-probs are those of the softmax over the kept tokens; the entropy stays that of the whole softmax.

`for_row_chunks` works on the rows of a large tensor, chunk by chunk, with one chunk per thread at a time on a CPU. An operation
that PyTorch spreads over threads ends with a barrier. Many short operations on a chunk that fits into a cache would mostly wait
there, above all where other processes want the same cores. So each thread takes whole chunks: operations of a worker thread do
not spread, and nothing waits until all rows are done.
- A chunk is computed by the same operations whoever does it, so results do not depend on the number of threads.
- The number of threads of everybody else stays as it is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from slime.estimates.training_memory import ACCELERATOR_CHUNK_BYTES, ONE_THREAD_CHUNK_BYTES
from slime.training.keep_set import KeepSet, KeptTokens

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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits: [T, V], any floating dtype, on the r-th of n ranks of `tp_group` the entries r·V … (r+1)·V − 1 of the vocabulary
    (None: all of it). tokens: [T], integer, ids in the whole vocabulary. Every rank gets the same results, float32 [T] (float64
    for float64 logits); the entropy is None unless asked for, and a constant unless `with_entropy_grad`. Logits of −inf are
    impossible tokens. chunk_size: rows per float32 chunk; 0 or less: by device, well under 256 MiB.
    log_prob_keep_mask: what top-p sampling kept of each row, either bool [T, V] over this rank's entries, or `KeptTokens` of
    the whole vocabulary, which takes far less memory. Log-probs are renormalised over the kept tokens and the sampled one.
    Raises ValueError for shapes that do not fit and for a temperature that is not positive.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise ValueError(f"logits [T, V] and tokens [T] expected, got {tuple(logits.shape)} and {tuple(tokens.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    keep = None
    if log_prob_keep_mask is not None:
        keep = KeepSet(log_prob_keep_mask, tokens, _first_id(logits, tp_group), logits.shape[1])
    return _LogProbsAndEntropy.apply(
        logits, tokens, tp_group, keep, with_entropy, with_entropy and with_entropy_grad, chunk_size, temperature
    )


class _LogProbsAndEntropy(torch.autograd.Function):
    """With p = softmax(x), x = logits / τ: ∂lp/∂x_j = 1[j = token] − p_j and ∂H/∂x_j = −p_j·(log p_j + H).

    With a keep set, the p of ∂lp is the softmax over the kept tokens, and 0 elsewhere.
    """

    @staticmethod
    def forward(ctx, logits_TV, tokens_T, tp_group, keep, with_entropy, entropy_grad, chunk_size, temperature):
        rows = _rows_per_chunk(logits_TV, chunk_size)
        columns_T, is_here_T = _local_columns(logits_TV, tokens_T, tp_group)
        # In the dtype of the sums that it is compared with: a large logit rounded in two ways would differ from itself.
        target_dtype = _work_dtype(logits_TV) if keep is None else torch.float64
        target_T = _target(logits_TV, columns_T, is_here_T, temperature, target_dtype)
        whole = kept = None
        if with_entropy or keep is None:
            whole = _exponential_sums(logits_TV, with_entropy, rows, temperature)
        if keep is not None:
            kept = _RowSums(*keep.exponential_sums(logits_TV, temperature))
        target_T, whole, kept = _over_all_ranks(target_T, whole, kept, tp_group)

        if kept is None:
            log_sum_T = whole.max + whole.sum.log()
        else:
            log_sum_T = torch.logaddexp(kept.max + kept.sum.log(), target_T)
        # A token outside the whole vocabulary has no rank to bring its logit: wrong aloud, not in silence.
        log_probs_T = (target_T - log_sum_T).masked_fill(target_T == -torch.inf, -torch.inf)
        entropy_T = whole.sum.log() - whole.weighted / whole.sum if with_entropy else None

        max_T, sum_T = (None, None) if whole is None else (whole.max, whole.sum)
        kept_entropy_T = entropy_T if entropy_grad else None
        ctx.save_for_backward(logits_TV, columns_T, is_here_T, log_probs_T, log_sum_T, max_T, sum_T, kept_entropy_T)
        ctx.keep, ctx.rows, ctx.temperature = keep, rows, temperature
        ctx.set_materialize_grads(False)
        dtype = _work_dtype(logits_TV)
        if entropy_T is not None:
            entropy_T = entropy_T.to(dtype)
            if not entropy_grad:
                ctx.mark_non_differentiable(entropy_T)
        return log_probs_T.to(dtype), entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs_T, grad_entropy_T):
        logits_TV, columns_T, is_here_T, log_probs_T, log_sum_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        keep, temperature = ctx.keep, ctx.temperature
        if grad_log_probs_T is None:
            grad_log_probs_T = torch.zeros_like(log_probs_T)
        grad_lp_T = grad_log_probs_T.double() / temperature
        own_share_T = 1.0 if keep is None else -torch.expm1(log_probs_T)
        target_T = (grad_lp_T * own_share_T * is_here_T).to(_work_dtype(logits_TV))

        def add_parts(out_CV: torch.Tensor, start: int, stop: int) -> None:
            chunk = slice(start, stop)
            places = torch.arange(stop - start, device=out_CV.device), columns_T[chunk]
            # Not scatter_add_, which copies a 16-bit tensor as a whole, twice.
            out_CV[places] += target_T[chunk].to(out_CV.dtype)
            if keep is not None:
                keep.add_gradient(out_CV, logits_TV, log_sum_T, -grad_lp_T, temperature, start, stop)

        grad_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
        slope_T = None
        if entropy_T is not None and grad_entropy_T is not None:
            slope_T = -grad_entropy_T.double() / temperature / sum_T
        if keep is not None and slope_T is None:
            grad_TV.zero_()
            for start, stop in keep.blocks():
                add_parts(grad_TV[start:stop], start, stop)
        else:
            # Σ divides the row factors instead of the row: e^{x − max}·factor/Σ needs no pass over the vocabulary of its own.
            factor_T = -grad_lp_T / sum_T if keep is None else torch.zeros_like(grad_lp_T)
            if slope_T is not None:
                factor_T = factor_T + slope_T * (entropy_T - sum_T.log())
            _write_gradient(grad_TV, logits_TV, max_T, factor_T, slope_T, ctx.rows, temperature, add_parts)
        return grad_TV, None, None, None, None, None, None, None


class _RowSums(NamedTuple):
    """Of every row, float64 [T]: a maximum, Σ e^{x − max} and, for the entropy, Σ (x − max)·e^{x − max}."""

    max: torch.Tensor
    sum: torch.Tensor
    weighted: torch.Tensor | None = None

    def around(self, new_max_T: torch.Tensor) -> _RowSums:
        """The same sums with another maximum."""
        shift_T = self.max - new_max_T
        scale_T = shift_T.exp()
        weighted_T = None if self.weighted is None else scale_T * (self.weighted + shift_T * self.sum)
        return _RowSums(new_max_T, scale_T * self.sum, weighted_T)


def _over_all_ranks(
    target_T: torch.Tensor, whole: _RowSums | None, kept: _RowSums | None, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, _RowSums | None, _RowSums | None]:
    """The targets and sums of the whole vocabulary on every rank, in two collectives."""
    if tp_group is None or dist.get_world_size(tp_group) == 1 or len(target_T) == 0:
        return target_T, whole, kept
    parts = [sums for sums in (whole, kept) if sums is not None]
    maxima = torch.stack([target_T, *(sums.max for sums in parts)])
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=tp_group)
    parts = [sums.around(new_max_T) for sums, new_max_T in zip(parts, maxima[1:], strict=True)]
    addends = torch.stack([value_T for sums in parts for value_T in sums[1:] if value_T is not None])
    dist.all_reduce(addends, group=tp_group)
    rows = iter(addends)
    parts = [
        _RowSums(sums.max, *(next(rows) if value_T is not None else None for value_T in sums[1:])) for sums in parts
    ]
    remaining = iter(parts)
    return maxima[0], *(None if sums is None else next(remaining) for sums in (whole, kept))


def _rows_per_chunk(logits_TV: torch.Tensor, chunk_size: int) -> int:
    if chunk_size > 0:
        return chunk_size
    chunk_bytes = ONE_THREAD_CHUNK_BYTES if logits_TV.device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    return max(chunk_bytes // (4 * max(logits_TV.shape[1], 1)), 1)


def _work_dtype(logits_TV: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits_TV.dtype == torch.float64 else torch.float32


def _first_id(logits_TV: torch.Tensor, tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group) * logits_TV.shape[1]


def _local_columns(
    logits_TV: torch.Tensor, tokens_T: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's column on this rank, and whether this rank has it (column 0 stands in where it does not)."""
    columns_T = tokens_T.long() - _first_id(logits_TV, tp_group)
    is_here_T = (columns_T >= 0) & (columns_T < logits_TV.shape[1])
    return columns_T.masked_fill(~is_here_T, 0), is_here_T


def _target(
    logits_TV: torch.Tensor, columns_T: torch.Tensor, is_here_T: torch.Tensor, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    """logit / τ of each row's token as `dtype` has it, −inf where it is not on this rank; float64 [T]."""
    target_T = logits_TV.gather(1, columns_T[:, None])[:, 0].to(dtype) / temperature
    return target_T.double().masked_fill(~is_here_T, -torch.inf)


def _exponential_sums(logits_TV: torch.Tensor, with_entropy: bool, rows: int, temperature: float) -> _RowSums:
    """Sums over this rank's part of each row around the maximum of that part."""
    max_T = torch.empty(len(logits_TV), dtype=_work_dtype(logits_TV), device=logits_TV.device)
    sums_2T = torch.zeros(2, len(logits_TV), dtype=torch.float64, device=logits_TV.device)

    def sum_chunk(start: int, stop: int, work_CV: torch.Tensor, exponentials_CV: torch.Tensor) -> None:
        chunk = slice(start, stop)
        max_C, shifted_CV = max_T[chunk], work_CV[: stop - start]
        scaled_CV = _scaled(shifted_CV, logits_TV[chunk], temperature)
        # A part without a possible token gets a finite maximum: −inf − (−inf) would be NaN.
        torch.amax(scaled_CV, dim=1, out=max_C).clamp_(min=IMPOSSIBLE)
        torch.sub(scaled_CV, max_C[:, None], out=shifted_CV)
        if not with_entropy:
            sums_2T[0, chunk] = shifted_CV.exp_().sum(dim=1)
            return
        shifted_CV.clamp_(min=IMPOSSIBLE)
        exponential_CV = torch.exp(shifted_CV, out=exponentials_CV[: stop - start])
        sums_2T[0, chunk] = exponential_CV.sum(dim=1)
        sums_2T[1, chunk] = shifted_CV.mul_(exponential_CV).sum(dim=1)

    def scratch() -> list[torch.Tensor]:
        work_CV = _work_chunk(logits_TV, rows)
        return [work_CV, torch.empty_like(work_CV) if with_entropy else work_CV]

    for_row_chunks(logits_TV, rows, sum_chunk, scratch)
    return _RowSums(max_T.double(), sums_2T[0], sums_2T[1] if with_entropy else None)


def _write_gradient(
    grad_TV: torch.Tensor,
    logits_TV: torch.Tensor,
    max_T: torch.Tensor,
    factor_T: torch.Tensor,
    slope_T: torch.Tensor | None,
    rows: int,
    temperature: float,
    add_parts: Callable[[torch.Tensor, int, int], None],
) -> None:
    """grad = e^s·(factor + slope·s) with s = x − max, and what `add_parts(chunk, start, stop)` adds, rounded once."""
    dtype = _work_dtype(logits_TV)
    max_T, factor_T = max_T.to(dtype), factor_T.to(dtype)
    slope_T = None if slope_T is None else slope_T.to(dtype)

    def write_chunk(start: int, stop: int, *scratch_CV: torch.Tensor) -> None:
        chunk = slice(start, stop)
        out_CV = grad_TV[chunk]
        work_CV = scratch_CV[0][: stop - start] if scratch_CV else out_CV
        torch.sub(_scaled(work_CV, logits_TV[chunk], temperature), max_T[chunk, None], out=work_CV)
        if slope_T is None:
            work_CV.exp_().mul_(factor_T[chunk, None])
        else:
            work_CV.clamp_(min=IMPOSSIBLE)
            coefficient_CV = work_CV * slope_T[chunk, None]
            work_CV.exp_().mul_(coefficient_CV.add_(factor_T[chunk, None]))
        add_parts(work_CV, start, stop)
        if work_CV is not out_CV:
            out_CV.copy_(work_CV)

    def scratch() -> list[torch.Tensor]:
        return [] if grad_TV.dtype == dtype else [_work_chunk(logits_TV, rows)]

    for_row_chunks(logits_TV, rows, write_chunk, scratch)


def _work_chunk(logits_TV: torch.Tensor, rows: int) -> torch.Tensor:
    shape = (min(rows, logits_TV.shape[0]), logits_TV.shape[1])
    return torch.empty(shape, dtype=_work_dtype(logits_TV), device=logits_TV.device)


def _scaled(work_CV: torch.Tensor, logits_CV: torch.Tensor, temperature: float) -> torch.Tensor:
    """logits / τ in the work dtype: the logits themselves where that changes nothing, else in `work_CV`."""
    if logits_CV.dtype != work_CV.dtype:
        logits_CV = work_CV.copy_(logits_CV)
    return logits_CV if temperature == 1.0 else torch.div(logits_CV, temperature, out=work_CV)


# Below so many elements there is nothing to gain from threads.
MIN_ELEMENTS = 1 << 20
_START_TIMEOUT_SECONDS = 60.0

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def for_row_chunks(
    rows_TV: torch.Tensor,
    rows_per_chunk: int,
    compute: Callable[..., None],
    make_scratch: Callable[[], Sequence[torch.Tensor]],
) -> None:
    """Call `compute(start, stop, *scratch)` for row ranges of at most `rows_per_chunk` rows that cover `rows_TV` once.

    Calls run side by side, in any order, without gradient; each thread has a scratch of its own. Returns when all have;
    raises what one of them raised.
    """
    row_count = len(rows_TV)
    # One iterator for all threads: whoever is free takes the next chunk.
    starts = iter(range(0, row_count, rows_per_chunk))

    def work(scratch: Sequence[torch.Tensor]) -> None:
        for start in starts:
            compute(start, min(start + rows_per_chunk, row_count), *scratch)

    threads = _thread_count(rows_TV, rows_per_chunk)
    if threads == 1:
        with torch.no_grad():
            work(make_scratch())
        return
    inference = torch.is_inference_mode_enabled()

    def work_in_thread(scratch: Sequence[torch.Tensor]) -> None:
        # Modes belong to threads.
        with torch.inference_mode() if inference else contextlib.nullcontext(), torch.no_grad():
            work(scratch)

    pool = _pool(threads)
    futures = [pool.submit(work_in_thread, make_scratch()) for _ in range(threads)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


def _thread_count(rows_TV: torch.Tensor, rows_per_chunk: int) -> int:
    if rows_TV.device.type != "cpu" or rows_TV.numel() < MIN_ELEMENTS:
        return 1
    return max(min(torch.get_num_threads(), -(-len(rows_TV) // rows_per_chunk)), 1)


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
    outside = torch.get_num_threads()

    def start() -> None:
        # PyTorch keeps the number per thread, and once more for threads that begin later: a thread takes that one when it
        # first asks, also over a number of its own that was set before.
        torch.get_num_threads()
        torch.set_num_threads(1)
        all_started.wait(_START_TIMEOUT_SECONDS)

    try:
        for future in [pool.submit(start) for _ in range(threads)]:
            future.result()
    finally:
        torch.set_num_threads(outside)
    return pool
