"""Checkpoints of the training ranks: torch_dist directories that exist whole or not at all.

A checkpoint is written whole and synced under a hidden name. Publishing it, when the data state is on disk too, renames it
to `{save}/iter_{rollout_id:07d}/` and replaces the pointer file that names the newest one. A crash, a full disk or a kill
at any byte leaves the previous checkpoint loadable. The common part holds plain values only. Generator states go to
safetensors of their own, one file per rank.
"""

from __future__ import annotations

import argparse
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.checkpoints import POINTER, WeightSource, iteration_directory, latest_iteration
from slime.backends.megatron_utils.model_provider import unwrap_model
from slime.utils.atomic_io import fsync_tree, replace_directory, write_text_atomically
from slime.utils.errors import RunError, UserError

logger = logging.getLogger(__name__)

_LAYOUT = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")


def save_checkpoint(
    args: argparse.Namespace, iteration: int, model: list[torch.nn.Module], optimizer: Any, scheduler: Any
) -> Path:
    """Write the checkpoint of rollout `iteration`; returns the directory that it will have. Collective over all ranks.

    It is there for nobody yet: `publish_checkpoint` shows it when the data state is on disk as well.

    Raises:
        RunError: writing failed on some rank; the message names the path and the cause, and nothing was published.
    """
    final = iteration_directory(args.save, iteration)
    temporary = _unpublished(final)
    error = _run_on_rank_zero(lambda: _fresh_directory(temporary))
    if error is None:
        error = _write(args, iteration, temporary, model, optimizer, scheduler)
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
    final = iteration_directory(args.save, iteration)
    try:
        replace_directory(_unpublished(final), final)
        write_text_atomically(Path(args.save) / POINTER, str(iteration))
        if args.keep_last is not None:
            for directory in _older_checkpoints(Path(args.save), iteration)[: -args.keep_last or None]:
                _forget(args, directory)
    except OSError as error:
        raise RunError(
            f"checkpoint {final} could not be published: {error}. Older checkpoints are untouched"
        ) from error


def load_checkpoint(
    args: argparse.Namespace,
    source: WeightSource,
    model: list[torch.nn.Module],
    optimizer: Any | None = None,
    scheduler: Any | None = None,
) -> int:
    """Load a Megatron checkpoint into `model` and, when given, optimizer and scheduler. Returns its iteration.

    Raises:
        UserError: the directory is no loadable checkpoint, or it lacks what is asked for.
    """
    iteration = latest_iteration(source.path) if source.step is None else source.step
    directory = iteration_directory(source.path, iteration)
    if not (directory / "metadata.json").is_file():
        raise UserError(f"{directory} is no torch_dist checkpoint, although {source.path} names iteration {iteration}")
    common = dist_checkpointing.load_common_state_dict(str(directory))
    if optimizer is not None and not common.get("has_optimizer"):
        logger.warning("%s was saved without optimizer: optimizer and scheduler start fresh", directory)
        optimizer = scheduler = None
    if optimizer is not None and scheduler is None:
        raise ValueError("optimizer state is loaded together with the scheduler's")
    _load_state(args, directory, common, model, optimizer, scheduler)
    if optimizer is not None and not args.no_load_rng:
        _load_generators(directory, common, args)
    return iteration


def _load_state(
    args: argparse.Namespace,
    directory: Path,
    common: dict[str, Any],
    model: list[torch.nn.Module],
    optimizer: Any | None,
    scheduler: Any | None,
) -> None:
    state = _sharded_state(args, model, optimizer, is_loading=True)
    strict = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
    try:
        with torch.no_grad():
            loaded = dist_checkpointing.load(state, str(directory), _load_strategy(args, directory), strict=strict)
            unwrap_model(model[0]).load_state_dict(loaded["model"])
            if optimizer is not None:
                optimizer.load_state_dict(loaded["optimizer"])
                scheduler.load_state_dict(common["scheduler"])
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError, OSError) as error:
        raise UserError(
            f"{directory} cannot be loaded into the model that the flags describe; it is damaged or of another shape "
            f"({type(error).__name__}: {' '.join(str(error).split())[:500]})"
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
        state = _sharded_state(args, model, None if args.no_save_optim else optimizer, is_loading=False)
        state.update(_common_state(args, iteration, scheduler))
        dist_checkpointing.save(state, str(directory), _save_strategy(args))
        if not getattr(args, "no_save_rng", False):
            save_file(_generator_states(), directory / _generator_file())
    except (Exception, CheckpointException) as cause:
        # Above all a full disk, which torch and safetensors report as errors of their own. Whatever it is, the other ranks
        # wait to hear of it.
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
    model_state = unwrap_model(model[0]).sharded_state_dict(metadata=metadata)
    state: dict[str, Any] = {"model": model_state}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
    return state


def _common_state(args: argparse.Namespace, iteration: int, scheduler: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "iteration": iteration,
        "scheduler": scheduler.state_dict(),
        "has_optimizer": not args.no_save_optim,
        "layout": {name: getattr(args, name) for name in _LAYOUT},
    }


def _generator_states() -> dict[str, torch.Tensor]:
    states = {"torch": torch.get_rng_state()}
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states.update({f"tracker.{name}": state.cpu() for name, state in tracker.items()})
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _load_generators(directory: Path, common: dict[str, Any], args: argparse.Namespace) -> None:
    layout = {name: getattr(args, name) for name in _LAYOUT}
    if common.get("layout") != layout:
        logger.warning("the parallel layout changed since %s was saved: random generators start from --seed", directory)
        return
    if not (directory / _generator_file()).is_file():
        logger.warning("%s was saved without random generators: they start from --seed", directory)
        return
    states = load_file(directory / _generator_file())
    torch.set_rng_state(states["torch"])
    prefix = "tracker."
    tracker = {name.removeprefix(prefix): state for name, state in states.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def _generator_file() -> str:
    return f"rng_{dist.get_rank():05d}.safetensors"


def _fresh_directory(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


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
