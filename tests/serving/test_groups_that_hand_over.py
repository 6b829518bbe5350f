"""Real engines of two groups of attention each: one reads prompts, and hands their caches to the groups of another.

What moves caches on a CPU is no part of what this project installs; `tests/e2e/test_prefill_and_decode.py` sees what a run says
without it.
"""

import concurrent.futures
import importlib.util
import itertools

import pytest
import ray

from slime.serving.engines import engines_of_run
from slime.serving.owner import ServingOwner
from slime.utils.env import actor_environment
from slime.weights.transports import Receiver
from tests.support.models.tiny_checkpoint import make_tiny_checkpoint
from tests.support.oracles.log_probs import ReferenceModel, generation_request, response_of
from tests.support.processes.local_ray import start_ray
from tests.support.processes.served_engines import PROMPT, Serving, make_args, post, pushing
from tests.support.processes.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("mooncake") is None, reason="mooncake moves the caches"),
]

GROUPS = range(2)
MIXTURE = {
    "model_type": "qwen3_moe", "tie": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
ENGINES = {
    "num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "prefill_num_servers": 1,
    "sglang_ep_size": 2, "sglang_dp_size": 2, "sglang_enable_dp_attention": True, "sglang_enable_dp_lm_head": True,
    "sglang_enable_deterministic_inference": None, "sglang_disaggregation_transfer_backend": None,
}  # fmt: skip
# Not the address on which the processes of an engine with groups speak to each other.
HOST = "127.0.0.2"
LONG = 1500


class Roles(Serving):
    """One engine that prefills and one that decodes, on four devices."""

    def __init__(self, args, log_dir, placement_group) -> None:
        self.args, self.log_dir, self.placement_group = args, log_dir, placement_group
        places = [(bundle, bundle) for bundle in range(args.rollout_num_gpus)]
        engines = engines_of_run(args, placement_group, places, log_dir, actor_environment())
        self.owner = ServingOwner(args, engines, log_dir)
        self.router = self.owner.start()["default"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [make_tiny_checkpoint(tmp_path_factory.mktemp("weights"), seed=seed, **MIXTURE) for seed in range(2)]


@pytest.fixture(scope="module")
def serving(checkpoints, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIME_HOST_IP", HOST)
        start_ray(num_cpus=4, num_gpus=4)
        placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * 4)
        assert placement_group.wait(120)
        serving = Roles(make_args(checkpoints[0], **ENGINES), tmp_path_factory.mktemp("logs"), placement_group)
        try:
            serving.wait_ready()
            assert [url.startswith(f"http://{HOST}:") for url in serving.urls] == [True, True]
            yield serving
        finally:
            serving.owner.shutdown()
            ray.shutdown()


@pytest.fixture
def pool():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def ask(serving, pool):
    """Sends a request to one group of each engine, as a router does; the answer is a future."""
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


def assert_computed_by(answer, model, prompt=PROMPT):
    tokens, log_probs = response_of(answer)
    assert len(tokens) > 1 and log_probs == pytest.approx(model.log_probs(prompt, tokens), abs=1e-4)


def test_every_group_takes_what_every_group_hands_over(ask, checkpoints):
    model = ReferenceModel(checkpoints[0])
    ways = list(itertools.product(GROUPS, GROUPS)) * 2
    prompts = [[*PROMPT[: 3 + position % 5], 7 * position] for position in range(len(ways))]
    answers = [ask(*way, prompt) for way, prompt in zip(ways, prompts, strict=True)]
    for (_, writes), prompt, answer in zip(ways, prompts, answers, strict=True):
        found = answer.result()
        assert found["meta_info"]["dp_rank"] == writes
        assert_computed_by(found, model, prompt)


def test_the_router_asks_one_of_each(serving, checkpoints):
    answer = post(f"{serving.router.url}/generate", generation_request(PROMPT)).json()
    assert_computed_by(answer, ReferenceModel(checkpoints[0]))


def test_the_probe_meets_every_group_that_prefills(serving):
    request = {**generation_request(PROMPT, 1), "input_ids": [PROMPT] * 4}
    answers = ray.get(serving.engines[0].generate.remote(request), timeout=60)
    assert [answer["meta_info"]["dp_rank"] for answer in answers] == [0, 1, 0, 1]


def test_a_push_reaches_the_ranks_of_all_groups(serving, ask, checkpoints):
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


@pytest.mark.parametrize("group", GROUPS)
def test_caches_are_flushed_when_no_group_has_requests(serving, ask, group):
    answer = ask(1 - group, group, length=LONG)
    wait_until(lambda: serving.call_all("has_requests")[1])
    assert [post(f"{serving.urls[1]}/flush_cache", {}).status_code for _ in range(3)] == [400] * 3
    serving.call_all("pause_generation")
    assert answer.result()["meta_info"]["finish_reason"]["type"] == "abort"
    serving.call_all("flush_cache")
    assert serving.call_all("has_requests") == [False, False]
    serving.call_all("continue_generation")
    assert len(response_of(ask(group, group).result())[0]) == 24


def test_all_groups_give_their_memory_back_and_take_it_again(serving, ask):
    for method in ("sleep", "wake_weights", "wake_caches", "continue_generation"):
        serving.call_all(method)
    answers = [ask(*way) for way in itertools.product(GROUPS, GROUPS)]
    assert [len(response_of(answer.result())[0]) for answer in answers] == [24] * 4
