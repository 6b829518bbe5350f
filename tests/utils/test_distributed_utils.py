import threading
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from slime.utils.distributed_utils import create_store, init_process_group

TIMEOUT = timedelta(seconds=20)


def test_two_members_of_a_group_without_a_default_group():
    store = create_store("127.0.0.1", TIMEOUT)
    received = {}

    def member():
        client = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=TIMEOUT)
        group = init_process_group("gloo", client, 2, 1, "test-group", TIMEOUT)
        tensor = torch.zeros(3)
        group.broadcast(tensor, 0).wait()
        received["tensor"] = tensor

    thread = threading.Thread(target=member)
    thread.start()
    group = init_process_group("gloo", store, 2, 0, "test-group", TIMEOUT)
    group.broadcast(torch.arange(3.0), 0).wait()
    thread.join(20)
    assert received["tensor"].tolist() == [0, 1, 2]
    assert not dist.is_initialized()


def test_the_store_listens_on_its_host_only():
    store = create_store("127.0.0.1", TIMEOUT)
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == store.port] == ["127.0.0.1"]


def test_a_member_that_never_comes_is_an_error():
    store = create_store("127.0.0.1", timedelta(seconds=1))
    with pytest.raises(RuntimeError):
        init_process_group("gloo", store, 2, 0, "lonely", timedelta(seconds=1))
