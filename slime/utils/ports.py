"""Ports that are reserved by binding, the address that our servers listen on, and how many connections they may have.

A reservation is a bound socket that does not listen. Binding is exclusive, so two reservations (of any run on the
machine) never get the same port; afterwards the socket is marked as reusable, which lets a *listening* server bind the
port while the reservation is still held. So there is no moment at which the port belongs to nobody: take the
reservation, start the server, release when the server answers.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import re
import resource
import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import psutil

from slime.utils import env
from slime.utils.errors import RunError

# No process may have more open files where nobody has changed the kernel's own limit.
_MOST_OPEN_FILES = 2**20
LOOPBACK, _LOOPBACK_OF_IPV6 = "127.0.0.1", "::1"


def allow_many_connections() -> None:
    """Raise this process's soft limit of open files to the hard one, as far as the system allows; its children inherit it.

    A shell's is often 1024, and Ray raises that of the driver alone. Each request takes one file, and two in a router.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (raised := min(hard, _MOST_OPEN_FILES)):
        # A system whose own limit was lowered since refuses all that is above it.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))


class PortReservation:
    """A reserved `port` of `host`, held until `release` or the end of the `with` block."""

    def __init__(self, host: str, port: int, holder: socket.socket):
        self.host = host
        self.port = port
        self._holder = holder

    def release(self) -> None:
        """Give the port up. A server that listens on it is not disturbed. Harmless when already released."""
        self._holder.close()

    def is_taken(self) -> bool:
        """Whether a server listens on it, ours or another one; any server that marks its socket as reusable can."""
        with socket.socket(self._holder.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError:
                return True
        return False

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def reserve_port(host: str, start: int, attempts: int = 2000) -> PortReservation:
    """Reserve the first free port of `start, start + 1, …` on the local address `host`.

    Raises:
        RunError: none of the `attempts` ports could be bound.
        OSError: `host` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(start, min(start + attempts, 65536)):
        holder = socket.socket(family, socket.SOCK_STREAM)
        try:
            holder.bind((host, port))
        except OSError as error:
            holder.close()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        # Set only after the bind, because before it this would let two reservations share the port.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return PortReservation(host, port, holder)
    raise RunError(f"no free port on {host} from {start} to {min(start + attempts, 65536) - 1}")


def reserve_row(count: int) -> list[PortReservation]:
    """Reserve `count` consecutive ports that are free on all addresses; raises as `reserve_port`."""
    row = [reserve_port("", random_port_start(17000))]
    while len(row) < count:
        following = reserve_port("", row[-1].port + 1)
        if following.port != row[-1].port + 1:
            for reservation in row:
                reservation.release()
            row = []
        row.append(following)
    return row


def random_port_start(base: int) -> int:
    """`base` plus a random offset below 1000, so that runs side by side seldom probe the same ports."""
    return base + random.SystemRandom().randrange(1000)


def service_host(clients: Iterable[str] = ()) -> str:
    """The address that a server of this node binds and announces.

    It is `SLIME_HOST_IP` if set; else the node's Ray address if the Ray cluster has several nodes; else the address from which
    this node connects to a client that is not on it; else loopback. It is never all interfaces. With `SLIME_PREFER_IPV6=1`
    an IPv4 address found in this way is replaced by `ipv6_of_this_node`, or by the loopback of IPv6.

    Args:
        clients: URLs of servers outside of Ray that will connect.

    Raises:
        RunError: `SLIME_HOST_IP` is no address of this machine, or an address of IPv6 is preferred and there is none.
    """
    override = env.host_ip_override()
    if override:
        interface_of(override)
        return override
    import ray

    if ray.is_initialized() and sum(node["Alive"] for node in ray.nodes()) > 1:
        found = ray.util.get_node_ip_address()
    else:
        ways = (_address_towards(client) for client in clients)
        found = next((address for address in ways if not ipaddress.ip_address(address).is_loopback), LOOPBACK)
    if ":" in found or not env.prefers_ipv6():
        return found
    if found != LOOPBACK:
        return ipv6_of_this_node()
    interface_of(_LOOPBACK_OF_IPV6)
    return _LOOPBACK_OF_IPV6


def ipv6_of_this_node() -> str:
    """The first IPv6 address of this machine at which other machines reach it.

    Raises:
        RunError: it has no such address.
    """
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET6 and not (
                (found := ipaddress.ip_address(entry.address.partition("%")[0])).is_loopback or found.is_link_local
            ):
                return str(found)
    raise RunError(
        "SLIME_PREFER_IPV6=1: this machine has no address of IPv6 that others reach; give it one, set SLIME_HOST_IP on each "
        "node, or set SLIME_PREFER_IPV6=0"
    )


def interface_of(address: str) -> str:
    """The name of the network interface of this machine that has `address`. Any loopback address belongs to that of loopback.

    Raises:
        RunError: no interface has it.
    """
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                # Link-local addresses name their interface behind a percent sign.
                found[ipaddress.ip_address(entry.address.partition("%")[0])] = name
    # A node may have been given a host name instead of an address.
    with contextlib.suppress(OSError):
        wanted = ipaddress.ip_address(socket.getaddrinfo(address, None)[0][4][0].partition("%")[0])
        for own, name in found.items():
            if own == wanted or (own.is_loopback and wanted.is_loopback and own.version == wanted.version):
                return name
    shown = ", ".join(f"{own} ({name})" for own, name in found.items())
    raise RunError(
        f"{address} is no address of this machine, which has {shown}: set SLIME_HOST_IP on each node to one of its own, "
        "or start its Ray node under one (`ray start --node-ip-address`)"
    )


def group_environment(host: str) -> dict[str, str]:
    """Environment variables that make Gloo use the interface of `host`; empty if the user has named an interface.

    By itself Gloo listens on the address of the machine's host name, which is often loopback, where no other node reaches it.
    """
    return {} if env.gloo_interface() else {"GLOO_SOCKET_IFNAME": interface_of(host)}


def _address_towards(url: str) -> str:
    """The local address from which this machine connects to `url`; nothing is sent to find out."""
    parts = urlsplit(url)
    family, kind, _, _, address = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def normalize_external_engine_addr(address: str) -> str:
    """The base URL, without a trailing slash, of an engine given as `host:port` or as a base URL with plain HTTP.

    Raises:
        ValueError: it has another scheme, no port, or more than an address.
    """
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "http" or parts.path.strip("/") or parts.query or parts.username:
        raise ValueError(f"Invalid external SGLang engine address: {address}")
    return f"http://{host_for_url(host)}:{port}"


def host_for_url(host: str) -> str:
    """`host` as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def engine_url(listed: str) -> str:
    """The engine's URL in a router's list. A router that chooses among an engine's data-parallel ranks lists `url@number`."""
    return re.sub(r"@\d+$", "", listed)


def engine_urls(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The URLs of the engines in a router's list, each once.

    Raises:
        KeyError, TypeError: `workers` is not a list as routers give it.
    """
    return list(dict.fromkeys(engine_url(worker["url"]) for worker in workers))


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without brackets, means the machine that asks, whichever that is."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuses_connections(url: str, timeout_s: float) -> bool:
    """Whether connections to the address of `url` are refused: its machine answers, and nothing listens there."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout_s):
            return False
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def is_port_available(port: int) -> bool:
    """Whether a TCP server could bind `port` on all interfaces at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except (OSError, OverflowError):
            return False
        return True


def find_available_port(base: int) -> int:
    """The first free port from `base` upwards. It is not reserved, so a caller that needs it has to bind it at once.

    Raises:
        RunError: every port up to 65535 is taken.
    """
    for port in range(base, 65536):
        if is_port_available(port):
            return port
    raise RunError(f"no free TCP port from {base} upwards")
