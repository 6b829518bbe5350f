import dataclasses

import pytest

from slime.scheduling.model_shape import LinearAttentionShape, MlaShape, ModelShape
from slime.scheduling.parameters import count_parameters
from slime.scheduling.serving_memory import ServingSetup, WeightBytes, served_bytes, serving_memory
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
    assert memory.cache_tokens == 2 * ((GIB // 2 - memory.weights) // 2048)
    with pytest.raises(UserError, match="--sglang-dp-size 3 does not divide the engine's tensor-parallel size 4"):
        serving_memory(SHAPE, dataclasses.replace(setup, attention_data=3))


def test_latent_and_linear_attention():
    mla = MlaShape(None, kv_lora_rank=128, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32)
    latent = dataclasses.replace(SHAPE, mla=mla)
    assert serving_memory(latent, dataclasses.replace(SETUP, tensor=8)).cache_bytes_per_token == 4 * (128 + 16) * 2
    linear = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
    assert serving_memory(dataclasses.replace(SHAPE, linear_attention=linear), SETUP).cache_bytes_per_token == 1024


def test_linear_attention_is_shared_by_the_ranks_of_an_engine():
    linear = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
    shape = dataclasses.replace(SHAPE, linear_attention=linear)
    held = {tensor: serving_memory(shape, dataclasses.replace(SETUP, tensor=tensor)).weights for tensor in (1, 4)}
    norms = 2 * (4 * 2 + 1) * 512
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
