"""The shape that flags describe: defaults, layer patterns, and what does not fit."""

from types import SimpleNamespace

import pytest

from slime.estimates.shape import (
    IndexerShape,
    LinearAttentionShape,
    MlaShape,
    MoeShape,
    expert_layers,
    linear_attention_layers,
)
from slime.models.shape_of_flags import model_shape_from_args
from slime.utils.errors import UserError

LEAST = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32}


def shape_of(**changes):
    return model_shape_from_args(SimpleNamespace(**{**LEAST, **changes}))


def test_least_that_describes_a_model():
    shape = shape_of()
    assert (shape.ffn_hidden_size, shape.num_query_groups, shape.head_dim, shape.padded_vocab_size) == (64, 2, 8, 32)
    assert not shape.tied_embeddings and shape.gated_mlp and shape.qk_norm is None
    assert shape.moe is shape.mla is shape.linear_attention is None


@pytest.mark.parametrize(
    ("grouped", "groups", "expected"), [(True, 1, 1), (True, None, 2), (False, 1, 2), (False, None, 2)]
)
def test_groups_count_only_with_grouped_query_attention(grouped, groups, expected):
    assert shape_of(group_query_attention=grouped, num_query_groups=groups).num_query_groups == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, None),
        ({"qk_layernorm": True}, "head"),
        ({"qk_layernorm": True, "spec": ["slime_plugins.models.glm4", "get_glm_spec"]}, "head"),
        ({"qk_layernorm": True, "spec": ["slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec"]}, "full"),
        ({"spec": ["slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec"]}, None),
    ],
)
def test_norms_of_queries_and_keys(flags, expected):
    assert shape_of(**flags).qk_norm == expected


def test_switches():
    shape = shape_of(
        untie_embeddings_and_output_weights=False, add_qkv_bias=True, add_bias_linear=True, post_mlp_layernorm=True,
        post_self_attn_layernorm=True, normalization="LayerNorm", swiglu=False, attention_output_gate=True,
        mtp_num_layers=1, padded_vocab_size=128, kv_channels=5,
    )  # fmt: skip
    assert shape.tied_embeddings and shape.qkv_bias and shape.linear_bias and shape.num_extra_norms == 2
    assert shape.norm_bias and not shape.gated_mlp and shape.attention_output_gate
    assert (shape.mtp_num_layers, shape.padded_vocab_size, shape.head_dim) == (1, 128, 5)


def test_experts():
    shape = shape_of(
        num_experts=8, moe_router_topk=3, moe_layer_freq=[0, 1, 1, 1], moe_ffn_hidden_size=10,
        moe_shared_expert_intermediate_size=7, moe_shared_expert_gate=True, moe_router_enable_expert_bias=True,
    )  # fmt: skip
    assert shape.moe == MoeShape(8, 3, 10, 7, True, True, (False, True, True, True))
    assert [shape.has_experts(layer) for layer in range(4)] == [False, True, True, True]


def test_expert_width_defaults_to_that_of_dense_layers():
    assert shape_of(num_experts=8, moe_router_topk=3, ffn_hidden_size=20).moe.ffn_hidden_size == 20


def test_latent_attention_with_shared_indexers():
    flags = dict(
        multi_latent_attention=True, q_lora_rank=None, kv_lora_rank=4, qk_head_dim=5, qk_pos_emb_head_dim=1, v_head_dim=6,
        dsa_indexer_n_heads=2, dsa_indexer_head_dim=3, dsa_indexer_topk=7, dsa_indexer_layers=[1, 0, 1, 0],
    )  # fmt: skip
    shape = shape_of(**flags)
    assert shape.mla == MlaShape(None, 4, 5, 1, 6, IndexerShape(2, 3, 7, (True, False, True, False)))
    assert (shape.query_width, shape.value_width) == (12, 12)
    assert [shape.has_indexer(layer) for layer in range(4)] == [True, False, True, False]
    assert not shape.trains_indexers and not shape_of(**flags, dsa_indexer_loss_coeff=0.0).trains_indexers
    assert shape_of(**flags, dsa_indexer_loss_coeff=0.1).trains_indexers


def test_linear_attention():
    shape = shape_of(
        linear_attention_freq=4, linear_num_key_heads=2, linear_key_head_dim=3, linear_num_value_heads=4,
        linear_value_head_dim=5, linear_conv_kernel_dim=6,
    )  # fmt: skip
    assert shape.linear_attention == LinearAttentionShape(2, 3, 4, 5, 6, (True, True, True, False))
    assert (shape.linear_attention.key_width, shape.linear_attention.value_width) == (6, 20)


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, [1, 1, 1, 1]), (2, [1, 0, 1, 0]), ([0, 1, 1, 0], [0, 1, 1, 0])]
)
def test_expert_layers(frequency, expected):
    assert list(expert_layers(frequency, 4)) == expected


def test_linear_attention_layers():
    assert list(linear_attention_layers(3, 7)) == [1, 1, 0, 1, 1, 0, 1]
    assert list(linear_attention_layers([0, 1], 2)) == [0, 1]


@pytest.mark.parametrize("function", [expert_layers, linear_attention_layers])
def test_patterns_that_do_not_fit(function):
    with pytest.raises(UserError, match="has 2 entries, but --num-layers is 4"):
        function([0, 1], 4)
    with pytest.raises(UserError, match="0: give a number from 1"):
        function(0, 4)
