"""Two real engines and the router in front of them under their owner, and a trainer of one process that pushes to them."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import requests

from slime.arguments import build_parser
from slime.observability.waiting import wait_for_all
from slime.serving.engines import engines_of_run
from slime.serving.owner import ServingOwner
from slime.utils.env import actor_environment
from tests.support.oracles.log_probs import ReferenceModel, response_of
from tests.support.processes.local_ray import start_ray
from tests.support.processes.waiting import runs, wait_until

API_KEY = "key-of-this-test-run"
# An integer with a suffix, a list of integers, JSON, a text that only sglang can parse, a switch turned off, a word.
TYPED_FLAGS = (
    "--sglang-max-total-tokens", "16Ki", "--sglang-gc-threshold", "701", "11", "12",
    "--sglang-default-chat-template-kwargs", '{"enable_thinking": false}',
    "--sglang-cuda-graph-config", '{"decode": {"backend": "disabled"}}', "--no-sglang-dllm-fdfo",
    "--sglang-served-model-name", "tiny",
)  # fmt: skip
# Config entries of a checkpoint with experts.
MIXTURE = {
    "model_type": "qwen3_moe", "tie": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}  # fmt: skip
# Arguments of an engine with two attention groups, without deterministic inference.
TWO_GROUPS = {
    "sglang_ep_size": 2, "sglang_dp_size": 2, "sglang_enable_dp_attention": True, "sglang_enable_dp_lm_head": True,
    "sglang_enable_deterministic_inference": None,
}  # fmt: skip
GROUPS = range(2)
# Arguments of an engine on the devices of training ranks.
TOGETHER = {"colocate": True, "has_trainer": True}
# The tokens of an answer that takes a while.
LONG = 1500
PROMPT = [5, 9, 77, 200, 31, 8, 90, 3]


def typed_server_flags() -> dict[str, Any]:
    """The parser's values for `TYPED_FLAGS`."""
    args = build_parser().parse_args(["--rollout-batch-size", "1", *TYPED_FLAGS])
    return {name: value for name, value in vars(args).items() if value is not None and name.startswith("sglang_")}


def make_args(checkpoint: str | Path, **overrides: Any) -> SimpleNamespace:
    values = {
        "hf_checkpoint": str(checkpoint),
        "log_level": "INFO",
        "seed": 1,
        "num_gpus_per_node": 2,
        "rollout_num_gpus": 2,
        "sglang_config": None,
        "prefill_num_servers": None,
        "sglang_router_ip": None,
        # The owner orders no pushes here, so the loaded weights count as the first version.
        "has_trainer": False,
        "asynchronous": False,
        "use_fault_tolerance": False,
        "rollout_health_check_interval": 30.0,
        "rollout_health_check_timeout": 30.0,
        "rollout_health_check_first_wait": 0.0,
        "rollout_num_gpus_per_engine": 1,
        "rollout_external_engine_infos": None,
        "router_api_key": API_KEY,
        "router_policy": "round_robin",
        "distributed_timeout_minutes": 1,
        "engine_start_timeout": 300.0,
        "engine_load_timeout": 60.0,
        "http_control_timeout": 60.0,
        "sglang_enable_deterministic_inference": True,
        "sglang_pp_size": None,
        "sglang_tp_size": None,
        "sglang_dp_size": None,
        "sglang_enable_dp_attention": None,
        "fp16": False,
        "use_rollout_routing_replay": False,
        "trust_remote_code": False,
        "update_weight_transport": "nccl",
        "colocate": False,
        "offload_rollout": False,
        "has_engines": True,
        "rollout_external": False,
        "world_size": 2,
        "actor_num_nodes": 1,
        "update_weight_mode": "full",
        "update_weight_local_checkpoint_dir": None,
        "sglang_custom_pull_weights_pre_read_hook": None,
        "custom_update_weight_post_write_path": None,
        "update_weights_in_flight": False,
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "update_weight_buffer_size": 100_000,
    }
    return SimpleNamespace(**{**values, **overrides})


class Serving:
    """Router and engines with their owner. `engines` are those that were started first, even if they have died."""

    def __init__(self, args, log_dir, placement_group) -> None:
        self.args, self.log_dir, self.placement_group = args, log_dir, placement_group
        places = [(bundle, bundle) for bundle in range(placement_group.bundle_count)]
        self.owner = ServingOwner(
            args, engines_of_run(args, placement_group, places, log_dir, actor_environment()), log_dir
        )
        self.router = self.owner.start()["default"]
        self.engines: list[Any] = []
        self.urls: list[str] = []

    def wait_ready(self) -> None:
        self.owner.wait_ready()
        self.engines = self.owner.engines().handles
        self.urls = self.call_all("url")

    def checksums(self) -> dict[int, dict[str, str]]:
        return dict(enumerate(self.call_all("weights_checksum")))

    def call_all(self, method, *arguments) -> list[Any]:
        return wait_for_all([getattr(engine, method).remote(*arguments) for engine in self.engines], method, 120)


