"""Reading a checkpoint into a model, in the layout that saved it or in another one."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch.distributed.checkpoint.api import CheckpointException

from slime.arguments.checkpoints import WeightSource
from slime.arguments.config_files.role_config import CRITIC
from slime.backends.megatron_utils.checkpoint.gathered_state import (
    has_float32_copies,
    prefix_in,
    put_copies,
    putting_copies,
)
from slime.backends.megatron_utils.checkpoint.optimizer_state import (
    groups_in,
    is_stateless,
    leave_out_groups,
    load_optimizer,
    other_kind,
    put_loss_scales,
    put_settings,
    trained_parts,
)
from slime.backends.megatron_utils.checkpoint.stored import Stored, other_settings, other_sizes, read_stored
from slime.backends.megatron_utils.checkpoint.writing import (
    chunks_by_key,
    has_layout,
    replicas,
    sharded_state,
)
from slime.backends.megatron_utils.generator_states import load_generators
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.parameter_selection import as_flags, selection_of
from slime.backends.megatron_utils.value_head import has_stored_head, leave_out_missing_head
from slime.training.checkpoint_parts import describe, directory_of_state
from slime.training.parameter_schedule import restore_schedule
from slime.utils.checkpoint_directory import iteration_directory, latest_iteration, require_backend
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# A weight, not an entry of the optimizer's state, whose name has another one in front.
_MISSING_PREDICTION_LAYER = re.compile(r"(?<![\w.])mtp\.layers\.\S+ from model not in state dict")
_PREDICTION_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


def load_checkpoint(
    args: argparse.Namespace,
    source: WeightSource,
    model: list[torch.nn.Module],
    optimizer: Any | None = None,
    scheduler: Any | None = None,
) -> int:
    """Load a Megatron checkpoint into `model` and, when given, optimizer and scheduler. Returns its iteration.

    The optimizer's float32 copies of 16-bit weights, which a stateless Adam has too, and the loss scale are those of the
    checkpoint. The copies are made of the loaded weights where it has none, and with `--no-load-optim`; the optimizer then
    starts fresh, and so it does where nothing is resumed. `--load-main-params-from-ckpt` takes the copies all the same, or else
    makes them of weights that the checkpoint has in float32. Settings, and the curves of the schedule, are this run's unless
    `--use-checkpoint-opt-param-scheduler` asks for those of the checkpoint.

    With a scheduler the run goes on where it was, random generators included, even if the optimizer starts fresh.

    Raises:
        UserError: the directory is no loadable checkpoint, is of another model, or lacks what is asked for.
    """
    require_backend("megatron", source.kind, source.path, source.step)
    iteration = latest_iteration(source.path) if source.step is None else source.step
    directory = iteration_directory(source.path, iteration)
    if not (directory / "metadata.json").is_file():
        raise UserError(
            f"{directory} is no torch_dist checkpoint, although {source.path} names iteration {iteration}; Megatron-LM turns "
            "its older format into this one with --ckpt-convert-format torch_dist"
        )
    common, stored = dist_checkpointing.load_common_state_dict(str(directory)), read_stored(directory)
    _require_same_sizes(args, directory, common, stored)
    _compare_settings(args, directory, common, stored, resumes=source.resume)
    if optimizer is None:
        _load_state(args, directory, stored, model, None)
    else:
        if source.resume and args.use_checkpoint_opt_param_scheduler:
            # First: whether SGD has a momentum to load is one of them.
            put_settings(optimizer, _settings_of(common))
        _load_with_optimizer(args, directory, common, stored, model, optimizer, resume=source.resume)
    if scheduler is not None:
        if "scheduler" in common:
            for line in restore_schedule(args, scheduler, common["scheduler"]):
                _tell(logging.WARNING, line)
        if not args.no_load_rng:
            if has_layout(args, common.get("layout")):
                load_generators(directory)
            else:
                _tell(
                    logging.WARNING, f"another parallel layout saved {directory}: random generators start from --seed"
                )
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
    stored = read_stored(directory)
    _require_same_sizes(args, directory, {}, stored)
    _load_state(args, directory, stored, model, None)
    return True


def _require_same_sizes(args: argparse.Namespace, directory: Path, common: dict[str, Any], stored: Stored) -> None:
    """Refuse a checkpoint of another model where all shapes fit: rows would have another meaning, or be missing."""
    differences = other_sizes(args, common, stored)
    if differences:
        raise UserError(
            f"{directory} is of another model than the flags describe: {'; '.join(differences)}; give the flags that it was "
            "saved with, or a checkpoint of this model"
        )


def _compare_settings(
    args: argparse.Namespace, directory: Path, common: dict[str, Any], stored: Stored, *, resumes: bool
) -> None:
    """Tell where the weights would compute something else than they were trained to, and which layers a run that resumes leaves
    out. A run that does not resume may mean it."""
    differences = other_settings(args, common)
    if differences and resumes:
        raise UserError(
            f"{directory} was trained with other flags of the model: {'; '.join(differences)}; give the flags that it was "
            "saved with, or begin a new run with its weights: --finetune"
        )
    if differences:
        _tell(logging.WARNING, f"{directory}: its weights compute something else here: {'; '.join(differences)}")
    there = len({found[1] for found in map(_PREDICTION_LAYER.match, stored.weights) if found is not None})
    here = args.mtp_num_layers or 0
    if resumes and there > here:
        left_out = f"--mtp-num-layers {here} leaves some out: later checkpoints lack them"
        _tell(logging.WARNING, f"{directory} has {there} layers for multi-token prediction, and {left_out}")


def _load_with_optimizer(
    args: argparse.Namespace,
    directory: Path,
    common: dict[str, Any],
    stored: Stored,
    model: list[torch.nn.Module],
    optimizer: Any,
    *,
    resume: bool,
) -> None:
    """Load the weights, and of the optimizer's state what there is and this run wants."""
    has_copies, wants = has_float32_copies(optimizer), resume and not args.no_load_optim
    loads_all = wants and bool(common.get("has_optimizer")) and not is_stateless(optimizer)
    differences = other_kind(args, stored) if loads_all else []
    if differences:
        raise UserError(
            f"the optimizer state in {directory} has no place in this run's optimizer: {'; '.join(differences)}; give the "
            "flags that it was saved with, or --no-load-optim: the optimizer then starts fresh, and its schedule goes on"
        )
    takes = wants or args.load_main_params_from_ckpt and _has_all_copies(args, common, stored)
    prefix = prefix_in(stored.shapes) if takes and has_copies and not loads_all else None
    advice = (
        _advice(args, common) if wants else ". If only float32 copies do not fit, drop --load-main-params-from-ckpt"
    )
    of_optimizer = optimizer if loads_all or prefix else None
    makes_copies = has_copies and not loads_all and prefix is None
    widens = makes_copies and args.load_main_params_from_ckpt and stored.has_float32_weights
    copied_by = optimizer if widens else None
    _load_state(args, directory, stored, model, of_optimizer, advice, float32_prefix=prefix, copied_by=copied_by)
    if wants:
        put_loss_scales(optimizer, common.get("loss_scales", ()))
    if loads_all:
        return
    level = logging.WARNING if common.get("scheduler", {}).get("num_steps", 0) > 0 else logging.INFO
    if wants and not is_stateless(optimizer):
        _tell(level, f"{directory} was saved without optimizer state: the optimizer starts fresh, its schedule goes on")
    if prefix is None and not widens:
        optimizer.reload_model_params()
        if has_copies:
            reason = "it holds no others"
            if not (wants or args.load_main_params_from_ckpt):
                reason = "--no-load-optim takes no others"
            elif prefix_in(stored.shapes) is not None:
                reason = "those that it holds are of a run that trained other weights"
            _tell(
                level,
                f"the optimizer's float32 copies of the weights are made of the 16-bit weights in {directory}, since {reason}: "
                "updates too small for 16 bits are lost",
            )
        elif prefix_in(stored.shapes) is not None and not stored.has_float32_weights:
            _tell(
                level,
                f"the float32 weights are made of the 16-bit ones in {directory}, not of its optimizer.s copies, which are "
                "float32: updates too small for 16 bits are lost. --bf16 goes on with those copies",
            )


