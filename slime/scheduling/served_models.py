"""What engines there shall be, as data: models behind routers of their own, in groups of equal engines."""

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
        where: `file:line`; empty where flags describe the group.
        model_path, update_weights: those of its model; None: --hf-checkpoint.
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
    """How many of the `size` GPUs from GPU `first` of the run on lie on each node, in the order of the nodes."""
    parts = []
    while size > 0:
        parts.append(min(size, gpus_per_node - first % gpus_per_node))
        first, size = first + parts[-1], size - parts[-1]
    return parts


def first_uneven(total: int, first: int, size: int, gpus_per_node: int) -> int | None:
    """Of engines with `size` GPUs each, on `total` GPUs from GPU `first` of the run on: the first GPU of the first one that has
    more of them on one of its nodes than on another; None where there is none."""
    starts = range(first, first + total - size + 1, size)
    return next((start for start in starts if len(set(node_parts(start, size, gpus_per_node))) > 1), None)


def first_beside_a_sender(total: int, first: int, size: int, layout: ParallelLayout) -> tuple[int, int] | None:
    """Of such engines, the first GPU of one that has GPUs of training ranks and others, and the first rank among those that
    sends weights; None where there is none."""
    ranks = layout.world_size
    starts = [start for start in range(first, first + total - size + 1, size) if start < ranks < start + size]
    return next(((start, sender) for start in starts for sender in layout.first_of_stages if sender >= start), None)
