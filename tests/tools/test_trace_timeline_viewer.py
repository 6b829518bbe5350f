"""The timeline of a dump: what it draws, the page beside the dump, and the server of that page."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from slime.observability.trace_utils import trace_event, trace_span
from slime.rollout.rollout_dump import save_rollout
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.tables.shell_arrays import ROOT
from tools.trace_timeline_viewer import page_of, server_of, timeline

TOOL = ROOT / "tools/trace_timeline_viewer.py"
# Words of a model.
EVIL = "</script><script>alert(1)</script>"


def span(name, start, end, span_id, parent=None, **more):
    record = {"kind": "span", "name": name, "span_id": span_id, "parent_id": parent, "attempt": 0, "attrs": {}, **more}
    return {**record, "start": start, "end": end, "status": None if end is None else "ok"}


def sample(index, group, trace_id, *events):
    return SimpleNamespace(index=index, group_index=group, trace={"trace_id": trace_id, "events": list(events)})


def drawn(row):
    return [(s["name"], s["start"], s["end"], s["lane"], s["status"]) for s in row["spans"]]


def test_rows_follow_groups_and_lanes_keep_what_is_at_once_apart():
    asked = {"kind": "event", "name": "asked", "parent_id": "b", "attempt": 0, "time": 103.0, "attrs": {"length": 3}}
    late = sample(5, 1, "second", span("whole", 101.0, None, "w"))
    fanned_out = (
        span("whole", 100.0, 110.0, "a"), span("request", 101.0, 105.0, "b", "a"), span("request", 102.0, 104.0, "c", "a"),
        span("reward", 105.0, 106.0, "d", "a"), asked,
    )  # fmt: skip
    first, sibling = (sample(index, 0, "first", *fanned_out) for index in (0, 1))
    found = timeline([late, first, sibling, sample(9, 2, "none"), SimpleNamespace(index=7, group_index=None)])
    assert found["seconds"] == 10.0
    one, other = found["rows"]
    assert (one["samples"], one["group"], one["lanes"]) == ([0, 1], 0, 3)
    assert drawn(one) == [
        ("whole", 0.0, 10.0, 0, "ok"), ("request", 1.0, 5.0, 1, "ok"), ("request", 2.0, 4.0, 2, "ok"),
        ("reward", 5.0, 6.0, 1, "ok"),
    ]  # fmt: skip
    assert one["events"] == [{"name": "asked", "time": 3.0, "attrs": {"length": 3}, "lane": 1}]
    # What has no end lasts as long as anything is known.
    assert (other["samples"], drawn(other)) == ([5], [("whole", 1.0, 10.0, 0, "unfinished")])


def test_the_row_of_copies_has_what_each_of_them_met():
    whole = span("whole", 100.0, 110.0, "a")
    at_once = {"kind": "event", "name": "asked", "parent_id": "a", "attempt": 0, "time": 101.0, "attrs": {}}
    own = [
        sample(index, 0, "shared", whole, at_once, span(f"request {index}", 101.0, 105.0, f"r{index}", "a"))
        for index in (0, 1)
    ]
    (row,) = timeline(own)["rows"]
    assert [name for name, *_ in drawn(row)] == ["whole", "request 0", "request 1"] and len(row["events"]) == 1


def test_a_dump_without_traces_is_refused(tmp_path):
    with pytest.raises(UserError, match="no sample of the dump has a trace"):
        timeline([SimpleNamespace(index=0, group_index=0)])
    (tmp_path / "0.pt").write_text("no dump")
    with pytest.raises(UserError, match="DUMP: .*0.pt is no readable rollout dump"):
        page_of(tmp_path / "0.pt")


@pytest.fixture
def dump(tmp_path):
    traced = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2], response_length=1)
    with trace_span(traced, "turns", {"answer": EVIL, "speed": float("nan")}):
        trace_event(traced, "asked")
    # A name of a directory that looks like a template.
    return save_rollout(f"{tmp_path}/{{{{a}}}}_{{rollout_id}}.pt", 3, [traced])


def test_the_page_is_one_file_beside_the_dump_and_made_anew_where_that_is_newer(dump):
    assert dump.name == "{a}_3.pt"
    page = page_of(dump)
    assert page == dump.with_name("{a}_3.pt.timeline.html")
    text = page.read_text()
    assert EVIL not in text and len(re.findall("<script", text)) == 1
    assert not re.search(r"(src|href)=|https?:", text), "nothing is fetched"
    data = json.loads(re.search(r"^const data = (.*);$", text, re.MULTILINE)[1])
    assert data["rows"][0]["spans"][0]["attrs"]["answer"] == EVIL
    page.write_text("cached")
    assert page_of(dump).read_text() == "cached"
    assert page_of(dump, rebuild=True).read_text() == text
    page.write_text("old")
    os.utime(page, (1, 1))
    assert page_of(dump).read_text() == text


def test_the_page_alone_is_served_on_loopback(dump):
    page = page_of(dump)
    with server_of(page, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            for path, status in (("/", 200), (f"/{dump.name}", 404), ("/../x", 404)):
                connection.request("GET", path)
                answer = connection.getresponse()
                assert (answer.status, (answer.read() == page.read_bytes())) == (status, status == 200)
                connection.close()
            with pytest.raises(UserError, match=f"--port {server.server_port}: .*in use; give another"):
                server_of(page, server.server_port)
        finally:
            server.shutdown()
            thread.join(60)


def test_the_tool_serves_until_it_is_interrupted(dump):
    command = [sys.executable, str(TOOL), str(dump), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline().strip() == str(page_of(dump))
            port = int(re.match(r"http://127.0.0.1:(\d+)/", process.stdout.readline())[1])
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    made = subprocess.run([*command, "--no-serve"], capture_output=True, text=True, timeout=120)
    assert (made.returncode, made.stdout.strip()) == (0, str(page_of(dump)))