def _has_all_copies(args: argparse.Namespace, common: dict[str, Any], stored: Stored) -> bool:
    """Whether the run that saved the checkpoint trained all that this one trains, as far as it is there."""
    is_whole = args.role != CRITIC or has_stored_head(stored.weights)
    return is_whole and common.get("parameter_selection", {}) == selection_of(args)


def _tell(level: int, line: str) -> None:
    if dist.get_rank() == 0:
        logger.log(level, line)


def _advice(args: argparse.Namespace, common: dict[str, Any]) -> str:
    """The way out where optimizer state cannot be loaded."""
    saved = common.get("parameter_selection", {})
    if saved == selection_of(args):
        return ". If only the optimizer state does not fit, --no-load-optim takes the weights"
    return (
        f"; its optimizer state was saved with {as_flags(saved)}, this run has {as_flags(selection_of(args))}: give "
        "--no-load-optim"
    )


def _settings_of(common: dict[str, Any]) -> list[dict[str, Any]]:
    """Settings of the parameter groups of a checkpoint; older ones hold them with the optimizer's state only."""
    if "parameter_groups" in common:
        return common["parameter_groups"]
    return groups_in(common["optimizer"]) if common.get("has_optimizer") else []


def _load_state(
    args: argparse.Namespace,
    directory: Path,
    stored: Stored,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    advice: str = "",
    *,
    float32_prefix: str | None = None,
    copied_by: Any | None = None,
) -> None:
    """Load a checkpoint into the model, and into the optimizer unless that is None.

    Args:
        advice: what the message of an error ends with, if the optimizer was to be loaded.
        float32_prefix: as of `sharded_state`.
        copied_by: the optimizer whose float32 copies are made of the weights as they are stored.

    Raises:
        UserError: the checkpoint is damaged, or is one of another model.
    """
    state = sharded_state(args, model, optimizer, stored=stored, float32_prefix=float32_prefix)
    if "optimizer" in state:
        leave_out_groups(state["optimizer"])
    try:
        with torch.no_grad():
            _load_described(args, directory, state, stored, model, optimizer, copied_by)
    except UserError:
        raise
    except (CheckpointingException, CheckpointException, RuntimeError, KeyError, ValueError, OSError) as error:
        reason = describe(error)
        if _MISSING_PREDICTION_LAYER.search(reason):
            raise UserError(
                f"{directory} has fewer layers for multi-token prediction than --mtp-num-layers {args.mtp_num_layers}: give "
                "the number that it was saved with (0 for none), or start from a Hugging Face directory: those that it lacks "
                "are made with random weights"
            ) from error
        raise UserError(
            f"{directory} cannot be loaded into the model that the flags describe; it is damaged or of another shape "
            f"({reason[:500]}){advice if optimizer is not None else ''}"
        ) from error


