"""The service over real HTTP, with generators in processes of their own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from slime.utils.child_process import ChildProcess
from slime.utils.ports import reserve_port
from slime_plugins.rollout_buffer import service
from slime_plugins.rollout_buffer.generators import find_generators
from slime_plugins.rollout_buffer.service import RolloutBuffer, WrongRun
from slime_plugins.rollout_buffer.store import Store
from tests.support.processes.buffer_service import IDLE, buffer_service, group_of, item
from tests.support.processes.http_server import status_with_token
from tests.support.processes.waiting import runs, until, wait_until

# Sends what the run tells it to, and ends.
SENDS = """
import json, os, urllib.request
TASK_TYPE = "sends"

def post(url, item):
    request = urllib.request.Request(url + "/buffer/write", json.dumps(item).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).read()

def run_rollout(data):
    for instance in data["instances"]:
        if instance in data["skip_instance_ids"]:
            continue
        for number in range(data["num_repeat_per_sample"]):
            messages = [{"role": "user", "content": instance}, {"role": "assistant", "content": "done"}]
            uid = f"{instance}.{number} of {os.getpid()}"
            post(data["remote_buffer_url"], {"uid": uid, "instance_id": instance, "messages": messages,
                 "reward": float(number), "extra_info": {"process": os.getpid()}})
    if data.get("fails"):
        raise RuntimeError("the tool is broken")
    if data.get("stays"):
        import time
        time.sleep(600)
