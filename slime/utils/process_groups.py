"""The making of process groups: the default one, the one of the same ranks for tensors on the host, and those with peers
outside our world (the engines). Only Megatron makes its parallel groups by itself, inside the default one."""

from __future__ import annotations

import contextlib
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from slime.utils.device import get_accelerator

if TYPE_CHECKING:
    import torch.distributed as dist


# (the default group, the group of its ranks on the host). If the default group was left and joined again it is another one.
# The references are weak: torch holds the groups until they are left, and a Gloo group that still lives when the interpreter
# ends aborts the process.
_on_host: tuple[weakref.ref[dist.ProcessGroup], weakref.ref[dist.ProcessGroup]] | None = None


def join_world(backend: str, timeout: timedelta) -> None:
    """Join the default group that the environment names, unless this process is in one, and the group of its ranks on the host.

    Collective. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as torch.distributed expects.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(backend=backend, timeout=timeout)
    init_gloo_group(timeout)


def init_gloo_group(timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The Gloo group of all ranks of the default group, for collectives on tensors of the host and on objects.

    Collective; later calls return the same group. If the default group already has the host's backend it is returned itself.
    """
    import torch.distributed as dist

    global _on_host
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default process group yet: call torch.distributed.init_process_group first")
    if _on_host is None or _on_host[0]() is not world:
        backend = get_accelerator().host_group_backend
        group = world if dist.get_backend() == backend else dist.new_group(backend=backend, timeout=timeout)
        _on_host = (weakref.ref(world), weakref.ref(group))
    return _on_host[1]()


def get_gloo_group() -> dist.ProcessGroup:
    """The group that `init_gloo_group` made; every training rank has one.

    Raises:
        RuntimeError: `init_gloo_group` was not called since the default group was joined.
    """
    import torch.distributed as dist

    if _on_host is None or dist.group.WORLD is None or _on_host[0]() is not dist.group.WORLD:
        raise RuntimeError("there is no Gloo group of all ranks: call init_gloo_group on every rank first")
    return _on_host[1]()


@contextlib.contextmanager
def patient_groups(seconds: float) -> Iterator[None]:
    """In the block, collectives of every group of this process wait at least `seconds` for the other ranks.

    It is for work whose time depends on how many bytes there are, and which some ranks do while the others wait: a rank that
    writes for a long time does not hang.
    """
    from torch.distributed import distributed_c10d

    backends = [
        group._get_backend(device) for group in distributed_c10d._world.pg_map for device in group._device_types
    ]
    # Stand-in groups, for ranks that are not there, wait for nobody and have no limit to set.
    limits = [(backend, backend.options._timeout) for backend in backends if hasattr(backend, "_set_default_timeout")]
    for backend, limit in limits:
        backend._set_default_timeout(max(limit, timedelta(seconds=seconds)))
    try:
        yield
    finally:
        for backend, limit in limits:
            backend._set_default_timeout(limit)


def create_store(host: str, timeout: timedelta) -> dist.TCPStore:
    """The rendezvous of a group in which we are rank 0; it listens on a free port (`.port`) of `host` only."""
    from torch.distributed import TCPStore

    # Left to itself, the store listens on all interfaces.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        # The store owns the descriptor from here on.
        master_listen_fd=listener.detach(),
    )


def init_process_group(
    backend: str, store: dist.Store, world_size: int, rank: int, group_name: str, timeout: timedelta
) -> dist.ProcessGroup:
    """Join `group_name`, a group independent of the default one (which need not exist).

    Joins with peers that call sglang's `init_custom_process_group` with `tcp://` and the address of `store`: both sides
    put the same key prefixes on the store, because both build the group with torch's `_new_process_group_helper`.
    Blocks until all `world_size` ranks are there, at most `timeout`. With NCCL, a peer that dies breaks the group, and not this
    process.
    """
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    with _outliving_peers(backend):
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(group_name, store),
            group_name=group_name,
            backend_options=None,
            timeout=timeout,
        )
    # Lets torch.distributed translate ranks of this group, as it does for groups of its own making.
    _world.pg_group_ranks[group] = {index: index for index in range(world_size)}
    return group


@contextlib.contextmanager
def _outliving_peers(backend: str) -> Iterator[None]:
    """NCCL's watchdog does not end this process because of a group that is made in the block, unless the user wants it to.

    A group reads what its watchdog is to do when it is made. By default that ends the process if a peer dies; `CleanUpOnly`, 2,
    aborts the communicator instead.
    """
    name, *older = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"
    if backend != "nccl" or any(given in os.environ for given in (name, *older)):
        yield
        return
    os.environ[name] = "2"
    try:
        yield
    finally:
        del os.environ[name]
