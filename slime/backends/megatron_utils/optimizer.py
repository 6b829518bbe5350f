"""Optimizer and learning-rate schedule of one training rank.

The scheduler counts rollouts ("samples" in Megatron's words), not iterations: a step that lost some of its rollouts
moves the schedule on by what it really trained. Lengths given in iterations are therefore multiplied by the global
batch size.

One update of Megatron's optimizers that can still be called off when the gradients are known, and the reset of their states.

Megatron's own `step` reports no gradient norm when the loss scale was too high, and updates the weights with gradients that
are not finite. This one is made of the same parts with a question in between.

Adam with the state layout that Megatron's optimizers save and reload.

Megatron-Core expects the fused Adam of Transformer Engine or Apex: first and second moment per parameter, the step
count in the parameter group. Without either it falls back to torch's AdamW, which trains but whose state its
distributed optimizer cannot load again (0.16.1: KeyError 'step'). `install()` puts this one in place of the fallback.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.arguments.sizes import train_iterations
from slime.backends.megatron_utils.config_fields import fields_from_args, params_dtype
from slime.backends.megatron_utils.stateless_adam import as_megatrons_adam
from slime.training.backend import Update
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError


def build_optimizer_and_scheduler(
    args: Any, model_chunks: list[DistributedDataParallel]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer over all parameters that require a gradient, and its scheduler at 0 rollouts.

    Build it after the weights are loaded, or hand it to `load_checkpoint`: in 16 bits the optimizer keeps float32 copies of
    its own.

    Raises:
        UserError: the schedule is empty, or its warmup is as long as the schedule.
    """
    install()
    with as_megatrons_adam() if args.use_stateless_adam else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(
            build_optimizer_config(args),
            model_chunks,
            use_gloo_process_groups=get_accelerator().host_group_backend == "gloo",
        )
    for group in optimizer.param_groups:
        # Megatron tells groups apart by this mark when it loads their state, and does not set it.
        group["is_decoupled_lr"] = not group["default_config"]
    if args.optimizer == "sgd":
        for part in parts_of(optimizer):
            part.init_state_fn = _start_momentum
    return optimizer, _build_scheduler(args, optimizer)


def _start_momentum(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make the momentum of SGD that a checkpoint is loaded into, which Megatron makes for Adam only. At 0 its first step is the
    one that torch takes without it."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def build_optimizer_config(args: Any) -> OptimizerConfig:
    """Megatron's optimizer configuration for `args` (same-named fields)."""
    fields = fields_from_args(OptimizerConfig, args)
    fields.update(
        params_dtype=params_dtype(args),
        min_lr=args.min_lr,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return OptimizerConfig(**fields)


def _build_scheduler(args: Any, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    decay_steps, warmup_steps = _schedule_lengths(args)
    weight_decay = args.weight_decay
    from_checkpoint, wsd_iterations = args.use_checkpoint_opt_param_scheduler, args.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=weight_decay if args.start_weight_decay is None else args.start_weight_decay,
        end_wd=weight_decay if args.end_weight_decay is None else args.end_weight_decay,
        wd_incr_steps=train_iterations(args) * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        # On resume the flags of this run hold, unless the checkpoint's are asked for; Megatron's third way, to stop
        # when they differ, would forbid to prolong a run, since the schedule's length follows --num-rollout.
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=not from_checkpoint,
        wsd_decay_steps=None if wsd_iterations is None else wsd_iterations * args.global_batch_size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def _schedule_lengths(args: Any) -> tuple[int, int]:
    """(decay, warmup) in rollouts."""
    decay_iterations = args.lr_decay_iters or train_iterations(args)
    decay_steps = decay_iterations * args.global_batch_size
    if decay_steps <= 0:
        raise UserError(
            f"the learning-rate schedule is empty: --num-rollout {args.num_rollout} gives no optimizer step with "
            f"--global-batch-size {args.global_batch_size}; raise --num-rollout or set --lr-decay-iters"
        )
    if args.lr_warmup_fraction is not None:
        warmup_steps = int(args.lr_warmup_fraction * decay_steps)
    else:
        warmup_steps = args.lr_warmup_iters * args.global_batch_size
    if warmup_steps >= decay_steps:
        raise UserError(
            f"the learning-rate warmup ({warmup_steps} rollouts) is not shorter than the schedule ({decay_steps} "
            "rollouts); lower --lr-warmup-iters / --lr-warmup-fraction or raise --lr-decay-iters"
        )
    return decay_steps, warmup_steps


# What an optimizer remembers of earlier steps. Float32 copies of the weights, which may stand beside these, are not history.
_HISTORY = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")


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


def tensors_of(optimizer: MegatronOptimizer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(what must not be lost, gradients). The first holds the parameters that are updated, some of which may be the model's."""
    kept, gradients = [], []
    for part in parts_of(optimizer):
        if part.optimizer is None:
            continue  # a rank without trained parameters
        for parameter in (parameter for group in part.optimizer.param_groups for parameter in group["params"]):
            kept.append(parameter)
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        kept += [value for state in part.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return kept, gradients


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


class Adam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015, arXiv 1412.6980), with decoupled weight decay (Loshchilov & Hutter 2019, arXiv
    1711.05101) when `adam_w_mode`, else with L2 regularisation.

    State per parameter: `exp_avg`, `exp_avg_sq`, of the parameter's shape and dtype. Group entry `step`: int, absent
    before the first step.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of all parameters that have a gradient."""
        if closure is not None:
            raise TypeError("Adam.step takes no closure")
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        lr, decay, step, (beta1, beta2) = group["lr"], group["weight_decay"], group["step"], group["betas"]
        gradients = [param.grad for param in params]
        moments = [self._moments(param) for param in params]
        exp_avg = [state["exp_avg"] for state in moments]
        exp_avg_sq = [state["exp_avg_sq"] for state in moments]

        if self.adam_w_mode:
            torch._foreach_mul_(params, 1 - lr * decay)
        elif decay:
            gradients = torch._foreach_add(gradients, params, alpha=decay)
        torch._foreach_lerp_(exp_avg, gradients, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, gradients, gradients, 1 - beta2)

        denominator = torch._foreach_sqrt(exp_avg_sq)
        torch._foreach_div_(denominator, (1 - beta2**step) ** 0.5)
        torch._foreach_add_(denominator, group["eps"])
        torch._foreach_addcdiv_(params, exp_avg, denominator, -lr / (1 - beta1**step))

    def _moments(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        return state


def l2_norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """The norm of all tensors together, float32 [1] on their device, with the arguments of Transformer Engine's and Apex's.

    In place of Megatron's own, which brings the norm of every tensor to the host.
    """
    (tensors,) = tensor_lists
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)).float())[None], None


def install() -> None:
    """Make Megatron's optimizers use this Adam, and `l2_norm`, where they would fall back to others. Idempotent."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    # These names say "the Adam at hand has the fused layout", which is what decides how state is saved and loaded.
    optimizer.Adam = distrib_optimizer.Adam = Adam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
