"""How the bytes of a weight push travel, one file per way. `transport_of` chooses one, by the table in
`slime.utils.weight_transports`. A colocated run may use two at once (`ColocatedTransport`)."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.arguments.sizes import GpuRanges, layout_of
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.weight_transports import WEIGHT_TRANSPORTS
from slime.weights.transports.disk import DiskTransport
from slime.weights.transports.process_group import ProcessGroupTransport
from slime.weights.transports.shared_handles import SharedHandlesTransport
from slime.weights.transports.transport import Delta, EnginesFailed, Order, Receiver, Transport

if TYPE_CHECKING:
    import torch.distributed as dist

    from slime.weights.buckets import NamedTensors

__all__ = [
    "ColocatedTransport",
    "Delta",
    "DiskTransport",
    "EnginesFailed",
    "Order",
    "ProcessGroupTransport",
    "Receiver",
    "Transport",
    "split_engines",
    "transport_of",
]


def transport_of(args: Any) -> type[Transport]:
    """The transport of this run. Engines that share devices with the trainer share memory, unless files are asked for."""
    way = WEIGHT_TRANSPORTS[args.update_weight_transport]
    if way.colocated is not None and args.colocate:
        return pkgutil.resolve_name(way.colocated)
    if way.delta is not None and args.update_weight_mode == "delta":
        return pkgutil.resolve_name(way.delta)
    return pkgutil.resolve_name(way.carrier)


class ColocatedTransport(Transport):
    """Engines on the trainer's devices get handles to its memory; engines with other devices get their weights over a process
    group, at the same time. If all engines are of one kind, only one of the two ways is used.

    Handles only work on a device of a training rank, so an engine with devices of both kinds belongs to the process group.
    There it may share a device with a rank, though with NCCL not with the rank that sends.
    """

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._layout = layout_of(args)
        self._handles = SharedHandlesTransport(args, source, num_sources)
        self._group = ProcessGroupTransport(args, source, num_sources)
        self._ways: list[Transport] = []
        # Whether any engine gets handles; if none does, no rank helps with them.
        self._gives_handles = False

    @classmethod
    def takes_every_rank(cls, args: Any) -> bool:
        return SharedHandlesTransport.takes_every_rank(args)

    @classmethod
    def bucket_bytes(cls, args: Any) -> int:
        size, layout = SharedHandlesTransport.bucket_bytes(args), layout_of(args)
        is_mixed = layout.first_rollout_gpu + layout.rollout_gpus > layout.actor_gpus
        return min(size, ProcessGroupTransport.bucket_bytes(args)) if is_mixed else size

    @classmethod
    def longest_wait(cls, args: Any) -> float:
        # A bucket is sent by both transports, one after the other.
        return SharedHandlesTransport.longest_wait(args) + ProcessGroupTransport.longest_wait(args)

    def connect(self, engines: Sequence[Receiver]) -> None:
        inside, beside = split_engines(engines, self._layout)
        self._refuse_own_device(beside)
        self._gives_handles = bool(inside)
        self._handles.connect(inside)
        if beside:
            self._group.connect(beside)
        else:
            self._group.close()
        self._ways = [way for way, of_way in ((self._handles, inside), (self._group, beside)) if of_way]

    def assist(self, engines: Sequence[Receiver]) -> None:
        inside, _ = split_engines(engines, self._layout)
        self._gives_handles = bool(inside)
        self._handles.assist(inside)

    def begin(self, version: int) -> None:
        self._each("begin", version)

    def send(self, bucket: NamedTensors) -> None:
        self._each("send", bucket)

    def help(self, bucket: NamedTensors) -> None:
        if self._gives_handles:
            self._handles.help(bucket)

    def relay_over(self, group: dist.ProcessGroup) -> None:
        self._handles.relay_over(group)

    def follow(self, source: int) -> None:
        if self._gives_handles:
            self._handles.follow(source)

    def end_walk(self) -> None:
        if self._gives_handles:
            self._handles.end_walk()

    def finish(self) -> None:
        self._each("finish")

    def discard(self) -> None:
        self._each("discard")

    def settle(self) -> None:
        for way in (self._handles, self._group):
            way.settle()

    def close(self) -> None:
        for way in (self._handles, self._group):
            way.close()

    def _refuse_own_device(self, engines: Sequence[Receiver]) -> None:
        # A run with such flags is refused as soon as its devices are known. This is for a transport that is made without a run.
        if get_accelerator().process_group_backend != "nccl":
            return
        import torch.distributed as dist

        first, own = self._layout.first_rollout_gpu, dist.get_rank()
        sharing = [engine.id for engine in engines if 0 <= own - first - engine.gpu_offset < engine.num_gpus]
        if sharing:
            raise UserError(
                f"engine {sharing[0]} has the GPU of training rank {own}, which sends weights, and others beside the ranks': "
                "NCCL takes two ranks of a group on one GPU for an error; choose --rollout-num-gpus-per-engine "
                "(num_gpus_per_engine in --sglang-config) so that no engine has both, or give --update-weight-transport disk"
            )

    def _each(self, method: str, *arguments: Any) -> None:
        """Call a method of both ways. If engines break one way, the other is carried on all the same."""
        failures = []
        for way in self._ways:
            try:
                getattr(way, method)(*arguments)
            except EnginesFailed as error:
                failures.append(error)
        # If some engines are certainly to blame, others may only have failed because of them.
        to_tell = [error for error in failures if error.certain] or failures
        if to_tell:
            failed = {id: reason for error in to_tell for id, reason in error.failed.items()}
            raise EnginesFailed(failed, certain=to_tell[0].certain)


def split_engines(engines: Sequence[Receiver], layout: GpuRanges) -> tuple[list[Receiver], list[Receiver]]:
    """(Engines on devices of training ranks alone, engines with at least one other device)."""
    inside: list[Receiver] = []
    beside: list[Receiver] = []
    for engine in engines:
        behind = layout.first_rollout_gpu + engine.gpu_offset + engine.num_gpus
        (inside if behind <= layout.actor_gpus else beside).append(engine)
    return inside, beside
