"""How long the calls of an engine take when its server is slow or silent; with real servers: `tests/serving`."""

from types import SimpleNamespace

import pytest
import requests

from slime.backends.sglang_utils import sglang_engine
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils.errors import RunError


class BusyServer:
    """In the place of a session: refuses for `refusals` times, each after `answer_s` seconds of a clock of its own."""

    def __init__(self, answer_s, refusals):
        self.answer_s, self.refusals, self.now = answer_s, refusals, 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def request(self, method, url, json, timeout):
        connect, read = timeout
        assert connect <= read
        self.now += min(read, self.answer_s)
        if read < self.answer_s:
            raise requests.ReadTimeout("too slow")
        self.refusals -= 1
        return SimpleNamespace(ok=self.refusals < 0, text="requests are running")


@pytest.fixture
def flush(monkeypatch, tmp_path):
    def call(answer_s, refusals):
        server = BusyServer(answer_s, refusals)
        engine = SGLangEngine(SimpleNamespace(), 3, tmp_path)
        engine._url, engine._session = "http://10.0.0.1:1", server
        monkeypatch.setattr(sglang_engine, "time", server)
        try:
            engine.flush_cache()
        finally:
            call.took = server.now

    return call


def test_a_cache_is_flushed_when_the_last_request_has_ended(flush):
    flush(answer_s=0.25, refusals=4)
    assert flush.took == 4 * (0.25 + 1) + 0.25


@pytest.mark.parametrize(
    ("answer_s", "message"),
    [(0.0, "engine 3 refused to flush its cache for 60 s: requests are running"),
     (25.0, "engine 3 did not answer /flush_cache within 8 s"),
     (1000.0, "engine 3 did not answer /flush_cache within 60 s")],
)  # fmt: skip
def test_a_minute_is_a_minute_for_a_slow_or_silent_server(flush, answer_s, message):
    with pytest.raises(RunError, match=message):
        flush(answer_s, refusals=1000)
    assert 59.0 <= flush.took <= 60.0
