"""The optimizer in a checkpoint: whether it has states, its step count, and which settings apply after a resume.

Megatron keeps the settings of a parameter group (learning rates, weight decay, betas, epsilon) and Adam's step count in one
dict, and saves that of rank 0. Here the two are separate. The settings of the command line apply, unless the checkpoint's are
asked for. The step count comes from all ranks, because a rank counts only in groups of which it has parameters, and rank 0 may
have none.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from slime.backends.megatron_utils.checkpoint.gathered_state import (
    STATES,
    describe_states,
    put_states,
    refuse_lacking,
    require_owned,
)
from slime.backends.megatron_utils.checkpoint.stored import Stored
from slime.backends.megatron_utils.optimizer import parts_of, scalers_of
from slime.backends.megatron_utils.stateless_adam import StatelessAdam
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# Entries that identify a parameter group in every layout. The others are its settings, and its step count.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "default_config")
# Entries that are no settings. `is_decoupled_lr` follows from `default_config`, and not every checkpoint has it.
_NO_SETTINGS = ("params", "step", "is_decoupled_lr")
# A non-distributed optimizer has its float32 copies in a list for each group, which may be empty on some ranks. An empty list
# of rank 0 would be saved as the common state of all ranks, and not fit theirs: so here the lists are dicts by number.
_COPIES, _NUMBERED = "fp32_from_fp16_params", "float32_copies"


@dataclasses.dataclass(frozen=True)
class Memory:
    """The history of optimizers.

    exists: whether any of them has states that a fresh one does not have.
    step: how many updates they have counted; None if they do not count.
    """

    exists: bool
    step: int | None

    @classmethod
    def of_all(cls, memories: Sequence[Memory]) -> Memory:
        """The history of all ranks together, from that of each."""
        steps = [memory.step for memory in memories if memory.step is not None]
        return cls(any(memory.exists for memory in memories), max(steps, default=None))


def memory_of(optimizer: MegatronOptimizer) -> Memory:
    """The history on this rank, read from the optimizers themselves."""
    groups = [group for part in trained_parts(optimizer) for group in part.optimizer.param_groups]
    steps = [int(group["step"]) for group in groups if group["params"] and "step" in group]
    return Memory(any(_remembers(part) for part in trained_parts(optimizer)), max(steps, default=None))


def is_stateless(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer never has moments."""
    return any(isinstance(part.optimizer, StatelessAdam) for part in trained_parts(optimizer))


def loss_scales(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """The state of float16's loss scale, for each part of the optimizer, as plain values."""
    states = [scaler.state_dict() for scaler in scalers_of(optimizer)]
    return [{name: _plain(value) for name, value in state.items()} for state in states]


def put_loss_scales(optimizer: MegatronOptimizer, states: Sequence[dict[str, Any]]) -> None:
    """Restore the loss scale of `loss_scales`, for all parts the same; a constant scale stays that of this run."""
    # In old checkpoints parts may have had different ones. The smallest one overflows in none.
    state = min((state for state in states if state), key=lambda state: state["scale"], default=None)
    for scaler in scalers_of(optimizer) if state is not None else ():
        if state.keys() == scaler.state_dict().keys():
            scaler.load_state_dict({**state, "scale": torch.tensor([state["scale"]], dtype=torch.float32)})


def optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    """This rank's share as Megatron describes it for torch_dist, for the chunks whose descriptions are `model`."""
    # A part none of whose parameters is trained on any rank cannot describe itself.
    parts = trained_parts(optimizer)
    states = [_state_of(part, model, is_loading=is_loading, metadata=metadata) for part in parts]
    return states[0] if len(states) == 1 else dict(enumerate(states))


def _state_of(
    part: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    if not isinstance(part, DistributedOptimizer):
        state = part.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        if _COPIES in state:
            state[_NUMBERED] = {group: dict(enumerate(copies)) for group, copies in enumerate(state.pop(_COPIES))}
        return state
    if is_loading:
        part.load_state_dict(part.state_dict())  # makes the moments, which are to be filled
    return {
        **part.state_dict(), "param_state": describe_states(part, model, is_loading=is_loading),
        "param_state_sharding_type": metadata["distrib_optim_sharding_type"],
    }  # fmt: skip


def other_kind(args: argparse.Namespace, stored: Stored) -> list[str]:
    """Lines that say why the optimizer state of a checkpoint has no place in this run's optimizer; none if it has.

    A distributed optimizer keeps states of every weight in the same form for all dtypes. Another one has states beside its
    float32 copies of 16-bit weights, or without any.
    """
    is_distributed, is_narrow = "param" in stored.states, not stored.has_float32_weights
    there = "sgd" if "exp_avg" not in stored.states else "adam"
    lines = []
    if is_distributed != args.use_distributed_optimizer:
        lines.append(_differing("--use-distributed-optimizer", "--no-use-distributed-optimizer", is_distributed))
    elif not is_distributed and is_narrow != bool(args.bf16 or args.fp16):
        lines.append(_differing("weights of 16 bits (--bf16 or --fp16)", "weights in float32", is_narrow))
    # SGD without momentum has no states that it could lack.
    if there != args.optimizer and (lines or args.optimizer == "adam" or args.sgd_momentum):
        lines.append(f"--optimizer {there} in the checkpoint, and {args.optimizer} by the flags")
    elif args.optimizer == "sgd" and args.sgd_momentum and "momentum_buffer" not in stored.states:
        # The settings of the checkpoint, where they are asked for, have no momentum either.
        if not args.use_checkpoint_opt_param_scheduler:
            lines.append(f"--sgd-momentum 0 in the checkpoint, and {args.sgd_momentum:g} by the flags")
    return lines


def _differing(yes: str, no: str, is_so_there: bool) -> str:
    there, here = (yes, no) if is_so_there else (no, yes)
    return f"{there} in the checkpoint, and {here} by the flags"


def put_step(state: dict[str, Any], step: int | None) -> None:
    """Put the step count of all ranks into an `optimizer_state` that is to be saved."""
    if step is not None:
        for group in groups_in(state):
            group["step"] = step


def leave_out_groups(state: dict[str, Any]) -> None:
    """Remove the parameter groups from an `optimizer_state` that is to be loaded: they then come as they were saved, be they
    more or fewer than this run has."""
    for holder in _holders_of_groups(state):
        del holder["param_groups"]


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], directory: Path) -> None:
    """Take moments, float32 copies of the weights, step count and loss scale out of a loaded state; settings stay.

    Raises:
        UserError: the optimizer counts its steps, and the state does not say how many there were.
    """
    steps = [int(group["step"]) for group in groups_in(state) if group.get("step") is not None]
    parts = trained_parts(optimizer)
    if not steps and optimizer.config.optimizer == "adam":
        raise UserError(
            f"the optimizer state in {directory} lacks Adam's step count, without which the next updates would be of a wrong "
            "size; give --no-load-optim: the optimizer then starts fresh, and its schedule goes on"
        )
    for part, holder in zip(parts, _holders_of_groups(state), strict=True):
        # Parameter numbers and settings are those of this run, so the groups are found whatever was saved.
        holder["param_groups"] = [_without(group, ("step",)) for group in part.optimizer.state_dict()["param_groups"]]
        # An optimizer without moments, like SGD without momentum, has none in what was loaded, not even their place.
        holder.setdefault("state", {})
    gathered = [of_part.pop("param_state", {}) for of_part in _states_of_parts(state)]
    require_owned(parts, gathered, STATES)
    numbered = [of_part.pop(_NUMBERED, {}) for of_part in _states_of_parts(state)]
    # Megatron would give a weight the copy of another one, or leave it that of the weights before they were loaded.
    refuse_lacking([
        (group, number)
        for part, own in zip(parts, numbered, strict=True)
        for group, weights in enumerate(_groups_with_copies(part))
        for number in range(len(weights))
        if number not in own.get(group, {})
    ])  # fmt: skip
    for part, of_part, own in zip(parts, _states_of_parts(state), numbered, strict=True):
        if isinstance(part, Float16OptimizerWithFloat16Params):
            groups = enumerate(_groups_with_copies(part))
            of_part[_COPIES] = [[own[group][number] for number in range(len(weights))] for group, weights in groups]
    ChainedOptimizer(parts).load_state_dict(state)
    for part, loaded in zip(parts, gathered, strict=True):
        if isinstance(part, DistributedOptimizer):
            put_states(part, loaded)
    for part in parts:
        for group in part.optimizer.param_groups if steps else ():
            group["step"] = max(steps)


