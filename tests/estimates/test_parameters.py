"""Parameter counts against published numbers, hand counts, and models that transformers builds."""

import dataclasses
from types import SimpleNamespace

import pytest

from slime.estimates.layout import ParallelLayout, split_as_laid_out, split_into_stages
from slime.estimates.parameters import LayerParameters, count_parameters, rank_parameters
from slime.estimates.shape import IndexerShape, LinearAttentionShape, MlaShape, ModelShape, MoeShape
from slime.models.shape_of_flags import model_shape_from_args
from tests.support.tables.model_scripts import PARAMETER_COUNTS
from tools.published_models import PUBLISHED_MODELS

TINY = ModelShape(
    num_layers=2, hidden_size=8, ffn_hidden_size=12, num_attention_heads=4, num_query_groups=2, head_dim=3, vocab_size=10,
    padded_vocab_size=16,
)  # fmt: skip


def changed(**changes) -> ModelShape:
    return ModelShape(**{**vars(TINY), **changes})


def test_dense_layer_by_hand():
    counts = count_parameters(TINY)
    # q 8x12, k and v 8x6, output 12x8; three projections 8x12; two norms of 8.
    layer = LayerParameters(
        attention=8 * 12 + 2 * 8 * 6 + 12 * 8, attention_replicated=0, dense_mlp=3 * 8 * 12, routed_experts=0,
        shared_experts=0, router=0, norms=16,
    )  # fmt: skip
    assert counts.layers == (layer, layer)
    assert (counts.embedding, counts.output_head, counts.final_norm) == (80, 80, 8)
    assert counts.total == counts.total_with_mtp == 168 + 2 * (288 + 288 + 16)


def test_tied_embeddings_and_padding():
    tied = count_parameters(changed(tied_embeddings=True), padded_vocabulary=True)
    assert (tied.embedding, tied.output_head) == (16 * 8, 0)


@pytest.mark.parametrize(
    ("changes", "attention", "replicated", "dense_mlp", "norms"),
    [
        ({"qkv_bias": True}, 288 + 24, 0, 288, 16),
        ({"qk_norm": "head"}, 288, 2 * 3, 288, 16),
        ({"qk_norm": "full"}, 288, 12 + 6, 288, 16),
        ({"num_extra_norms": 2}, 288, 0, 288, 32),
        ({"norm_bias": True}, 288, 0, 288, 32),
        ({"gated_mlp": False}, 288, 0, 192, 16),
        ({"attention_output_gate": True}, 288 + 96, 0, 288, 16),
        # Biases: q, k, v 24; gate and up 24; output and down 8 each, whole on every rank.
        ({"linear_bias": True}, 288 + 24, 0, 288 + 24, 16 + 16),
    ],
)
def test_one_property_at_a_time(changes, attention, replicated, dense_mlp, norms):
    layer = count_parameters(changed(**changes)).layers[0]
    assert layer == LayerParameters(attention, replicated, dense_mlp, 0, 0, 0, norms)


def test_experts_by_hand():
    moe = MoeShape(
        5, 2, ffn_hidden_size=4, shared_ffn_hidden_size=6, shared_gate=True, expert_bias=True, layers=(False, True)
    )
    dense, sparse = count_parameters(changed(moe=moe)).layers
    assert (dense.dense_mlp, dense.routed_experts, dense.router) == (288, 0, 0)
    assert (sparse.dense_mlp, sparse.routed_experts, sparse.shared_experts) == (0, 5 * 3 * 8 * 4, 3 * 8 * 6)
    assert sparse.router == 8 * 5 + 5 + 8


