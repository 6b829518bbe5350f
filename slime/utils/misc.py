"""Small helpers without a better home. Nothing here imports torch."""

from __future__ import annotations

import base64
import contextlib
import difflib
import gc
import os
import random
import resource
import socket
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime.utils import env
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function

__all__ = [
    "Box",
    "SharedAnswer",
    "SingletonMeta",
    "chunk_named_params_by_size",
    "collect_garbage_rarely",
    "decode_int32_meta_array",
    "get_current_node_ip",
    "get_free_port",
    "get_host_info",
    "group_by",
    "host_memory_gib",
    "load_function",
    "near_name",
    "no_garbage_collection",
    "should_run_periodic_action",
    "unique_hex",
    "without_repetition",
]


# How alike two long names must be for one to count as a slip of the other; and the length from which two letters may differ.
_CLOSE = 0.9
_SHORT_NAME = 12
# How many new containers start a garbage collection; Python's default is 700. They take some tens of MB at most.
_CONTAINERS_BETWEEN_COLLECTIONS = 50_000

# It is seeded once by the system; to ask the system for every id would be a call of the kernel each. A child reseeds its own.
_ids = random.Random()
os.register_at_fork(after_in_child=_ids.seed)


class SingletonMeta(type):
    """Metaclass of classes with one instance per process; tests reset them with `clear_instances`."""

    _instances: dict[type, Any] = {}
    _lock = threading.RLock()

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = SingletonMeta._instances.get(cls)
        if instance is None:
            with SingletonMeta._lock:
                if cls not in SingletonMeta._instances:
                    SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
                instance = SingletonMeta._instances[cls]
        return instance

    @classmethod
    def clear_instances(mcs) -> None:
        """Forget every instance, so that the next call of a class makes a new one."""
        with SingletonMeta._lock:
            SingletonMeta._instances.clear()


class Box:
    """Hides a Ray object reference from Ray, which resolves references that are passed bare."""

    def __init__(self, inner: Any):
        self._inner = inner

    @property
    def inner(self) -> Any:
        """The object in the box."""
        return self._inner


class SharedAnswer:
    """The answer to a question that many threads have at the same time. One of them asks for all that wait, and nobody gets an
    answer to a question that was asked before they came."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        # Questions are numbered; the answer is that to the last one that had one.
        self._asked = 0
        self._answered = 0
        self._answer: Any = None

    def get(self, ask: Callable[[], Any], seconds: float) -> Any:
        """What `ask`, of this thread or of one that waits beside it, gives after this call has begun.

        Raises:
            TimeoutError: the threads before this one took more than `seconds`.
            Exception: what this thread's `ask` raises, which the others do not get.
        """
        wanted = self._asked + 1
        if not self._turn.acquire(timeout=seconds):
            raise TimeoutError
        try:
            if self._answered < wanted:
                self._asked += 1
                self._answer = ask()
                self._answered = self._asked
            return self._answer
        finally:
            self._turn.release()


def collect_garbage_rarely() -> None:
    """Collect garbage more rarely. A process that keeps many objects without cycles would else spend half of its time on it."""
    gc.set_threshold(_CONTAINERS_BETWEEN_COLLECTIONS, *gc.get_threshold()[1:])


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """In the block no garbage is collected. It is for blocks that make many lasting objects, as imports do, which the
    collector would go through again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def host_memory_gib() -> float:
    """GiB of the host's memory that this process holds now, including pages that it shares with others."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**30


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether an action with this interval is due after rollout `rollout_id` (counted from 0).

    It never is without an interval. It is after the last of `num_rollout`, after every `interval` rollouts, and at the end of
    every epoch.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    done = rollout_id + 1
    return done % interval == 0 or bool(num_rollout_per_epoch and done % num_rollout_per_epoch == 0)


def group_by(items: Iterable[Any], key: Callable[[Any], Hashable] | None = None) -> dict[Hashable, list[Any]]:
    """Items by key (the item itself without `key`), both in the order of their first appearance; equal keys need not be
    neighbours."""
    groups: dict[Hashable, list[Any]] = {}
    for item in items:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def get_free_port(start_port: int | None = None, consecutive: int = 1) -> int:
    """The first of `consecutive` ports that are free now on all interfaces.

    A single port without `start_port` is chosen by the system. The port is not held: if another process could take it before
    the server binds, use `slime.utils.ports.reserve_port`.

    Raises:
        UserError: no such run of ports from `start_port` upwards.
    """
    if start_port is None:
        if consecutive == 1:
            return _bind_and_release(0)
        start_port = 10000
    for port in range(start_port, 65536 - consecutive + 1):
        if all(_bind_and_release(candidate) for candidate in range(port, port + consecutive)):
            return port
    raise UserError(f"no {consecutive} consecutive free ports from {start_port} upwards")


def _bind_and_release(port: int) -> int:
    """The bound port number, or 0 when `port` is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as candidate:
        try:
            candidate.bind(("", port))
        except OSError:
            return 0
        return candidate.getsockname()[1]


