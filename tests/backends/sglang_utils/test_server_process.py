"""What a server process changes in SGLang, most of it for data-parallel attention and pipeline stages; and what it hides.

Where a test of its source fails, the change is no longer needed.

What follows is shown by `test_groups_of_attention.py`, `test_groups_that_hand_over.py` and `test_engine_of_stages.py` of
`tests/serving`.
"""

import contextlib
import logging
import re
import sys
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils import server_process, worker_watch
from slime.backends.sglang_utils.server_process import StepsOfStages, answer_of_all, hide_from_logs
from slime.models.families import FAMILIES
from tests.backends.sglang_utils.test_cpu_runtime import source_of
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.processes.distributed import run_distributed
from tests.support.processes.patched_rank import registered, rows_of_experts
from tests.support.processes.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    ("module", "assumption"),
    [
        (
            "sglang.srt.managers.tokenizer_control_mixin",
            "await self.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))\n        )[0]\n",
        ),
        ("sglang.srt.managers.scheduler", "        set_random_seed(self.random_seed)\n"),
        ("sglang.srt.managers.scheduler", "            self.idle_sleeper = IdleSleeper(\n"),
        # An engine that is paused is told to go on for a moment, since it refuses to flush (`SGLangEngine.flush_cache`).
        ("sglang.srt.managers.scheduler", "            idle &= len(self.grammar_manager.grammar_queue) == 0\n"),
        ("sglang.srt.managers.scheduler_components.idle_sleeper", "        self.poller.poll(1000)\n"),
        ("sglang.srt.server_args", '                    wait_port_available(port_base, "port_base")\n'),
        (
            "sglang.srt.entrypoints.engine",
            "infos = _wait_for_scheduler_ready(scheduler_pipe_readers, scheduler_procs)\n",
        ),
        ("sglang.srt.entrypoints.engine", "            scheduler_init_result.block_until_scheduler_exits()\n"),
        ("sglang.srt.managers.data_parallel_controller", "scheduler_info.append(scheduler_pipe_readers[i].recv())\n"),
        ("sglang.srt.entrypoints.http_server", "    run_scheduler_process_func: Callable = run_scheduler_process,\n"),
        ("sglang.srt.layers.dp_attention", "        local_start_pos = dp_rank * cuda_graph_batch\n"),
        ("sglang.srt.model_executor.model_runner", '=getattr(self.decode_cuda_graph_runner, "bs", None),\n'),
        (
            "sglang.srt.disaggregation.common.conn",
            "            host = NetworkAddress.parse(self.dist_init_addr).resolved().host\n        else:\n",
        ),
    ],
)
def test_sglang_still_does_what_is_changed(module, assumption):
    assert assumption in source_of(module)


PIPELINE, SCHEDULER = "sglang.srt.managers.scheduler_pp_mixin", "sglang.srt.managers.scheduler"
RUNNER_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater"


def function_of(module, name):
    """The text of a function or method."""
    pattern = rf"^( *)def {name}\(.*?(?=^\1(?:def|@|class|async) ?|\Z)"
    return re.search(pattern, source_of(module), re.DOTALL | re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("module", "name", "assumption"),
    [
        (SCHEDULER, "ingest_requests", "self.process_input_requests(recv_reqs)\n        return recv_reqs\n"),
        (SCHEDULER, "is_fully_idle", "and self._pp_microbatches_drained()\n"),
        (SCHEDULER, "pause_generation", "retract_reqs = [r for r in self.running_batch.reqs if not r.finished()]\n"),
        (SCHEDULER, "on_idle", "self.invariant_checker._check_all_pools("),
        (SCHEDULER, "init_load_inquirer", "get_running_batch=lambda: self.running_batch,\n"),
        (RUNNER_UPDATER, "init_weights_update_group", "rank = rank_offset + self.tp_rank\n"),
        (
            "sglang.srt.managers.tp_worker",
            "deserialize_own_rank",
            "serialized_named_tensors[self.model_runner.tp_rank]\n",
        ),
        (UPDATER, "check_weights", "all_payloads, payload, group=self.tp_cpu_group\n"),
    ],
)
def test_sglang_still_does_so_on_each_stage(module, name, assumption):
    assert assumption in function_of(module, name)


def test_ranks_of_a_stage_still_answer_alone():
    texts = {name: function_of(UPDATER, name) for name in server_process._CARRIED_OUT_ALONE}
    release = texts.pop("release_memory_occupation")
    assert all("success=success" in text and "gather" not in text for text in texts.values())
    # They wait for each other before memory is free, and not after it.
    assert release.index("self.tp_cpu_group") < release.index("pause(GPU_MEMORY_TYPE_WEIGHTS)")
    # With tensors they do so before these are let go.
    assert texts["update_weights_from_tensor"].count("group=self.tp_cpu_group") == 1


