"""What checkpoints of all backends have in common: a hidden directory to begin with, errors of one rank that all hear of, and
states of random generators, in one safetensors file per rank, so that no pickle is needed.

And a save that ranks write themselves, one part after the other, while nobody trains.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from slime.training.checkpoint_publication import unpublished
from slime.utils.device import get_accelerator
from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import free_room, fsync_tree
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


def write_whole(
    final: Path, begin: Callable[[], None], parts: Sequence[Callable[[], None]], complete: Callable[[], None]
) -> WrittenCheckpoint:
    """Write the checkpoint that will be `final`, under its hidden name. Collective; nothing is left to wait for.

    Args:
        begin, complete: called on rank 0 alone, before all parts and after them.
        parts: called on all ranks, in this order, up to the first that any rank fails in. A rank that fails between two
            collectives of a part leaves the others to the limit of their wait (--checkpoint-write-timeout).
    """
    directory, error = unpublished(final), run_on_rank_zero(begin)
    for part in parts:
        error = error or first_error(_error_of(part))
    error = error or run_on_rank_zero(complete) or run_on_rank_zero(lambda: fsync_tree(directory))
    if error is not None:
        run_on_rank_zero(lambda: shutil.rmtree(directory, ignore_errors=True))
    return WrittenCheckpoint(final, error)


class WrittenCheckpoint:
    """A checkpoint that is on the disk, or of which a rank could not write its part; an `UnfinishedSave`."""

    bytes_on_host = 0

    def __init__(self, final: Path, error: str | None) -> None:
        self._final, self._error = final, error

    def has_ended(self) -> bool:
        return True

    def finish(self) -> Path:
        if self._error is None:
            return self._final
        raise RunError(
            f"checkpoint {self._final} could not be written: {self._error}. {free_room(self._final.parent)}. Older checkpoints "
            "are untouched"
        )


def read_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill the tensors with those of a directory of torch.distributed.checkpoint, by name. Collective.

    Raises:
        UserError: they are not there, or of another shape.
    """
    try:
        dcp.load(tensors, checkpoint_id=directory)
    except (Exception, CheckpointException) as error:
        raise UserError(
            f"{directory} cannot be loaded into the model that the flags describe; it is damaged or of another shape "
            f"({describe(error)[:500]})"
        ) from error


def directory_of_state(checkpoint: Path, name: str) -> Path:
    """Where the further set of weights `name` lies in a checkpoint."""
    return checkpoint / "states" / name


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


def _error_of(part: Callable[[], None]) -> str | None:
    try:
        part()
    except (Exception, CheckpointException) as cause:
        logger.debug("a part of the checkpoint could not be written", exc_info=True)
        return describe(cause.__cause__ or cause)
    return None


def save_generators(directory: Path, further: Mapping[str, torch.Tensor]) -> None:
    """Write the states of this rank's generators: torch's, and `further` ones of the backend's own (uint8, by name)."""
    states = {**{name: state.cpu() for name, state in further.items()}, "torch": torch.get_rng_state()}
    of_device = get_accelerator().generator_state()
    if of_device is not None:
        states[_DEVICE] = of_device
    save_file(states, _file(directory))


def load_generators(directory: Path) -> dict[str, torch.Tensor]:
    """Put this rank's generators where they were; only for the parallel layout that saved them. Returns the further ones.

    Raises:
        UserError: their file is damaged.
    """
    if not _file(directory).is_file():
        logger.warning("%s was saved without random generators: they start from --seed", directory)
        return {}
    try:
        states = load_file(_file(directory))
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{_file(directory)} cannot be read ({error}); copy the checkpoint again, or give --no-load-rng to start random "
            "generators from --seed"
        ) from error
    seed = _seed()
    torch.set_rng_state(states.pop("torch"))
    if _DEVICE in states:
        get_accelerator().set_generator_state(states.pop(_DEVICE))
    if dist.get_rank() == 0 and _seed() != seed:
        logger.warning(
            "%s: random generators go on from there, where --seed %d had begun them, and not from the --seed of this start, "
            "which engines alone get; --no-load-rng starts them from it",
            directory,
            _seed(),
        )
    return states


def _seed() -> int:
    """The seed with which the generator began that a step draws from: the device's, or the host's where that has none."""
    state = get_accelerator().generator_state()
    generator = torch.Generator("cpu" if state is None else get_accelerator().current_device())
    generator.set_state(torch.get_rng_state() if state is None else state)
    return generator.initial_seed()


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Whatever the block draws from torch's generators of this rank, they are where they were behind it."""
    accelerator = get_accelerator()
    on_host, of_device = torch.get_rng_state(), accelerator.generator_state()
    yield
    torch.set_rng_state(on_host)
    if of_device is not None:
        accelerator.set_generator_state(of_device)


def _file(directory: Path) -> Path:
    return directory / f"rng_{dist.get_rank():05d}.safetensors"
