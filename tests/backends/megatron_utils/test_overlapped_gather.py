"""Weights that are gathered behind the next forward pass are, wherever they are read, those that are gathered at once."""

import numpy as np
import pytest

from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

STEPS, ROLLOUTS = 2, 2
# Half of the executions of the batch make a step.
COMMON = {"data_parallel_size": 2, "global_batch_size": 4, "overlap_grad_reduce": True, "ddp_bucket_size": 2000}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
PREDICTING = {"mtp_num_layers": 1, "enable_mtp_training": True}
# Name: the model, and its layout.
LAYOUTS = {
    2: {
        "plain": ("tied", {}),
        "bf16": ("tied", {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}),
        "recomputed": (
            "tied",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        # Its layers of linear attention compute with the weights of modules that they never call.
        "linear attention": ("qwen3_next", {}),
    },
    4: {
        "pipeline": ("tied", PIPELINE),
        "virtual, together": ("tied", VIRTUAL),
        "virtual": ("tied", {**VIRTUAL, "align_param_gather": False}),
        "two optimizers": ("tied", {"data_parallel_size": 4, "num_distributed_optimizer_instances": 2}),
        "experts": ("qwen3_next", {"data_parallel_size": 4, "expert_model_parallel_size": 2}),
    },
}
# What reads weights between two steps, so that each has to end with the gather.
READING = {
    "norm": {"log_params_norm": True},
    "comparison": {"check_weight_hash_across_dp_replicas_interval": 1},
    "prediction layers": PREDICTING,
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_model(root / "tied", tied=True, layers=4)
    TINY_FAMILIES["qwen3_next"].save(root / "qwen3_next")
    return root


def train_rollouts(cases):
    """By case: the metrics of each step, whether replicas differed behind it, and what a push sent after each rollout."""
    from slime.backends.megatron_utils.parameter_names import differing_weights
    from slime.training.train_step import train_one_step
    from tests.support.processes.megatron_worker import whole_weights

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        metrics, differed, pushed = [], [], []
        for rollout in range(ROLLOUTS):
            for step in range(STEPS):
                metrics.append(train_one_step(args, run.backend, run.data, rollout, step))
                differed.append(bool(differing_weights(run.model)))
            pushed.append({name: tensor.float().numpy() for name, tensor in whole_weights(args, run.model).items()})
            run.prepare()
        found[name] = metrics, differed, pushed
    return found


def both(directory, **flags):
    return {
        overlaps: layout_args(directory, **{**COMMON, **flags}, overlap_param_gather=overlaps)
        for overlaps in (False, True)
    }


def assert_alike(ranks, name, differed):
    for rank in ranks:
        (metrics, never, pushed), (found, behind_steps, sent) = rank[name, False], rank[name, True]
        assert found == metrics, name
        assert not any(never) and behind_steps == differed * ROLLOUTS, name
        for weights, expected in zip(sent, pushed, strict=True):
            assert weights.keys() == expected.keys()
            assert all(np.array_equal(weights[tensor], expected[tensor]) for tensor in expected), name
        # Each rollout moved them.
        assert any(not np.array_equal(sent[0][tensor], sent[1][tensor]) for tensor in sent[0])


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_and_what_is_pushed_behind_the_last_one_are_the_same(directories, size):
    cases = {
        (name, overlaps): args
        for name, (model, flags) in LAYOUTS[size].items()
        for overlaps, args in both(directories / model, **flags).items()
    }
    ranks = run_distributed(train_rollouts, size, (cases,), timeout=400)
    for name in LAYOUTS[size]:
        assert_alike(ranks, name, [True, False])


@pytest.mark.slow
def test_what_reads_weights_between_steps_finds_them_gathered(directories):
    cases = {
        (name, overlaps): args
        for name, flags in READING.items()
        for overlaps, args in both(directories / "tied", **flags).items()
    }
    ranks = run_distributed(train_rollouts, 2, (cases,), timeout=300)
    for name in READING:
        assert_alike(ranks, name, [False, False])
