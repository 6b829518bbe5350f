"""How a shard of a train batch comes from the rollout manager to the training ranks: `--rollout-data-transport`.

A box holds a reference to an object in Ray's store; what it stands for is freed with the last such reference. With
`object-store` the object is the shard. With `nixl` the object is what the shard consists of, without the bytes of its arrays.
Those stay in the manager's memory, registered with NIXL, and each rank reads them from there into its own. Ray's direct
transport keeps them as long as the object, and ends when their process does.
"""

from __future__ import annotations

import argparse
import functools
import ipaddress
import logging
import os
import pickle
import socket
import time
from dataclasses import dataclass
from typing import Any

from slime.utils import env
from slime.utils.errors import RunError, UserError
from slime.utils.misc import Box
from slime.utils.ports import interface_of, service_host

# The name under which Ray knows the transport of `_nixl`; Ray's own transport by NIXL keeps its name.
_NAME = "SLIME_NIXL"
# The version of nixl that is known to work: `_make_agent` replaces the inner agent, which is no public part of nixl.
_VERSION = "1.5.1"
# Each array begins at a multiple of this in the memory that is registered, as NumPy and torch want it for any dtype.
_ALIGNMENT = 64
# The longest sleep of the agent's thread while this process asks it for nothing; what comes from other processes wakes it.
_SLEEP_MICROSECONDS = 100_000


@dataclass(frozen=True)
class SentShard:
    """A shard whose arrays lie elsewhere.

    Attributes:
        structure: the pickled shard, with a gap in the place of each array's bytes.
        parts: (first byte, byte behind the last) of each of these in `memory`.
        memory: reference to a uint8 tensor in the memory of the process that sent the shard.
    """

    structure: bytes
    parts: tuple[tuple[int, int], ...]
    memory: Any


def open_transport(args: argparse.Namespace) -> None:
    """Get this process ready to send or to fetch shards.

    Raises:
        UserError: `--rollout-data-transport nixl`, and NIXL is not installed in this process's Python or cannot work here.
    """
    if args.rollout_data_transport == "object-store":
        return
    try:
        _nixl().get_nixl_agent()
    except Exception as error:
        raise UserError(
            f"--rollout-data-transport nixl: NIXL does not work on {os.uname().nodename} ({type(error).__name__}: {error}); "
            f"where it is not installed, or in another version: pip install nixl=={_VERSION}; else leave the flag out"
        ) from error


def send_shard(args: argparse.Namespace, shard: Any) -> Box:
    """`shard` in the way of `--rollout-data-transport`; it stays until nobody has the box any more.

    Its arrays are copied, so they may change afterwards. What is no array travels as Ray pickles it.
    """
    import ray

    buffers: list[memoryview] = []
    if args.rollout_data_transport == "nixl":
        structure = ray.cloudpickle.dumps(shard, protocol=5, buffer_callback=functools.partial(_keep, buffers))
    if not buffers:
        return Box(ray.put(shard))
    import torch

    _nixl()
    parts, end = [], 0
    for buffer in buffers:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + buffer.nbytes
        parts.append((begin, end))
    # One tensor: NIXL registers memory piece by piece, and an array is often shorter than its description.
    memory = torch.empty(end, dtype=torch.uint8)
    for buffer, (begin, end) in zip(buffers, parts, strict=True):
        memoryview(memory.numpy())[begin:end] = buffer
    return Box(ray.put(SentShard(structure, tuple(parts), ray.put(memory, _tensor_transport=_NAME))))


