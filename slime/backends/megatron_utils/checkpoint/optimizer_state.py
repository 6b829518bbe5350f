"""The optimizer in a checkpoint: whether it has anything to remember, its step count, and whose settings hold after a resume.

Megatron keeps the settings of a parameter group (learning rates, weight decay, betas, epsilon) and Adam's step count in one
dict, and saves those of rank 0. Here they part. The settings of the command line hold, unless the checkpoint's are asked for.
The step count is of all ranks: a rank counts only in groups of which it has parameters, and rank 0 may have none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer

from slime.backends.megatron_utils.optimizer_step import parts_of
from slime.backends.megatron_utils.stateless_adam import StatelessAdam
from slime.utils.errors import UserError

# What a parameter group is, in every layout; the other entries are its settings, and what it has counted.
_IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "default_config")
_NO_SETTINGS = ("params", "step")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the optimizers of all ranks remember of earlier updates.

    exists: whether any of them has moments.
    step: how many updates they have counted; None where nothing was counted.
    """

    exists: bool
    step: int | None


def memory_of(optimizer: MegatronOptimizer) -> Memory:
    """Read from the optimizers themselves. Collective over all ranks."""
    groups = [group for part in _parts(optimizer) for group in part.optimizer.param_groups]
    steps = [int(group["step"]) for group in groups if group["params"] and "step" in group]
    has_state = any(state for part in _parts(optimizer) for state in part.optimizer.state.values())
    found: list[tuple[bool, int | None]] = [(False, None)] * dist.get_world_size()
    dist.all_gather_object(found, (has_state, max(steps, default=None)))
    return Memory(any(has for has, _ in found), max((step for _, step in found if step is not None), default=None))


def optimizer_state(
    optimizer: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    """This rank's share as Megatron describes it for torch_dist, for the chunks whose descriptions are `model`."""
    # A part none of whose parameters is trained on any rank cannot describe itself.
    trained = ChainedOptimizer(_parts(optimizer))
    return trained.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)


def put_step(state: dict[str, Any], step: int | None) -> None:
    """Have an `optimizer_state` that is to be saved say the step count of all ranks."""
    if step is not None:
        for group in settings_in(state):
            group["step"] = step


def leave_out_groups(state: dict[str, Any]) -> None:
    """Have an `optimizer_state` that is to be loaded ask for no parameter groups: they come as they were saved, which may be
    more or fewer than this run has."""
    for holder in _holders_of_groups(state):
        del holder["param_groups"]


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any], directory: Path) -> None:
    """Take moments, float32 copies of the weights, step count and loss scale out of a loaded state; settings stay.

    A stateless Adam takes the float32 copies alone.

    Raises:
        UserError: the optimizer counts its steps, and the state does not say how many there were.
    """
    steps = [int(group["step"]) for group in settings_in(state) if group.get("step") is not None]
    parts = _parts(optimizer)
    is_stateless = any(isinstance(part.optimizer, StatelessAdam) for part in parts)
    if not steps and not is_stateless and optimizer.config.optimizer == "adam":
        raise UserError(
            f"the optimizer state in {directory} lacks Adam's step count, without which the next updates would be of a wrong "
            "size; give --no-load-optim: the optimizer then starts fresh, and its schedule goes on"
        )
    for part, holder in zip(parts, _holders_of_groups(state), strict=True):
        # Numbers of parameters and settings, both of this run; so the groups are found whatever was saved.
        holder["param_groups"] = [_without(group, ("step",)) for group in part.optimizer.state_dict()["param_groups"]]
    ChainedOptimizer(parts).load_state_dict(state)
    for part in parts:
        if is_stateless:
            part.optimizer.state.clear()
        elif steps:
            for group in part.optimizer.param_groups:
                group["step"] = max(steps)


def group_settings(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """What every parameter group is and which settings it has, as plain values."""
    groups = [_without(group, _NO_SETTINGS) for part in _parts(optimizer) for group in part.optimizer.param_groups]
    return [{name: value for name, value in group.items() if not torch.is_tensor(value)} for group in groups]


def settings_in(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameter groups in an `optimizer_state`, with the settings of the run that saved it."""
    return [group for holder in _holders_of_groups(state) for group in holder["param_groups"]]


def put_settings(optimizer: MegatronOptimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Give every parameter group the settings of the group of the same kind in `settings`, if there is one."""
    by_kind = {_kind(group): _without(group, (*_IDENTITY, *_NO_SETTINGS)) for group in settings}
    for part in _parts(optimizer):
        for group in part.optimizer.param_groups:
            group.update(by_kind.get(_kind(group), {}))


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers of dense and of expert parameters, as far as any rank trains such."""
    return [part for part in parts_of(optimizer) if part.optimizer is not None]


def _holders_of_groups(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The dicts that have `param_groups`, one for each part in an `optimizer_state`; several parts are numbered there."""
    parts = [state[key] for key in sorted(state)] if all(isinstance(key, int) for key in state) else [state]
    return [part.get("optimizer", part) for part in parts]


def _kind(group: dict[str, Any]) -> tuple:
    return tuple(group.get(name) for name in _IDENTITY)


def _without(group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}