def _groups_with_copies(part: MegatronOptimizer) -> list[list[torch.Tensor]]:
    """The weights of 16 bits of a whole optimizer, by group."""
    return part.float16_groups if isinstance(part, Float16OptimizerWithFloat16Params) else []


def group_settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """The identity and the settings of every parameter group, as plain values."""
    groups = [
        _without(group, _NO_SETTINGS) for part in trained_parts(optimizer) for group in part.optimizer.param_groups
    ]
    return [{name: value for name, value in group.items() if not torch.is_tensor(value)} for group in groups]


def groups_in(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups in an `optimizer_state`, as the run that saved it had them."""
    return [group for holder in _holders_of_groups(state) for group in holder["param_groups"]]


def put_settings(optimizer: MegatronOptimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Give every parameter group the settings of the group of the same kind in `settings`; a warning names those for which
    there is none. Collective over all ranks."""
    by_kind = {_kind(group): _without(group, (*_IDENTITY, *_NO_SETTINGS)) for group in settings}
    groups = [group for part in trained_parts(optimizer) for group in part.optimizer.param_groups]
    for group in groups:
        group.update(by_kind.get(_kind(group), {}))
    # A rank may have no parameters of a group.
    local = [_kind(group) for group in groups if group["params"] and _kind(group) not in by_kind]
    gathered: list[list[tuple]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    missing = dict.fromkeys(kind for kinds in gathered for kind in kinds)
    if missing and dist.get_rank() == 0:
        described = "; ".join(
            ", ".join(f"{name}={value}" for name, value in zip(_IDENTITY, kind, strict=True)) for kind in missing
        )
        logger.warning(
            "--use-checkpoint-opt-param-scheduler: the checkpoint has no settings for the parameter groups with %s; those of "
            "the command line hold there",
            described,
        )


def _remembers(part: MegatronOptimizer) -> bool:
    if part.config.optimizer == "sgd" and not part.config.sgd_momentum:
        # It has no moments, but float32 copies of 16-bit weights are history, too.
        return True
    if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
        # Its main parameters are states, but before the first update they are made of the weights alone.
        return any(group.get("step") for group in part.optimizer.param_groups)
    return any(part.optimizer.state.values())


def trained_parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense and of expert parameters, without those that have no trained parameter on any rank."""
    return [part for part in parts_of(optimizer) if part.optimizer is not None]


def _plain(value: Any) -> Any:
    return value.item() if torch.is_tensor(value) else value


def _holders_of_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The dicts that have `param_groups`, one for each part in an `optimizer_state`; several parts are numbered there."""
    return [part.get("optimizer", part) for part in _states_of_parts(state)]


def _states_of_parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [state[key] for key in sorted(state)] if all(isinstance(key, int) for key in state) else [state]


def _kind(group: dict[str, Any]) -> tuple:
    return tuple(group.get(name) for name in _IDENTITY)


def _without(group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}
