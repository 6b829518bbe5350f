"""The memory of an engine, and the bytes of quantised weights."""

import dataclasses

import pytest

from slime.estimates.parameters import count_parameters
from slime.estimates.serving_memory import (
    ServingSetup,
    WeightBytes,
    quantisation_of,
    served_bytes,
    served_weight_bytes,
    serving_memory,
    unknown_quantisation,
)
from slime.estimates.shape import IndexerShape, LinearAttentionShape, MlaShape, ModelShape, MoeShape
from slime.utils.errors import UserError

GIB = 2**30
SHAPE = ModelShape(4, 512, 1536, 8, 4, 64, 32000, 32000)
PLAIN = WeightBytes.everywhere(2.0)
SETUP = ServingSetup(1, 1, 1, PLAIN, 2.0, gpu_memory=GIB, static_fraction=0.5)


def test_cache_takes_what_weights_leave():
    memory = serving_memory(SHAPE, SETUP)
    assert memory.weights == 2 * count_parameters(SHAPE).total
    assert memory.cache_bytes_per_token == 4 * 2 * 4 * 64 * 2
    assert memory.cache_tokens == (GIB // 2 - memory.weights) // 4096
    assert memory.reserve == GIB // 2 and memory.total <= GIB
    capped = serving_memory(SHAPE, dataclasses.replace(SETUP, max_total_tokens=100))
    assert capped.kv_cache == 100 * 4096


def test_ranks_share_weights_and_key_heads_until_there_is_one_left():
    per_token = {
        tensor: serving_memory(SHAPE, dataclasses.replace(SETUP, tensor=tensor)).cache_bytes_per_token
        for tensor in (1, 2, 4, 8)
    }
    assert per_token == {1: 4096, 2: 2048, 4: 1024, 8: 1024}


def test_data_parallel_attention_keeps_caches_of_their_own():
    setup = dataclasses.replace(SETUP, tensor=4, attention_data=2)
    memory = serving_memory(SHAPE, setup)
    assert memory.cache_bytes_per_token == 2048
    assert memory.cache_tokens == 2 * memory.group_tokens == 2 * ((GIB // 2 - memory.weights) // 2048)
    with pytest.raises(UserError, match="--sglang-dp-size 3 does not divide the engine's tensor-parallel size 4"):
        serving_memory(SHAPE, dataclasses.replace(setup, attention_data=3))


def test_stages_have_layers_of_their_own_and_cache_the_same_tokens():
    """Of five layers the second stage has three, and what follows them."""
    shape = dataclasses.replace(SHAPE, num_layers=5)
    counts = count_parameters(shape)
    each, embedding = counts.layers[0].total, 32000 * 512
    one, two = (serving_memory(shape, dataclasses.replace(SETUP, pipeline=stages)) for stages in (1, 2))
    assert one.weights == 2 * counts.total
    assert two.weights == 2 * (3 * each + counts.output_head + counts.final_norm)
    assert two.cache_bytes_per_token == 3 * 1024
    assert two.cache_tokens == (GIB // 2 - two.weights) // (3 * 1024)
    first = 2 * (2 * each + embedding) + 2 * 1024 * two.cache_tokens + GIB // 2
    assert (two.stage, two.stage_totals) == (1, (first, two.total)) and (one.stage, one.stage_totals) == (
        0,
        (one.total,),
    )
    # The first stage may be the one with most: its experts come first, or its share of the layers is as large.
    even = serving_memory(SHAPE, dataclasses.replace(SETUP, pipeline=2))
    assert even.weights == 2 * (2 * each + embedding + 512)
    # A head that is the embedding is there twice, once on each end.
    tied = dataclasses.replace(SHAPE, tied_embeddings=True)
    assert count_parameters(tied).output_head == 0
    for pipeline, weights in ((1, 4 * each + embedding + 512), (2, 2 * each + embedding + 512)):
        assert serving_memory(tied, dataclasses.replace(SETUP, pipeline=pipeline)).weights == 2 * weights
    assert serving_memory(SHAPE, dataclasses.replace(SETUP, pipeline=4)).weights == 2 * (each + embedding + 512)


def test_latent_and_linear_attention():
    mla = MlaShape(None, kv_lora_rank=128, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32)
    latent = dataclasses.replace(SHAPE, mla=mla)
    assert serving_memory(latent, dataclasses.replace(SETUP, tensor=8)).cache_bytes_per_token == 4 * (128 + 16) * 2
    # Each rank of an engine has the projections down to the latent vectors, and reads them whole.
    one, two = (serving_memory(latent, dataclasses.replace(SETUP, tensor=tensor)).weights for tensor in (1, 2))
    whole = 2 * (4 * 512 * (128 + 16) + (4 * 2 + 1) * 512)
    assert two - whole == (one - whole) / 2
    # Of 4 layers two have an indexer, and so has a layer that drafts. The precision of the cache is not that of their keys.
    indexer = IndexerShape(4, 128, 5, (True, False, False, True))
    sparse = dataclasses.replace(SHAPE, mla=dataclasses.replace(mla, indexer=indexer))
    for size, draft, hands_over, keys in ((2, 0, False, 2), (2, 1, False, 3), (1, 1, False, 3), (2, 1, True, 5)):
        setup = dataclasses.replace(SETUP, cache_bytes=size, draft_layers=draft, hands_over=hands_over)
        # In FP8 the latent vector has a scale for 128 channels, too, and the part with the position has 16 bits.
        latent = 128 + 4 + 16 * 2 if size == 1 else (128 + 16) * size
        assert serving_memory(sparse, setup).cache_bytes_per_token == (4 + draft) * latent + keys * (128 + 4)


def test_sparse_attention_keeps_656_bytes_of_a_token_in_fp8():
    """As SGLang's `calculate_mla_kv_cache_dim` counts them for DeepSeek-V3.2, beside 132 of an indexer's key."""
    mla = MlaShape(1536, kv_lora_rank=512, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128)
    sparse = dataclasses.replace(mla, indexer=IndexerShape(64, 128, 2048, (True,) * 4))
    setup = dataclasses.replace(SETUP, cache_bytes=1)
    for found, expected in ((mla, 576), (sparse, 656 + 132)):
        shape = dataclasses.replace(SHAPE, mla=found)
        assert serving_memory(shape, setup).cache_bytes_per_token == 4 * expected


def test_linear_attention_has_no_cache():
    linear = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
    assert serving_memory(dataclasses.replace(SHAPE, linear_attention=linear), SETUP).cache_bytes_per_token == 1024


@pytest.mark.parametrize("stages", [1, 2])
def test_states_of_linear_attention_share_with_the_cache_what_weights_leave(stages):
    shape = dataclasses.replace(SHAPE, linear_attention=LinearAttentionShape(4, 32, 4, 32, 4, (True, False) * 2))
    setup = dataclasses.replace(SETUP, pipeline=stages, state_ratio=0.25)
    memory = serving_memory(shape, setup)
    room = GIB // 2 - memory.weights
    assert memory.states == round(room * 0.2) and memory.cache_bytes_per_token == 2 // stages * 1024
    assert memory.cache_tokens == (room - memory.states) // memory.cache_bytes_per_token
    assert GIB - memory.cache_bytes_per_token < memory.total == memory.stage_totals[memory.stage] <= GIB
    # With the number of states given, or without such layers, the cache has all.
    counted = serving_memory(shape, dataclasses.replace(setup, state_ratio=0.0))
    assert (counted.states, counted.cache_tokens) == (0, room // memory.cache_bytes_per_token)
    assert serving_memory(SHAPE, setup) == serving_memory(SHAPE, dataclasses.replace(setup, state_ratio=0.0))


def test_linear_attention_is_shared_by_the_ranks_of_an_engine():
    linear = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
    shape = dataclasses.replace(SHAPE, linear_attention=linear)
    held = {tensor: serving_memory(shape, dataclasses.replace(SETUP, tensor=tensor)).weights for tensor in (1, 4)}
    norms = 2 * ((4 * 2 + 1) * 512 + 3 * 32)
    assert held[4] - norms == (held[1] - norms) / 4
    groups = serving_memory(shape, dataclasses.replace(SETUP, tensor=4, attention_data=4)).weights
    # Attention of both kinds, and the embedding, are whole again; the MLP and the head stay shared.
    layers = count_parameters(shape).layers
    attention = sum(layer.attention + layer.linear_attention for layer in layers)
    assert layers[0].linear_attention > 0 and groups - held[4] == 2 * (attention + 32000 * 512) * 3 / 4


def test_embedding_and_head_of_data_parallel_attention():
    pairs = dataclasses.replace(SETUP, tensor=4, attention_data=2)
    whole_head = dataclasses.replace(pairs, sharded_head=False)
    vocabulary = 2 * 32000 * 512
    assert serving_memory(SHAPE, whole_head).weights - serving_memory(SHAPE, pairs).weights == vocabulary / 4
    attention = sum(layer.attention for layer in count_parameters(SHAPE).layers)
    together = serving_memory(SHAPE, dataclasses.replace(SETUP, tensor=4)).weights
    assert serving_memory(SHAPE, pairs).weights - together == (vocabulary + 2 * attention) / 4


def test_a_layer_that_drafts_is_one_layer_more_in_weights_and_cache():
    """With a projection that no rank shares; embedding and head are the model's."""
    drafting = dataclasses.replace(SETUP, draft_layers=1)
    for tensor in (1, 2):
        plain, more = (serving_memory(SHAPE, dataclasses.replace(setup, tensor=tensor)) for setup in (SETUP, drafting))
        (layer,) = count_parameters(dataclasses.replace(SHAPE, mtp_num_layers=1)).mtp
        own = layer.projection + layer.norms + layer.layer.norms
        assert more.weights - plain.weights == 2 * (own + (layer.layer.total - layer.layer.norms) // tensor)
        assert more.cache_bytes_per_token == plain.cache_bytes_per_token * 5 / 4
    linear = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
    mixed = dataclasses.replace(SHAPE, linear_attention=linear)
    assert [serving_memory(mixed, setup).cache_bytes_per_token for setup in (SETUP, drafting)] == [1024, 2048]


def test_a_layer_that_drafts_has_the_groups_of_the_others():
    """A rank has the attention of its group, the MLP of all, and the cache of its group's requests."""
    pairs = dataclasses.replace(SETUP, tensor=4, attention_data=2)
    plain, more = (serving_memory(SHAPE, dataclasses.replace(pairs, draft_layers=layers)) for layers in (0, 1))
    (layer,) = count_parameters(dataclasses.replace(SHAPE, mtp_num_layers=1)).mtp
    whole = layer.projection + layer.norms + layer.layer.norms
    split = layer.layer.attention / 2 + (layer.layer.total - layer.layer.norms - layer.layer.attention) / 4
    assert more.weights - plain.weights == 2 * (whole + split)
    assert more.cache_bytes_per_token == plain.cache_bytes_per_token * 5 / 4


def test_quantised_weights_leave_vocabulary_and_norms_alone():
    one_byte = dataclasses.replace(WeightBytes.everywhere(1.0), rest=2.0)
    plain, quantised = served_bytes(SHAPE, PLAIN), served_bytes(SHAPE, one_byte)
    counts = count_parameters(SHAPE)
    linear = sum(layer.attention + layer.attention_replicated + layer.dense_mlp for layer in counts.layers)
    assert plain == 2 * counts.total and plain - quantised == linear


def test_weights_that_do_not_fit_leave_no_cache_and_cpu_engines_take_a_fixed_one():
    assert serving_memory(SHAPE, dataclasses.replace(SETUP, gpu_memory=2**20)).cache_tokens == 0
    cpu = serving_memory(SHAPE, dataclasses.replace(SETUP, gpu_memory=0, static_fraction=None, max_total_tokens=1000))
    assert (cpu.kv_cache, cpu.reserve, cpu.cache_tokens) == (1000 * 4096, 0, 1000)


MOE = MoeShape(8, 2, 64, 64, False, False, (False, True, True, True))


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        # A dense MLP has three matrices of 512 x 1536, and each of three layers a shared expert with three of 512 x 64. Of both
        # a rank of four has the other three quarters too.
        ({"dense_whole": True}, 3 * 512 * 1536 * 3 // 4),
        ({"shared_whole": True}, 3 * 3 * 512 * 64 * 3 // 4),
        # A rank has two experts of eight in each layer, of twelve one more.
        ({"redundant_experts": 4}, 3 * 3 * 512 * 64),
        ({"redundant_experts": 4, "dense_whole": True}, 3 * 3 * 512 * 64 + 3 * 512 * 1536 * 3 // 4),
    ],
)
def test_what_ranks_do_not_divide_and_what_they_have_on_top(flags, more):
    shape = dataclasses.replace(SHAPE, moe=MOE)
    setup = dataclasses.replace(SETUP, tensor=4)
    divided, found = serving_memory(shape, setup), serving_memory(shape, dataclasses.replace(setup, **flags))
    assert found.weights - divided.weights == 2 * more
    # On one rank everything is whole in any case, and all engines get the same.
    if "redundant_experts" not in flags:
        one = dataclasses.replace(SETUP, **flags)
        assert serving_memory(shape, one).weights == serving_memory(shape, SETUP).weights == served_bytes(shape, PLAIN)


LINEAR = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
MIXED = ModelShape(4, 512, 1536, 8, 4, 64, 1000, 1000, moe=MOE, linear_attention=LINEAR)


def compressed(form, **weights):
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}},
    }  # fmt: skip


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 1 + 2 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 0.5 + 2 / 64),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "group_size": 32}, 0.5625),
        (compressed("pack-quantized", num_bits=4, group_size=128, strategy="group"), 0.5 + 2 / 128),
        (compressed("pack-quantized", num_bits=8, group_size=None, strategy="channel"), 1.0),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), 1.0),
        (compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]), 1 + 4 / 16384),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "mxfp4"}, 0.5 + 1 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5 + 4 / 64),
    ],
)
def test_bytes_of_a_weight(config, expected):
    assert quantisation_of(config, None).bytes_per_weight == expected
    assert unknown_quantisation(config, None) is None
    sizes = served_weight_bytes(MIXED, 2.0, config, None)
    assert sizes.attention == sizes.routed_experts == expected and sizes.rest == 2.0


