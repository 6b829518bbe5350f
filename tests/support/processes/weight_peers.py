"""Fake engines that receive weights, as actors: one for each device of an engine, and one that takes the engine's orders."""

from __future__ import annotations

import base64
import functools
import math
import os
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from slime.utils.errors import RunError
from tests.support.processes.waiting import wait_until


class Peer:
    """A device of an engine: its rank in weight groups, and the weights that it received."""

    def __init__(self) -> None:
        import torch  # noqa: F401

        import slime.utils.process_groups  # noqa: F401

        self.trouble, self.received, self.groups = None, [], {}

    def start(self, trouble):
        """Forget all received weights. `trouble` names the fault that occurs at the second bucket. If it is a directory, bucket
        n, counted from 0, is received when the directory has a file `n + 1`."""
        self.trouble, self.received = trouble, []

    def init_weights_update_group(self, host, port, rank, world_size, name, backend, timeout):
        import torch.distributed as dist

        from slime.utils.process_groups import init_process_group

        if self.trouble == "does not join":
            raise RunError("the engine does not join")
        limit = timedelta(seconds=60)
        store = dist.TCPStore(host, port, is_master=False, timeout=limit)
        self.groups[name] = init_process_group(backend, store, world_size, rank, name, limit)

    def destroy_weights_update_group(self, name):
        import torch.distributed as dist

        dist.destroy_process_group(self.groups.pop(name))

    def update_weights_from_distributed(self, names, dtypes, shapes, group_name, version, load_format, timeout):
        import torch
        import torch.distributed as dist

        assert set(dtypes) == {"float32"}
        if isinstance(self.trouble, Path):
            wait_until((self.trouble / str(len(self.received) + 1)).exists)
        elif self.received:
            if self.trouble == "dies":
                os._exit(1)
            if self.trouble == "hangs":
                time.sleep(600)
            if self.trouble in ("refuses", "refuses once"):
                self.trouble = self.trouble if self.trouble == "refuses" else None
                raise RunError("no memory for this bucket")
        # SGLang receives buckets in the same way.
        if load_format:
            assert load_format == "flattened_bucket"
            buffers = [torch.empty(sum(4 * math.prod(shape) for shape in shapes), dtype=torch.uint8)]
        else:
            buffers = [torch.empty(shape) for shape in shapes]
        try:
            works = [dist.broadcast(buffer, 0, self.groups[group_name], async_op=True) for buffer in buffers]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RunError(f"the broadcast broke: {error}") from None
        found = {value for buffer in buffers for value in buffer.view(torch.float32).flatten().tolist()}
        self.received.append((names, found, load_format) if len(names) == 3 else (names, found))

    def open_handle(self, handle):
        """Open the tensors of a handle as SGLang does."""
        found = pickle.loads(base64.b64decode(handle))
        values = set(found["flattened_tensor"].view(found["metadata"][0].dtype).tolist())
        self.received.append(([entry.name for entry in found["metadata"]], values))

    def get_weight_version(self):
        return "0"

    def all_received(self):
        return self.received

    def update_weights_from_tensor(self, handles, load_format, timeout, version):
        for handle in handles:
            self.open_handle(handle)

    def names_received(self):
        return [name for names, *_ in self.received for name in names]


@functools.cache
def _peer_here() -> Peer:
    return Peer()


def take(method: str, *arguments: Any) -> Any:
    """Carry out an order to an engine with one device, which the process of this call stands for."""
    return getattr(_peer_here(), method)(*arguments)


class EnginePeer:
    """An engine whose devices are the `ranks`, actors of `Peer`; `told` lists its orders.

    `reports`: the weight version that it reports; None: the one that it was given.
    """

    def __init__(self, ranks: Sequence[Any], reports: str | None = None) -> None:
        self.start(ranks, reports)

    def start(self, ranks: Sequence[Any], reports: str | None = None) -> None:
        """Become another engine, which has had no orders yet."""
        self.ranks, self.reports, self.told, self.version = ranks, reports, [], "0"

    def _ask(self, method: str, arguments: Sequence[Sequence[Any]]) -> None:
        """Call all ranks at the same time, because they may wait for each other."""
        import ray

        refs = [getattr(rank, method).remote(*words) for rank, words in zip(self.ranks, arguments, strict=True)]
        ray.get(refs, timeout=120)

    def init_weights_update_group(self, host, port, rank_offset, *rest):
        self.told.append(("join", rank_offset, rest[0]))
        places = [(host, port, rank_offset + position, *rest) for position in range(len(self.ranks))]
        self._ask("init_weights_update_group", places)

    def destroy_weights_update_group(self, name):
        self._ask("destroy_weights_update_group", [[name]] * len(self.ranks))

    def update_weights_from_distributed(self, *bucket):
        self._take("broadcast", version=bucket[4])
        self._ask("update_weights_from_distributed", [bucket] * len(self.ranks))

    def update_weights_from_tensor(self, handles, load_format, timeout, weight_version):
        self._take("handles", weight_version)
        self._ask("open_handle", [[handle] for handle in handles])

    def _take(self, way, version):
        self.told.append((way, version))
        self.version = version

    def carry_out(self, orders):
        result = None
        for method, *arguments in orders:
            result = getattr(self, method)(*arguments)
        return result

    def pause_generation(self, mode):
        self.told.append(("pause", mode))

    def flush_cache(self):
        self.told.append(("flush",))

    def begin_weight_update(self):
        self.told.append(("begin",))

    def end_weight_update(self):
        self.told.append(("end",))

    def get_weight_version(self):
        self.told.append(("version?",))
        return self.reports or self.version

    def prove_weight_version(self, version):
        found = self.get_weight_version()
        if found != version:
            raise RunError(f"the engine reports weight version {found}")

    def continue_generation(self):
        self.told.append(("continue",))

    def all_told(self):
        told, self.told = self.told, []
        return told


def start_peers(count: int) -> list[Any]:
    """Actors of `Peer` that are ready."""
    import ray

    peers = [ray.remote(num_cpus=0, max_concurrency=4)(Peer).remote() for _ in range(count)]
    ray.get([peer.get_weight_version.remote() for peer in peers], timeout=300)
    return peers


def engine_of(ranks: Sequence[Any], reports: str | None = None) -> Any:
    """An actor of `EnginePeer`. It carries out one order after the other, as a server does."""
    import ray

    return ray.remote(num_cpus=0)(EnginePeer).remote(list(ranks), reports)