def _load_described(
    args: argparse.Namespace,
    directory: Path,
    state: dict[str, Any],
    stored: Stored,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    copied_by: Any | None,
) -> None:
    """Load what `state` describes (`sharded_state`), and put it where it belongs; arguments as of `_load_state`."""
    chunks = chunks_by_key(model)
    headless = [key for key in chunks if leave_out_missing_head(state[key], stored.weights)]
    weights = {key: _ask_in_float32(state[key]) for key in chunks} if copied_by is not None else {}
    # Nobody takes the names that Megatron can return, so it logs them in both cases.
    strategy, strict = _load_strategy(args, directory), args.dist_ckpt_strictness.replace("return_", "log_")
    loaded = dist_checkpointing.load(state, str(directory), strategy, strict=strict)
    for key, chunk in chunks.items():
        unwrap_model(chunk).load_state_dict(loaded[key], strict=key not in headless)
    if "optimizer" in state:
        load_optimizer(optimizer, loaded["optimizer"], directory)
    elif "float32_copies" in state:
        put_copies(trained_parts(optimizer), loaded.get("float32_copies", {}))
    if copied_by is None:
        return
    # Weights that the checkpoint lacks have copies too, which are made of the model's.
    copied_by.reload_model_params()
    with putting_copies(copied_by) as put:
        for key, of_chunk in weights.items():
            for name, weight in of_chunk.items():
                put(weight, loaded[key][name])


def _ask_in_float32(described: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Have a chunk's description bring the weights of 16 bits in host memory, and in float32. Gives these, by name: all of
    them, because layers that are stored as one tensor must be asked for in one dtype, whichever are trained."""
    found = {}
    for name, entry in described.items():
        weight = entry.data if isinstance(entry, ShardedTensor | ShardedTensorFactory) else None
        if weight is not None and weight.is_floating_point() and weight.dtype.itemsize == 2:
            found[name], entry.data = weight, torch.empty(weight.shape, dtype=torch.float32)
            if isinstance(entry, ShardedTensor):
                entry.dtype = torch.float32
    return found


def _load_strategy(args: argparse.Namespace, directory: Path) -> Any:
    strategy = get_default_load_sharded_strategy(str(directory))
    if args.ckpt_fully_parallel_load:
        algorithm = args.ckpt_fully_parallel_load_exchange_algo
        return FullyParallelLoadStrategyWrapper(strategy, replicas(), exchange_algo=algorithm)
    return strategy
