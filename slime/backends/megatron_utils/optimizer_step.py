"""One update of Megatron's optimizers that can still be called off when the gradients are known, and the reset of their states.

Megatron's own `step` reports no gradient norm when the loss scale was too high, and updates the weights with gradients that
are not finite. This one is made of the same parts with a question in between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

# What an optimizer remembers of earlier steps. Float32 copies of the weights, which may stand beside these, are not history.
_HISTORY = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclasses.dataclass(frozen=True)
class Update:
    """What became of an update.

    taken: whether the weights were changed.
    grad_norm: of all parameters of all ranks, before clipping; infinite or NaN where a gradient is.
    zeros: entries of the gradient that are zero, over all ranks; None unless `--log-num-zeros-in-grad`.
    """

    taken: bool
    grad_norm: float
    zeros: float | None = None


@torch.no_grad()
def update_weights(optimizer: ChainedOptimizer, accepts: Callable[[float, bool], bool]) -> Update:
    """Clip the gradients and update the weights. Collective: all ranks call it, and take the update or none does.

    Args:
        optimizer: as `get_megatron_optimizer` returns it.
        accepts: asked with the gradient norm and whether the loss scale of float16 overflowed (the scale is then lowered
            already, and no update taken, whatever the answer); must answer the same on all ranks.
    """
    overflowed = optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not accepts(grad_norm, overflowed) or overflowed:
        return Update(taken=False, grad_norm=grad_norm)
    limit = optimizer.config.clip_grad
    if limit > 0:
        decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        for part in parts_of(optimizer):
            if parameters := part.get_parameters():
                clip_grad_by_total_norm_fp32(parameters, limit, grad_norm, decoupled)
    zeros = float(optimizer.count_zeros()) if optimizer.config.log_num_zeros_in_grad else None
    return Update(optimizer.step_with_ready_grads(), grad_norm, zeros)


@torch.no_grad()
def reset_optimizer_states(optimizer: MegatronOptimizer) -> None:
    """Make the next update a first one: step count and moments are zeroed in place, weights and learning rate stay."""
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue  # a rank without trained parameters
        for group in part.optimizer.param_groups:
            _zero(group)
        for state in part.optimizer.state.values():
            _zero(state)


def parts_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers, of dense and of expert parameters, that Megatron made into one."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _zero(entries: dict) -> None:
    for name in _HISTORY:
        value = entries.get(name)
        if torch.is_tensor(value):
            value.zero_()
        elif value is not None:
            entries[name] = 0
