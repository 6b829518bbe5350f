import re
import resource
import socket
from types import SimpleNamespace

import psutil
import pytest
import ray

from slime.utils import ports
from slime.utils.errors import RunError
from slime.utils.misc import get_current_node_ip
from slime.utils.ports import (
    allow_many_connections,
    engine_urls,
    group_environment,
    host_for_url,
    interface_of,
    is_loopback,
    normalize_external_engine_addr,
    refuses_connections,
    reserve_port,
    reserve_row,
    service_host,
)

LOOPBACK = "127.0.0.1"


def listen(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((LOOPBACK, port))
    server.listen()
    return server


def test_f7_two_reservations_never_share_a_port():
    with reserve_port(LOOPBACK, 21000) as first, reserve_port(LOOPBACK, first.port) as second:
        assert second.port > first.port


def test_f7_a_port_that_a_server_listens_on_is_skipped():
    with reserve_port(LOOPBACK, 21000) as reservation:
        server = listen(reservation.port)
    with server, reserve_port(LOOPBACK, reservation.port) as next_reservation:
        assert next_reservation.port > reservation.port


def test_a_server_can_listen_while_the_reservation_is_held():
    with reserve_port(LOOPBACK, 21000) as reservation, listen(reservation.port):
        with socket.create_connection((LOOPBACK, reservation.port), timeout=5):
            pass


def test_connections_are_refused_where_nothing_listens_and_nowhere_else():
    with reserve_port(LOOPBACK, 21000) as reservation:
        url = f"http://{LOOPBACK}:{reservation.port}"
        assert refuses_connections(url, 5.0)
        with listen(reservation.port):
            assert not refuses_connections(url, 5.0)
    assert not refuses_connections("http://no-such-host.invalid:1", 5.0)


def test_loopback_addresses_are_known_by_all_their_names():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "fd00::1", "node-3", "")))


def test_a_released_port_can_be_reserved_again():
    first = reserve_port(LOOPBACK, 21500)
    first.release()
    first.release()
    with reserve_port(LOOPBACK, first.port) as second:
        assert second.port == first.port


@pytest.mark.parametrize("host", [LOOPBACK, "127.0.0.2"])
def test_a_row_of_ports_begins_behind_one_that_is_taken_on_any_address(monkeypatch, host):
    with reserve_port("", 21700) as free:
        pass
    monkeypatch.setattr(ports, "random_port_start", lambda base: free.port)
    with reserve_port(host, free.port + 2) as taken:
        row = reserve_row(4)
        numbers = [reservation.port for reservation in row]
        assert numbers[0] > taken.port and numbers == list(range(numbers[0], numbers[0] + 4))
        with listen(numbers[3]), reserve_port(LOOPBACK, numbers[0]) as behind:
            assert behind.port > numbers[3]
    for reservation in row:
        reservation.release()
    reserve_port("", numbers[0], attempts=1).release()


def test_no_free_port_is_an_error_with_the_range():
    with reserve_port(LOOPBACK, 21000) as taken:
        with pytest.raises(RunError, match=f"{taken.port} to {taken.port}"):
            reserve_port(LOOPBACK, taken.port, attempts=1)


def test_an_address_of_another_machine_is_an_error():
    with pytest.raises(OSError):
        reserve_port("192.0.2.1", 21000)


def test_ipv6_addresses_are_bracketed_in_urls():
    assert host_for_url("::1") == "[::1]"
    assert host_for_url("[::1]") == "[::1]"
    assert host_for_url("10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    "address, url",
    [
        ("10.0.0.5:30000", "http://10.0.0.5:30000"),
        ("http://node-3:30000/", "http://node-3:30000"),
        ("[fd00::1]:30000", "http://[fd00::1]:30000"),
        ("http://[fd00::1]:30000", "http://[fd00::1]:30000"),
    ],
)
def test_an_engine_is_named_by_its_address_or_its_base_url(address, url):
    assert normalize_external_engine_addr(address) == url


@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.5",
        "10.0.0.5:",
        ":30000",
        "https://a:1",
        "a:0",
        "a:65536",
        "a:1/generate",
        "a:1?b",
        "u:p@a:1",
        "fd00::1:x",
    ],
)
def test_what_is_no_address_of_an_engine(address):
    with pytest.raises(ValueError, match="Invalid external SGLang engine address"):
        normalize_external_engine_addr(address)


def test_clients_on_other_machines_are_given_an_address_that_they_reach():
    assert service_host() == service_host(["http://127.0.0.1:30000", "http://localhost:1"]) == LOOPBACK
    # Of documentation: nobody has it, and the way to it is that to everybody outside. Nothing is sent.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 30000))
        except OSError:
            pytest.skip("this machine has no way out")
        expected = probe.getsockname()[0]
    assert service_host(["http://127.0.0.1:30000", "http://203.0.113.1:30000"]) == expected != LOOPBACK


