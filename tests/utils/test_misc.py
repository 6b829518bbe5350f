import base64
import gc
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from slime.utils.misc import (
    Box,
    SharedAnswer,
    SingletonMeta,
    chunk_named_params_by_size,
    decode_int32_meta_array,
    get_current_node_ip,
    get_free_port,
    group_by,
    host_memory_gib,
    no_garbage_collection,
    should_run_periodic_action,
    unique_hex,
)


def test_the_memory_of_a_process_rises_with_what_it_holds():
    code = (
        "from slime.utils.misc import host_memory_gib\n"
        "before = host_memory_gib(); held = bytearray(b'x') * 2**28; print(host_memory_gib() - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(0.25, rel=0.05)
    assert 0.01 < host_memory_gib() < 100


def test_ids_are_nobody_elses():
    ids = {unique_hex(16) for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(name) for name in ids} == {16} and all(int(name, 16) >= 0 for name in ids)
    random.seed(0)
    first = unique_hex()
    random.seed(0)
    assert unique_hex() != first


def test_a_forked_process_has_ids_of_its_own():
    code = (
        "import os; from slime.utils.misc import unique_hex\n"
        "child = os.fork(); os.write(1, f'{unique_hex()} '.encode()); os._exit(0) if not child else os.waitpid(child, 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert len(set(told.split())) == 2


@pytest.mark.parametrize(
    "rollout_id, interval, per_epoch, num_rollout, due",
    [
        (0, None, 1, 1, False),
        (9, 7, None, 10, True),  # the last one
        (8, 7, None, 10, False),
        (6, 7, None, 10, True),
        (0, 1, None, None, True),
        (4, 100, 5, None, True),  # end of an epoch
        (3, 100, 5, None, False),
        (9, 100, 5, 20, True),
    ],
)
def test_should_run_periodic_action(rollout_id, interval, per_epoch, num_rollout, due):
    assert should_run_periodic_action(rollout_id, interval, per_epoch, num_rollout) is due


@pytest.mark.parametrize("before", [True, False])
def test_garbage_is_collected_as_before_once_a_block_has_ended(before):
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(KeyError), no_garbage_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is before
    finally:
        gc.enable()


def test_singletons_until_cleared():
    class Single(metaclass=SingletonMeta):
        def __init__(self, value):
            self.value = value

    first = Single(1)
    assert Single(2) is first and first.value == 1
    SingletonMeta.clear_instances()
    assert Single(2).value == 2
    Single.clear_instances()
    assert Single(3).value == 3


def test_box_and_group_by():
    assert Box([1]).inner == [1]
    assert group_by([3, 1, 4, 1, 5], lambda value: value % 2) == {1: [3, 1, 1, 5], 0: [4]}
    assert list(group_by("abca")) == ["a", "b", "c"]


def test_free_ports_skip_taken_ones():
    assert 0 < get_free_port() < 65536
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert get_free_port(port) > port
        assert get_free_port(port - 1, consecutive=2) > port


def test_node_address_can_be_overridden(monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", "[fe80::1]")
    assert get_current_node_ip() == "fe80::1"
    monkeypatch.delenv("SLIME_HOST_IP")
    socket.inet_aton(get_current_node_ip())


class TestDecodeInt32:
    def test_base64_and_sequences_under_the_first_key_present(self):
        values = np.array([1, -2, 2**31 - 1], dtype=np.int32)
        encoded = base64.b64encode(values.tobytes()).decode()
        for meta in ({"b": encoded}, {"a": None, "b": values.tolist()}, {"a": encoded, "b": [0]}):
            decoded = decode_int32_meta_array(meta, ("a", "b"))
            assert decoded.dtype == np.int32 and decoded.tolist() == values.tolist()
        assert decode_int32_meta_array({"a": encoded}, "a").tolist() == values.tolist()
        assert decode_int32_meta_array({}, ("a", "b")) is None

    @pytest.mark.parametrize("value", ["!!!!", "AAA=", [2**40], [1.5, "x"]])
    def test_garbage_names_the_key(self, value):
        with pytest.raises(ValueError, match="meta_info\\['a'\\]"):
            decode_int32_meta_array({"a": value}, "a")


class TestSharedAnswer:
    def test_an_answer_is_of_a_question_that_was_asked_after_one_came(self):
        shared, asked, answers = SharedAnswer(), threading.Event(), iter("abcd")
        released = threading.Event()

        def ask():
            asked.set()
            assert released.wait(60)
            return next(answers)

        with ThreadPoolExecutor(4) as threads:
            first = threads.submit(shared.get, ask, 60.0)
            assert asked.wait(60)
            later = [threads.submit(shared.get, ask, 60.0) for _ in range(3)]
            released.set()
            assert first.result(60) == "a"
            assert "a" not in {one.result(60) for one in later}
        assert shared.get(lambda: "new", 60.0) == "new"

    def test_an_error_is_of_the_thread_that_asked_and_the_next_one_asks_itself(self):
        shared = SharedAnswer()
        with pytest.raises(KeyError):
            shared.get(lambda: {}["none"], 1.0)
        assert shared.get(lambda: "answer", 1.0) == "answer"

    def test_nobody_waits_longer_than_they_say_for_those_before_them(self):
        shared, asked, released = SharedAnswer(), threading.Event(), threading.Event()
        with ThreadPoolExecutor(1) as threads:
            slow = threads.submit(shared.get, lambda: asked.set() or released.wait(60), 60.0)
            try:
                assert asked.wait(60)
                with pytest.raises(TimeoutError):
                    shared.get(lambda: "never", 0.01)
            finally:
                released.set()
            assert slow.result(60) is True


def test_chunks_by_size():
    def param(count):
        return SimpleNamespace(numel=lambda: count, element_size=lambda: 4)

    named = [("a", param(1)), ("b", param(2)), ("c", param(9)), ("d", param(1)), ("e", param(2))]
    chunks = list(chunk_named_params_by_size(iter(named), 12))
    assert [[name for name, _ in chunk] for chunk in chunks] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(chunk_named_params_by_size([], 12)) == []
