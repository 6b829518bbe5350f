"""Checkpoints of the training ranks: torch_dist directories that exist whole or not at all.

A checkpoint is written whole and synced under a hidden name. Publishing it, when the data state is on disk too, renames it
to `{save}/iter_{rollout_id:07d}/` and replaces the pointer file that names the newest one. A crash, a full disk or a kill
at any byte leaves the previous checkpoint loadable. The common part holds plain values only. Generator states go to
safetensors of their own, one file per rank. Further sets of weights that exist nowhere else, such as a refreshed reference,
are torch_dist directories in `states/` of the checkpoint.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.checkpoints import POINTER, WeightSource, iteration_directory, latest_iteration
from slime.backends.megatron_utils.generator_states import load_generators, save_generators
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.parameter_selection import as_flags, selection_of
from slime.backends.megatron_utils.value_head import leave_out_missing_head
from slime.training.model_states import ModelStates
from slime.utils.atomic_io import fsync_tree, replace_directory, write_text_atomically
from slime.utils.errors import RunError, UserError

logger = logging.getLogger(__name__)

_LAYOUT = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")


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
    temporary = _unpublished(final)
    error = _run_on_rank_zero(lambda: _fresh_directory(temporary, stored))
    if error is None:
        error = _write(args, iteration, temporary, model, optimizer, scheduler)
    for name in stored:
        if error is None:
            error = _write_state(args, _directory_of_state(temporary, name), model, states, name)
    if error is None:
        error = _run_on_rank_zero(lambda: fsync_tree(temporary))
    if error is not None:
        _run_on_rank_zero(lambda: shutil.rmtree(temporary, ignore_errors=True))
        free = shutil.disk_usage(final.parent).free / 1e6
        raise RunError(
            f"checkpoint {final} could not be written: {error}. {free:.0f} MB are free there. Older checkpoints are untouched"
        )
    return final


def publish_checkpoint(args: argparse.Namespace, iteration: int) -> None:
    """Make the checkpoint of rollout `iteration` the newest one and delete those that `--keep-last` lets go.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    show_checkpoint(args, iteration)
    forget_checkpoints(args, iteration)


def show_checkpoint(args: argparse.Namespace, iteration: int) -> None:
    """Make the checkpoint of rollout `iteration` the newest one, and keep all older ones.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    final = iteration_directory(args.save, iteration)
    try:
        replace_directory(_unpublished(final), final)
        write_text_atomically(Path(args.save) / POINTER, str(iteration))
    except OSError as error:
        raise RunError(
            f"checkpoint {final} could not be published: {error}. Older checkpoints are untouched"
        ) from error


def forget_checkpoints(args: argparse.Namespace, iteration: int) -> None:
    """Delete the checkpoints up to `iteration` that `--keep-last` lets go.

    Raises:
        RunError: the disk refuses; the message names the path.
    """
    if args.keep_last is None:
        return
    for directory in _older_checkpoints(Path(args.save), iteration)[: -args.keep_last or None]:
        try:
            _forget(args, directory)
        except OSError as error:
            raise RunError(f"the old checkpoint {directory} could not be deleted: {error}") from error


def load_checkpoint(
    args: argparse.Namespace,
    source: WeightSource,
    model: list[torch.nn.Module],
    optimizer: Any | None = None,
    scheduler: Any | None = None,
) -> int:
    """Load a Megatron checkpoint into `model` and, when given, optimizer and scheduler. Returns its iteration.

    With a scheduler the run goes on where it was, random generators included, even if the optimizer starts fresh.

    Raises:
        UserError: the directory is no loadable checkpoint, or it lacks what is asked for.
    """
    iteration = latest_iteration(source.path) if source.step is None else source.step
    directory = iteration_directory(source.path, iteration)
    if not (directory / "metadata.json").is_file():
        raise UserError(f"{directory} is no torch_dist checkpoint, although {source.path} names iteration {iteration}")
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if optimizer is not None and not common.get("has_optimizer"):
        took_steps = common.get("scheduler", {}).get("num_steps", 0) > 0
        logger.log(
            logging.WARNING if took_steps else logging.INFO,
            "%s was saved without optimizer state: the optimizer starts fresh, its schedule goes on",
            directory,
        )
        optimizer = None
    saved_selection = common.get("parameter_selection", {})
    advice = ""
    if optimizer is not None and saved_selection != selection_of(args):
        advice = (
            f"; its optimizer state was saved with {as_flags(saved_selection)}, this run has "
            f"{as_flags(selection_of(args))}: give --no-load-optim"
        )
    _load_state(args, directory, model, optimizer, advice)
    if scheduler is not None:
        if "scheduler" in common:
            _restore_schedule(scheduler, common["scheduler"])
        if not args.no_load_rng:
            if common.get("layout") == _layout(args):
                load_generators(directory)
            else:
                logger.warning("another parallel layout saved %s: random generators start from --seed", directory)
    return iteration


def _restore_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Put the schedule where it was. Megatron's own loading moves it on by that much, so it must stand at the start."""
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def load_stored_state(args: argparse.Namespace, source: WeightSource, name: str, model: list[torch.nn.Module]) -> bool:
    """Load the weights that a checkpoint of ours holds under `name`; False, and nothing done, where it holds none.

    Raises:
        UserError: they do not fit the model, or are damaged.
    """
    iteration = latest_iteration(source.path) if source.step is None else source.step
    directory = _directory_of_state(iteration_directory(source.path, iteration), name)
    if not (directory / "metadata.json").is_file():
        return False
    _load_state(args, directory, model, None)
    return True


