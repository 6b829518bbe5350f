"""What the stand-in for an engine leaves behind."""

import contextlib
import gc
import threading

import requests

from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.processes.waiting import wait_until


def test_a_server_that_ends_leaves_no_task_of_a_request_that_it_holds(caplog):
    """It would be thrown away in another test, and be in the log of that."""
    end_while_it_holds_a_request()
    gc.collect()
    assert caplog.messages == []


def end_while_it_holds_a_request():
    def ask(url):
        with contextlib.suppress(requests.ConnectionError):
            requests.post(f"{url}/generate", json={"input_ids": [1], "sampling_params": {}}, timeout=60)

    with FakeGenerateServer(hold=lambda payload: True) as server:
        asking = threading.Thread(target=ask, args=(server.url,))
        asking.start()
        wait_until(lambda: server._held)
    asking.join(60)
    assert not asking.is_alive()