def _carry_out_on_two_ranks(go):
    """The answers of the first rank to requests, of which the second carries the first one out later, and fails."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    carried_out = []

    class Updater:
        tp_cpu_group = dist.group.WORLD

        def update_weights_from_disk(self, request):
            if dist.get_rank() == 1 and request == "bad":
                wait_until(go.exists, 60)
                return SimpleNamespace(success=False, message="unreadable")
            if request == "bad":
                go.touch()
            return SimpleNamespace(success=True, message=f"loaded by {dist.get_rank()}")

        update_weights_from_tensor = update_weights_from_distributed = init_weights_update_group = (
            update_weights_from_disk
        )

        def release_memory_occupation(self, request):
            carried_out.append(request)
            return SimpleNamespace(message="free")

    server_process.answer_for_all_ranks(Updater)
    updater = Updater()
    orders = (updater.update_weights_from_disk, "bad"), (updater.update_weights_from_distributed, "good")
    answers = [carry_out(request).message for carry_out, request in orders]
    return answers, updater.release_memory_occupation("all").message, carried_out


def test_weights_are_loaded_and_memory_is_free_when_all_ranks_are_done(tmp_path):
    expected = ["unreadable", "loaded by 0"], "free", ["all"]
    assert run_distributed(_carry_out_on_two_ranks, 2, (tmp_path / "go",)) == [expected] * 2


def test_a_stage_still_hands_requests_on_when_it_has_carried_them_out_and_does_not_pause():
    loop = function_of(PIPELINE, "event_loop_pp")
    takes, sends, plans = (
        loop.index(text)
        for text in ("self.ingest_requests()", "self._pp_send_pyobj_to_next_stage(", "self.get_next_batch_to_run(")
    )
    assert takes < sends < plans
    assert loop.count("_pp_send_pyobj_to_next_stage") == 1 and "_engine_paused" not in source_of(PIPELINE)


def test_what_is_carried_out_by_all_stages_is_there_and_answers_whether_it_went_well():
    updater, requests = source_of(UPDATER), source_of("sglang.srt.managers.io_struct")
    for name in server_process._CARRIED_OUT_BY_ALL:
        assert "ReqOutput(" in function_of(UPDATER, name)
        assert ("success=" in function_of(UPDATER, name)) is (name != "release_memory_occupation")
    assert "class SchedulerWeightUpdaterManager:" in updater
    assert all(f"class {name}(" in requests for name in server_process._ALONE)


MODELS = "sglang.srt.models"


def test_models_that_are_refused_stages_still_have_none():
    files = {family.model_types[0] for family in FAMILIES.values() if not family.engines_have_stages}
    assert files == {"mimo", "qwen3_next"}
    assert not any("pp_proxy_tensors" in source_of(f"{MODELS}.{file}") for file in files)


def test_the_last_stage_of_models_with_one_vocabulary_still_takes_the_embedding_for_its_head():
    files = {family.model_types[0] for family in FAMILIES.values() if family.stages_tie}
    assert files == {"qwen2", "qwen3", "qwen3_vl", "qwen3_5", "qwen3_5_moe"}
    for file in ("qwen2", "qwen3", "qwen3_vl", "qwen3_5"):
        loading = source_of(f"{MODELS}.{file}")
        taken = loading[loading.index('"model.embed_tokens.weight"') - 200 :][:600]
        for text in ("pp_group.is_last_rank", "self.config.tie_word_embeddings", 'if "lm_head.weight" in params_dict:'):
            assert text in taken, (file, text)


def steps(is_first=True):
    return StepsOfStages(is_first, lambda request: request.isupper())


def test_a_request_for_all_stages_waits_for_the_end_of_all_batches_and_holds_back_what_came_behind():
    first, second = steps(), steps(is_first=False)

    def step(arrived, has_batches):
        requests = first.take(arrived, has_batches)
        assert second.take(first.to_hand_on(requests), has_batches) == requests
        assert first.begins == second.begins
        return requests, first.begins

    assert step(["a", "b"], True) == (["a", "b"], True)
    assert step(["c", "PUSH", "d"], True) == (["c"], False)
    assert step([], True) == ([], False)
    assert step(["e", "FLUSH"], True) == ([], False)
    assert step(["f"], False) == (["PUSH", "d", "e", "FLUSH", "f"], True)
    assert step([], True) == ([], True)
    assert step(["PUSH"], False) == (["PUSH"], True)


def test_the_answer_is_that_of_a_stage_that_failed():
    answers = [SimpleNamespace(success=number != 1, message=str(number)) for number in range(3)]
    assert answer_of_all(answers).message == "1"
    assert answer_of_all(answers[2:]).message == "2"


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


@pytest.mark.slow
def test_groups_take_the_experts_of_their_own_tokens(model):
    """Of a graph for three requests, of which a group has four drafted tokens each, the second group's rows begin at twelve."""
    found = run_distributed(rows_of_experts, 1, (model,), start_method="spawn")[0]
    assert found["verified by a graph"] == [*range(12, 20)]
    assert found["verified"] == [*range(4, 12)]
    assert found["decoded by a graph"] == [3, 4]


@pytest.mark.slow
def test_ranks_that_prefill_register_where_their_server_listens(model):
    """They meet on loopback, and it is at the address of the node."""
    assert run_distributed(registered, 1, (model,), start_method="spawn")[0] == 200


def test_the_api_key_is_hidden_in_log_records(caplog):
    factory = logging.getLogRecordFactory()
    try:
        hide_from_logs("s3cret")
        with caplog.at_level(logging.INFO):
            logging.getLogger("server").info("arguments %s and %d%%", {"api_key": "s3cret"}, 5)
            logging.getLogger("server").info("plain %s", "text")
    finally:
        logging.setLogRecordFactory(factory)
    assert caplog.messages == ["arguments {'api_key': '***'} and 5%", "plain text"]


def test_records_that_cannot_be_formatted_and_tracebacks(caplog):
    factory = logging.getLogRecordFactory()
    try:
        hide_from_logs("s3cret")
        record = logging.getLogRecordFactory()("server", logging.INFO, "f", 1, "careful", (FutureWarning,), None)
        assert (record.msg, record.args) == ("careful", (FutureWarning,)), "left alone"
        try:
            raise ValueError("key s3cret is wrong")
        except ValueError:
            logging.getLogger("server").exception("failed")
    finally:
        logging.setLogRecordFactory(factory)
    assert "ValueError: key *** is wrong" in caplog.text and "s3cret" not in caplog.text
