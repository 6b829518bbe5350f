"""FLOPs counted by hand, for the shapes that flags describe."""

from types import SimpleNamespace

import pytest

from slime.estimates.flops import mla_attention_flops
from slime.models.shape_of_flags import calculate_fwd_flops, flops_model_from_args
from tests.support.models.tiny_shape import TINY_SHAPE


@pytest.mark.parametrize(("length", "expected"), [(1, 17472), (4, 70656), (10, 180480)])
def test_tiny_dense_model(length, expected):
    assert calculate_fwd_flops([length], SimpleNamespace(**TINY_SHAPE)) == expected


def test_sequences_attend_only_to_themselves():
    assert calculate_fwd_flops([1, 4, 10], SimpleNamespace(**TINY_SHAPE)) == 17472 + 70656 + 180480


def test_qwen3_4b_where_heads_times_width_is_not_the_hidden_size():
    args = SimpleNamespace(
        hidden_size=2560,
        num_attention_heads=32,
        num_query_groups=8,
        kv_channels=128,
        vocab_size=151936,
        ffn_hidden_size=9728,
        num_layers=36,
    )
    assert calculate_fwd_flops([4096], args) == 37898254548992


def test_query_groups_default_to_the_heads():
    without_groups = SimpleNamespace(**{**TINY_SHAPE, "num_query_groups": None, "kv_channels": None})
    assert calculate_fwd_flops([10], without_groups) == 180480


@pytest.mark.parametrize(("frequency", "num_moe_layers"), [(1, 2), ([0, 1], 1), ([0, 0], 0)])
def test_experts_count_as_often_as_a_token_visits_them(frequency, num_moe_layers):
    args = SimpleNamespace(
        **TINY_SHAPE,
        num_experts=8,
        moe_layer_freq=frequency,
        moe_ffn_hidden_size=10,
        moe_router_topk=3,
        moe_shared_expert_intermediate_size=7,
    )
    moe_minus_dense = 6 * 16 * (10 * 3 + 7) - 6 * 16 * 64
    assert calculate_fwd_flops([5], args) - calculate_fwd_flops([5], SimpleNamespace(**TINY_SHAPE)) == (
        5 * num_moe_layers * moe_minus_dense
    )


def test_latent_attention_by_hand():
    flops = mla_attention_flops(
        hidden_size=10, num_heads=2, q_lora_rank=3, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=1, v_head_dim=6
    )
    query = 2 * 3 * (10 + 2 * 6)
    key_value = 2 * (4 * (10 + 2 * 11) + 10 * 1)
    output = 2 * 2 * 6 * 10
    assert (flops.per_token, flops.per_token_pair) == (query + key_value + output, 2 * 6 + 2 * 6)
    without_q_lora = mla_attention_flops(10, 2, None, 4, 5, 1, 6)
    assert without_q_lora.per_token == 2 * 10 * 12 + key_value + output


def test_latent_attention_is_chosen_by_its_flag():
    args = SimpleNamespace(
        **TINY_SHAPE,
        multi_latent_attention=True,
        q_lora_rank=3,
        kv_lora_rank=4,
        qk_head_dim=5,
        qk_pos_emb_head_dim=1,
        v_head_dim=6,
    )
    attention = mla_attention_flops(16, 2, 3, 4, 5, 1, 6)
    model = flops_model_from_args(args)
    assert model.per_token_pair == 2 * attention.per_token_pair
    assert model.per_token == 2 * attention.per_token + 2 * 6 * 16 * 64 + 2 * 16 * 32


def test_sparse_attention_chooses_its_keys_where_there_are_more_and_attends_to_all_under_a_mask():
    latent = dict(
        multi_latent_attention=True, q_lora_rank=3, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=1, v_head_dim=6,
    )  # fmt: skip
    indexer = dict(dsa_indexer_n_heads=2, dsa_indexer_head_dim=5, dsa_indexer_topk=4, dsa_indexer_layers=[1, 0])
    dense, sparse = (SimpleNamespace(**TINY_SHAPE, **latent, **more) for more in ({}, indexer))

    def choosing(*lengths):
        return calculate_fwd_flops(lengths, sparse) - calculate_fwd_flops(lengths, dense)

    # One of two layers has an indexer: queries 3x10, keys 16x5 and weights 16x2 of a token, and of half the pairs two products
    # of width 5 and their sum.
    assert choosing(4) == 0
    assert choosing(5) == choosing(3, 5) == 5 * 2 * (30 + 80 + 32) + 25 * (2 * 5 + 2)


def test_linear_attention_has_no_pairs_and_a_gate_doubles_the_queries():
    linear = dict(
        linear_attention_freq=2, linear_num_key_heads=2, linear_key_head_dim=3, linear_num_value_heads=4,
        linear_value_head_dim=5, linear_conv_kernel_dim=6,
    )  # fmt: skip
    plain = flops_model_from_args(SimpleNamespace(**TINY_SHAPE))
    mixed = flops_model_from_args(SimpleNamespace(**TINY_SHAPE, **linear, attention_output_gate=True))
    # q, k 6 wide, v, z 20 wide, beta and decay 4 each: 16x60; convolution 6x32; state 3x20 three times; output 20x16.
    delta_net = 2 * (16 * 60 + 6 * 32 + 3 * 3 * 20 + 20 * 16)
    softmax, gate = 2 * 4 * 16 * 16, 2 * 16 * 16
    assert mixed.per_token_pair == plain.per_token_pair // 2
    assert mixed.per_token - plain.per_token == delta_net - softmax + gate


def test_an_mlp_without_gate_has_two_projections():
    plain = flops_model_from_args(SimpleNamespace(**TINY_SHAPE))
    without_gate = flops_model_from_args(SimpleNamespace(**TINY_SHAPE, swiglu=False))
    assert plain.per_token - without_gate.per_token == 2 * 2 * 16 * 64