def _load_state(
    args: argparse.Namespace,
    directory: Path,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    advice: str = "",
) -> None:
    state = _sharded_state(args, model, optimizer, is_loading=True)
    strict = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
    try:
        with torch.no_grad():
            chunks = _chunks_by_key(model)
            headless = [key for key in chunks if leave_out_missing_head(state[key], directory)]
            loaded = dist_checkpointing.load(state, str(directory), _load_strategy(args, directory), strict=strict)
            for key, chunk in chunks.items():
                unwrap_model(chunk).load_state_dict(loaded[key], strict=key not in headless)
            if optimizer is not None:
                optimizer.load_state_dict(loaded["optimizer"])
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError, OSError) as error:
        raise UserError(
            f"{directory} cannot be loaded into the model that the flags describe; it is damaged or of another shape "
            f"({_describe(error)[:500]}){advice}"
        ) from error


def _write(
    args: argparse.Namespace,
    iteration: int,
    directory: Path,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
) -> str | None:
    """Write all parts; the first error of any rank, or None."""
    error = None
    try:
        state = _sharded_state(args, model, optimizer if _saves_optimizer(args, scheduler) else None, is_loading=False)
        state.update(_common_state(args, iteration, scheduler))
        dist_checkpointing.save(state, str(directory), _save_strategy(args))
        if not getattr(args, "no_save_rng", False):
            save_generators(directory)
    except (Exception, CheckpointException) as cause:
        # Above all a full disk, which torch and safetensors report as errors of their own. Whatever it is, the other ranks
        # wait to hear of it.
        logger.debug("writing %s failed", directory, exc_info=True)
        error = _describe(cause)
    return _first_error(error)


def _write_state(
    args: argparse.Namespace, directory: Path, model: list[torch.nn.Module], states: ModelStates, name: str
) -> str | None:
    """Write the weights of the state `name`; the first error of any rank, or None."""
    error = None
    try:
        with states(name):
            state = _sharded_state(args, model, None, is_loading=False)
            dist_checkpointing.save(state, str(directory), _save_strategy(args))
    except (Exception, CheckpointException) as cause:
        logger.debug("writing %s failed", directory, exc_info=True)
        error = _describe(cause)
    return _first_error(error)