def get_current_node_ip() -> str:
    """The address under which other nodes reach this one, without the brackets of IPv6.

    It is `SLIME_HOST_IP` if set; else the address that Ray uses for this node; else that of the default route; else loopback.
    With `SLIME_PREFER_IPV6=1` it is an IPv6 address: that of Ray, or `ipv6_of_this_node`, which raises RunError if there is
    none.
    """
    override = env.host_ip_override()
    if override:
        return override.strip("[]")
    ray = sys.modules.get("ray")
    ray_address = ray.util.get_node_ip_address().strip("[]") if ray is not None and ray.is_initialized() else None
    if env.prefers_ipv6():
        from slime.utils.ports import ipv6_of_this_node

        return ray_address if ray_address is not None and ":" in ray_address else ipv6_of_this_node()
    if ray_address is not None:
        return ray_address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing: it only makes the kernel choose a route.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


def get_host_info() -> tuple[str, str]:
    """(host name, address under which other nodes reach this one)."""
    return socket.gethostname(), get_current_node_ip()


def decode_int32_meta_array(meta: dict[str, Any], keys: str | Sequence[str]) -> np.ndarray | None:
    """The int32 array under the first of `keys` that `meta` has: base64 of little-endian int32, or a sequence.

    Returns None when no key is present (or its value is None).

    Raises:
        ValueError: the value cannot be decoded; the message names the key.
    """
    names = (keys,) if isinstance(keys, str) else keys
    for name in names:
        if (value := meta.get(name)) is not None:
            break
    else:
        return None
    try:
        if isinstance(value, str | bytes):
            return np.frombuffer(base64.b64decode(value, validate=True), dtype="<i4").astype(np.int32)
        return np.asarray(value, dtype=np.int32)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"meta_info[{name!r}] is no int32 array: {error}") from error


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, Any]], chunk_size: int
) -> Iterator[list[tuple[str, Any]]]:
    """Lists of consecutive (name, tensor) of at most `chunk_size` bytes; a larger tensor makes a list of its own."""
    chunk: list[tuple[str, Any]] = []
    chunk_bytes = 0
    for name, param in named_params:
        param_bytes = param.numel() * param.element_size()
        if chunk and chunk_bytes + param_bytes > chunk_size:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append((name, param))
        chunk_bytes += param_bytes
    if chunk:
        yield chunk


def unique_hex(digits: int = 32) -> str:
    """An even number of random hexadecimal digits for a unique name. They can be guessed, so they serve as no secret."""
    # A sample gets many, and to format a large number takes twice as long.
    return _ids.randbytes(digits // 2).hex()


def near_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` probably is a slip of: one letter amiss in a short name, two in a longer one."""
    if name in known:
        return None
    allowed = 1 if len(name) < _SHORT_NAME else 2
    best: tuple[float, str] | None = None
    for candidate in known:
        if abs(len(candidate) - len(name)) > allowed:
            continue
        # The cheap bounds come first, because there are more than a thousand names.
        matcher = difflib.SequenceMatcher(None, candidate, name, autojunk=False)
        if matcher.quick_ratio() < 0.6:
            continue
        distance = _edit_distance(name, candidate)
        if distance <= allowed and (best is None or distance < best[0]):
            best = (distance, candidate)
    if best is not None:
        return best[1]
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)), None)


def _edit_distance(left: str, right: str) -> int:
    """Insertions, deletions, replacements and swaps of neighbours that turn one word into the other."""
    before: list[int] = []
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        current = [i]
        for j, b in enumerate(right, 1):
            cost = min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


def without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of JSON that users write. Raises ValueError for a name that stands twice in an object."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{repeated!r} stands twice in it, and only the last one would count; keep one")
    return found
