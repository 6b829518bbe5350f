"""States of a rank's random generators in a checkpoint: torch's, and those that Megatron keeps for tensor-parallel regions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron.core import tensor_parallel

from slime.training import checkpoint_parts

_TRACKER = "tracker."


def save_generators(directory: Path) -> None:
    """Write the states of this rank's generators."""
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    checkpoint_parts.save_generators(directory, {_TRACKER + name: state for name, state in tracker.items()})


def load_generators(directory: Path) -> None:
    """Restore this rank's generators; possible only in the parallel layout that saved them."""
    states = checkpoint_parts.load_generators(directory)
    if states:
        tracker = {name.removeprefix(_TRACKER): state for name, state in states.items()}
        tensor_parallel.get_cuda_rng_tracker().set_states(tracker)


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """After the block this rank's generators have the state from before it, whatever the block draws."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    with checkpoint_parts.kept_generators():
        yield
    tracker.set_states(states)