"""


def served(test, tmp_path, *texts, **options):
    async def main():
        async with buffer_service(tmp_path, *texts, **options) as client, asyncio.timeout(300):
            return await test(client)

    return asyncio.run(main())


def instances(answer):
    return [group["instance_id"] for group in answer["groups"]]


def test_groups_of_a_generator_in_a_process_of_its_own(tmp_path):
    async def test(client):
        await client.start("sends", instances=["a", "b", "c"])
        first = await client.take("1", 2, wait_s=30)
        second = await client.take("2", 1, wait_s=30, received=["1"])
        await until(lambda: True)
        while (await client.status())["generator"] == "running":
            await asyncio.sleep(0.05)
        return first, second, await client.status()

    first, second, status = served(test, tmp_path, SENDS)
    assert (instances(first), instances(second)) == (["a", "b"], ["c"])
    (process,) = {one["extra_info"]["process"] for group in first["groups"] for one in group["items"]}
    assert process != __import__("os").getpid()
    assert status["generator"] == "ended" and status["failure"] is None
    assert status["groups"] == {"open": 0, "waiting": 0, "handed": 1, "received": 2, "dropped": 0}


def test_a_request_waits_for_as_many_groups_as_it_asks_for_and_no_longer_than_it_says(tmp_path):
    async def test(client):
        await client.start()
        assert (await client.take("1", 2, wait_s=0.05))["groups"] == []
        waiting = asyncio.create_task(client.take("1", 2, wait_s=30))
        for one in [*group_of("a"), *group_of("b")]:
            assert not waiting.done()
            assert await client.post("/buffer/write", one) == {"written": 1, "known": 0}
        return await waiting

    assert instances(served(test, tmp_path)) == ["a", "b"]


def test_requests_and_items_that_are_sent_again_change_nothing(tmp_path):
    """As of clients whose connection broke before they had the answer."""

    async def test(client):
        await client.start()
        items = [*group_of("a"), *group_of("b"), *group_of("c")]
        assert await client.post("/buffer/write", {"items": items}) == {"written": 6, "known": 0}
        assert await client.post("/buffer/write", {"items": items}) == {"written": 0, "known": 6}
        # Whoever is cut off while groups are on their way asks again.
        with pytest.raises(asyncio.TimeoutError):
            await client.post(
                "/get_rollout_data", {"request_id": "1", "num_groups": 1}, timeout=aiohttp.ClientTimeout(1e-6)
            )
        answers = [await client.take("1") for _ in range(3)]
        assert (await client.start())["started"] is False
        taken = [await client.take("2"), await client.take("3", received=["1"])]
        assert "was told as received" in (await client.take("1", status=400))["error"]
        return [instances(answer) for answer in (*answers, *taken)]

    assert served(test, tmp_path) == [["a"], ["a"], ["a"], ["b"], ["c"]]


def test_many_clients_get_every_group_once(tmp_path):
    async def test(client):
        await client.start()
        names = [str(number) for number in range(40)]
        writes = [client.post("/buffer/write", one) for name in names for one in group_of(name)]
        takes = [client.take(f"request {number}", 4, wait_s=30) for number in range(10)]
        answers = (await asyncio.gather(*takes, *writes))[:10]
        return sorted(names), sorted(name for answer in answers for name in instances(answer))

    sent, taken = served(test, tmp_path)
    assert sent == taken


def test_generators_wait_while_enough_groups_do(tmp_path):
    async def test(client):
        await client.start(max_waiting_groups=1)
        await client.post("/buffer/write", item("b.0", "b"))
        await client.post("/buffer/write", {"items": group_of("a")})
        refused = await client.post("/buffer/write", item("c.0", "c"), status=429)
        # What has begun may come to its end, and what is there may be sent again.
        await client.post("/buffer/write", {"items": group_of("b") + group_of("a")})
        await client.take("1", 2)
        await client.post("/buffer/write", item("c.0", "c"))
        # Who asks for more than that gets it.
        await client.take("2", 3)
        for name in ("c", "d", "e"):
            await client.post("/buffer/write", {"items": group_of(name)})
        return refused["error"], instances(await client.take("2", 3))

    error, taken = served(test, tmp_path)
    assert error == "1 groups wait to be taken; send it again in a while" and taken == ["c", "d", "e"]


def test_a_service_that_is_started_again_goes_on_where_it_was(tmp_path):
    """The generator went with it: it makes again what was not whole, and leaves out what is here or was taken."""
    state, names = tmp_path / "buffer.sqlite", ["a", "b", "c", "d"]
    wanted = {"task": "sends", "instances": names, "stays": True, "remote_engine_api_key": "a-secret"}

    async def before(client):
        await client.start(**{**wanted, "instances": ["a", "b"]})
        first = await client.take("1", 1, wait_s=30)
        while (await client.status())["groups"]["waiting"] < 1:
            await asyncio.sleep(0.02)
        await client.post("/buffer/write", item("c.0", "c"))
        return first

    async def after(client):
        assert (await client.status())["generator"] == "lost"
        # The request whose answer was lost, before the run knows of anything.
        again = await client.take("1", 1)
        assert (await client.start(**wanted, skip_instance_ids=["d"]))["started"]
        rest = await client.take("2", 2, wait_s=30)
        return again, rest, await client.status()

    first = served(before, tmp_path, SENDS, state=state)
    again, rest, status = served(after, tmp_path, SENDS, state=state)
    assert first["groups"] == again["groups"] and instances(again) == ["a"] and instances(rest) == ["b", "c"]
    assert status["groups"] == {"open": 0, "waiting": 0, "handed": 3, "received": 0, "dropped": 0}
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"a-secret" in path.read_bytes()]
    assert written == []


def test_a_new_run_takes_the_buffer_over(tmp_path):
    async def test(client):
        await client.start(run_id="one")
        await client.post("/buffer/write", {"items": group_of("a")})
        waiting = asyncio.create_task(client.take("1", 2, status=409, run_id="one", wait_s=30))
        await asyncio.sleep(0)
        await client.start(run_id="two")
        errors = [await waiting, await client.take("1", status=409, run_id="one")]
        errors.append(await client.post("/stop_rollout", {"run_id": "one"}, status=409))
        assert (await client.take("1", run_id="two"))["groups"] == []
        return [answer["error"] for answer in errors]

    for error in served(test, tmp_path):
        assert "the buffer belongs to run two now, and not to one" in error


def test_items_of_another_run_are_refused(tmp_path):
    """Instances of two runs have the same ids."""

    async def test(client):
        await client.start(run_id="one")
        one, two = group_of("a")
        await client.post("/buffer/write", {**one, "run_id": "one"})
        await client.start(run_id="two")
        await client.post("/buffer/write", {**two, "run_id": "two"})
        late = [{**two, "uid": "late", "run_id": "one"}, {"items": group_of("a"), "run_id": "one"}]
        errors = [(await client.post("/buffer/write", body, status=409))["error"] for body in late]
        assert (await client.status())["groups"]["open"] == 1
        await client.post("/buffer/write", {"items": [one], "run_id": "two"})
        (group,) = (await client.take("1"))["groups"]
        return errors, [sorted(entry) for entry in group["items"]]

    errors, fields = served(test, tmp_path)
    assert all("the buffer belongs to run two now, and not to one" in error for error in errors)
    assert all("run_id" not in names for names in fields)


def test_a_stop_that_comes_late_leaves_the_generator_of_the_next_run(tmp_path):
    """It came while that one was being started."""
    file = tmp_path / "idle_generator.py"
    file.write_text(IDLE)
    store = Store()
    buffer = RolloutBuffer(store, find_generators([str(file)]), tmp_path / "logs")
    wanted = {"task_type": "idle", "num_repeat_per_sample": 2}

    async def test():
        async with asyncio.timeout(300):
            await buffer.start({**wanted, "run_id": "one"}, "http://127.0.0.1:9")
            starting = asyncio.create_task(buffer.start({**wanted, "run_id": "two"}, "http://127.0.0.1:9"))
            await until(buffer._starting.locked)
            try:
                with pytest.raises(WrongRun, match="belongs to run two now, and not to one"):
                    await buffer.stop("one")
                assert buffer.status()["generator"] == "running"
            finally:
                await starting
                await buffer.stop("two")

    try:
        asyncio.run(test())
    finally:
        store.close()


def test_what_was_received_long_ago_makes_no_write_slower(tmp_path):
    """In steps of the database, which are the same on every machine."""
    file = tmp_path / "idle_generator.py"
    file.write_text(IDLE)
    store = Store()
    store.begin({"run_id": "run", "task_type": "idle", "num_repeat_per_sample": 2, "max_waiting_groups": 9})
    buffer = RolloutBuffer(store, find_generators([str(file)]), tmp_path)
    steps = 0

    def count():
        nonlocal steps
        steps += 1

    def steps_of(instance_id):
        before = steps
        asyncio.run(buffer.write(group_of(instance_id)))
        store.hand_out("more than there are", 9)
        return steps - before

    store._database.set_progress_handler(count, 20)
    first = steps_of("a")
    rows = [(f"old {number}", f"request {number}") for number in range(5000)]
    store._database.executemany("INSERT INTO groups (instance_id, state, request_id) VALUES (?, 'received', ?)", rows)
    assert steps_of("b") <= first + 20
    store.close()


def test_groups_before_an_item_that_is_not_taken_are_told_of(tmp_path):
    async def test(client):
        await client.start(max_waiting_groups=1)
        waiting = asyncio.create_task(client.take("1", 1, wait_s=30))
        async with asyncio.timeout(10):
            # It is there, and has found nothing.
            await until(lambda: client.buffer._changed._waiters)
            await client.post("/buffer/write", {"items": [*group_of("a"), item("c.0", "c")]}, status=429)
            return await waiting

    assert instances(served(test, tmp_path)) == ["a"]


def test_an_end_that_cannot_be_told_fails_the_run(tmp_path, monkeypatch):
    def broken(self):
        raise OSError("the log is gone")

    monkeypatch.setattr(ChildProcess, "describe_end", broken)

    async def test(client):
        await client.start("sends", instances=[], fails=True)
        async with asyncio.timeout(20):
            return await client.take("1", 1, wait_s=30)

    status = served(test, tmp_path, SENDS)["status"]
    assert status["failure"] == "the generator cannot be watched: OSError: the log is gone"


@pytest.mark.parametrize("path", ["/start_rollout", "/buffer/write", "/get_rollout_data", "/stop_rollout"])
def test_what_a_web_page_could_send_is_refused(tmp_path, path):
    async def test(client):
        await client.start()
        body = json.dumps(
            {**item("a", "a"), "task_type": "idle", "num_repeat_per_sample": 1, "request_id": "1", "num_groups": 1}
        )
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await client.post(path, None, status=415, data=body, headers={"Content-Type": kind})
            assert "send JSON with the header Content-Type: application/json" in answer["error"]
        return await client.status()

    status = served(test, tmp_path)
    assert status["run_id"] == "run" and status["generator"] == "running" and status["groups"]["open"] == 0


def test_code_of_a_checkpoint_runs_only_where_the_service_says_so(tmp_path):
    text = (
        "import json\nTASK_TYPE = 'note'\ndef run_rollout(data):\n    open(data['note'], 'w').write(json.dumps(data))\n"
    )
    note = tmp_path / "note.json"

    async def refused(client):
        answer = await client.post(
            "/start_rollout", {"task_type": "note", "num_repeat_per_sample": 1, "trust_remote_code": True}, status=400
        )
        assert "start it with --trust-remote-code" in answer["error"]

    def given(trusts):
        async def test(client):
            await client.start("note", trust_remote_code=trusts, note=str(note), trajectory_timeout=1e9)
            while (await client.status())["generator"] == "running":
                await asyncio.sleep(0.02)

        served(test, tmp_path, text, trust_remote_code=True, trajectory_timeout=7.0)
        data = json.loads(note.read_text())
        return data["trust_remote_code"], data["trajectory_timeout"]

    served(refused, tmp_path, text)
    assert given(True) == (True, 7.0) and given(False) == (False, 7.0)


def test_a_generator_that_fails_is_told_with_its_last_lines(tmp_path):
    async def test(client):
        await client.start("sends", instances=["a"], fails=True)
        early = await client.take("1", 1, wait_s=30)
        late = await client.take("2", 1, wait_s=30)
        return early, late

    early, late = served(test, tmp_path, SENDS)
    assert instances(early) == ["a"] and late["groups"] == []
    assert late["status"]["generator"] == "failed"
    assert "generator sends: exit code 1" in late["status"]["failure"]
    assert "RuntimeError: the tool is broken" in late["status"]["failure"]


def test_a_generator_that_hangs_is_ended_and_one_that_waits_for_room_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(service, "_SENDING_S", 3.0)

    async def test(client):
        await client.start("idle", max_waiting_groups=1)
        await client.post("/buffer/write", {"items": group_of("a")})
        # For longer than it may be silent.
        for _ in range(45):
            await asyncio.sleep(0.1)
            await client.post("/buffer/write", item("b.0", "b"), status=429)
        waits, process = await client.status(), client.buffer._process
        await client.take("1")
        return waits, (await client.take("2", wait_s=30))["status"], process.poll()

    waits, hangs, code = served(test, tmp_path, trajectory_timeout=0.5)
    assert (waits["generator"], hangs["generator"]) == ("running", "failed") and code is not None
    assert "generator idle: it has sent no trajectory for" in hangs["failure"] and "still answer" in hangs["failure"]


def test_stopping_ends_the_generator_and_keeps_the_groups(tmp_path):
    async def test(client):
        await client.start("sends", instances=["a"], stays=True)
        await client.take("1", 1, wait_s=30)
        return await client.post("/stop_rollout", {"run_id": "run"}), await client.take("1", 1)

    stopped, taken = served(test, tmp_path, SENDS)
    assert stopped["status"]["generator"] == "ended" and instances(taken) == ["a"]


def test_functions_about_groups(tmp_path):
    text = IDLE.replace("idle", "picky") + (
        "def is_valid_group(group, size): return sum(item['reward'] for item in group[1]) > 0\n"
        "def get_group_data_meta_info(groups): return {'best': max(i['reward'] for g in groups.values() for i in g)}\n"
    )

    async def test(client):
        await client.start("picky")
        await client.post("/buffer/write", {"items": group_of("a", reward=0.0)})
        await client.post("/buffer/write", {"items": group_of("b", reward=3.0)})
        return await client.take("1"), await client.status()

    answer, status = served(test, tmp_path, text)
    assert instances(answer) == ["b"] and answer["meta_info"] == {"best": 3.0} and status["groups"]["dropped"] == 1


def test_a_function_that_fails_is_told_to_writer_and_run(tmp_path):
    text = IDLE.replace("idle", "broken") + "def is_valid_group(group): return group[1][0]['reward'] / 0\n"

    async def test(client):
        await client.start("broken")
        one, two = group_of("a")
        await client.post("/buffer/write", one)
        written = await client.post("/buffer/write", two, status=422)
        return written["error"], (await client.take("1", wait_s=30))["status"]["failure"]

    for told in served(test, tmp_path, text):
        assert "raised ZeroDivisionError for is_valid_group" in told


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/start_rollout", {"task_type": "chess"}, "task_type 'chess': no generator .* there is idle, math"),
        ("/start_rollout", {"task_type": "idle"}, "num_repeat_per_sample is None; expected a whole number above 0"),
        ("/start_rollout", {"task_type": "idle", "num_repeat_per_sample": "x"}, "num_repeat_per_sample is 'x'"),
        ("/get_rollout_data", {"num_groups": 1}, "request_id is missing"),
        ("/get_rollout_data", {"request_id": "1"}, "num_groups is None"),
        (
            "/get_rollout_data",
            {"request_id": "1", "num_groups": 1, "wait_s": 1e9},
            "wait_s 1000000000.0: .* from 0 to 30",
        ),
        ("/get_rollout_data", {"request_id": "1", "num_groups": 1, "received": "1"}, "received: expected a list"),
        ("/buffer/write", {"uid": "u"}, "`instance_id` of an item is None"),
        ("/buffer/write", {"items": 3}, "`items` is int; expected a list"),
        ("/buffer/write", {"items": [item("a", "a"), 3]}, "an item is an object"),
        ("/buffer/write", [1], "the body is a JSON list; expected an object"),
    ],
)
def test_requests_that_are_wrong_are_told(tmp_path, path, body, message):
    async def test(client):
        await client.start()
        answer = await client.post(path, body, status=400)
        assert (await client.status())["groups"]["open"] == 0
        return answer["error"]

    import re

    error = served(test, tmp_path)
    assert re.search(message, error), error


def test_bodies_and_keys_are_limited(tmp_path):
    async def test(client):
        long = item("a", "a", extra_info={"text": "x" * 5000})
        bearer = {"Authorization": "Bearer open sesame"}
        await client.post("/start_rollout", {"task_type": "idle", "num_repeat_per_sample": 1}, headers=bearer)
        await client.post("/buffer/write", long, status=413, headers=bearer)
        as_json = {**bearer, "Content-Type": "application/json"}
        await client.post("/buffer/write", None, status=400, headers=as_json, data=b"{")
        for headers in ({}, {"Authorization": "Bearer open"}):
            await client.post("/buffer/write", item("a", "a"), status=401, headers=headers)
        for token, status in ((b"open sesame", 200), (b"\xff\xfe", 401)):
            assert await status_with_token(f"{client.url}/status", token) == status
        await client.post("/buffer/write", item("a", "a"), headers=bearer)
        await client.post("/nowhere", {}, status=404, headers=bearer)

    served(test, tmp_path, api_key="open sesame", max_bytes=4096)


def test_nothing_works_before_a_run_is_started(tmp_path):
    async def test(client):
        assert (await client.status())["generator"] == "none"
        for path, body in (("/buffer/write", item("a", "a")), ("/stop_rollout", {})):
            assert "no run has been started" in (await client.post(path, body, status=400))["error"]
        assert (await client.take("1"))["groups"] == []

    served(test, tmp_path)


def test_the_command_serves_and_its_generator_ends_with_it(tmp_path):
    (tmp_path / "own_generator.py").write_text(
        "import os, pathlib, time\nTASK_TYPE = 'note'\ndef run_rollout(data):\n"
        "    pathlib.Path(data['note']).write_text(str(os.getpid()))\n    time.sleep(600)\n"
    )
    note = tmp_path / "pid"
    with reserve_port("127.0.0.1", 26500) as reserved, (tmp_path / "output").open("wb") as output:
        words = ["--port", str(reserved.port), "--generator", str(tmp_path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "slime_plugins.rollout_buffer", *words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=Path(__file__).parents[3],
        )  # fmt: skip
        try:
            body = {"task_type": "note", "num_repeat_per_sample": 1, "note": str(note)}
            wait_until(lambda: _posted(reserved.port, "/start_rollout", body), 240)
            pid = int(wait_until(lambda: note.exists() and note.read_text(), 240))
            # As when it is killed: the pipe to its child closes.
            process.kill()
            process.wait(60)
            wait_until(lambda: not runs(pid))
        finally:
            process.kill()
            process.wait(60)


def _posted(port, path, body):
    import urllib.request

    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=60).status == 200
    except OSError:
        # Nobody listens yet, or whoever does is not ready.
        return False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: everybody on the network could ask; set SLIME_BUFFER_API_KEY"),
        (["--trajectory-timeout", "0"], "--trajectory-timeout 0: expected seconds above 0"),
        (["--generator", "no_such_module"], "--generator no_such_module: the import failed"),
    ],
)
def test_commands_that_are_refused(words, message):
    done = subprocess.run(
        [sys.executable, "-m", "slime_plugins.rollout_buffer", *words],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[3], stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2 and message in done.stderr
