"""Log-probs and entropy of given tokens from vocabulary-parallel logits, fused and in row chunks.

Tensor names carry their dimensions: T tokens, V vocabulary entries of this rank, C rows of one chunk.

Invariants
- The only full-size tensor made here is the gradient, one buffer in the logits' own dtype. Forward keeps the logits that the
  model made anyway and three numbers per row; float32 exists for one chunk of rows at a time.
- A softmax is e^{x − max} / Σ, with Σ of all ranks; per-row numbers are combined in float64, so a vocabulary cut into ranks
  gives what one rank gives, to float32 rounding.
- Two collectives of a few numbers per token, however large the vocabulary; none in backward.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

# One thread is fastest when a chunk stays in its cache. Several meet at a barrier per operation and chunk, which costs a time
# slice each where other processes want the same cores. On an accelerator a chunk is a few kernel launches.
ONE_THREAD_CHUNK_BYTES = 2 << 20
THREADED_CHUNK_BYTES = 32 << 20
ACCELERATOR_CHUNK_BYTES = 128 << 20
# Stands for −inf where a logit is multiplied by its probability 0: its exponential is 0 and it overflows under no gradient.
IMPOSSIBLE = -1e20


def calculate_log_probs_and_entropy(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    tp_group: dist.ProcessGroup | None,
    with_entropy: bool = False,
    chunk_size: int = -1,
    *,
    with_entropy_grad: bool = True,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature) at `tokens`, and the entropy of that distribution in nats.

    logits: [T, V], any floating dtype, on the r-th of n ranks of `tp_group` the entries r·V … (r+1)·V − 1 of the vocabulary
    (None: all of it). tokens: [T], integer, ids in the whole vocabulary. Every rank gets the same results, float32 [T]; the
    entropy is None unless asked for, and a constant unless `with_entropy_grad`. Logits of −inf are impossible tokens.
    chunk_size: rows per float32 chunk; 0 or less: by device, well under 256 MiB.
    Raises ValueError for shapes that do not fit and for a temperature that is not positive.
    """
    if logits.dim() != 2 or tokens.shape != logits.shape[:1]:
        raise ValueError(f"logits [T, V] and tokens [T] expected, got {tuple(logits.shape)} and {tuple(tokens.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    return _LogProbsAndEntropy.apply(
        logits, tokens, tp_group, with_entropy, with_entropy and with_entropy_grad, chunk_size, temperature
    )


class _LogProbsAndEntropy(torch.autograd.Function):
    """With p = softmax(x), x = logits / τ: ∂lp/∂x_j = 1[j = token] − p_j and ∂H/∂x_j = −p_j·(log p_j + H)."""

    @staticmethod
    def forward(ctx, logits_TV, tokens_T, tp_group, with_entropy, entropy_grad, chunk_size, temperature):
        rows = _rows_per_chunk(logits_TV, chunk_size)
        columns_T, is_here_T = _local_columns(tokens_T, logits_TV.shape[1], tp_group)
        max_T, target_T = _max_and_target(logits_TV, columns_T, is_here_T, tp_group)
        max_T, target_T = max_T / temperature, target_T / temperature
        sum_T, weighted_T = _exponential_sums(logits_TV, max_T, with_entropy, rows, temperature, tp_group)

        log_sum_T = sum_T.log()
        log_probs_T = (target_T.double() - max_T.double() - log_sum_T).float()
        entropy_T = (log_sum_T - weighted_T / sum_T) if with_entropy else None

        ctx.save_for_backward(logits_TV, columns_T, is_here_T, max_T, sum_T, entropy_T if entropy_grad else None)
        ctx.rows, ctx.temperature = rows, temperature
        ctx.set_materialize_grads(False)
        if not with_entropy:
            return log_probs_T, None
        entropy_T = entropy_T.float()
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return log_probs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs_T, grad_entropy_T):
        logits_TV, columns_T, is_here_T, max_T, sum_T, entropy_T = ctx.saved_tensors
        if grad_log_probs_T is None:
            grad_log_probs_T = torch.zeros_like(max_T)
        grad_TV = torch.empty_like(logits_TV, memory_format=torch.contiguous_format)
        grad_lp_T = grad_log_probs_T.double() / ctx.temperature
        # Σ divides the row factors instead of the row: e^{x − max}·factor/Σ needs no pass over the vocabulary of its own.
        factor_T = -grad_lp_T / sum_T
        slope_T = None
        if entropy_T is not None and grad_entropy_T is not None:
            slope_T = -grad_entropy_T.double() / ctx.temperature / sum_T
            factor_T = factor_T + slope_T * (entropy_T - sum_T.log())
            slope_T = slope_T.float()
        factor_T = factor_T.float()
        target_grad_T = (grad_lp_T * is_here_T).float()

        scratch_CV = None if grad_TV.dtype == torch.float32 else _float32_chunk(logits_TV, ctx.rows)
        for start in range(0, logits_TV.shape[0], ctx.rows):
            chunk = slice(start, start + ctx.rows)
            out_CV = grad_TV[chunk]
            work_CV = out_CV if scratch_CV is None else scratch_CV[: len(out_CV)]
            _write_shifted(work_CV, logits_TV[chunk], max_T[chunk], ctx.temperature)
            if slope_T is None:
                work_CV.exp_().mul_(factor_T[chunk, None])
            else:
                work_CV.clamp_(min=IMPOSSIBLE)
                coefficient_CV = work_CV * slope_T[chunk, None]
                work_CV.exp_().mul_(coefficient_CV.add_(factor_T[chunk, None]))
            work_CV.scatter_add_(1, columns_T[chunk, None], target_grad_T[chunk, None])
            if work_CV is not out_CV:
                out_CV.copy_(work_CV)
        return grad_TV, None, None, None, None, None, None


