"""Some steps of training on four context-parallel ranks, zigzag and all-gather, are those of one rank; two have their place in
`test_layouts`.

The batch of `grpo_batch` has what is awkward here: one-token responses, a fully masked sample, prompts longer than a chunk,
and, with one sample per micro-batch, passes in which a rank owns no response token at all.
"""

import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

ALONE = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
OBJECTIVES = {"rollout": {}, "token": {"calculate_per_token_loss": True}, "alone": ALONE}
LAYOUTS = {
    "cp4": {"context_parallel_size": 4},
    "cp4_gathered": {"context_parallel_size": 4, "allgather_cp": True},
    "cp2_tp2_sp": {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2_tp2_gathered": {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "allgather_cp": True},
    "cp2_dp2": {"context_parallel_size": 2, "data_parallel_size": 2},
    "cp2_dp2_gathered": {"context_parallel_size": 2, "data_parallel_size": 2, "allgather_cp": True},
    "cp2_pp2": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "cp2_pp2_gathered": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "allgather_cp": True},
    "cp2_recompute": {
        "context_parallel_size": 2, "data_parallel_size": 2, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return directory


def combinations(layouts):
    """Layout and objective; nine samples, one each, cannot be dealt to two data-parallel ranks."""
    return [
        (layout, objective)
        for layout, sizes in layouts.items()
        for objective in OBJECTIVES
        if objective != "alone" or "data_parallel_size" not in sizes
    ]


def cases_of(hf_dir, layouts):
    return {
        f"{layout}/{objective}": layout_args(hf_dir, **layouts[layout], **OBJECTIVES[objective])
        for layout, objective in combinations(layouts)
    }


@pytest.fixture(scope="module")
def one_rank(hf_dir):
    return run_distributed(train_steps, 1, (cases_of(hf_dir, {"one": {}}),))[0]


@pytest.fixture(scope="module")
def four_ranks(hf_dir):
    return run_distributed(train_steps, 4, (cases_of(hf_dir, LAYOUTS),), timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "objective"), combinations(LAYOUTS))
def test_four_ranks_train_like_one(one_rank, four_ranks, layout, objective):
    ranks = [rank[f"{layout}/{objective}"] for rank in four_ranks]
    assert_equal_runs(ranks, one_rank[f"one/{objective}"])
