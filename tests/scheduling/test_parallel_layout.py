import pytest

from slime.scheduling.parallel_layout import ParallelLayout, RankPlace
from slime.utils.errors import UserError


def test_default_order_is_tensor_context_data_pipeline():
    layout = ParallelLayout(16, tensor=2, context=2, pipeline=2)
    assert layout.data == 2
    places = [layout.place(rank) for rank in range(16)]
    assert [(p.tensor, p.context, p.data, p.pipeline) for p in places[:5]] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0),
    ]  # fmt: skip
    assert (places[8].data, places[8].pipeline) == (0, 1) and places[15] == RankPlace(1, 1, 1, 1, 0, 7)


def test_experts_count_the_same_ranks_in_their_own_way():
    layout = ParallelLayout(16, tensor=4, expert=8, pipeline=1)
    assert (layout.data, layout.dense_replicas, layout.expert_replicas) == (4, 4, 2)
    assert [layout.place(rank).expert for rank in range(16)] == [*range(8), *range(8)]
    assert layout.place(9).expert_data == 1
    cut = ParallelLayout(16, tensor=4, expert=2, expert_tensor=4)
    assert [cut.place(rank).expert for rank in range(0, 16, 4)] == [0, 1, 0, 1]


def test_megatron_numbers_ranks_like_this():
    """Against the groups that Megatron-Core's own generator makes."""
    from megatron.core.parallel_state import RankGenerator

    layout = ParallelLayout(32, tensor=2, context=2, pipeline=2)
    generator = RankGenerator(tp=2, ep=1, dp=layout.data, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    for name, coordinate in {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}.items():
        for group in generator.get_ranks(name):
            assert [getattr(layout.place(rank), coordinate) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(
    "sizes, fragments",
    [
        ({"tensor": 3}, ("--tensor-model-parallel-size 3", "a multiple of 3 would do")),
        ({"tensor": 2, "context": 8}, ("--context-parallel-size 8", "= 16")),
        ({"expert": 3}, ("--expert-model-parallel-size 3", "a multiple of 3")),
    ],
)
def test_sizes_that_do_not_divide_name_the_flags(sizes, fragments):
    with pytest.raises(UserError) as error:
        ParallelLayout(8, **sizes)
    assert all(fragment in str(error.value) for fragment in fragments)
