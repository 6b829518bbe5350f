"""The ways in which weights reach engines: one table for the command line, the plan of a run and the pushes themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightTransport:
    """A way. Import paths are those of subclasses of `slime.weights.transports.Transport`, which are imported when they carry.

    Attributes:
        carrier: carries all weights.
        told_as: the carrier, as a plan calls it.
        colocated: in its place where engines share the trainer's devices; None: none.
        delta: in its place with `--update-weight-mode delta`; None: none.
    """

    carrier: str
    told_as: str
    colocated: str | None = None
    delta: str | None = None


_HOME = "slime.weights.transports"
# By its name at `--update-weight-transport`.
WEIGHT_TRANSPORTS = {
    "nccl": WeightTransport(
        f"{_HOME}.process_group.ProcessGroupTransport", "process group", colocated=f"{_HOME}.ColocatedTransport"
    ),
    "disk": WeightTransport(f"{_HOME}.disk.DiskTransport", "disk", delta=f"{_HOME}.disk_delta.DiskDeltaTransport"),
}
