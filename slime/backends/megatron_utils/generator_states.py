"""States of a rank's random generators in a checkpoint: one safetensors file per rank, so that no pickle is needed."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from safetensors.torch import load_file, save_file

from slime.utils.device import get_accelerator

logger = logging.getLogger(__name__)

# Of torch's own generators apart from those that Megatron keeps for tensor-parallel regions.
_TRACKER = "tracker."
_DEVICE = "cuda"


def save_generators(directory: Path) -> None:
    """Write the states of this rank's generators."""
    states = {"torch": torch.get_rng_state()}
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    states.update({_TRACKER + name: state.cpu() for name, state in tracker.items()})
    of_device = get_accelerator().generator_state()
    if of_device is not None:
        states[_DEVICE] = of_device
    save_file(states, _file(directory))


def load_generators(directory: Path) -> None:
    """Put this rank's generators where they were; only for the parallel layout that saved them."""
    if not _file(directory).is_file():
        logger.warning("%s was saved without random generators: they start from --seed", directory)
        return
    states = load_file(_file(directory))
    torch.set_rng_state(states["torch"])
    tracker = {name.removeprefix(_TRACKER): state for name, state in states.items() if name.startswith(_TRACKER)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
    if _DEVICE in states:
        get_accelerator().set_generator_state(states[_DEVICE])


def _file(directory: Path) -> Path:
    return directory / f"rng_{dist.get_rank():05d}.safetensors"