def test_a_flag_counts_where_the_checkpoint_is_plain():
    assert served_weight_bytes(MIXED, 2.0, None, "fp8").dense_mlp == 1.0
    assert served_weight_bytes(MIXED, 2.0, {"quant_method": "gptq", "bits": 4}, "fp8").dense_mlp == 0.5
    plain = served_weight_bytes(MIXED, 2.0, None, None)
    assert plain.attention == plain.routed_experts == plain.rest == 2.0 and unknown_quantisation(None, None) is None


@pytest.mark.parametrize(
    "config, name",
    [
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt (MIXED_PRECISION)"),
        (compressed("marlin-24"), "compressed-tensors (marlin-24)"),
    ],
)
def test_other_formats_are_named(config, name):
    assert unknown_quantisation(config, None) == name
    assert served_weight_bytes(MIXED, 2.0, config, None).routed_experts == 2.0


def test_what_is_left_out_counts_plain():
    int4 = compressed("pack-quantized", num_bits=4, group_size=32)
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    sizes = served_weight_bytes(MIXED, 2.0, {**int4, "ignore": ignore}, None)
    assert (sizes.attention, sizes.dense_mlp, sizes.shared_experts) == (2.0, 2.0, 2.0)
    assert (sizes.routed_experts, sizes.linear_attention) == (0.5625, 0.5625)


