"""How the bytes of a weight push travel, one file per way; the table is keyed by `--update-weight-transport`."""

from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.process_group import ProcessGroupTransport
from slime.weights.transports.transport import EnginesFailed, Order, Receiver, Transport

TRANSPORTS: dict[str, type[Transport]] = {"nccl": ProcessGroupTransport, "disk": DiskTransport}

__all__ = ["TRANSPORTS", "EnginesFailed", "Order", "Receiver", "Transport"]
