"""The routers of layers with experts. Their counts and averages leave padding out, however a stream is cut.

The balancing loss of a sample (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): each of its T tokens has scores s′ over all
N experts, which sum to one, and goes to the K experts with the largest scores. With the coefficient α

    L = α Σ_i f_i P_i,        f_i = N / (K T) Σ_t [i is one of the K experts of token t],        P_i = 1/T Σ_t s′_(i,t)

The loss of a step is the mean over its samples, however these are packed. Megatron's own loss takes a whole stream for one
sequence.

The global balancing loss (Qiu et al. 2025, arXiv 2501.11873, section 3) is the same formula with the T tokens of a whole step,
those of all ranks. Each micro-batch contributes the sum over its own tokens, for which it needs the f of all. So a step with
several micro-batches begins with a pass over them in which routers count. Megatron's own loss uses the mean over the
micro-batches so far, which depends on how samples are packed and dealt.

Two passes over a stream must give the same log-probs. So noise on routers' inputs (Fedus et al. 2021, arXiv 2101.03961, section
2.2) occurs in training steps alone, and experts that are chosen at random, to measure the speed of an even load, are the same
in every pass.

A router sees rows. It is told with the forward pass of a micro-batch to which sample each row belongs. A pass that is repeated
during backward (activation recomputation) gets that first in, first out: a model chunk sees the backward passes of its
micro-batches in the order of their forward passes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from slime.training.packed_stream import PackedStream
from slime.training.train_step import MicroBatches
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

# Megatron-Core's router asks for this name, which only an import of Transformer Engine defines.
vars(moe_utils).setdefault("te_general_gemm", None)
_drop_tokens = moe_utils.apply_router_token_dropping
_OF_SAMPLES = "seq_aux_loss"
_OF_STEPS = "global_aux_loss"
# While a router chooses: which of its rows are padding, bool [rows]; None: none is.
_padding: ContextVar[torch.Tensor | None] = ContextVar("padding of the rows of a router", default=None)
# Distance between the seeds of two layers: more than there are ranks.
_SEEDS_OF_A_LAYER = 2**20


def drop_tokens(
    probs: torch.Tensor, routing_map: torch.Tensor, *, drop_policy: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Megatron's `apply_router_token_dropping`, whose policy `position` keeps the first tokens of each expert. Megatron's own
    takes the largest of zeros and ones, which leaves it to the sort of the device which of its tokens a full expert keeps.
    Padding goes to no expert: its rows are alike, and would together take the places of tokens.

    Args:
        probs: weights of the experts of each token, [tokens, experts].
        routing_map: whether a token is sent to an expert, bool of the same shape.

    Returns:
        Both, for the tokens that are kept.
    """
    if (padding := _padding.get()) is not None:
        routing_map = routing_map & ~padding[:, None]
        probs = probs * routing_map
    if drop_policy != "position":
        return _drop_tokens(probs, routing_map, drop_policy=drop_policy, **options)
    places = torch.arange(len(routing_map), 0, -1, device=routing_map.device)
    _, kept = _drop_tokens(routing_map * places[:, None], routing_map, drop_policy="probs", **options)
    return probs * kept, kept


megatron_router.apply_router_token_dropping = drop_tokens


@dataclass(frozen=True, eq=False)
class SampleRows:
    """The samples to which the rows of this rank's routers belong.

    numbers: the number of each row's sample, int64 [rows]; padding has the number after the last sample's.
    lengths: tokens of each sample over all ranks, float32 [samples].
    weight: the weight of a sample's loss, given the averages that Megatron takes; a scalar on the device.
    """

    numbers: torch.Tensor
    lengths: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of_stream(cls, stream: PackedStream, weight: torch.Tensor, sequence_parallel: bool) -> SampleRows:
        """The rows of a stream; with sequence parallelism this rank's part of them."""
        lengths = [end + 1 for _, end in stream.predicting_positions]
        numbers = stream.rows_of([torch.full((length,), number + 1) for number, length in enumerate(lengths)]) - 1
        numbers[numbers < 0] = len(lengths)
        if sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            numbers = numbers.chunk(group.size())[group.rank()]
        device = stream.tokens.device
        return cls(
            numbers.to(device, non_blocking=True),
            torch.tensor(lengths, dtype=torch.float32).to(device, non_blocking=True),
            weight,
        )


