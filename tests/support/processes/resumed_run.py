"""A run in any layout and precision that stops at a checkpoint, and the run that resumes from it by a rank's normal start."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.checkpoints import WeightSource
from tests.support.processes.layout_steps import LayoutRun, layout_args

# The loss scale fits the tiny model, and one step of the resumed run completes the window.
FLOAT16 = {
    "fp16": True, "initial_loss_scale": 2.0**10, "min_loss_scale": 1.0, "loss_scale_window": 3, "hysteresis": 2,
}  # fmt: skip


def resumable_args(hf_dir: Any, save: Any, **overrides: Any) -> SimpleNamespace:
    """The arguments of `layout_args` for a run that saves to `save`."""
    sizes = (
        "data_parallel_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    )
    world_size = 1
    for name in sizes:
        world_size *= overrides.get(name, 1)
    checkpoint = {
        "save": str(save), "save_hf": None, "no_save_optim": False, "no_load_optim": False, "no_load_rng": False,
        "keep_last": None, "world_size": world_size, "log_level": "WARNING", "lr": 1e-5, "clip_grad": 1.0,
    }  # fmt: skip
    return layout_args(hf_dir, **{**checkpoint, **overrides})


def changed(args: SimpleNamespace, **overrides: Any) -> SimpleNamespace:
    """A copy of `args` with other values."""
    return SimpleNamespace(**{**vars(args), **overrides})


class ResumableRun(LayoutRun):
    """A run of the actor or, with `role="critic"`, of the critic, on data that the resumed run has too."""

    def prepare(self) -> None:
        if getattr(self.args, "role", "actor") == "actor":
            return super().prepare()
        from slime.training.train_step import forward_values

        self.data.update(forward_values(self.args, self.backend, self.data))
        if self.is_last_stage:
            self.data["returns"] = [torch.linspace(-0.5, 0.9, len(row)) for row in self.data["values"]]
        return None

    def step(self) -> dict[str, float]:
        from slime.training.train_step import train_one_step

        return train_one_step(self.args, self.backend, self.data, 0, 0, role=getattr(self.args, "role", "actor"))

    def save(self, iteration: int = 0) -> None:
        """Write and publish the checkpoint of `iteration`."""
        from slime.training.checkpoint_publication import publish_checkpoint

        self.backend.save(iteration).finish()
        if dist.get_rank() == 0:
            publish_checkpoint(self.args, iteration)
        dist.barrier()

    def parts(self) -> list[Any]:
        """Megatron's optimizers: of dense and of expert parameters, if they are trained."""
        return [part for part in self.optimizer.chained_optimizers if part.optimizer is not None]

    def groups(self) -> list[dict[str, Any]]:
        """All entries of the parameter groups but the parameters."""
        groups = [group for part in self.parts() for group in part.optimizer.param_groups]
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def fingerprints(self) -> dict[str, Any]:
        """The state on which the next steps depend, with tensors as digests of their bytes."""
        inner = [part.optimizer for part in self.parts()]
        masters = [p.detach() for optimizer in inner for group in optimizer.param_groups for p in group["params"]]
        moments = [t for optimizer in inner for state in optimizer.state.values() for _, t in sorted(state.items())]
        scalers = [getattr(part, "grad_scaler", None) for part in self.parts()]
        steps = [group.get("step") for group, full in zip(self.groups(), self._has_parameters(), strict=True) if full]
        return {
            "weights": digest(p.detach() for chunk in self.model for p in chunk.parameters()),
            "masters": digest(masters),
            "moments": digest(moments),
            "steps": steps,
            "rates": [(group["lr"], group["weight_decay"]) for group in self.groups()],
            "rollouts": self.scheduler.num_steps,
            "loss scale": [str(scaler.state_dict()) for scaler in scalers if scaler is not None],
        }

    def _has_parameters(self) -> list[bool]:
        return [bool(group["params"]) for part in self.parts() for group in part.optimizer.param_groups]


def digest(tensors: Any) -> str:
    """A digest of the bytes of all tensors."""
    found = hashlib.blake2b(digest_size=12)
    for tensor in tensors:
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def resumed(args: SimpleNamespace, directory: Any, data: dict[str, Any] | None = None) -> ResumableRun:
    """The run of `args` that starts from the newest checkpoint in `directory`, loaded by the backend.

    Before it loads, its model has other weights than any other run. `data` replaces its training data.
    """
    run = ResumableRun(changed(args, seed=args.seed + 77), loads=False)
    run.args = run.backend.args = args
    run.backend.load(WeightSource("megatron", str(directory), resume=True))
    run.optimizer, run.scheduler = run.backend.optimizer, run.backend.scheduler
    run.data = run.data if data is None else data
    return run


@contextlib.contextmanager
def lines_of_slime() -> Iterator[list[str]]:
    """Yields a list that collects the lines of our loggers in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("slime")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def stored_tensors(directory: Any) -> dict[str, torch.Tensor]:
    """All whole tensors of a torch_dist checkpoint, read by torch alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(directory)
    entries = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(entries, storage_reader=reader, no_dist=True)
    return entries
