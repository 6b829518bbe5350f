"""The numbering of ranks and the split of layers over pipeline stages, by hand and against Megatron-Core."""

import pytest
import torch

from slime.estimates.layout import (
    ParallelLayout,
    RankPlace,
    chunks_in_flight,
    parts_of_layout,
    split_as_laid_out,
    split_into_stages,
    stage_of_predictions,
)
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

    coordinates = {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}
    of_experts = {"tp": None, "ep": "expert", "dp": "expert_data", "pp": "pipeline"}
    for order, beside in (("tp-cp-ep-dp-pp", False), ("tp-cp-ep-pp-dp", True)):
        layout = ParallelLayout(32, tensor=2, context=2, pipeline=2, expert=2, expert_tensor=2, stages_beside=beside)
        dense = RankGenerator(tp=2, ep=1, dp=layout.data, pp=2, cp=2, order=order)
        experts = RankGenerator(tp=2, ep=2, dp=layout.expert_replicas, pp=2, cp=1, order=order)
        for generator, names in ((dense, coordinates), (experts, of_experts)):
            for name, coordinate in names.items():
                for group in generator.get_ranks(name) if coordinate else ():
                    assert [getattr(layout.place(rank), coordinate) for rank in group] == list(range(len(group)))


def test_first_ranks_of_stages_lie_apart_or_beside_each_other():
    apart, beside = (ParallelLayout(32, tensor=2, pipeline=4, stages_beside=is_beside) for is_beside in (False, True))
    assert [apart.stages_among(ranks) for ranks in (1, 8, 9, 16, 32)] == [1, 1, 2, 2, 4]
    assert [beside.stages_among(ranks) for ranks in (1, 2, 3, 8, 32)] == [1, 1, 2, 4, 4]
    for layout in (apart, beside):
        assert [layout.place(rank).pipeline for rank in layout.first_of_stages] == [0, 1, 2, 3]
        placed = [[rank for rank in range(32) if layout.place(rank).pipeline == stage] for stage in range(4)]
        assert [layout.ranks_of_stage(stage) for stage in range(4)] == placed


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


def counts(*arguments, **options):
    return [len(stage.layers) for stage in split_into_stages(*arguments, **options)]


@pytest.mark.parametrize(
    "layers, stages, last, expected",
    [
        (94, 4, 22, [24, 24, 24, 22]),
        (61, 4, 13, [16, 16, 16, 13]),
        (78, 8, 8, [10] * 7 + [8]),
        (61, 8, 5, [8] * 7 + [5]),
    ],
)
def test_published_splits(layers, stages, last, expected):
    assert counts(layers, stages, last=last) == expected


def test_first_and_last():
    assert counts(20, 4, first=3, last=5) == [3, 6, 6, 5]
    assert counts(20, 2, first=8, last=12) == [8, 12]
    assert counts(30, 4, embedding_counts=True, loss_counts=True) == [7, 8, 8, 7]
    assert counts(4, 1) == [4] and counts(4, 1, last=4) == [4]


def test_chunks_of_virtual_stages_go_round():
    stages = split_into_stages(8, 2, virtual_pipeline=2)
    assert stages[0].chunks == ((0, 1), (4, 5)) and stages[1].chunks == ((2, 3), (6, 7))
    assert stages[0].is_first and stages[1].is_last and stages[1].layers == (2, 3, 6, 7)


def test_uneven_layers_name_a_last_stage_that_would_do():
    with pytest.raises(UserError, match="--decoder-last-pipeline-num-layers 13 would do"):
        split_into_stages(61, 4)
    assert counts(61, 4, last=13) == [16, 16, 16, 13]
    with pytest.raises(UserError, match="cannot be cut into 3 virtual stages"):
        split_into_stages(16, 2, virtual_pipeline=3)
    with pytest.raises(UserError, match="need --pipeline-model-parallel-size above 1"):
        split_into_stages(16, 1, last=8)
    with pytest.raises(UserError, match="--decoder-first-pipeline-num-layers 10 .*: -4 layers cannot .* 6 would do"):
        split_into_stages(16, 2, first=10, last=10)


