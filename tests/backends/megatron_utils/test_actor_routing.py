"""A rank of the actor with routing replay: which of its passes record, which replay, and which choose freely."""

import itertools
import os

import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import shard_of
from tests.support.processes.distributed import run_distributed

EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_router_dtype": "fp32", "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "none", "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
    "use_routing_replay": True,
}  # fmt: skip


def worker(words):
    """Stages in which routers asked, runs of equal ones once, per pass of the actor; and records that were left."""
    from slime.arguments import parse_args
    from slime.arguments.checkpoints import WeightSource
    from slime.training.actor_rank import ActorRank
    from slime.training.model_states import REFERENCE
    from slime.training.rollout_data import RolloutData
    from slime.training.routing_replay import LayerReplay

    args = parse_args(argv=words)
    # Flags cannot ask for experts yet.
    vars(args).update(EXPERTS, initial_weights=WeightSource("random"))
    actor = ActorRank(args, 0, 1, 0)
    data = RolloutData()

    def fetch(shards):
        data.update(shard_of(args, 0))
        del data["log_probs"], data["ref_log_probs"]
        return data

    actor._fetch = fetch
    actor.init((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
    actor.states.capture(REFERENCE)
    stages, get_replay_topk = [], LayerReplay.get_replay_topk

    def watched(layer, *arguments):
        stages.append(str(layer.current.stage))
        return get_replay_topk(layer, *arguments)

    LayerReplay.get_replay_topk = watched

    def stages_of(work):
        stages.clear()
        work()
        return [stage for stage, _ in itertools.groupby(stages)]

    training = stages_of(lambda: actor.train(0, []))
    left = sum(len(layer.records) + len(layer.awaited) for layer in actor.backend.routing_replay.layers[0])
    probe = stages_of(lambda: actor.probe_log_probs([[1, 2, 3]]))
    args.num_critic_only_steps = 2
    critic_only = stages_of(lambda: actor.train(1, []))
    left += sum(len(layer.records) for layer in actor.backend.routing_replay.layers[0])
    return training, sum(data["num_microbatches"]), probe, critic_only, left


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("actor")
    write_tiny_model(directory / "model")
    (directory / "prompts.jsonl").write_text('{"prompt": "p", "label": "1"}\n' * 8)
    words = [
        "--hf-checkpoint", str(directory / "model"), "--model-args-from-hf", "--debug-train-only", "--num-rollout", "4",
        "--rollout-batch-size", "8", "--n-samples-per-prompt", "1", "--actor-num-gpus-per-node", "1", "--num-steps-per-rollout",
        "2", "--micro-batch-size", "1", "--prompt-data", str(directory / "prompts.jsonl"), "--rm-type", "math",
        "--data-pad-size-multiplier", "8", "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ]  # fmt: skip
    return run_distributed(worker, 1, (words,), timeout=240)[0]


def test_the_log_prob_pass_records_and_training_replays_in_both_directions(seen):
    training, micro_batches, *_ = seen
    assert training == ["fallthrough", "record", *["replay_forward", "replay_backward"] * micro_batches]
    assert micro_batches > 2


def test_a_reference_and_a_probe_choose_freely(seen):
    training, _, probe, *_ = seen
    assert training[0] == "fallthrough" and probe == ["fallthrough"]


def test_l23_nothing_is_left_of_a_rollout_that_trains_only_the_critic(seen):
    *_, critic_only, left = seen
    assert critic_only == ["fallthrough", "record"] and left == 0
