"""The loss that trains the indexers of sparse attention (`--dsa-indexer-loss-coeff`).

An indexer learns to score keys as the heads of its own layer attend to them (DeepSeek-V3.2, arXiv 2512.02556, section 2.1). The
heads' probabilities of the keys that row t sees, added up and divided by their sum, are the target p_t, a constant. With the
indexer's scores I_t, the N tokens of a step's samples and the coefficient α, the loss of a layer is

    L = α / N Σ_t KL(p_t ‖ softmax(I_t))

over all keys that the row sees, or, with `--dsa-indexer-use-sparse-loss`, over those that were chosen for it. It trains nothing
but the indexer, whose inputs are constants, and nothing else trains that. Megatron-Core's own loss is the mean over the rows of
a micro-batch, and then over micro-batches: the same where all of these have as many tokens. Here a token counts as much in any
micro-batch.

The gradient of a row's divergence by its scores is softmax(I_t) − p_t. So gradients are computed in the forward pass, while a
block of probabilities is at hand. Of that only the gradients of the indexer's few vectors per token are kept for the backward
pass, which adds them when it comes by. A pass without gradient computes nothing; where a layer is recomputed, the second pass
alone has a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from torch.autograd.function import once_differentiable

from slime.backends.megatron_utils.attention import StreamParams
from slime.training.context_parallel import gather_rows
from slime.training.metric_reduction import all_reduce_sum
from slime.training.packed_stream import PackedStream
from slime.training.stream_attention import visible_keys
from slime.training.train_step import MicroBatches
from slime.utils.device import get_accelerator

# Elements of a matrix of scores in float32, which makes 64 MiB. Up to six exist at a time.
_SCORES = 2**24


@dataclass(frozen=True)
class IndexVectors:
    """What an indexer makes of a stream. A row's score of a key is the sum over heads h of weight_h · relu(query_h · key).

    query: [n, heads, channels], of the stream's n rows from `first` on, which with sequence parallelism are this rank's part.
    weight: [n, heads], float32.
    key: [rows of all context-parallel ranks, channels].
    """

    query: torch.Tensor
    weight: torch.Tensor
    key: torch.Tensor
    first: int

    @property
    def rows(self) -> range:
        return range(self.first, self.first + len(self.query))


def index_scores(query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scores of all of the keys [K, channels] for rows with `query` [n, heads, channels] and `weight` [n, heads]: float32
    [n, K]. No gradient passes."""
    scores = query.new_zeros(len(query), len(key), dtype=torch.float32)
    key = key.float().t()
    for head, head_weight in zip(query.float().unbind(1), weight.split(1, dim=1), strict=True):
        scores.addcmul_((head @ key).relu_(), head_weight)
    return scores


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of one sequence: `rows` of this rank's stream, and the keys of the whole stream that their last one
    sees. The first row sees `seen` of them, and every further row one more."""

    rows: range
    keys: slice
    seen: int


def blocks_of(stream: PackedStream, rows: range, elements: int) -> Iterator[Block]:
    """Those of the rows of this rank's `stream` that are in `rows`, in blocks with about so many pairs of row and key."""
    start = 0
    for segment in stream.segments:
        begin, end = max(start, rows.start), min(start + segment.queries, rows.stop)
        at_once = max(elements // segment.keys, 1)
        for row in range(begin, end, at_once):
            stop = min(row + at_once, end)
            seen = segment.keys - segment.queries + row - start + 1
            keys = slice(segment.first_key, segment.first_key + seen + stop - row - 1)
            yield Block(range(row, stop), keys, seen)
        start += segment.queries


class IndexerLoss(torch.nn.Module):
    """The loss of one layer's indexer.

    Attributes:
        tokens: N of the last step, int64, a scalar on the device.
        scale: what the gradient of a row's divergence is multiplied by, a scalar there; None outside of a step.
        divergence: Σ_t KL over this rank's rows of the last step, a scalar there.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.coefficient, self.is_sparse = config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss
        self.tokens = self.scale = self.divergence = None

    @property
    def is_due(self) -> bool:
        """Whether a pass through the layer is one that the indexer learns from."""
        return self.scale is not None and self.training and torch.is_grad_enabled()

    def forward(
        self,
        activation: torch.Tensor,
        vectors: IndexVectors,
        query: torch.Tensor,
        key: torch.Tensor,
        packed: StreamParams,
    ) -> torch.Tensor:
        """`activation`, whose backward pass also adds the gradients of this loss to those of `vectors`. Collective over
        tensor- and context-parallel ranks.

        Args:
            query, key: [T, heads, dim] of this rank's heads and rows.
        """
        gradients, divergence = self._gradients(vectors, query, key, packed)
        self.divergence += divergence
        learning = vectors.query, vectors.weight, vectors.key
        scaled = [(gradient * self.scale).to(of.dtype) for gradient, of in zip(gradients, learning, strict=True)]
        return _WithGradients.apply(activation, *learning, *scaled)

    @torch.no_grad()
    def _gradients(
        self, vectors: IndexVectors, query: torch.Tensor, key: torch.Tensor, packed: StreamParams
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        stream, group = packed.stream, parallel_state.get_tensor_model_parallel_group()
        key = gather_rows(key, stream.cp, stream.gather_order)
        counted = (~stream.is_padding).float()
        gradients = [torch.zeros_like(of, dtype=torch.float32) for of in (vectors.query, vectors.weight, vectors.key)]
        total = counted.new_zeros(())
        for block in blocks_of(stream, range(len(query)), _SCORES):
            rows, keys = slice(block.rows.start, block.rows.stop), block.keys
            hidden = self._hidden_keys(block, packed.chosen, query.device)
            attended = attention_to_keys(query[rows], key[keys], hidden, self.softmax_scale)
            if group.size() > 1:
                dist.all_reduce(attended, group=group)
            # With sequence parallelism a rank may have some of these rows, or none.
            start, stop = max(rows.start, vectors.rows.start), min(rows.stop, vectors.rows.stop)
            if start >= stop:
                continue
            of_block, own = (slice(start - first, stop - first) for first in (rows.start, vectors.first))
            given = vectors.query[own], vectors.weight[own], vectors.key[keys]
            scores = index_scores(*given).masked_fill_(hidden[of_block], -torch.inf)
            divergence, gradient = divergence_and_gradient(attended[of_block], scores)
            total += divergence @ counted[start:stop]
            gradient *= counted[start:stop, None]
            of_query, of_weight, of_key = score_gradients(*given, gradient)
            gradients[0][own], gradients[1][own] = of_query, of_weight
            gradients[2][keys] += of_key
        return gradients, total

    def _hidden_keys(self, block: Block, chosen: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Of each row of the block which keys do not count, bool [rows, keys]."""
        count = block.keys.stop - block.keys.start
        if self.is_sparse and chosen is not None:
            return ~visible_keys(chosen[block.rows.start : block.rows.stop], count)
        return torch.ones(len(block.rows), count, dtype=torch.bool, device=device).triu_(block.seen)


def attention_to_keys(query: torch.Tensor, key: torch.Tensor, hidden: torch.Tensor, scale: float) -> torch.Tensor:
    """The probabilities of keys, summed over heads: float32 [n, K], from `query` [n, heads, dim] and `key` [K, heads, dim].

    Args:
        hidden: the keys that a row does not see, bool [n, K].
    """
    attended = query.new_zeros(hidden.shape, dtype=torch.float32)
    for of_rows, of_keys in zip(query.unbind(1), key.unbind(1), strict=True):
        logits = (of_rows.float() @ of_keys.float().t()).mul_(scale)
        attended += logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return attended


def divergence_and_gradient(attended: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(p ‖ softmax(scores)) of each row, [n], and its gradient by the scores, [n, K].

    Args:
        attended: p before it is normalised, [n, K]; 0 for keys that do not count.
        scores: [n, K]; −∞ for these keys.
    """
    target = attended / attended.sum(-1, keepdim=True)
    logarithms = scores.log_softmax(-1)
    gradient = logarithms.exp() - target
    terms = torch.xlogy(target, target) - target * logarithms.masked_fill_(scores == -torch.inf, 0)
    return terms.sum(-1), gradient


def score_gradients(
    query: torch.Tensor, weight: torch.Tensor, key: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From gradients of `index_scores`, [n, K], those of its arguments, float32."""
    of_query, of_weight, key = [], [], key.float()
    of_key = torch.zeros_like(key)
    for head, head_weight in zip(query.float().unbind(1), weight.split(1, dim=1), strict=True):
        products = (head @ key.t()).relu_()
        of_weight.append((products * gradient).sum(-1))
        of_products = (gradient * head_weight).masked_fill_(products == 0, 0)
        of_query.append(of_products @ key)
        of_key.addmm_(of_products.t(), head)
    return torch.stack(of_query, 1), torch.stack(of_weight, 1), of_key


class _WithGradients(torch.autograd.Function):
    """Gives the activation on unchanged, and in the backward pass the three vectors the gradients that stand behind them."""

    @staticmethod
    def forward(ctx, activation: torch.Tensor, *vectors_and_gradients: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*vectors_and_gradients[3:])
        return activation

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *ctx.saved_tensors, None, None, None


def _losses(model: Sequence[torch.nn.Module]) -> list[IndexerLoss]:
    return [module for chunk in model for module in chunk.modules() if isinstance(module, IndexerLoss)]


@contextlib.contextmanager
def learning_indexers(
    model: Sequence[torch.nn.Module], batches: MicroBatches, scale_loss: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """In the block, which is a step, indexers learn, if they have a loss. Collective over the data-parallel ranks.

    Args:
        model: the chunks of this rank.
        batches: the micro-batches of the step.
        scale_loss: multiplies a loss by the factor that keeps small gradients in 16 bits.
    """
    losses = _losses(model)
    if losses:
        device = get_accelerator().current_device()
        tokens = torch.full((), sum(map(len, batches.samples["tokens"])), dtype=torch.int64, device=device)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        # Gradients are averaged over data- and context-parallel ranks.
        ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        scale = scale_loss(losses[0].coefficient * ranks / tokens.float())
        for loss in losses:
            loss.tokens, loss.scale, loss.divergence = tokens, scale, tokens.new_zeros((), dtype=torch.float32)
    try:
        yield
    finally:
        for loss in losses:
            loss.scale = None


def mean_divergence(model: Sequence[torch.nn.Module]) -> dict[str, float]:
    """`indexer_loss`: the losses of a step that is over, without their coefficient, as a mean over the layers that have one.
    Collective over the world; nothing without `--dsa-indexer-loss-coeff`."""
    config, losses = model[0].config, _losses(model)
    if not config.dsa_indexer_loss_coeff:
        return {}
    # Each tensor-parallel rank has its part of the rows, or all of them.
    copies = 1 if config.sequence_parallel else config.tensor_model_parallel_size
    own = [loss.divergence / (copies * loss.tokens) for loss in losses]
    counted = torch.tensor([0.0, len(losses)], device=get_accelerator().current_device())
    counted[0] += sum(own)
    divergence, layers = all_reduce_sum(counted, dist.group.WORLD).tolist()
    ranks_of_stage = dist.get_world_size() / config.pipeline_model_parallel_size
    return {"indexer_loss": divergence * ranks_of_stage / layers} if layers else {}
