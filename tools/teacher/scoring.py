"""Scores one sequence by vocabulary-parallel logits: log-probs of its tokens, of given ids, and of drawn ones.

Names carry their dimensions as in `slime.training.log_probs`: T rows of the logits, R of them that predict a token of the
sequence, C of the R in one chunk, V entries of this rank; K ids that are given for each row, N that are drawn.

Invariants
- No rank has a row of the whole vocabulary: ranks exchange a sum for each row and a number for each id.
- Beside the logits that the model made there are never more rows at a time than a chunk has.
- Draws come from a generator that is seeded by the question's seed and the rank. No global generator is used, and the same
  question gives the same draws as long as ranks and chunks are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from slime.training.log_probs import log_sums
from slime.training.packed_stream import Rows

# The least exponential draw: every device tells it from 0, which would win whatever the token's probability.
_LEAST_DRAW = 2.0**-25
_NOBODYS_ID = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Question:
    """A question about a sequence.

    Attributes:
        tokens: ids, int64 [n], at least two.
        temperature: all log-probs are of softmax(logits / temperature), and draws from it.
        sample_n: ids to draw for each of the positions 1 … n − 1.
        seed: the seed of the draws, below 2⁶³.
        labels: int64 [n − 1, K], ids to tell the log-probs of at positions 1 … n − 1.
    """

    tokens: np.ndarray
    temperature: float = 1.0
    sample_n: int = 0
    seed: int = 0
    labels: np.ndarray | None = None


@torch.no_grad()
def score(
    logits_TV: torch.Tensor,
    rows: Rows,
    question: Question,
    group: dist.ProcessGroup | None,
    *,
    sample_rows: int,
    label_rows: int,
) -> dict[str, torch.Tensor]:
    """The answer to `question`, on the device of the logits and the same on every rank of `group`.

    Args:
        logits_TV: on the r-th rank of `group`, the entries r·V … (r+1)·V − 1 of the vocabulary; all entries without a group.
        rows: the n − 1 rows that predict the tokens 1 … n − 1.
        sample_rows, label_rows: how many rows a chunk of draws has, and one of log-probs.

    Returns:
        `log_probs` float32 [n − 1]; with `sample_n` `sampled_token_ids` int64 and `sampled_log_probs` float32, [n − 1, N]; with
        labels `label_token_log_probs` float32 [n − 1, K].
    """
    part = _Part(logits_TV, rows, question.temperature, group)
    tokens = torch.from_numpy(question.tokens).to(logits_TV.device)
    found = {"log_probs": part.log_probs_of(tokens[1:, None], label_rows)[:, 0]}
    if question.sample_n:
        found["sampled_token_ids"] = part.drawn(question.sample_n, question.seed, sample_rows)
        found["sampled_log_probs"] = part.log_probs_of(found["sampled_token_ids"], label_rows)
    if question.labels is not None:
        labels = torch.from_numpy(question.labels).to(logits_TV.device)
        found["label_token_log_probs"] = part.log_probs_of(labels, label_rows)
    return found


class _Part:
    """A rank's entries of the rows that are asked about."""

    def __init__(
        self, logits_TV: torch.Tensor, rows: Rows, temperature: float, group: dist.ProcessGroup | None
    ) -> None:
        self.logits_TV, self.rows_R, self.temperature = logits_TV, rows.index, temperature
        self.group = None if group is None or dist.get_world_size(group) == 1 else group
        self.rank = 0 if self.group is None else dist.get_rank(group)
        self.first_id = self.rank * logits_TV.shape[1]
        self.work_dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        self.sums_R = log_sums(logits_TV, self.group, temperature=temperature, rows=rows)

    def log_probs_of(self, ids_RK: torch.Tensor, chunk: int) -> torch.Tensor:
        """log softmax at `ids_RK`, float32 [R, K]; −∞ for ids that no rank has."""
        found = []
        for rows_C, ids_CK, sums_C in zip(*(of.split(chunk) for of in (self.rows_R, ids_RK, self.sums_R)), strict=True):
            columns_CK = ids_CK - self.first_id
            is_here_CK = (columns_CK >= 0) & (columns_CK < self.logits_TV.shape[1])
            values_CK = self.logits_TV[rows_C[:, None], columns_CK.masked_fill(~is_here_CK, 0)].to(self.work_dtype)
            values_CK = (values_CK / self.temperature).double().masked_fill_(~is_here_CK, -torch.inf)
            values_CK = self._of_all_ranks(values_CK, dist.ReduceOp.MAX)
            # Rounding may make a token's logit larger than the sum of all.
            found.append((values_CK - sums_C[:, None]).clamp_(max=0).float())
        return torch.cat(found)

    def drawn(self, count: int, seed: int, chunk: int) -> torch.Tensor:
        """`count` ids for each row, drawn from the softmax, int64 [R, N].

        The id is the one for which logit / temperature plus noise of its own is largest (the Gumbel-max trick); −log of an
        exponential draw has a Gumbel distribution. Each rank finds the largest of its part, and ranks compare these.
        """
        device = self.logits_TV.device
        of_rank = np.random.SeedSequence([seed, self.rank]).generate_state(1, np.uint64)
        generator, found = torch.Generator(device).manual_seed(int(of_rank[0])), []
        for rows_C in self.rows_R.split(chunk):
            scaled_CV = self.logits_TV.index_select(0, rows_C).to(self.work_dtype) / self.temperature
            keys_CV, largest = torch.empty_like(scaled_CV), []
            for _ in range(count):
                keys_CV.exponential_(generator=generator).clamp_(min=_LEAST_DRAW).log_().neg_().add_(scaled_CV)
                largest.append(keys_CV.max(dim=1))
            keys_CN = torch.stack([of_draw.values for of_draw in largest], dim=1)
            ids_CN = torch.stack([of_draw.indices for of_draw in largest], dim=1) + self.first_id
            whole_CN = self._of_all_ranks(keys_CN.clone(), dist.ReduceOp.MAX)
            found.append(self._of_all_ranks(ids_CN.masked_fill_(keys_CN < whole_CN, _NOBODYS_ID), dist.ReduceOp.MIN))
        return torch.cat(found)

    def _of_all_ranks(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values