@contextlib.contextmanager
def serving_of(args: SimpleNamespace, log_dir: Path) -> Iterator[Serving]:
    """Yields router and engines for `args` when they are ready, in a Ray of their own, which ends with the block."""
    devices = args.rollout_num_gpus
    start_ray(num_cpus=2 * devices, num_gpus=devices)
    try:
        placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * devices)
        assert placement_group.wait(120)
        serving = Serving(args, log_dir, placement_group)
        try:
            serving.wait_ready()
            yield serving
        finally:
            serving.owner.shutdown()
    finally:
        ray.shutdown()


def requests_of_groups(url: str) -> list[int]:
    """The number of running requests in each attention group of an engine; an engine without groups has one."""
    headers = {"Authorization": f"Bearer {API_KEY}"}
    answer = requests.get(f"{url}/v1/loads?include=core", headers=headers, timeout=60).json()
    return [load["num_running_reqs"] for load in sorted(answer["loads"], key=lambda load: load["dp_rank"])]


def flush(url: str) -> int:
    """Ask an engine to flush its caches. Returns the status of its answer."""
    return post(f"{url}/flush_cache", {}).status_code


def post(url, payload, key=API_KEY):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return requests.post(url, json=payload, headers=headers, timeout=300)


def mean_difference(answer, model) -> float:
    tokens, log_probs = response_of(answer)
    assert len(tokens) == 24
    reference = model.log_probs(PROMPT, tokens)
    return sum(abs(a - b) for a, b in zip(log_probs, reference, strict=True)) / len(tokens)


def assert_computed_by(answer: dict[str, Any], model: ReferenceModel, prompt: list[int] = PROMPT) -> None:
    """The answer has at least two tokens; each log-prob differs from the model's by at most 1e-4, and on average by 1e-5."""
    tokens, log_probs = response_of(answer)
    expected = model.log_probs(prompt, tokens)
    assert len(tokens) > 1 and log_probs == pytest.approx(expected, abs=1e-4)
    assert sum(abs(a - b) for a, b in zip(log_probs, expected, strict=True)) <= 1e-5 * len(tokens)


def server_tree(pid: int) -> list[psutil.Process]:
    server = psutil.Process(pid)
    return [server, *server.children(recursive=True)]


def wait_until_ended(processes):
    wait_until(lambda: not any(map(runs, processes)))


class Trainer:
    """One process with all sources of a push; each of them sends its share of `tensors`."""

    def __init__(self, args, tensors, expected=None, num_sources=1, version=0):
        from slime.weights.buckets import split_into_buckets
        from slime.weights.source import WeightSource
        from slime.weights.transports import transport_of

        def buckets(index):
            share = [name for position, name in enumerate(tensors) if position % num_sources == index]
            return split_into_buckets([(name, tensors[name]) for name in share], args.update_weight_buffer_size)

        transport = transport_of(args)
        self.sources = [
            WeightSource(functools.partial(buckets, index), transport(args, index, num_sources), expected)
            for index in range(num_sources)
        ]
        self.expected, self.version = expected, version

    def open_weight_push(self):
        from slime.weights.push import Opening

        return Opening(len(self.sources), self.version, self.expected)

    def connect_engines(self, source, engines):
        return self.sources[source].connect(engines)

    def send_weights(self, source, version, whole):
        return self.sources[source].send(version, whole)

    def weights_pushed(self, version):
        for source in self.sources:
            source.settle()


@contextlib.contextmanager
def pushing(serving, tensors, expected=None, num_sources=1, version=0, **flags):
    """Makes a function that pushes `tensors` to all engines and returns the report."""
    from slime.weights.push import WeightPush
    from slime.weights.transports import Receiver

    args = SimpleNamespace(**{**vars(serving.args), **flags})
    receivers = [Receiver(index, engine, 1, index) for index, engine in enumerate(serving.engines)]
    trainer = Trainer(args, tensors, expected, num_sources, version)
    pushes = WeightPush(args, trainer)
    try:
        yield lambda engines=receivers: pushes.push(engines)
    finally:
        for source in trainer.sources:
            source.close()


def assert_groups_compute(ask, checkpoint):
    """Both groups of an engine give the model's log-probs: while the other group is idle, and while both have requests that end
    at different times."""
    model = ReferenceModel(checkpoint)
    for group in GROUPS:
        answer = ask(group).result()
        assert answer["meta_info"]["dp_rank"] == group
        assert_computed_by(answer, model)
    prompts = [PROMPT[: 3 + position] + [7 * position] for position in range(6)]
    answers = [ask(position % 3 % 2, prompt, 4 + 9 * position) for position, prompt in enumerate(prompts)]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_computed_by(answer.result(), model, prompt)
