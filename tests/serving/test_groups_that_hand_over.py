"""Real engines of two groups of attention each: one reads prompts, and hands their caches to the groups of another.

What moves caches on a CPU is no part of what this project installs: its package needs libraries of the system, for RDMA. Where
it is missing, an engine that would prefill says so when it starts.
"""

import concurrent.futures
import importlib.util
import itertools

import pytest
import ray

from slime.utils.errors import UserError
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request, response_of
from tests.support.processes.served_engines import (
    GROUPS,
    LONG,
    MIXTURE,
    PROMPT,
    TWO_GROUPS,
    assert_computed_by,
    flush,
    make_args,
    post,
    pushing,
    requests_of_groups,
    serving_of,
)
from tests.support.processes.waiting import wait_until

ENGINES = {
    **TWO_GROUPS, "num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "prefill_num_servers": 1,
    "sglang_disaggregation_transfer_backend": None,
}  # fmt: skip
# Not the address on which the processes of an engine with groups speak to each other.
HOST = "127.0.0.2"


@pytest.mark.slow
def test_groups_take_what_the_groups_of_another_engine_have_read(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_HOST_IP", HOST)
    checkpoints = [make_tiny_checkpoint(tmp_path / f"weights {seed}", seed=seed, **MIXTURE) for seed in range(2)]
    served = serving_of(make_args(checkpoints[0], **ENGINES), tmp_path / "logs")
    if importlib.util.find_spec("mooncake") is None:
        with pytest.raises(UserError, match="mooncake-transfer-engine-non-cuda"), served:
            pass
        return
    with served as serving, concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert [url.startswith(f"http://{HOST}:") for url in serving.urls] == [True, True]
        ask = asks_by_group(serving, pool)
        every_group_takes_what_every_group_hands_over(ask, checkpoints[0])
        the_router_asks_one_of_each(serving, checkpoints[0])
        the_probe_meets_every_group_that_prefills(serving)
        a_push_reaches_the_ranks_of_all_groups(serving, ask, checkpoints)
        for group in GROUPS:
            caches_are_flushed_when_no_group_has_requests(serving, ask, group)
        all_groups_give_their_memory_back_and_take_it_again(serving, ask)


def asks_by_group(serving, pool):
    """A function that sends a request to one group of each engine, as a router does; the answer is a future."""
    rooms, (port, _) = itertools.count(1000, 2), serving.call_all("bootstrap_port")

    def send(reads, writes, prompt=PROMPT, length=24):
        request = {
            **generation_request(prompt, length), "bootstrap_host": HOST, "bootstrap_port": port,
            "bootstrap_room": next(rooms) + reads,
        }  # fmt: skip
        prefill, decode = (f"{url}/generate" for url in serving.urls)
        pool.submit(post, prefill, request)
        return pool.submit(lambda: post(decode, {**request, "routed_dp_rank": writes}).json())

    return send


def every_group_takes_what_every_group_hands_over(ask, checkpoint):
    model = ReferenceModel(checkpoint)
    ways = list(itertools.product(GROUPS, GROUPS)) * 2
    prompts = [[*PROMPT[: 3 + position % 5], 7 * position] for position in range(len(ways))]
    answers = [ask(*way, prompt) for way, prompt in zip(ways, prompts, strict=True)]
    for (_, writes), prompt, answer in zip(ways, prompts, answers, strict=True):
        found = answer.result()
        assert found["meta_info"]["dp_rank"] == writes
        assert_computed_by(found, model, prompt)


def the_router_asks_one_of_each(serving, checkpoint):
    answer = post(f"{serving.router.url}/generate", generation_request(PROMPT)).json()
    assert_computed_by(answer, ReferenceModel(checkpoint))


def the_probe_meets_every_group_that_prefills(serving):
    request = {**generation_request(PROMPT, 1), "input_ids": [PROMPT] * 4}
    answers = ray.get(serving.engines[0].generate.remote(request), timeout=60)
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1, 0, 1]


def a_push_reaches_the_ranks_of_all_groups(serving, ask, checkpoints):
    from safetensors.torch import load_file

    for checkpoint in reversed(checkpoints):
        serving.call_all("update_weights_from_disk", str(checkpoint))
        from_disk = serving.checksums()
        serving.call_all("reset_weights")
        with pushing(serving, load_file(checkpoint / "model.safetensors")) as push:
            receivers = [Receiver(index, engine, 2, 2 * index) for index, engine in enumerate(serving.engines)]
            assert push(receivers).failed == {}
        assert serving.checksums() == from_disk
        for way in itertools.product(GROUPS, GROUPS):
            assert_computed_by(ask(*way).result(), ReferenceModel(checkpoint))


def caches_are_flushed_when_no_group_has_requests(serving, ask, group):
    answer = ask(1 - group, group, length=LONG)
    wait_until(lambda: requests_of_groups(serving.urls[1])[group] == 1)
    assert serving.call_all("has_requests")[1]
    assert [flush(serving.urls[1]) for _ in range(3)] == [400] * 3
    serving.call_all("pause_generation")
    assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort", answer.result()
    serving.call_all("flush_cache")
    assert serving.call_all("has_requests") == [False, False]
    serving.call_all("continue_generation")
    assert len(response_of(ask(group, group).result())[0]) == 24


def all_groups_give_their_memory_back_and_take_it_again(serving, ask):
    for method in ("sleep", "wake_weights", "wake_caches", "continue_generation"):
        serving.call_all(method)
    answers = [ask(*way) for way in itertools.product(GROUPS, GROUPS)]
    assert [len(response_of(answer.result())[0]) for answer in answers] == [24] * 4
