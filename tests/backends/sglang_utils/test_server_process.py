"""What a server process changes in SGLang, most of it for data-parallel attention: where a test of its source fails, the change
is no longer needed.

What follows from it is shown by `tests/serving/test_groups_of_attention.py`.
"""

import contextlib
import sys
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils import server_process, worker_watch
from tests.backends.sglang_utils.test_cpu_runtime import source_of


@pytest.mark.parametrize(
    ("module", "assumption"),
    [
        (
            "sglang.srt.managers.tokenizer_control_mixin",
            "await self.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))\n        )[0]\n",
        ),
        ("sglang.srt.managers.scheduler", "        set_random_seed(self.random_seed)\n"),
        ("sglang.srt.managers.scheduler", "            self.idle_sleeper = IdleSleeper(\n"),
        ("sglang.srt.managers.scheduler_components.idle_sleeper", "        self.poller.poll(1000)\n"),
        ("sglang.srt.server_args", '                    wait_port_available(port_base, "port_base")\n'),
        (
            "sglang.srt.entrypoints.engine",
            "infos = _wait_for_scheduler_ready(scheduler_pipe_readers, scheduler_procs)\n",
        ),
        ("sglang.srt.entrypoints.engine", "            scheduler_init_result.block_until_scheduler_exits()\n"),
        ("sglang.srt.managers.data_parallel_controller", "scheduler_info.append(scheduler_pipe_readers[i].recv())\n"),
        ("sglang.srt.entrypoints.http_server", "    run_scheduler_process_func: Callable = run_scheduler_process,\n"),
    ],
)
def test_sglang_still_does_what_is_changed(module, assumption):
    assert assumption in source_of(module)


def test_torch_native_still_cannot_fill_up_a_batch():
    for module in ("torch_native_backend", "base_attn_backend"):
        assert "get_cpu_graph_seq_len_fill_value" not in source_of(f"sglang.srt.layers.attention.{module}")


def fail():
    raise RuntimeError("no model")


@pytest.mark.parametrize(
    ("node_rank", "load", "later"),
    [(0, lambda: "ready", []), (1, lambda: "ready", ["start"]), (1, fail, [])],
    ids=["first node", "further node", "failed"],
)
def test_schedulers_are_watched_while_a_server_starts_and_on_further_nodes_for_good(
    monkeypatch, tmp_path, node_rank, load, later
):
    told = []

    class Watch:
        def __init__(self, *arguments):
            assert arguments == (tmp_path / "cause", ["one", "other"], ["scheduler_0", "scheduler_1"])

        def __getattr__(self, name):
            return lambda: told.append(name)

    engine = SimpleNamespace(_wait_for_scheduler_ready=lambda readers, schedulers: told.append("waits") or load())
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints", SimpleNamespace(engine=engine))
    monkeypatch.setattr(worker_watch, "WorkerWatch", Watch)
    server_process._end_when_a_worker_dies(tmp_path / "cause", node_rank)
    with pytest.raises(RuntimeError, match="no model") if load is fail else contextlib.nullcontext():
        assert engine._wait_for_scheduler_ready("pipes", ["one", "other"]) == "ready"
    assert told == ["start_early", "waits", *later, "stop"]