@pytest.mark.parametrize(
    "entry",
    [
        "model.language_model.layers.0.self_attn", "language_model.model.layers.0.self_attn",
        "language_model.layers.0.self_attn", "model.language_model.layers.0.self_attn.o_proj",
        "*language_model.layers.0.self_attn*",
        "re:model\\.language_model\\.layers\\.0\\.self_attn.*", "re:.*language_model.*layers\\.0\\.self_attn.*",
        "re:(?!.*visual).*\\.layers\\.0\\.self_attn.*",
    ],
)  # fmt: skip
def test_names_in_the_text_part_of_a_model_that_takes_images(entry):
    config = {"quant_method": "fp8", "modules_to_not_convert": ["model.visual.blocks.0.attn", entry]}
    sizes = served_weight_bytes(SHAPE, 2.0, config, None)
    assert (sizes.attention, sizes.dense_mlp) == ((2 + 3 * 1) / 4, 1.0)


def test_names_with_layers_and_patterns():
    names = ["model.layers.0.linear_attn", "model.language_model.layers.2.mlp.experts", "mlp.shared_expert", "mlp.gate"]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": names}
    sizes = served_weight_bytes(MIXED, 2.0, fp8, None)
    # One of three linear layers, one of three layers with experts; a router is no projection.
    assert sizes.linear_attention == pytest.approx((2 + 1 + 1) / 3) == sizes.routed_experts
    assert (sizes.shared_experts, sizes.dense_mlp) == (2.0, 1.0)
    starred = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "re:broken("]}
    assert served_weight_bytes(MIXED, 2.0, starred, None).attention == 2.0