def fetch_shard(box: Box, seconds: float) -> Any:
    """The shard that `send_shard` gave the box of; its arrays cannot be written to.

    Args:
        seconds: until it has to be there (`--http-control-timeout`). For what NIXL reads Ray has a limit of its own, 60 s, and
            the shorter one holds.

    Raises:
        RunError: it did not come in time, or its process has ended.
    """
    import ray

    limit, deadline = f"{seconds:g} s (--http-control-timeout)", time.monotonic() + seconds
    try:
        found = ray.get(box.inner, timeout=seconds)
        if not isinstance(found, SentShard):
            return found
        _nixl()
        left, of_ray = max(deadline - time.monotonic(), 0.0), _limit_of_ray()
        if of_ray < left:
            limit = f"{of_ray:g} s (Ray's limit of a read, RAY_rdt_fetch_fail_timeout_milliseconds)"
        memory = ray.get(found.memory, timeout=left)
    except Exception as error:  # of Ray, or of NIXL where it gives a transfer up
        reason = (str(error).strip().splitlines() or [""])[0].partition(". ")[0]
        raise RunError(
            f"the train batch did not come from the rollout manager within {limit}, or the manager has ended: "
            f"{type(error).__name__}: {reason}"
        ) from error
    _forget(found.memory)
    view = memoryview(memory.numpy()).toreadonly()
    return pickle.loads(found.structure, buffers=[view[begin:end] for begin, end in found.parts])


def _keep(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Add the bytes of `buffer` to `buffers`. Returns whether pickle is to store the buffer itself: only where it is empty."""
    if raw := buffer.raw().nbytes:
        buffers.append(buffer.raw())
    return not raw


def _limit_of_ray() -> float:
    """Seconds after which Ray gives a read up, whatever `ray.get` allows."""
    from ray._private import ray_constants

    return ray_constants.RDT_FETCH_FAIL_TIMEOUT_SECONDS


def _forget(memory: Any) -> None:
    """Ray 2.60 keeps the description of memory that it has read once until the process ends: a kilobyte of every shard. The
    process whose memory it is needs its own."""
    from ray._private.worker import global_worker

    manager = global_worker.rdt_manager
    if not manager.rdt_store.has_object(memory.hex()):
        with manager._lock:
            manager._managed_rdt_metadata.pop(memory.hex(), None)


@functools.cache
def _nixl() -> Any:
    """Ray's transport by NIXL in this process. It makes its agent when it first needs one, or is asked for it."""
    import torch
    from ray.experimental import register_tensor_transport
    from ray.experimental.rdt.nixl_tensor_transport import NixlTensorTransport
    from ray.experimental.rdt.util import get_tensor_transport_manager

    class Transport(NixlTensorTransport):
        def _init_nixl_agent(self) -> Any:
            self._backend = self.select_backend()
            return _make_agent(self._backend)

        def garbage_collect(self, *arguments: Any) -> None:
            super().garbage_collect(*arguments)
            with self._cache_lock:
                # Each read leaves a word for the process whose memory it was, which the agent keeps until somebody takes it.
                self.get_nixl_agent().get_new_notifs()

    register_tensor_transport(_NAME, ["cpu"], Transport, torch.Tensor)
    return get_tensor_transport_manager(_NAME)


def _make_agent(backend: str) -> Any:
    """A NIXL agent whose thread sleeps while nothing travels.

    That of nixl 1.5.1's own constructor asks again and again without a pause, and takes a core for itself: here the inner agent
    is another one. Both Ray's transport and `nixl_agent` reach it by that attribute alone.
    """
    import ray
    from nixl import _bindings
    from nixl._api import nixl_agent, nixl_agent_config

    if not env.debug_enabled():
        logging.getLogger("nixl").setLevel(logging.ERROR)
    host, name = service_host(), ray.get_runtime_context().get_worker_id()
    # A node may have been given a name in place of an address.
    if ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0].partition("%")[0]).is_loopback:
        # UCX would listen on the networks of this machine as well.
        os.environ.setdefault("UCX_NET_DEVICES", interface_of(host))
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = _bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _SLEEP_MICROSECONDS
    # Ray frees memory in another thread than it is sent and fetched in.
    config.syncMode = _bindings.NIXL_THREAD_SYNC_RW
    agent.agent = _bindings.nixlAgent(name, config)
    agent.create_backend(backend)
    return agent
