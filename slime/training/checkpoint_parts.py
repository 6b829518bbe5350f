"""What checkpoints of all backends have in common: a hidden directory to begin with, errors of one rank that all hear of, and
states of random generators, in one safetensors file per rank, so that no pickle is needed.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from slime.utils.device import get_accelerator
from slime.utils.errors import RunError
from slime.weights.push import write_weight_version

logger = logging.getLogger(__name__)

_DEVICE = "cuda"


def fresh_directory(directory: Path, stored: Sequence[str], weight_version: int | None) -> None:
    """Make `directory` anew, with places for the further sets of weights `stored` and a note of the weight version."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    for name in stored:
        directory_of_state(directory, name).mkdir(parents=True)
    if weight_version is not None:
        write_weight_version(directory, weight_version)


def directory_of_state(checkpoint: Path, name: str) -> Path:
    """Where the further set of weights `name` lies in a checkpoint."""
    return checkpoint / "states" / name


def free_room(directory: Path) -> str:
    """How much is free on the disk of `directory`, in a sentence for an error."""
    try:
        return f"{shutil.disk_usage(directory).free / 1e6:.0f} MB are free there"
    except OSError as error:
        # Above all: there is no such directory.
        return str(error)


def run_on_rank_zero(action: Callable[[], Any]) -> str | None:
    """Run `action` on rank 0; its OSError as text on every rank, or None. Collective."""
    error = None
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as cause:
            error = str(cause)
    return first_error(error)


def first_error(error: str | None) -> str | None:
    """The first error of any rank. Collective."""
    return exchange(None, error)[1]


def exchange(value: Any, error: str | None) -> tuple[list[Any], str | None]:
    """Every rank's value, and the first error of any rank. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (value, error))
    return [value for value, _ in gathered], next((found for _, found in gathered if found is not None), None)


def describe(cause: BaseException) -> str:
    """An error of the writer in one line; of what torch gathered from several ranks the first, without its traceback."""
    if isinstance(cause, RunError):
        return str(cause)
    if isinstance(cause, CheckpointException) and cause.failures:
        rank, (first, _) = next(iter(cause.failures.items()))
        return f"rank {rank}: {describe(first)}"
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def save_generators(directory: Path, further: Mapping[str, torch.Tensor]) -> None:
    """Write the states of this rank's generators: torch's, and `further` ones of the backend's own (uint8, by name)."""
    states = {**{name: state.cpu() for name, state in further.items()}, "torch": torch.get_rng_state()}
    of_device = get_accelerator().generator_state()
    if of_device is not None:
        states[_DEVICE] = of_device
    save_file(states, _file(directory))


def load_generators(directory: Path) -> dict[str, torch.Tensor]:
    """Put this rank's generators where they were; only for the parallel layout that saved them. Returns the further ones."""
    if not _file(directory).is_file():
        logger.warning("%s was saved without random generators: they start from --seed", directory)
        return {}
    states = load_file(_file(directory))
    torch.set_rng_state(states.pop("torch"))
    if _DEVICE in states:
        get_accelerator().set_generator_state(states.pop(_DEVICE))
    return states


def _file(directory: Path) -> Path:
    return directory / f"rng_{dist.get_rank():05d}.safetensors"
