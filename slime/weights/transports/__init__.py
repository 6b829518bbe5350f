"""How the bytes of a weight push travel, one file per way. `transport_of` chooses; the table is keyed by
`--update-weight-transport`."""

from typing import Any

from slime.weights.transports.colocated import ColocatedTransport
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.disk_delta import DiskDeltaTransport
from slime.weights.transports.process_group import ProcessGroupTransport
from slime.weights.transports.transport import Delta, EnginesFailed, Order, Receiver, Transport

TRANSPORTS: dict[str, type[Transport]] = {"nccl": ProcessGroupTransport, "disk": DiskTransport}


def transport_of(args: Any) -> type[Transport]:
    """How the weights of this run travel: who shares devices shares memory, unless files are asked for."""
    if args.colocate and args.update_weight_transport == "nccl":
        return ColocatedTransport
    if args.update_weight_transport == "disk" and args.update_weight_mode == "delta":
        return DiskDeltaTransport
    return TRANSPORTS[args.update_weight_transport]


__all__ = [
    "TRANSPORTS",
    "ColocatedTransport",
    "Delta",
    "DiskTransport",
    "EnginesFailed",
    "Order",
    "ProcessGroupTransport",
    "Receiver",
    "Transport",
    "transport_of",
]
