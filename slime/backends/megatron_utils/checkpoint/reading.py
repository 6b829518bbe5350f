"""Reading a checkpoint into a model, in the layout that saved it or in another one."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.checkpoints import WeightSource, iteration_directory, latest_iteration
from slime.backends.megatron_utils.checkpoint.sharded_state import (
    chunks_by_key,
    describe,
    directory_of_state,
    layout_of,
    replicas,
    sharded_state,
)
from slime.backends.megatron_utils.generator_states import load_generators
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.parameter_selection import as_flags, selection_of
from slime.backends.megatron_utils.value_head import leave_out_missing_head
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# A weight, not an entry of the optimizer's state, whose name has another one in front.
_MISSING_PREDICTION_LAYER = re.compile(r"(?<![\w.])mtp\.layers\.\S+ from model not in state dict")


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
            if common.get("layout") == layout_of(args):
                load_generators(directory)
            else:
                logger.warning("another parallel layout saved %s: random generators start from --seed", directory)
    return iteration


def load_stored_state(args: argparse.Namespace, source: WeightSource, name: str, model: list[torch.nn.Module]) -> bool:
    """Load the weights that a checkpoint of ours holds under `name`; False, and nothing done, where it holds none.

    Raises:
        UserError: they do not fit the model, or are damaged.
    """
    iteration = latest_iteration(source.path) if source.step is None else source.step
    directory = directory_of_state(iteration_directory(source.path, iteration), name)
    if not (directory / "metadata.json").is_file():
        return False
    _load_state(args, directory, model, None)
    return True


def _restore_schedule(scheduler: Any, state: dict[str, Any]) -> None:
    """Put the schedule where it was. Megatron's own loading moves it on by that much, so it must stand at the start."""
    scheduler.num_steps = 0
    scheduler.load_state_dict(state)


def _load_state(
    args: argparse.Namespace,
    directory: Path,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    advice: str = "",
) -> None:
    state = sharded_state(args, model, optimizer, is_loading=True)
    strict = getattr(args, "dist_ckpt_strictness", "assume_ok_unexpected")
    try:
        with torch.no_grad():
            chunks = chunks_by_key(model)
            headless = [key for key in chunks if leave_out_missing_head(state[key], directory)]
            loaded = dist_checkpointing.load(state, str(directory), _load_strategy(args, directory), strict=strict)
            for key, chunk in chunks.items():
                unwrap_model(chunk).load_state_dict(loaded[key], strict=key not in headless)
            if optimizer is not None:
                optimizer.load_state_dict(loaded["optimizer"])
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError, OSError) as error:
        reason = describe(error)
        if _MISSING_PREDICTION_LAYER.search(reason):
            raise UserError(
                f"{directory} has fewer layers for multi-token prediction than --mtp-num-layers {args.mtp_num_layers}: give "
                "the number that it was saved with (0 for none), or start from a Hugging Face directory: those that it lacks "
                "are made with random weights"
            ) from error
        raise UserError(
            f"{directory} cannot be loaded into the model that the flags describe; it is damaged or of another shape "
            f"({reason[:500]}){advice}"
        ) from error


def _load_strategy(args: argparse.Namespace, directory: Path) -> Any:
    strategy = get_default_load_sharded_strategy(str(directory))
    if getattr(args, "ckpt_fully_parallel_load", True):
        algorithm = getattr(args, "ckpt_fully_parallel_load_exchange_algo", "broadcast")
        return FullyParallelLoadStrategyWrapper(strategy, replicas(), exchange_algo=algorithm)
    return strategy