def balancing_loss(
    scores: torch.Tensor, chosen: torch.Tensor, rows: SampleRows, topk: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """This rank's share of Σ f_i P_i, summed over the samples of a stream, times their weight. Collective over `group`.

    Args:
        scores: s′, [rows, experts].
        chosen: the experts with the `topk` largest ones, of the same shape.
        group: the ranks that the rows of the stream are divided among.
    """
    samples, experts = len(rows.lengths), scores.shape[1]
    counts = torch.zeros(samples + 1, experts, device=scores.device)
    counts.index_add_(0, rows.numbers, chosen.to(counts.dtype))
    dist.all_reduce(counts, group=group)
    of_samples = counts[:-1] * (rows.weight * experts / (topk * rows.lengths.square()))[:, None]
    # Padding has weight 0. The counts are the weights of scores, and get no gradient.
    weights = torch.cat([of_samples, of_samples.new_zeros(1, experts)]).index_select(0, rows.numbers)
    return (scores * weights).sum()


class _ByChance(torch.autograd.Function):
    """Replaces logits by random ones, which depend only on the seed and the number of rows. The gradient passes unchanged."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator(logits.device).manual_seed(seed)
        return torch.empty_like(logits).normal_(generator=generator)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class RouterOfPasses(TopKRouter):
    """Megatron's router. Its random choices are the same in two passes, so that these give the same log-probs. Padding takes no
    place of an expert that is full."""

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config.moe_router_force_load_balancing:
            return super().forward(input, padding_mask)
        self._maintain_float32_expert_bias()
        seed = self.layer_number * _SEEDS_OF_A_LAYER + dist.get_rank()
        logits = _ByChance.apply(self.gating(self.apply_input_jitter(input)), seed)
        return self.routing(logits, padding_mask=padding_mask)

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        token = _padding.set(None if padding_mask is None else padding_mask.flatten())
        try:
            return super().routing(logits, padding_mask)
        finally:
            _padding.reset(token)

    def apply_input_jitter(self, input: torch.Tensor) -> torch.Tensor:
        return super().apply_input_jitter(input) if self.training else input


class Router(RouterOfPasses):
    """A router with losses and counts that are those of samples and their tokens."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Megatron's own counts, which nothing here reads.
        self.global_tokens_per_expert = self.ga_steps = None
        # The rows of the current forward pass; None outside of one, when a pass is repeated.
        self.rows_under_way: SampleRows | None = None
        self.repeated_rows: deque[SampleRows] = deque()
        self._rows: SampleRows | None = None
        # This rank's tokens per expert, float32 [experts], while a pass counts them.
        self.counts: torch.Tensor | None = None
        # The weight of a token's score in the loss of the step, float32 [experts]; None: it follows from the one micro-batch.
        self.step_weights: torch.Tensor | None = None
        # By name, this rank's shares of losses without coefficients, summed over micro-batches since `take_losses`.
        self.losses: dict[str, torch.Tensor] = {}

    def balances_samples(self) -> bool:
        """Whether the loss of each sample has a coefficient."""
        return self.get_aux_loss_coeff(_OF_SAMPLES) > 0

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        if self.training and self.balances_samples():
            under_way = self.rows_under_way
            self._rows = self.repeated_rows.popleft() if under_way is None else under_way
            if not torch.is_grad_enabled():
                self.repeated_rows.append(self._rows)
        if self.counts is not None:
            padding = None if padding_mask is None else padding_mask.flatten()
            chosen, _ = moe_utils.compute_routing_scores_for_aux_loss(
                logits.view(-1, self.num_experts),
                self.topk,
                self.score_function,
                self.config.moe_router_fusion,
                padding,
            )
            self.counts += chosen.sum(0)
        return super().routing(logits, padding_mask)

    def _apply_seq_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        if not self.balances_samples():
            return probs
        coefficient = self.get_aux_loss_coeff(_OF_SAMPLES)
        loss = coefficient * balancing_loss(scores_for_aux_loss, routing_map, self._rows, self.topk, self.tp_cp_group)
        return self.attach_and_log_load_balancing_loss(probs, coefficient, loss, "seq_load_balancing_loss")

    def _apply_global_aux_loss(
        self, probs: torch.Tensor, scores_for_aux_loss: torch.Tensor, routing_map: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff(_OF_STEPS)
        if coefficient == 0:
            return probs
        weights = self.step_weights
        if weights is None:
            # A repeated pass counts again, with the same result.
            weights = self.weights_in_step(routing_map.sum(0, dtype=torch.float32), 1)
        loss = coefficient * (scores_for_aux_loss * weights).sum()
        return self.attach_and_log_load_balancing_loss(probs, coefficient, loss, "global_load_balancing_loss")

    def weights_in_step(self, counts: torch.Tensor, micro_batches: int) -> torch.Tensor:
        """f_i / T of the step for each expert i, times the number by which Megatron divides, since it averages over the
        micro-batches of a rank and over data-parallel ranks. Collective over the ranks that have tokens of the layer.

        Args:
            counts: tokens that this rank sends to each expert in the step, float32 [experts]; becomes that of all ranks.
        """
        dist.all_reduce(counts, group=self.tp_dp_cp_group)
        tokens = (counts.sum() / self.topk).clamp(min=1)
        averaged = micro_batches * parallel_state.get_data_parallel_world_size()
        return counts * (averaged * self.num_experts / (self.topk * tokens.square()))

    def attach_and_log_load_balancing_loss(
        self,
        activation: torch.Tensor,
        aux_loss_coeff: float,
        aux_loss: torch.Tensor,
        aux_loss_name: str,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """`activation`, whose backward pass also adds the gradient of `aux_loss`: this rank's share of the loss, with its
        coefficient."""
        if self.config.moe_per_layer_logging:
            self.losses[aux_loss_name] = self.losses.get(aux_loss_name, 0) + aux_loss.detach() / aux_loss_coeff
        return MoEAuxLossAutoScaler.apply(activation, aux_loss)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        super()._apply_expert_bias(routing_map, None if padding_mask is None else padding_mask[:, None])

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Add the gradient of the z-loss: the mean of logsumexp² over the tokens of a stream (Zoph et al. 2022, arXiv
        2202.08906, equation 5). It is computed in float32, since 16 bits cannot count the tokens of a stream."""
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not (self.training and torch.is_grad_enabled()):
            return logits
        squares = logits.float().logsumexp(-1).square()
        counted = torch.ones_like(squares) if padding_mask is None else (~padding_mask).to(squares.dtype)
        tokens = counted.sum()
        torch.distributed.all_reduce(tokens, group=self.tp_cp_group)
        loss = coefficient * (squares * counted).sum() / tokens.clamp(min=1)
        return self.attach_and_log_load_balancing_loss(logits, coefficient, loss, "z_loss")


def take_losses(model: Sequence[torch.nn.Module], micro_batches: int) -> dict[str, float]:
    """The losses of routers since the last call, as means over the micro-batches and samples of all ranks: `moe_…/layer_N` with
    the number of the layer in the whole model, from 0. Collective over the world; nothing without `--moe-per-layer-logging`."""
    if not model[0].config.moe_per_layer_logging:
        return {}
    losses: dict[str, torch.Tensor] = {}
    for router in (module for chunk in model for module in chunk.modules() if isinstance(module, Router)):
        losses |= {f"moe_{name}/layer_{router.layer_number - 1}": loss for name, loss in router.losses.items()}
        router.losses = {}
    own = dict(zip(losses, torch.stack([*losses.values()]).tolist(), strict=True)) if losses else {}
    of_ranks = [own] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    count = micro_batches * parallel_state.get_data_parallel_world_size()
    names = sorted({name for found in of_ranks for name in found})
    return {name: sum(found.get(name, 0.0) for found in of_ranks) / count for name in names}


class PredictionRouter(RouterOfPasses):
    """The router of a layer for multi-token prediction. It learns only from the loss of its layer: it has no balancing loss and
    no z-loss, and its expert biases do not change."""

    def is_aux_loss_enabled(self) -> bool:
        return False

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> torch.Tensor:
        return logits

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count nothing: experts whose counts are equal keep their biases."""


def _asking(model: Sequence[torch.nn.Module], kind: str) -> list[list[Router]]:
    """For each chunk the routers whose balancing loss of this kind has a coefficient.

    Raises:
        UserError: there is one that would compute another loss.
    """
    asking = [
        [module for module in chunk.modules() if isinstance(module, TopKRouter) and module.get_aux_loss_coeff(kind) > 0]
        for chunk in model
    ]
    if any(not isinstance(router, Router | PredictionRouter) for router in itertools.chain(*asking)):
        raise UserError(
            f"--moe-router-load-balancing-type {kind}: the model has routers that take all packed samples for one sequence and "
            "a micro-batch for a step, as Megatron-Core's own do; have --custom-model-provider-path start from "
            "get_model_provider_func(args), or give aux_loss"
        )
    return [[router for router in of_chunk if isinstance(router, Router)] for of_chunk in asking]


@contextlib.contextmanager
def loads_of_step(model: Sequence[torch.nn.Module], micro_batches: int, count: Callable[[], None]) -> Iterator[None]:
    """In the block, which is a step, routers know the loads of the whole step, if a balancing loss needs them. Collective.

    Args:
        model: the chunks of this rank.
        micro_batches: how many the step has; all ranks have the same number.
        count: runs a pass over them without gradient, on all ranks. It is not called for a single micro-batch.

    Raises:
        UserError: there is a router that would compute another loss.
    """
    routers = list(itertools.chain(*_asking(model, _OF_STEPS)))
    config = model[0].config
    types, weights = (
        value if isinstance(value, list) else [value]
        for value in (config.moe_router_load_balancing_type, config.moe_aux_loss_coeff)
    )
    # All stages of a pipeline take part, even those without experts.
    counts = micro_batches > 1 and any(
        kind == _OF_STEPS and weight > 0 for kind, weight in zip(types, weights, strict=True)
    )
    try:
        if counts:
            for router in routers:
                router.counts = torch.zeros(router.num_experts, device=get_accelerator().current_device())
            count()
            for router in routers:
                router.step_weights, router.counts = router.weights_in_step(router.counts, micro_batches), None
        yield
    finally:
        for router in routers:
            router.step_weights = router.counts = None


class SampleBalance:
    """Tells the routers of a model, in a step, to which samples the rows of a micro-batch belong, if a loss needs that.

    Args:
        model: the chunks of this rank.
        batches: the micro-batches of the step. Collective over the data-parallel ranks.

    Raises:
        UserError: there is a router that would compute another loss.
    """

    def __init__(self, model: Sequence[torch.nn.Module], batches: MicroBatches) -> None:
        self._routers = _asking(model, _OF_SAMPLES)
        if not any(self._routers):
            return
        for router in itertools.chain(*self._routers):
            router.repeated_rows.clear()
        samples = float(sum(map(len, batches.indices)))
        count = torch.full((), samples, device=get_accelerator().current_device())
        dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
        # Megatron averages over micro-batches and data-parallel ranks.
        self._weight = len(batches) * parallel_state.get_data_parallel_world_size() / count

    def forward(self, chunk: int, stream: PackedStream) -> contextlib.AbstractContextManager[None]:
        """The forward pass of a stream through the model chunk with this index. If it is made in parts, each of them may enter
        the context."""
        routers = self._routers[chunk]
        if not routers:
            return contextlib.nullcontext()
        return _Told(routers, SampleRows.of_stream(stream, self._weight, routers[0].config.sequence_parallel))


@dataclass(frozen=True, eq=False)
class _Told(contextlib.AbstractContextManager[None]):
    """In it routers know the rows of a stream; it can be entered several times, one after the other."""

    routers: Sequence[Router]
    rows: SampleRows

    def __enter__(self) -> None:
        for router in self.routers:
            router.rows_under_way = self.rows

    def __exit__(self, *_: object) -> None:
        for router in self.routers:
            router.rows_under_way = None