def _rows_per_chunk(logits_TV: torch.Tensor, chunk_size: int) -> int:
    if chunk_size > 0:
        return chunk_size
    if logits_TV.device.type != "cpu":
        chunk_bytes = ACCELERATOR_CHUNK_BYTES
    else:
        chunk_bytes = ONE_THREAD_CHUNK_BYTES if torch.get_num_threads() == 1 else THREADED_CHUNK_BYTES
    return max(chunk_bytes // (4 * max(logits_TV.shape[1], 1)), 1)


def _local_columns(
    tokens_T: torch.Tensor, local_vocab_size: int, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's column on this rank, and whether this rank has it (column 0 stands in where it does not)."""
    first = 0 if tp_group is None else dist.get_rank(tp_group) * local_vocab_size
    columns_T = tokens_T.long() - first
    is_here_T = (columns_T >= 0) & (columns_T < local_vocab_size)
    return columns_T.masked_fill(~is_here_T, 0), is_here_T


def _max_and_target(
    logits_TV: torch.Tensor, columns_T: torch.Tensor, is_here_T: torch.Tensor, tp_group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of each row and the logit of its token, over all ranks, float32 [T] each.

    A token outside the whole vocabulary has no rank to bring its logit and gets log-prob −inf: wrong aloud, not in silence.
    """
    max_T = logits_TV.amax(dim=1).float()
    target_T = logits_TV.gather(1, columns_T[:, None])[:, 0].float()
    target_T = target_T.masked_fill(~is_here_T, -torch.inf)
    both_2T = torch.stack([max_T, target_T])
    _all_reduce(both_2T, dist.ReduceOp.MAX, tp_group)
    return both_2T[0], both_2T[1]


def _exponential_sums(
    logits_TV: torch.Tensor,
    max_T: torch.Tensor,
    with_entropy: bool,
    rows: int,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ_j e^{s_j} and Σ_j s_j·e^{s_j} (zeros without entropy) with s = x − max, over all ranks, float64 [T] each."""
    work_CV = _float32_chunk(logits_TV, rows)
    exponentials_CV = torch.empty_like(work_CV) if with_entropy else None
    sums_2T = torch.zeros(2, logits_TV.shape[0], dtype=torch.float64, device=logits_TV.device)
    for start in range(0, logits_TV.shape[0], rows):
        chunk = slice(start, start + rows)
        chunk_logits_CV = logits_TV[chunk]
        shifted_CV = _write_shifted(work_CV[: len(chunk_logits_CV)], chunk_logits_CV, max_T[chunk], temperature)
        if with_entropy:
            shifted_CV.clamp_(min=IMPOSSIBLE)
            exponential_CV = torch.exp(shifted_CV, out=exponentials_CV[: len(shifted_CV)])
            sums_2T[0, chunk] = exponential_CV.sum(dim=1)
            sums_2T[1, chunk] = shifted_CV.mul_(exponential_CV).sum(dim=1)
        else:
            sums_2T[0, chunk] = shifted_CV.exp_().sum(dim=1)
    _all_reduce(sums_2T, dist.ReduceOp.SUM, tp_group)
    return sums_2T[0], sums_2T[1]


def _float32_chunk(logits_TV: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.empty(min(rows, logits_TV.shape[0]), logits_TV.shape[1], dtype=torch.float32, device=logits_TV.device)


def _write_shifted(
    out_CV: torch.Tensor, logits_CV: torch.Tensor, max_C: torch.Tensor, temperature: float
) -> torch.Tensor:
    """out = logits / τ − max, float32; the logits stay as they are."""
    if logits_CV.dtype != torch.float32:
        logits_CV = out_CV.copy_(logits_CV)
    if temperature != 1.0:
        logits_CV = torch.div(logits_CV, temperature, out=out_CV)
    return torch.sub(logits_CV, max_C[:, None], out=out_CV)


def _all_reduce(tensor: torch.Tensor, operation: dist.ReduceOp, tp_group: dist.ProcessGroup | None) -> None:
    if tp_group is not None and tensor.numel() > 0 and dist.get_world_size(tp_group) > 1:
        dist.all_reduce(tensor, op=operation, group=tp_group)