def _describe(cause: BaseException) -> str:
    """An error of the writer in one line; of what torch gathered from several ranks the first, without its traceback."""
    if isinstance(cause, CheckpointException) and cause.failures:
        rank, (first, _) = next(iter(cause.failures.items()))
        return f"rank {rank}: {_describe(first)}"
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def _save_strategy(args: argparse.Namespace) -> Any:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if getattr(args, "ckpt_fully_parallel_save", True):
        # What data-parallel ranks hold alike is written by all of them, a share each.
        return FullyParallelSaveStrategyWrapper(strategy, _replicas())
    return strategy


def _load_strategy(args: argparse.Namespace, directory: Path) -> Any:
    strategy = get_default_load_sharded_strategy(str(directory))
    if getattr(args, "ckpt_fully_parallel_load", True):
        algorithm = getattr(args, "ckpt_fully_parallel_load_exchange_algo", "broadcast")
        return FullyParallelLoadStrategyWrapper(strategy, _replicas(), exchange_algo=algorithm)
    return strategy


def _replicas() -> dist.ProcessGroup:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def _sharded_state(
    args: argparse.Namespace, model: list[torch.nn.Module], optimizer: Any | None, *, is_loading: bool
) -> dict[str, Any]:
    memory_efficient = getattr(args, "distrib_optim_fully_reshardable_mem_efficient", False)
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": memory_efficient,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": _replicas(),
    }
    state: dict[str, Any] = {
        key: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for key, chunk in _chunks_by_key(model).items()
    }
    if optimizer is not None:
        described = dict(state)
        if selection_of(args):
            # Megatron stacks the layers into one tensor, in which those that are not trained would be missing.
            metadata["non_homogeneous_layers"] = True
            described = {
                key: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
                for key, chunk in _chunks_by_key(model).items()
            }
        state["optimizer"] = optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=metadata)
    return state


def _chunks_by_key(model: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Where a rank's chunks stand in its state. On disk tensors go by their place in the model, whichever chunk has them."""
    return {"model" if len(model) == 1 else f"model{index}": chunk for index, chunk in enumerate(model)}


def _common_state(args: argparse.Namespace, iteration: int, scheduler: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "iteration": iteration,
        "scheduler": scheduler.state_dict(),
        "has_optimizer": _saves_optimizer(args, scheduler),
        "layout": _layout(args),
        "parameter_selection": selection_of(args),
    }


def _saves_optimizer(args: argparse.Namespace, scheduler: Any) -> bool:
    """Before its first step an optimizer has no state, and nothing is lost: one that starts fresh is the same."""
    return not args.no_save_optim and scheduler.num_steps > 0


def _layout(args: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(args, name) for name in _LAYOUT}


def _fresh_directory(directory: Path, stored: Sequence[str]) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for name in stored:
        _directory_of_state(directory, name).mkdir(parents=True)


def _directory_of_state(checkpoint: Path, name: str) -> Path:
    return checkpoint / "states" / name


def _unpublished(final: Path) -> Path:
    return final.with_name(f".{final.name}.writing")


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
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((found for found in errors if found is not None), None)


def _older_checkpoints(save: Path, newest: int) -> list[Path]:
    found = [path for path in save.glob("iter_*") if re.fullmatch(r"iter_\d{7}", path.name)]
    return sorted(path for path in found if int(path.name.removeprefix("iter_")) <= newest)


def _forget(args: argparse.Namespace, directory: Path) -> None:
    """Delete a checkpoint with its data state and, where every save has an export of its own, its export."""
    iteration = int(directory.name.removeprefix("iter_"))
    shutil.rmtree(directory)
    shutil.rmtree(Path(args.save) / "rollout" / f"global_dataset_state_dict_{iteration}", ignore_errors=True)
    if args.save_hf is not None and "{rollout_id" in args.save_hf:
        shutil.rmtree(args.save_hf.format(rollout_id=iteration), ignore_errors=True)
    logger.info("deleted %s (--keep-last)", directory)
