"""A real engine of two pipeline stages, whose ranks attend in two groups: all four are one engine."""

import concurrent.futures

import pytest
from safetensors.torch import load_file

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
    serving_of,
)
from tests.support.processes.waiting import wait_until

pytestmark = pytest.mark.slow

ENGINE = {
    **TWO_GROUPS, "num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4, "world_size": 4,
    "sglang_pp_size": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    directory = tmp_path_factory.mktemp("weights")
    return [make_tiny_checkpoint(directory / str(seed), seed=seed, **MIXTURE) for seed in range(2)]


@pytest.fixture(scope="module")
def serving(checkpoints, tmp_path_factory):
    with serving_of(make_args(checkpoints[0], **ENGINE), tmp_path_factory.mktemp("logs")) as serving:
        yield serving


@pytest.fixture
def ask(serving):
    """Sends a request to a group; the answer is a future."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:

        def send(group, prompt=PROMPT, length=24):
            request = {**generation_request(prompt, length), "routed_dp_rank": group}
            return pool.submit(lambda: post(f"{serving.urls[0]}/generate", request).json())

        yield send


def test_log_probs_of_every_group_are_those_of_the_model(ask, checkpoints):
    assert_groups_compute(ask, checkpoints[0])


@pytest.mark.parametrize("placement", [{}, TOGETHER], ids=["group", "handles"])
def test_a_push_reaches_the_groups_of_every_stage(serving, ask, checkpoints, placement):
    for checkpoint in reversed(checkpoints):
        serving.call_all("update_weights_from_disk", str(checkpoint))
        (from_disk,) = serving.checksums().values()
        assert {name.partition("/")[0] for name in from_disk} == {"0", "1", "2", "3"}
        serving.call_all("reset_weights")
        with pushing(serving, load_file(checkpoint / "model.safetensors"), **placement) as push:
            report = push([Receiver(0, serving.engines[0], 4, 0)])
        assert (report.version, report.failed) == (1, {})
        assert list(serving.checksums().values()) == [from_disk]
        for group in GROUPS:
            assert_computed_by(ask(group).result(), ReferenceModel(checkpoint))


@pytest.mark.parametrize("group", GROUPS)
def test_caches_are_flushed_when_no_batch_of_any_group_has_requests(serving, ask, group):
    answer = ask(group, length=LONG)
    wait_until(lambda: requests_of_groups(serving.urls[0])[group] == 1)
    assert [flush(serving.urls[0]) for _ in range(5)] == [400] * 5
    serving.call_all("pause_generation")
    assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
    serving.call_all("flush_cache")
    assert serving.call_all("has_requests") == [False]
    serving.call_all("continue_generation")
    assert len(response_of(ask(group).result())[0]) == 24


def test_requests_of_every_group_wait_for_new_weights_and_go_on(serving, ask, checkpoints):
    serving.call_all("update_weights_from_disk", str(checkpoints[0]), "1")
    answers = [ask(group, length=LONG // 4) for group in (*GROUPS, *GROUPS)]
    wait_until(lambda: requests_of_groups(serving.urls[0]) == [2, 2])
    serving.call_all("pause_generation", "retract")
    serving.call_all("flush_cache")
    serving.call_all("update_weights_from_disk", str(checkpoints[1]), "7")
    assert not any(answer.done() for answer in answers)
    serving.call_all("continue_generation")
    models = dict(zip("17", map(ReferenceModel, checkpoints), strict=True))
    for answer in answers:
        found = answer.result()
        tokens, log_probs = response_of(found)
        spans = found["meta_info"]["weight_versions"]
        assert len(tokens) == LONG // 4 and [span["version"] for span in spans] == ["1", "7"]
        for span in spans:
            part = slice(span["start"], span["end"])
            expected = models[span["version"]].log_probs(PROMPT, tokens)[part]
            assert log_probs[part] == pytest.approx(expected, abs=1e-4)


def test_memory_is_given_back_and_taken_again_by_every_rank(serving, ask):
    for method in ("sleep", "wake_weights", "wake_caches", "continue_generation"):
        serving.call_all(method)
    assert [len(response_of(ask(group).result())[0]) for group in GROUPS] == [24, 24]
