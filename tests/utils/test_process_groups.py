import os
import socket
import subprocess
import sys
import weakref
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from slime.utils import process_groups
from slime.utils.child_process import environment_for_python
from slime.utils.ports import group_environment
from slime.utils.process_groups import (
    create_store,
    get_gloo_group,
    init_gloo_group,
    init_process_group,
    patient_groups,
)
from tests.support.processes.distributed import run_distributed

TIMEOUT = timedelta(seconds=30)

MEMBER = """
import sys
import torch
from datetime import timedelta
from torch.distributed import TCPStore
from slime.utils.process_groups import init_process_group

timeout = timedelta(seconds=30)
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timeout)
group = init_process_group("gloo", store, 2, 1, "test-group", timeout)
tensor = torch.zeros(3)
group.broadcast(tensor, 0).wait()
print(tensor.tolist(), torch.distributed.is_initialized())
"""


def test_two_members_of_a_group_without_a_default_group():
    store = create_store("127.0.0.1", TIMEOUT)
    command = [sys.executable, "-c", MEMBER, str(store.port)]
    with subprocess.Popen(command, env=environment_for_python(), stdout=subprocess.PIPE, text=True) as member:
        try:
            group = init_process_group("gloo", store, 2, 0, "test-group", TIMEOUT)
            group.broadcast(torch.arange(3.0), 0).wait()
            assert member.communicate(timeout=30)[0].strip() == "[0.0, 1.0, 2.0] False"
        finally:
            member.kill()
    dist.destroy_process_group(group)
    assert not dist.is_initialized()


def listening_worker(host):
    """The addresses on which the member of a group listens."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.update(group_environment(host))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


# One of each interface that has any.
OWN_ADDRESSES = sorted(
    next(entry.address for entry in addresses if entry.family == socket.AF_INET)
    for addresses in psutil.net_if_addrs().values()
    if any(entry.family == socket.AF_INET for entry in addresses)
)


@pytest.mark.parametrize("host", OWN_ADDRESSES)
def test_a_group_listens_where_its_node_is_reached_whatever_the_name_of_the_machine_leads_to(host):
    assert run_distributed(listening_worker, 1, (host,)) == [{host}]


def test_the_store_listens_on_its_host_only():
    store = create_store("127.0.0.1", TIMEOUT)
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]


def test_a_member_that_never_comes_is_an_error():
    store = create_store("127.0.0.1", timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        init_process_group("gloo", store, 2, 0, "lonely", timedelta(seconds=1))


@pytest.mark.parametrize(
    "backend, given, seen",
    [("nccl", None, "2"), ("nccl", "1", "1"), ("gloo", None, None)],
    ids=["nccl", "nccl, as the user says", "gloo"],
)
def test_a_peer_that_dies_does_not_take_this_process_with_it(monkeypatch, backend, given, seen):
    """NCCL's watchdog would end it, here as in all groups of one world."""
    name, found = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    monkeypatch.delenv("NCCL_ASYNC_ERROR_HANDLING", raising=False)
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)

    def helper(*arguments, **options):
        found.append(os.environ.get(name))
        return object(), None

    monkeypatch.setattr("torch.distributed.distributed_c10d._new_process_group_helper", helper)
    monkeypatch.setattr("torch.distributed.distributed_c10d._pg_group_ranks", {})
    init_process_group(backend, dist.HashStore(), 2, 0, "engines", TIMEOUT)
    assert (found, os.environ.get(name)) == ([seen], given)


def gloo_group_worker(backend):
    """A sum over the group, and what else there is to say of it; `backend` is what the default group is said to be."""
    dist.init_process_group("gloo")
    with pytest.raises(RuntimeError, match="call init_gloo_group"):
        get_gloo_group()
    with mock.patch.object(dist, "get_backend", lambda group=None: backend):
        group = init_gloo_group(TIMEOUT)
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total, group=get_gloo_group())
    same, is_default = group is get_gloo_group() is init_gloo_group(), group is dist.group.WORLD
    kept = weakref.ref(group)
    del group
    dist.destroy_process_group()
    return same, is_default, total.item(), kept() is None


@pytest.mark.parametrize("backend", ["gloo", "another"])
def test_the_gloo_group_of_all_ranks(backend):
    """It is the default group where that is one of Gloo, made once, and gone when the groups are left."""
    assert run_distributed(gloo_group_worker, 2, (backend,)) == [(True, backend == "gloo", 3.0, True)] * 2


def test_without_a_default_group_there_is_no_gloo_group():
    assert process_groups._on_host is None
    with pytest.raises(RuntimeError, match="no default process group"):
        init_gloo_group()


def patience_worker(seconds):
    """Limits of the default group and of a second one: before, in the block, and after an error in it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    groups = [dist.group.WORLD, dist.new_group(timeout=timedelta(seconds=90))]

    def limits():
        return [group._get_backend(torch.device("cpu")).options._timeout.seconds for group in groups]

    found = [limits()]
    try:
        with patient_groups(seconds):
            found.append(limits())
            dist.barrier()
            raise OSError("disk full")
    except OSError:
        found.append(limits())
    dist.destroy_process_group()
    return found


def test_who_waits_for_a_writer_has_patience_and_afterwards_none():
    expected = [[40, 90], [60, 90], [40, 90]]
    assert run_distributed(patience_worker, 2, (60,)) == [expected] * 2


def test_groups_that_stand_for_others_wait_for_nobody():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with patient_groups(60.0):
            dist.barrier()
    finally:
        dist.destroy_process_group()
