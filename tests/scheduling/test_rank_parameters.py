"""Parameters per rank: sums over ranks give the model back, with what is replicated counted as often as it is held."""

from slime.scheduling.model_shape import LinearAttentionShape, ModelShape, MoeShape
from slime.scheduling.parallel_layout import ParallelLayout
from slime.scheduling.parameters import count_parameters
from slime.scheduling.pipeline_split import split_into_stages
from slime.scheduling.rank_parameters import rank_parameters

QWEN3_8B = ModelShape(36, 4096, 12288, 32, 8, 128, 151936, 152064, qk_norm="head")
TINY = {
    "num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 4,
    "vocab_size": 30, "padded_vocab_size": 32,
}  # fmt: skip


def per_stage(shape, layout):
    counts = count_parameters(shape, padded_vocabulary=True)
    stages = split_into_stages(shape.num_layers, layout.pipeline)
    return [rank_parameters(shape, counts, layout, stage) for stage in stages]


def test_tensor_parallel_rank_by_hand():
    held = per_stage(ModelShape(**TINY, qk_norm="head"), ParallelLayout(2, tensor=2))[0]
    assert held.embedding == held.output_head == 32 * 8 // 2
    # q 16, k 8, v 8 rows of 8, and 8 rows of 16, halved; norms of width 4 whole.
    assert held.attention == 4 * ((32 * 8 + 8 * 16) // 2 + 2 * 4)
    assert held.dense_mlp == 4 * 3 * 8 * 16 // 2
    assert held.norms == 4 * 2 * 8 + 8
    assert held.total == held.dense == held.embedding * 2 + held.attention + held.dense_mlp + held.norms


def test_embedding_first_head_last_and_a_tied_copy():
    untied = per_stage(ModelShape(**TINY), ParallelLayout(4, pipeline=4))
    assert [rank.embedding for rank in untied] == [256, 0, 0, 0]
    assert [rank.output_head for rank in untied] == [0, 0, 0, 256]
    tied = per_stage(ModelShape(**TINY, tied_embeddings=True), ParallelLayout(4, pipeline=4))
    assert tied[3].output_head == 256 and tied[0].embedding == 256
    alone = per_stage(ModelShape(**TINY, tied_embeddings=True), ParallelLayout(1))
    assert alone[0].embedding == 256 and alone[0].output_head == 0
    assert [rank.norms for rank in untied] == [16, 16, 16, 16 + 8]


def test_sum_over_pipeline_and_tensor_ranks_is_the_model():
    layout = ParallelLayout(16, tensor=4, pipeline=4)
    held = per_stage(QWEN3_8B, layout)
    replicated = sum(rank.norms for rank in held) + 36 * 2 * 128
    everything = 4 * sum(rank.total for rank in held)
    assert everything - 3 * replicated == count_parameters(QWEN3_8B, padded_vocabulary=True).total


def test_experts_are_divided_by_their_own_sizes():
    moe = MoeShape(8, 2, 16, 16, False, False, (False, True, True, True))
    shape = ModelShape(**TINY, moe=moe)
    held = per_stage(shape, ParallelLayout(8, tensor=2, expert=4))[0]
    assert held.routed_experts == 3 * 8 // 4 * 3 * 8 * 16
    assert held.shared_experts == 3 * 3 * 8 * 16 // 2
    assert held.router == 3 * 8 * 8 and held.dense_mlp == 3 * 8 * 16 // 2
    cut = per_stage(shape, ParallelLayout(8, tensor=2, expert=4, expert_tensor=2))[0]
    assert cut.routed_experts == held.routed_experts // 2


def test_linear_attention_is_whole_on_every_training_rank():
    linear = LinearAttentionShape(2, 4, 2, 4, 4, (True, True, True, False))
    shape = ModelShape(**TINY, linear_attention=linear)
    counts = count_parameters(shape)
    held = per_stage(shape, ParallelLayout(2, tensor=2))[0]
    assert held.attention == 3 * counts.layers[0].linear_attention + counts.layers[3].attention // 2


def test_layers_of_multi_token_prediction_lie_last_and_bring_the_embedding():
    held = per_stage(ModelShape(**TINY, mtp_num_layers=1), ParallelLayout(2, pipeline=2))
    assert held[1].embedding == 256 and held[1].dense_mlp - held[0].dense_mlp == 3 * 8 * 16 + 2 * 8 * 8