@pytest.mark.parametrize(
    ("arguments", "options", "advice"),
    [
        ((2, 4), {}, "use fewer stages"),
        ((6, 2), {"first": 6, "last": 1}, "--decoder-first-pipeline-num-layers of at most 5 would leave"),
        ((10, 3), {"first": 3, "virtual_pipeline": 2}, "use fewer stages, or no virtual ones"),
        ((10, 4), {"virtual_pipeline": 2}, "--decoder-last-pipeline-num-layers 4 would do"),
        ((61, 4), {"loss_counts": True}, "drop --account-for-.*; then --decoder-last-pipeline-num-layers 13 would do"),
        ((12, 2), {"virtual_pipeline": 5}, "--num-virtual-stages-per-pipeline-rank 3 would do"),
        ((14, 2), {"virtual_pipeline": 2}, "drop --num-virtual-stages-per-pipeline-rank"),
        ((10, 2), {"first": 4, "loss_counts": True}, "both shift layers between stages; drop one of them"),
        ((1, 2), {"embedding_counts": True, "loss_counts": True, "virtual_pipeline": 1}, "drop --account-for-"),
    ],
)
def test_what_cannot_be_split_names_what_would_do(arguments, options, advice):
    with pytest.raises(UserError, match=advice):
        split_into_stages(*arguments, **options)


def test_uneven_stages_in_virtual_stages():
    stages = split_into_stages(10, 2, first=4, virtual_pipeline=2)
    assert [stage.chunks for stage in stages] == [((0, 1), (5, 6)), ((2, 3, 4), (7, 8, 9))]


def test_embedding_and_loss_take_a_layer_of_one_chunk_each():
    """Megatron-Core cuts a stage into chunks first, then takes the layer out of its first or last chunk."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    stages = split_into_stages(6, 2, virtual_pipeline=2, embedding_counts=True, loss_counts=True)
    assert [stage.chunks for stage in stages] == [((0,), (3, 4)), ((1, 2), (5,))]
    config = TransformerConfig(
        num_layers=6, hidden_size=8, num_attention_heads=1, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=2, account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )  # fmt: skip
    for stage in stages:
        sizes = [get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage.index) for chunk in range(2)]
        assert [len(chunk) for chunk in stage.chunks] == sizes


def test_micro_batches_in_flight():
    layout = ParallelLayout(4, pipeline=4)
    assert [chunks_in_flight(layout, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert [chunks_in_flight(layout, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    interleaved = ParallelLayout(4, pipeline=4, virtual_pipeline=2)
    # Stage 0 runs 2·3 + 4 chunks ahead, and one is on its way: 11 chunks of half a stage. Korthikanti et al. 2022 (arXiv
    # 2205.05198, section 4.2.3) have 1 + (p − 1)/(p·m) times all layers = 4 stages · 1.375 = 11 halves.
    assert chunks_in_flight(interleaved, 0, 64) == 4 * (1 + 3 / (4 * 2)) == 5.5
    # Groups of 6 micro-batches: 2·3 + 6 ahead and one on its way; never more than there are.
    assert chunks_in_flight(interleaved, 0, 64, group=6) == 13 / 2
    assert chunks_in_flight(interleaved, 3, 64, group=6) == 7 / 2 and chunks_in_flight(interleaved, 0, 6, group=6) == 6
    assert chunks_in_flight(ParallelLayout(1), 0, 8) == 1


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ("Et|tL", ["Et", "tL"]),
        ("Et*3|tL", ["Ettt", "tL"]),
        ("Ettt|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E(t|)*3tL", ["Et", "t", "t", "tL"]),
        ("E|t*2,t|L", ["E", "ttt", "L"]),
    ],
)
def test_repetitions_of_a_layout_are_written_out(layout, parts):
    assert parts_of_layout(layout) == parts


@pytest.mark.parametrize(
    ("layout", "chunks"),
    [
        ("Et|ttt|L", [((0,),), ((1, 2, 3),), ((),)]),
        # Ranks take turns, and layers are counted as a token meets them.
        ("E|tt|t|t|t*3|L", [((), (3,)), ((0, 1), (4, 5, 6)), ((2,), ())]),
    ],
)
def test_stages_hold_what_a_layout_says(layout, chunks):
    stages = split_as_laid_out(layout, 3)
    assert [stage.chunks for stage in stages] == chunks
    assert [(stage.is_first, stage.is_last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert [(stage.predicts, stage.passes_on) for stage in stages] == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize(
    ("layout", "stage"),
    [("Et|ttt|mL", 2), ("Ett|ttm*2|L", 1), ("Ettttm||L", 0), ("E|tt|t|t|m|L", 1), ("Et|ttt|L", 2), (None, 2)],
)
def test_layers_of_multi_token_prediction_are_where_a_layout_has_them(layout, stage):
    assert stage_of_predictions(layout, 3) == stage
    if layout is not None:
        stages = split_as_laid_out(layout, 3)
        assert [index for index, one in enumerate(stages) if one.predicts] == [stage]
        assert [index for index, one in enumerate(stages) if one.passes_on] == list(range(stage + 1, 3))