@pytest.mark.parametrize(
    ("q_lora_rank", "attention", "norms", "down"),
    [
        # Up-projections: q 7x4x(3+2), k and v 6x4x(3+5); output 4x5x8. Norms 7 and 6; down-projections 8x7 and 8x(6+2).
        (7, 7 * 20 + 6 * 32 + 20 * 8, 13, 8 * 7 + 8 * 8),
        (None, 8 * 20 + 6 * 32 + 20 * 8, 6, 8 * 8),
    ],
)
def test_latent_attention_by_hand(q_lora_rank, attention, norms, down):
    mla = MlaShape(q_lora_rank, kv_lora_rank=6, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=5)
    shape = changed(mla=mla, qk_norm="head")
    counts = count_parameters(shape)
    layer = counts.layers[0]
    assert (layer.attention, layer.attention_replicated, layer.latent_projections) == (attention, norms, down)
    # Two tensor-parallel ranks share the projections down, by their channels; the norms are whole.
    held = rank_parameters(shape, counts, ParallelLayout(2, 2), *split_into_stages(2, 1))
    assert held.attention == 2 * ((attention + down) // 2 + norms)


def test_linear_attention_is_a_part_of_its_own():
    linear = LinearAttentionShape(2, 3, 4, 5, conv_kernel=2, layers=(True, False))
    first, second = count_parameters(changed(linear_attention=linear)).layers
    # qkvz 8x(6+6+20+20), beta and decay 8x8, convolution 2x32, A and dt 2x4, norm 5, output 20x8.
    assert (first.attention, first.attention_replicated, first.linear_attention) == (0, 5, 416 + 64 + 64 + 8 + 160)
    assert (second.attention, second.linear_attention) == (288, 0)
    # A layer of multi-token prediction has softmax attention, whatever the last one of the decoder has.
    last = dataclasses.replace(linear, layers=(False, True))
    assert count_parameters(changed(linear_attention=last, mtp_num_layers=1)).mtp[0].layer == second


def test_multi_token_prediction_is_apart():
    counts = count_parameters(changed(mtp_num_layers=2))
    (first, _) = counts.mtp
    assert (first.projection, first.norms, first.layer) == (2 * 8 * 8, 3 * 8, counts.layers[-1])
    assert counts.total_with_mtp - counts.total == 2 * (128 + 24 + 592) and counts.total == 1352


# Every family at a small size.
_TINY_CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "moe_intermediate_size": 24, "num_experts": 6,
    "n_routed_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 12,
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 14, "index_n_heads": 2,
    "index_head_dim": 16, "index_topk": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "use_qk_norm": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
_LATENT = {"num_key_value_heads": 4}
TINY_CONFIGS = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "glm4": ("glm4", {"attention_bias": True}),
    "glm4-without-bias": ("glm4", {"attention_bias": False}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [2]}),
    "qwen3_moe": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "glm4_moe": ("glm4_moe", {"attention_bias": True}),
    "glm4_moe-without-norms": ("glm4_moe", {"use_qk_norm": False}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "n_group": 2}),
    "deepseek_v3-direct-queries": ("deepseek_v3", {**_LATENT, "q_lora_rank": None}),
    "deepseek_v32": ("deepseek_v32", _LATENT),
    "glm_moe_dsa": ("glm_moe_dsa", {**_LATENT, "indexer_types": ["full", "shared", "full", "shared"]}),
    "minimax_m2": ("minimax_m2", {}),
}


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_models_of_transformers_have_as_many(name):
    torch = pytest.importorskip("torch")
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from slime.models.families import model_args_from_hf

    model_type, changes = TINY_CONFIGS[name]
    known = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    entries = {key: value for key, value in {**_TINY_CONFIG, **changes}.items() if key in known}
    config = CONFIG_MAPPING[model_type](**entries)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    biases = [buffer for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")]
    built = sum(tensor.numel() for tensor in [*model.parameters(), *biases])
    shape = model_shape_from_args(SimpleNamespace(**model_args_from_hf(config.to_dict())))
    assert count_parameters(shape).total == built


@pytest.mark.parametrize("name", PARAMETER_COUNTS)
def test_published_models_have_as_many(name):
    from slime.models.families import model_args_from_hf

    shape = model_shape_from_args(SimpleNamespace(**model_args_from_hf(PUBLISHED_MODELS[name])))
    assert count_parameters(shape).total == PARAMETER_COUNTS[name]


QWEN3_8B = ModelShape(36, 4096, 12288, 32, 8, 128, 151936, 152064, qk_norm="head")
SIZES = {
    "num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "head_dim": 4,
    "vocab_size": 30, "padded_vocab_size": 32,
}  # fmt: skip


def per_stage(shape, layout):
    counts = count_parameters(shape, padded_vocabulary=True)
    stages = split_into_stages(shape.num_layers, layout.pipeline)
    return [rank_parameters(shape, counts, layout, stage) for stage in stages]


def test_tensor_parallel_rank_by_hand():
    held = per_stage(ModelShape(**SIZES, qk_norm="head"), ParallelLayout(2, tensor=2))[0]
    assert held.embedding == held.output_head == 32 * 8 // 2
    # q 16, k 8, v 8 rows of 8, and 8 rows of 16, halved; norms of width 4 whole.
    assert held.attention == 4 * ((32 * 8 + 8 * 16) // 2 + 2 * 4)
    assert held.dense_mlp == 4 * 3 * 8 * 16 // 2
    assert held.norms == 4 * 2 * 8 + 8
    assert held.total == held.dense == held.embedding * 2 + held.attention + held.dense_mlp + held.norms


def test_embedding_first_head_last_and_a_tied_copy():
    untied = per_stage(ModelShape(**SIZES), ParallelLayout(4, pipeline=4))
    assert [rank.embedding for rank in untied] == [256, 0, 0, 0]
    assert [rank.output_head for rank in untied] == [0, 0, 0, 256]
    tied = per_stage(ModelShape(**SIZES, tied_embeddings=True), ParallelLayout(4, pipeline=4))
    assert tied[3].output_head == 256 and tied[0].embedding == 256
    alone = per_stage(ModelShape(**SIZES, tied_embeddings=True), ParallelLayout(1))
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
    shape = ModelShape(**SIZES, moe=moe)
    held = per_stage(shape, ParallelLayout(8, tensor=2, expert=4))[0]
    assert held.routed_experts == 3 * 8 // 4 * 3 * 8 * 16
    assert held.shared_experts == 3 * 3 * 8 * 16 // 2
    assert held.router == 3 * 8 * 8 and held.dense_mlp == 3 * 8 * 16 // 2
    cut = per_stage(shape, ParallelLayout(8, tensor=2, expert=4, expert_tensor=2))[0]
    assert cut.routed_experts == held.routed_experts // 2


def test_training_ranks_share_linear_attention_but_for_its_norm():
    linear = LinearAttentionShape(2, 4, 2, 4, 4, (True, True, True, False))
    shape = ModelShape(**SIZES, linear_attention=linear)
    counts = count_parameters(shape)
    held = per_stage(shape, ParallelLayout(2, tensor=2))[0]
    assert held.attention == 3 * (counts.layers[0].linear_attention // 2 + 4) + counts.layers[3].attention // 2


@pytest.mark.parametrize("tied", [False, True])
def test_layers_of_multi_token_prediction_lie_last_and_bring_no_embedding(tied):
    held = per_stage(ModelShape(**SIZES, mtp_num_layers=1, tied_embeddings=tied), ParallelLayout(2, pipeline=2))
    assert (held[1].embedding, held[1].output_head) == (0, 256)
    assert held[1].dense_mlp - held[0].dense_mlp == 3 * 8 * 16 + 2 * 8 * 8


def test_layers_of_multi_token_prediction_before_the_last_stage_have_the_last_norm_beside_them():
    shape, layout = ModelShape(**SIZES, mtp_num_layers=1), ParallelLayout(3, pipeline=3)
    counts = count_parameters(shape, padded_vocabulary=True)

    def stages_of(shape, counts):
        return [rank_parameters(shape, counts, layout, stage) for stage in split_as_laid_out("Ett|ttm|L", 3)]

    first, middle, last = stages_of(shape, counts)
    assert last.total == last.output_head == 256
    assert middle.total - first.total + first.embedding == counts.mtp[0].total + counts.final_norm
    # A critic has none of them, and the norm where its values are made.
    *_, last = stages_of(
        dataclasses.replace(shape, mtp_num_layers=0, value_head=True), dataclasses.replace(counts, mtp=())
    )
    assert last.norms == counts.final_norm


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_one_row_in_place_of_the_head_on_the_last_stage_alone(tied):
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    held = per_stage(ModelShape(**SIZES, tied_embeddings=tied, value_head=True), layout)
    assert [rank.embedding for rank in held] == [128, 0]
    # Whole on every tensor-parallel rank.
    assert [rank.output_head for rank in held] == [0, 8]


def test_what_is_trained_has_indexers_and_prediction_layers_only_where_they_learn():
    indexer = IndexerShape(num_heads=2, head_dim=4, topk=3, layers=(True, False, True, False))
    mla = MlaShape(5, kv_lora_rank=6, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=5, indexer=indexer)
    counts = count_parameters(ModelShape(**SIZES, mla=mla, mtp_num_layers=1))
    # Queries from 5 latent channels, keys, their norm, a weight for each head; in two decoder layers and one that predicts.
    one = 5 * 2 * 4 + 8 * 4 + 2 * 4 + 8 * 2
    both, layers_alone = (counts.trained(predictions=learn, indexers=False) for learn in (True, False))
    assert counts.total_with_mtp - both.total_with_mtp == 3 * one
    assert counts.total - layers_alone.total == 2 * one and layers_alone.total_with_mtp == layers_alone.total
    # In a prediction layer that is trained the indexer learns, too.
    assert counts.trained(predictions=True, indexers=True) == counts
    assert counts.trained(predictions=False, indexers=True).total_with_mtp == counts.total
