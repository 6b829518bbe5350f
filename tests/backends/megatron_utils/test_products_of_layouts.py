"""Eight ranks: the products of layouts that the launch scripts of large mixtures of experts have train as one rank does."""

import pytest

from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

FAMILIES = ("qwen3_moe", "deepseek_v3")
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
EIGHT_RANKS = {
    "tensor x pipeline x context x experts, whole": {
        **TENSOR, **PIPELINE, **CONTEXT, **EXPERTS, "expert_tensor_parallel_size": 1,
    },
    "tensor x pipeline x context x experts, cut": {**TENSOR, **PIPELINE, **CONTEXT, **EXPERTS},
    "pipeline x context x experts x data": {
        **PIPELINE, **CONTEXT, "data_parallel_size": 2, "expert_model_parallel_size": 4,
    },
    "pipeline x experts x cut x data": {
        **PIPELINE, **EXPERTS, "data_parallel_size": 4, "expert_tensor_parallel_size": 2,
    },
    "pipeline x experts x cut x context x data": {
        **PIPELINE, **EXPERTS, **CONTEXT, "data_parallel_size": 2, "expert_tensor_parallel_size": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        TINY_FAMILIES[name].save(root / name)
    return root


@pytest.fixture(scope="module")
def one_rank(models):
    return run_distributed(train_steps, 1, ({name: layout_args(models / name) for name in FAMILIES},))[0]


@pytest.fixture(scope="module")
def eight_ranks(models, selected):
    chosen = [(case["name"], case["layout"]) for case in selected(test_eight_ranks_train_as_one)]
    cases = {(name, layout): layout_args(models / name, **EIGHT_RANKS[layout]) for name, layout in chosen}
    return run_distributed(train_steps, 8, (cases,), timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize("layout", EIGHT_RANKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_eight_ranks_train_as_one(one_rank, eight_ranks, name, layout):
    assert_equal_runs([rank[name, layout] for rank in eight_ranks], one_rank[name])
