"""Optimizer and learning-rate schedule of one training rank.

The scheduler counts rollouts ("samples" in Megatron's words), not iterations: a step that lost some of its rollouts
moves the schedule on by what it really trained. Lengths given in iterations are therefore multiplied by the global
batch size.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.arguments.sizes import train_iterations
from slime.backends.megatron_utils import adam
from slime.backends.megatron_utils.config_fields import fields_from_args, params_dtype
from slime.backends.megatron_utils.optimizer_step import parts_of
from slime.backends.megatron_utils.stateless_adam import as_megatrons_adam
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
    adam.install()
    stateless = getattr(args, "use_stateless_adam", False)
    with as_megatrons_adam() if stateless else contextlib.nullcontext():
        optimizer = get_megatron_optimizer(build_optimizer_config(args), model_chunks)
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
        min_lr=_min_lr(args),
        use_distributed_optimizer=bool(getattr(args, "use_distributed_optimizer", True)),
    )
    return OptimizerConfig(**fields)


def _build_scheduler(args: Any, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    decay_steps, warmup_steps = _schedule_lengths(args)
    weight_decay = args.weight_decay
    from_checkpoint = bool(getattr(args, "use_checkpoint_opt_param_scheduler", False))
    wsd_iterations = getattr(args, "lr_wsd_decay_iters", None)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=getattr(args, "lr_warmup_init", None) or 0.0,
        max_lr=args.lr,
        min_lr=_min_lr(args),
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=_given(args, "start_weight_decay", weight_decay),
        end_wd=_given(args, "end_weight_decay", weight_decay),
        wd_incr_steps=train_iterations(args) * args.global_batch_size,
        wd_incr_style=_given(args, "weight_decay_incr_style", "constant"),
        # On resume the flags of this run hold, unless the checkpoint's are asked for; Megatron's third way, to stop
        # when they differ, would forbid to prolong a run, since the schedule's length follows --num-rollout.
        use_checkpoint_opt_param_scheduler=from_checkpoint,
        override_opt_param_scheduler=not from_checkpoint,
        wsd_decay_steps=None if wsd_iterations is None else wsd_iterations * args.global_batch_size,
        lr_wsd_decay_style=_given(args, "lr_wsd_decay_style", "exponential"),
    )


def _schedule_lengths(args: Any) -> tuple[int, int]:
    """(decay, warmup) in rollouts."""
    decay_iterations = getattr(args, "lr_decay_iters", None) or train_iterations(args)
    decay_steps = decay_iterations * args.global_batch_size
    if decay_steps <= 0:
        raise UserError(
            f"the learning-rate schedule is empty: --num-rollout {args.num_rollout} gives no optimizer step with "
            f"--global-batch-size {args.global_batch_size}; raise --num-rollout or set --lr-decay-iters"
        )
    fraction = getattr(args, "lr_warmup_fraction", None)
    if fraction is not None:
        warmup_steps = int(fraction * decay_steps)
    else:
        warmup_steps = (getattr(args, "lr_warmup_iters", None) or 0) * args.global_batch_size
    if warmup_steps >= decay_steps:
        raise UserError(
            f"the learning-rate warmup ({warmup_steps} rollouts) is not shorter than the schedule ({decay_steps} "
            "rollouts); lower --lr-warmup-iters / --lr-warmup-fraction or raise --lr-decay-iters"
        )
    return decay_steps, warmup_steps


def _min_lr(args: Any) -> float:
    return _given(args, "min_lr", 0.0)


def _given(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, name, None)
    return default if value is None else value
