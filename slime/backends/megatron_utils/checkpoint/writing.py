"""Writing a checkpoint, whole and synced, under its hidden name. A rank that cannot write its part fails the save on all."""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.checkpoints import iteration_directory
from slime.backends.megatron_utils.checkpoint.float32_weights import PREFIXES, has_float32_copies
from slime.backends.megatron_utils.checkpoint.optimizer_state import (
    Memory,
    group_settings,
    is_stateless,
    loss_scales,
    memory_of,
    put_step,
)
from slime.backends.megatron_utils.checkpoint.schedule_state import schedule_state
from slime.backends.megatron_utils.checkpoint.sharded_state import (
    describe,
    directory_of_state,
    layout_of,
    replicas,
    sharded_state,
)
from slime.backends.megatron_utils.generator_states import save_generators
from slime.backends.megatron_utils.parameter_selection import selection_of
from slime.training.checkpoint_publication import unpublished
from slime.training.model_states import ModelStates
from slime.utils.atomic_io import fsync_tree
from slime.utils.errors import RunError

logger = logging.getLogger(__name__)


def save_checkpoint(
    args: argparse.Namespace,
    iteration: int,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    states: ModelStates | None = None,
    stored: Sequence[str] = (),
) -> Path:
    """Write the checkpoint of rollout `iteration`; returns the directory that it will have. Collective over all ranks.

    It is there for nobody yet: `publish_checkpoint` shows it when the data state is on disk as well.

    Args:
        stored: names out of `states` whose weights the checkpoint holds too, for `load_stored_state`.

    Raises:
        RunError: writing failed on some rank; the message names the path and the cause, and nothing was published.
    """
    final = iteration_directory(args.save, iteration)
    temporary = unpublished(final)
    error = _run_on_rank_zero(lambda: _fresh_directory(temporary, stored))
    if error is None:
        error = _write(args, iteration, temporary, model, optimizer, scheduler)
    for name in stored:
        if error is None:
            error = _write_state(args, directory_of_state(temporary, name), model, states, name)
    if error is None:
        error = _run_on_rank_zero(lambda: fsync_tree(temporary))
    if error is not None:
        _run_on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
        free = shutil.disk_usage(final.parent).free / 1e6
        raise RunError(
            f"checkpoint {final} could not be written: {error}. {free:.0f} MB are free there. Older checkpoints are untouched"
        )
    return final


def _write(
    args: argparse.Namespace,
    iteration: int,
    directory: Path,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
) -> str | None:
    """Write all parts; the first error of any rank, or None."""
    common, memory, error = {}, Memory(exists=False, step=None), None
    try:
        memory, common = memory_of(optimizer), _common_state(args, iteration, optimizer, scheduler)
    except Exception as cause:
        logger.debug("the state of the run could not be read", exc_info=True)
        error = describe(cause)
    memories, error = _exchange(memory, error)
    if error is not None:
        return error
    memory = Memory.of_all(memories)
    # An optimizer that remembers nothing has no state to save, and nothing is lost: one that starts fresh is the same. Only
    # its float32 copies of the weights are not.
    has_optimizer = memory.exists and not args.no_save_optim
    has_copies = has_float32_copies(optimizer) and (is_stateless(optimizer) or not args.no_save_optim)
    try:
        state = sharded_state(
            args,
            model,
            optimizer if has_optimizer or has_copies else None,
            is_loading=False,
            float32_prefix=None if has_optimizer else PREFIXES[0],
        )
        if has_optimizer:
            put_step(state["optimizer"], memory.step)
        state.update(common, has_optimizer=has_optimizer)
        dist_checkpointing.save(state, str(directory), _save_strategy(args))
        if not getattr(args, "no_save_rng", False):
            save_generators(directory)
    except (Exception, CheckpointException) as cause:
        # Above all a full disk, which torch and safetensors report as errors of their own, on all ranks that write. The
        # others hear of it here. Who fails between two collectives of Megatron's leaves them to the limit of the process
        # group (--distributed-timeout-minutes).
        logger.debug("writing %s failed", directory, exc_info=True)
        error = describe(cause)
    return _first_error(error)


def _write_state(
    args: argparse.Namespace, directory: Path, model: list[torch.nn.Module], states: ModelStates, name: str
) -> str | None:
    """Write the weights of the state `name`; the first error of any rank, or None."""
    error = None
    try:
        with states(name):
            state = sharded_state(args, model, None, is_loading=False)
            dist_checkpointing.save(state, str(directory), _save_strategy(args))
    except (Exception, CheckpointException) as cause:
        logger.debug("writing %s failed", directory, exc_info=True)
        error = describe(cause)
    return _first_error(error)


def _save_strategy(args: argparse.Namespace) -> Any:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if getattr(args, "ckpt_fully_parallel_save", True):
        # What data-parallel ranks hold alike is written by all of them, a share each.
        return FullyParallelSaveStrategyWrapper(strategy, replicas())
    return strategy


def _common_state(args: argparse.Namespace, iteration: int, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "iteration": iteration,
        "scheduler": schedule_state(scheduler),
        "parameter_groups": group_settings(optimizer),
        "loss_scales": loss_scales(optimizer),
        "layout": layout_of(args),
        "parameter_selection": selection_of(args),
    }


def _fresh_directory(directory: Path, stored: Sequence[str]) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for name in stored:
        directory_of_state(directory, name).mkdir(parents=True)


def _run_on_rank_zero(action: Any) -> str | None:
    """Run `action` on rank 0; its OSError as text on every rank, or None."""
    error = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as cause:
            error = str(cause)
    return _first_error(error)


def _first_error(error: str | None) -> str | None:
    return _exchange(None, error)[1]


def _exchange(value: Any, error: str | None) -> tuple[list[Any], str | None]:
    """Every rank's value, and the first error of any rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (value, error))
    return [value for value, _ in gathered], next((found for _, found in gathered if found is not None), None)
