"""A real engine with data-parallel attention: two groups of one rank, with requests and caches of their own, are one engine."""

import concurrent.futures
import os
import signal

import psutil
import pytest

from slime.utils.errors import RunError
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request, response_of
from tests.support.processes.served_engines import (
    GROUPS,
    LONG,
    MIXTURE,
    PROMPT,
    TOGETHER,
    TWO_GROUPS,
    assert_computed_by,
    assert_groups_compute,
    flush,
    make_args,
    post,
    pushing,
    requests_of_groups,
    server_tree,
    serving_of,
)
from tests.support.processes.waiting import wait_until

pytestmark = pytest.mark.slow

ENGINE = {**TWO_GROUPS, "rollout_num_gpus_per_engine": 2, "router_dp_aware": True}


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("old"), seed=0, **MIXTURE)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("new"), seed=1, **MIXTURE)


@pytest.fixture(scope="module")
def serving(old, tmp_path_factory):
    with serving_of(make_args(old, **ENGINE), tmp_path_factory.mktemp("logs")) as serving:
        yield serving


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def ask(serving, pool):
    """Sends a request to a group; the answer is a future."""

    def send(group, prompt=PROMPT, length=24):
        request = {**generation_request(prompt, length), "routed_dp_rank": group}
        return pool.submit(lambda: post(f"{serving.urls[0]}/generate", request).json())

    return send


def test_groups_draw_different_answers_to_one_prompt(ask):
    """Asked first, when no group has drawn anything."""
    first, second = [ask(group) for group in GROUPS]
    assert response_of(first.result())[0] != response_of(second.result())[0]


def test_the_router_chooses_the_group(serving):
    assert [worker["url"] for worker in serving.router.workers()] == serving.urls
    asked = [post(f"{serving.router.url}/generate", generation_request(PROMPT, 4)).json() for _ in range(4)]
    assert sorted(answer["meta_info"]["dp_rank"] for answer in asked) == [0, 0, 1, 1]


def test_log_probs_of_every_group_are_those_of_the_model(ask, old):
    assert_groups_compute(ask, old)


@pytest.mark.parametrize("placement", [{}, TOGETHER], ids=["group", "handles"])
def test_a_push_reaches_the_ranks_of_every_group(serving, ask, old, new, placement):
    for checkpoint in (new, old):
        model = ReferenceModel(checkpoint)
        serving.call_all("update_weights_from_disk", str(checkpoint))
        (from_disk,) = serving.checksums().values()
        assert {name.partition("/")[0] for name in from_disk} == {"0", "1"}
        serving.call_all("reset_weights")
        (after_reset,) = serving.checksums().values()
        assert not from_disk.items() & after_reset.items()
        with pushing(serving, on_disk(checkpoint), **placement) as push:
            report = push([Receiver(0, serving.engines[0], 2, 0)])
        assert (report.version, report.failed) == (1, {})
        assert list(serving.checksums().values()) == [from_disk]
        for group in GROUPS:
            answer = ask(group).result()
            assert answer["meta_info"]["weight_version"] == "1"
            assert_computed_by(answer, model)


def on_disk(checkpoint):
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("group", GROUPS)
def test_caches_are_flushed_when_no_group_has_requests(serving, ask, group):
    answer = ask(group, length=LONG)
    wait_until(lambda: requests_of_groups(serving.urls[0])[group] == 1)
    assert requests_of_groups(serving.urls[0])[1 - group] == 0
    assert [flush(serving.urls[0]) for _ in range(5)] == [400] * 5
    assert serving.call_all("has_requests") == [True]
    serving.call_all("pause_generation")
    assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
    serving.call_all("flush_cache")
    assert serving.call_all("has_requests") == [False]
    serving.call_all("continue_generation")
    assert len(response_of(ask(group).result())[0]) == 24


def test_requests_of_every_group_wait_for_new_weights_and_go_on(serving, ask, old, new):
    """Both stop, compute anew what they had in the cache, and write the rest with the new weights."""
    answers = [ask(group, length=LONG // 4) for group in GROUPS]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [1, 1])
    serving.call_all("pause_generation", "retract")
    serving.call_all("flush_cache")
    serving.call_all("update_weights_from_disk", str(new), "7")
    assert not any(answer.done() for answer in answers)
    serving.call_all("continue_generation")
    models = {"1": ReferenceModel(old), "7": ReferenceModel(new)}
    for answer in answers:
        found = answer.result()
        tokens, log_probs = response_of(found)
        assert len(tokens) == LONG // 4 and found["meta_info"]["finish_reason"]["type"] == "length"
        spans = found["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == ["1", "7"]
        for span in spans:
            part = slice(span["start"], span["end"])
            expected = models[span["version"]].log_probs(PROMPT, tokens)[part]
            assert log_probs[part] == pytest.approx(expected, abs=1e-4)


def test_an_abort_reaches_every_group(serving, ask):
    answers = [ask(group, length=LONG) for group in GROUPS]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [1, 1])
    assert post(f"{serving.urls[0]}/abort_request", {"abort_all": True}).ok
    for answer in answers:
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"


def test_memory_is_given_back_and_taken_again_by_every_group(serving, ask):
    serving.call_all("sleep")
    serving.call_all("wake_weights")
    serving.call_all("wake_caches")
    serving.call_all("continue_generation")
    assert [len(response_of(ask(group).result())[0]) for group in GROUPS] == [24, 24]


def test_a_group_that_died_ends_the_engine(serving):
    schedulers = [process for process in server_tree(server_of(serving)) if "scheduler" in process.cmdline()[0]]
    (last,) = [process for process in schedulers if "DP1" in process.cmdline()[0]]
    assert len(schedulers) == 2
    os.kill(last.pid, signal.SIGKILL)
    with pytest.raises(RunError, match="engine 0 died: its scheduler"):
        serving.owner.ended.result(60)


def server_of(serving):
    (pid,) = serving.call_all("server_pid")
    assert psutil.pid_exists(pid)
    return pid
