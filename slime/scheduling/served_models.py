"""The engines that a run shall have, as data: each model is behind a router of its own and has groups of equal engines."""

from dataclasses import dataclass, field
from typing import Any

from slime.estimates.layout import ParallelLayout

WORKER_TYPES = ("regular", "prefill", "decode", "placeholder", "encoder")


@dataclass(frozen=True)
class ServerGroup:
    """Equal engines of one model. A `placeholder` keeps its GPUs free of engines.

    Attributes:
        num_gpus: GPUs of the whole group, above 0.
        overrides: server arguments of these engines, by field name; they win over `--sglang-*`.
        where: `file:line` where the group is described; empty if flags describe it.
        model_path: that of its model; None means --hf-checkpoint.
        update_weights: whether its model receives the trainer's weights.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: dict[str, Any]
    where: str = field(default="", compare=False)
    model_path: str | None = field(default=None, compare=False)
    update_weights: bool = field(default=True, compare=False)

    @property
    def num_engines(self) -> int:
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine


@dataclass(frozen=True)
class ModelServing:
    """A model behind a router of its own; `update_weights`: it receives the trainer's weights."""

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[ServerGroup, ...]
    where: str = field(default="", compare=False)


def node_parts(first: int, size: int, gpus_per_node: int) -> list[int]:
    """How many of the `size` GPUs that begin with GPU `first` of the run lie on each node, in the order of the nodes."""
    parts = []
    while size > 0:
        parts.append(min(size, gpus_per_node - first % gpus_per_node))
        first, size = first + parts[-1], size - parts[-1]
    return parts


def first_uneven(total: int, first: int, size: int, gpus_per_node: int) -> int | None:
    """The first GPU of the first engine that has more GPUs on one of its nodes than on another; None if there is none.

    The engines have `size` GPUs each, and take up the `total` GPUs that begin with GPU `first` of the run.
    """
    starts = range(first, first + total - size + 1, size)
    return next((start for start in starts if len(set(node_parts(start, size, gpus_per_node))) > 1), None)


def first_beside_a_sender(total: int, first: int, size: int, layout: ParallelLayout) -> tuple[int, int] | None:
    """Of the same engines as in `first_uneven`, one that shares only some of its GPUs with training ranks, among which one
    sends weights: (the engine's first GPU, that rank); None if there is none."""
    ranks = layout.world_size
    starts = [start for start in range(first, first + total - size + 1, size) if start < ranks < start + size]
    return next(((start, sender) for start in starts for sender in layout.first_of_stages if sender >= start), None)