@pytest.fixture
def interfaces(monkeypatch):
    """A machine with an address of each kind, whatever this one has."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("SLIME_HOST_IP", raising=False)
    found = {
        "lo": [(socket.AF_INET, LOOPBACK), (socket.AF_INET6, "::1")],
        "eth0": [
            (socket.AF_PACKET, "02:fc:00:00:00:01"),
            (socket.AF_INET, "10.0.0.7"),
            (socket.AF_INET6, "fe80::1%eth0"),
        ],
        "eth1": [(socket.AF_INET, "10.1.0.7"), (socket.AF_INET6, "fd00::7")],
    }
    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
            for name, addresses in found.items()
        },
    )
    return found


@pytest.mark.parametrize(
    "address, name",
    [
        (LOOPBACK, "lo"),
        ("127.0.0.5", "lo"),
        ("::1", "lo"),
        ("localhost", "lo"),
        ("10.0.0.7", "eth0"),
        ("fe80::1", "eth0"),
        ("10.1.0.7", "eth1"),
    ],
)
def test_an_address_lies_on_an_interface(interfaces, address, name):
    assert interface_of(address) == name
    assert group_environment(address) == {"GLOO_SOCKET_IFNAME": name}


def test_an_interface_that_the_user_names_is_kept(interfaces, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert group_environment("10.0.0.7") == {}


def test_an_address_that_the_node_announces_and_does_not_have_is_told_with_those_that_it_has(interfaces, monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.0.7")
    assert service_host() == "10.1.0.7"
    for other in ("10.9.9.9", "no-such-host.invalid"):
        monkeypatch.setenv("SLIME_HOST_IP", other)
        with pytest.raises(
            RunError, match=re.escape(f"{other} is no address of this machine, which has 127.0.0.1 (lo), ")
        ):
            service_host()


@pytest.mark.parametrize(
    ("alive", "of_ray", "client", "expected"),
    [
        (1, "10.0.0.7", None, "::1"),
        (2, "10.0.0.7", None, "fd00::7"),
        (2, "fd00::9", None, "fd00::9"),
        (1, "10.0.0.7", "10.0.0.7", "fd00::7"),
        (1, "10.0.0.7", "fd00::8", "fd00::8"),
        (1, "10.0.0.7", LOOPBACK, "::1"),
    ],
)
def test_nodes_that_prefer_ipv6_announce_nothing_else(interfaces, monkeypatch, alive, of_ray, client, expected):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}] * alive)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: of_ray)
    monkeypatch.setattr(ports, "_address_towards", lambda url: url)
    clients = [] if client is None else [client]
    monkeypatch.delenv("SLIME_PREFER_IPV6", raising=False)
    assert service_host(clients) in (LOOPBACK, of_ray, client)
    monkeypatch.setenv("SLIME_PREFER_IPV6", "1")
    assert service_host(clients) == expected
    assert get_current_node_ip() == (of_ray if ":" in of_ray else "fd00::7")
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.0.7")
    assert service_host(clients) == get_current_node_ip() == "10.1.0.7"
    monkeypatch.delenv("SLIME_HOST_IP")
    for addresses in interfaces.values():
        addresses[:] = [(family, address) for family, address in addresses if family != socket.AF_INET6]
    if ":" in of_ray or expected == client:
        assert service_host(clients) == expected
    else:
        message = "^SLIME_PREFER_IPV6=1: this machine has no address of IPv6 that others reach; give it one"
        with pytest.raises(RunError, match="^::1 is no address of this machine" if expected == "::1" else message):
            service_host(clients)


def test_the_engines_that_a_router_lists_are_there_once_with_all_their_groups():
    listed = (
        "http://10.0.0.5:30000@0",
        "http://10.0.0.5:30000@1",
        "http://[fd00::1]:30000",
        "http://user@host:30000@12",
    )
    workers = [{"url": url} for url in listed]
    assert engine_urls(workers) == ["http://10.0.0.5:30000", "http://[fd00::1]:30000", "http://user@host:30000"]


@pytest.mark.parametrize(
    "soft, hard, raised",
    [(256, 4096, 4096), (1024, 2**30, 2**20), (4096, 4096, None), (2**21, 2**30, None)],
)
def test_a_process_that_serves_may_have_as_many_connections_as_the_system_lets_it(monkeypatch, soft, hard, raised):
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append((what, limit)))
    allow_many_connections()
    assert limits == ([] if raised is None else [(resource.RLIMIT_NOFILE, (raised, hard))])


def test_a_system_that_refuses_leaves_the_limit_as_it_was(monkeypatch):
    """One whose own limit was lowered since refuses all that is above it."""

    def refuse(what, limit):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    allow_many_connections()
