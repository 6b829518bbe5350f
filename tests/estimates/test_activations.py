"""Bytes per token that a layer keeps, against lists written out by hand and the published formula."""

import dataclasses

from slime.estimates.activations import (
    ActivationModel,
    Kernels,
    Recompute,
    backward_working_set,
    kept_of_chunks,
)
from slime.estimates.layout import ParallelLayout
from slime.estimates.shape import IndexerShape, LinearAttentionShape, MlaShape, ModelShape, MoeShape

FUSED, CUDA, CPU = Kernels.TRANSFORMER_ENGINE, Kernels.TORCH_CUDA, Kernels.TORCH_CPU
SHAPE = {
    "num_layers": 4, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8, "num_query_groups": 4,
    "head_dim": 64, "vocab_size": 32000, "padded_vocab_size": 32000,
}  # fmt: skip


def model(
    kernels=FUSED, compute_bytes=2, recompute=None, tensor=1, sequence_parallel=False, expert=1, context=1, **changes
):
    world = tensor * expert * context
    layout = ParallelLayout(world, tensor, context=context, expert=expert, sequence_parallel=sequence_parallel)
    shape = ModelShape(**{**SHAPE, **changes})
    return ActivationModel(shape, layout, kernels, compute_bytes, recompute or Recompute(), delta_rule_kernels=False)


def test_published_formula_for_a_plain_transformer():
    """Korthikanti et al. 2022, section 4.1: 34 bytes per token and hidden channel, with its two masks of dropout.

    Without them 32. Ours has rotated queries and keys on top (2 + 2), and a float32 per head instead of scores.
    """
    layer = model(num_query_groups=8, ffn_hidden_size=4 * 512, gated_mlp=False).layer(0)
    assert layer.kept == (34 - 2 + 4) * 512 + 4 * 8


def test_a_residual_stream_in_float32_takes_twice_the_bytes():
    """The inputs of both norms, and what is kept of a recomputed layer; outputs of norms have the dtype of the weights."""
    shape, one = ModelShape(**SHAPE), ParallelLayout(1)
    usual, wide = (
        ActivationModel(shape, one, FUSED, 2, Recompute(), delta_rule_kernels=False, residual_bytes=size)
        for size in (0, 4)
    )
    assert wide.layer(0).kept - usual.layer(0).kept == 2 * 2 * 512
    assert wide.layer_input == 2 * usual.layer_input == 4 * 512
    assert wide.layer(0).backward - usual.layer(0).backward == 2 * 512


def test_pytorch_on_cpu_keeps_every_step():
    """What a dispatch-mode listing of a real layer showed, in float32 elements per token."""
    layer = model(CPU, 4, qk_norm="head").layer(0)
    query, key, hidden, ffn = 512, 256, 512, 1536
    norms = 2 * hidden
    residual = 2 * hidden
    projection = query + 2 * key
    query_key_norm = query  # copy of the queries
    rotated = query + key
    attention = 2 * query + 8
    assert layer.kept == 4 * (norms + residual + projection + query_key_norm + rotated + attention + 5 * ffn)


def test_queries_and_keys_of_all_layers_of_a_chunk_keep_the_same_cosines_and_sines():
    plain, kept, angles = model(CPU, 4), model(CPU, 4).layer(0).kept, 4 * 2 * 64
    assert kept_of_chunks(plain, [range(4)]) == plain.kept(range(4)) == 4 * kept + angles
    assert kept_of_chunks(plain, [range(2), range(2, 4), (-1,)]) == 5 * kept + 2 * angles
    # Each unit that is recomputed makes its own; what is kept of it is its input.
    full = model(CPU, 4, recompute=Recompute("full", "uniform", 2))
    assert kept_of_chunks(full, [range(4)]) == 2 * full.layer_input
    assert backward_working_set(full, [range(4)]) == 2 * kept + angles + plain.layer(0).backward
    block = model(CPU, 4, recompute=Recompute("full", "block", 1))
    assert kept_of_chunks(block, [range(4)]) == block.layer_input + 3 * kept + angles
    # The rotation of Transformer Engine keeps the angles of the pass.
    assert kept_of_chunks(model(), [range(4)]) == 4 * model().layer(0).kept


def test_pytorch_on_cuda_keeps_what_its_kernels_need():
    """What a dispatch-mode listing of a real layer showed, in elements of 2 bytes; sums of the kernel are float32 per head."""
    query, key, hidden, ffn = 512, 256, 512, 1536
    norms_and_residual, mlp, sums = 4 * hidden, 5 * ffn, 4 * 8 / 2
    values, output = key, query
    rest = norms_and_residual + mlp + sums + query + key + output
    projection = query + 2 * key
    assert model(CUDA).layer(0).kept == 2 * (rest + values)
    # Norms keep their inputs: keys as part of the projection, queries of several groups as a copy.
    assert model(CUDA, qk_norm="head").layer(0).kept == 2 * (rest + values + projection + query)
    one_group = {"num_query_groups": 1, "qk_norm": "head"}
    assert model(CUDA, **one_group).layer(0).kept == 2 * (rest + values + projection - 4 * (key - 64))


def test_a_rank_of_a_context_keeps_the_keys_and_values_that_it_sees():
    """Of 3 ranks the first has parts 1 and 6 of the sequence, which see 1 and 6 parts: 7 parts of half a rank's rows."""
    alone, one_of_three = model(CUDA).layer(0), model(CUDA, context=3).layer(0)
    key = value = 256
    assert one_of_three.attention - alone.attention == 2 * (7 / 2 * (key + value) - (key + value))
    # The ring of Transformer Engine passes them on.
    assert model(context=3).layer(0) == model().layer(0)


def test_tensor_and_sequence_parallelism_divide_their_parts():
    whole, cut, both = (model(tensor=t, sequence_parallel=s).layer(0) for t, s in ((1, False), (2, False), (2, True)))
    assert cut.mlp == whole.mlp / 2 and cut.attention == whole.attention / 2
    assert cut.norms_and_residual == whole.norms_and_residual == 2 * both.norms_and_residual


def test_ranks_that_share_a_query_group_keep_the_projection_of_all():
    """8 heads of 64 and one group, on 2 ranks; in float32."""
    query, key, projection = 512 / 2, 64, 512 + 2 * 64
    shared = {"tensor": 2, "num_query_groups": 1}
    for norm in ("head", None):
        kept = model(CPU, 4, qk_norm=norm, **shared).layer(0).attention
        assert kept == 4 * (projection + query + key + 2 * query + 4)
    # PyTorch's kernel on CUDA copies the values, so that nothing keeps the projection.
    assert model(CUDA, **shared).layer(0).attention == 2 * (query + key + query + key) + 4 * 4
    gated = model(CPU, 4, **shared, attention_output_gate=True).layer(0).attention
    assert gated - kept == 4 * (512 + 2 * query)
    # Two ranks of two groups have one each.
    divided = model(CPU, 4, tensor=2, num_query_groups=2).layer(0).attention
    assert divided == 4 * (query + 2 * key + query + key + 2 * query + 4)


def test_recomputation():
    none, full = model(), model(recompute=Recompute("full", "uniform", 1))
    kept = none.layer(0).kept
    assert kept_of_chunks(none, [range(4)]) == 4 * kept
    assert kept_of_chunks(full, [range(4)]) == 4 * 2 * 512
    assert kept_of_chunks(model(recompute=Recompute("full", "uniform", 2)), [range(4)]) == 2 * 2 * 512
    assert kept_of_chunks(model(recompute=Recompute("full", "block", 1)), [range(4)]) == 2 * 512 + 3 * kept
    assert backward_working_set(full, [range(4)]) == kept + 2 * 2 * 1536 + 2 * 512
    pairs = model(recompute=Recompute("full", "uniform", 2))
    assert backward_working_set(pairs, [range(4)]) - backward_working_set(full, [range(4)]) == kept
    assert backward_working_set(none, [range(4)]) == 2 * 2 * 1536 and backward_working_set(none, []) == 0
    distributed = model(tensor=2, recompute=Recompute("full", "uniform", 1, distributed=True))
    assert kept_of_chunks(distributed, [range(4)]) == 4 * 512


def test_every_chunk_of_an_interleaved_stage_begins_anew():
    """A block in each chunk; units of 3 layers do not cross from one chunk into the next."""
    kept, chunks = model().layer(0).kept, [(0, 1, 2, 3), (8, 9, 10, 11)]
    block, threes = (model(recompute=Recompute("full", *how), num_layers=16) for how in (("block", 1), ("uniform", 3)))
    assert kept_of_chunks(block, chunks) == 2 * 2 * 512 + 6 * kept
    assert kept_of_chunks(threes, chunks) == 4 * 2 * 512
    assert backward_working_set(threes, [(0, 1), (4, 5)]) == 2 * kept + 2 * 2 * 1536 + 2 * 512


def test_a_layer_of_multi_token_prediction_is_recomputed_by_either_method():
    for method in ("block", "uniform"):
        recomputing = model(recompute=Recompute("full", method, 3))
        assert kept_of_chunks(recomputing, [range(1, 4), (-1,)]) == (4 if method == "block" else 2) * 2 * 512


def test_selective_recomputation_takes_out_its_modules():
    plain = model(CPU, 4)
    core = model(CPU, 4, recompute=Recompute("selective"))
    # The output inside attention and the sums; the concatenated output stays.
    assert plain.layer(0).kept - core.layer(0).kept == 4 * (512 + 8)
    mlp = model(recompute=Recompute("selective", modules=("mlp",))).layer(0)
    assert mlp.mlp == 0 and mlp.backward > model().layer(0).backward


def test_experts_see_topk_copies():
    moe = MoeShape(16, 4, 256, 0, False, False, (False, True, True, True))
    one = model(moe=moe)
    router = 4 * 3 * 16 + 12 * 4
    assert one.layer(1).mlp == 4 * 2 * (512 + 4 * 256) + router
    assert one.layer(0).mlp == 2 * 3 * 1536
    # Of 2 tensor-parallel ranks each routes half of the tokens to experts that are whole.
    two = model(moe=moe, tensor=2, sequence_parallel=True)
    assert two.layer(1).mlp == 2 * 2 * (512 + 4 * 256) + 4 * 3 * 16 / 2 + 12 * 4


def test_chosen_keys_are_kept_on_every_rank():
    """5 numbers of int32 per token in each layer with an indexer; of recomputed ones, where the next layer uses them too."""
    dense = MlaShape(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24)
    mla = dataclasses.replace(dense, indexer=IndexerShape(4, 16, 5, (True, True, False, True)))
    for tensor in (1, 2):
        sparse, plain = (model(mla=kind, tensor=tensor) for kind in (mla, dense))
        more = [sparse.layer(index).kept - plain.layer(index).kept for index in range(4)]
        assert more == [4 * 5, 4 * 5, 0, 4 * 5]
    recompute = Recompute("full", method="block", num_layers=3)
    chunk = [range(4)]
    sparse, plain = (kept_of_chunks(model(mla=kind, recompute=recompute), chunk) for kind in (mla, dense))
    assert sparse - plain == 4 * 5 + 4 * 5  # the second, and the last, which is not recomputed


def test_a_prediction_layer_has_an_indexer_whichever_layers_of_the_decoder_have():
    indexer = IndexerShape(4, 16, 5, (True, True, True, False))
    mla = MlaShape(
        q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24, indexer=indexer
    )
    predicting, first, last = (model(mla=mla).layer(index).kept for index in (-1, 0, 3))
    assert predicting == first == last + 4 * 5


def test_indexers_that_learn_keep_the_gradients_of_their_vectors():
    """Of 4 heads with 16 channels, and one key of 16, in 16 bits: gradients and what the norm of keys takes; of 16 rotated
    channels cosines and sines of queries and of keys; a weight for each head, and mean and deviation of keys, in 32 bits."""
    choosing = IndexerShape(4, 16, 5, (True, False, True, True))
    dense = MlaShape(96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24, indexer=choosing)
    mla = dataclasses.replace(dense, indexer=dataclasses.replace(choosing, is_trained=True))

    def more(**layout):
        learning, still = (model(mla=kind, **layout) for kind in (mla, dense))
        return [learning.layer(index).kept - still.layer(index).kept for index in range(4)]

    own, keys = 2 * (4 * 16 + 16 + 4 * 16) + 4 * (4 + 2), 2 * 16
    assert more() == more(tensor=2) == [own + keys, 0, own + keys, own + keys]
    assert more(tensor=2, sequence_parallel=True)[0] == own / 2 + keys
    # Every rank has the keys of all.
    assert more(context=2)[0] == own + 2 * keys


def test_latent_attention():
    mla = MlaShape(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24)
    kept = model(mla=mla, num_attention_heads=8).layer(0).attention
    assert kept == model(CUDA, mla=mla).layer(0).attention
    query = key = 8 * 48
    down, output, angles = 64 + 16 + 96, 8 * 24, 4 * 16
    # The kernel knows one width: values are padded to that of the keys, and so is what it gives.
    wide_values = wide_output = key
    assert kept == 2 * (down + query + key + angles + wide_values + wide_output + output) + 4 * 8

    def without(module, **changes):
        recompute = Recompute("selective", modules=(module,))
        return kept - model(mla=mla, recompute=recompute, **changes).layer(0).attention

    assert without("mla_up_proj") == 2 * (query + key + angles)
    # On CPU attention keeps copies of queries and keys where values have another width, which are not computed again.
    cpu = [
        model(CPU, 4, Recompute("selective", modules=names), mla=mla).layer(0).attention
        for names in ((), ("mla_up_proj",))
    ]
    assert cpu[0] - cpu[1] == 4 * (8 * 24 + angles)
    # Attention that is called once more is called with the values as they are.
    assert without("core_attn") == 2 * (wide_values + wide_output - 8 * 24) + 4 * 8
    normed = model(mla=mla, qk_norm="head").layer(0).attention
    assert normed - kept == 2 * (64 + 96)
    as_wide = dataclasses.replace(mla, v_head_dim=48)
    assert model(mla=as_wide).layer(0).attention == 2 * (down + query + key + angles + wide_values + query) + 4 * 8


def test_latent_attention_over_ranks():
    mla = MlaShape(q_lora_rank=96, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=24)
    wide = {"mla": mla, "qk_norm": "head"}
    key = 8 * 48
    # Keys and wide values of 3 ranks: 7 parts of half a rank's rows, in place of its own.
    alone, one_of_three = (model(context=size, **wide).layer(0).attention for size in (1, 3))
    assert one_of_three - alone == 2 * (7 / 2 * 2 * key - 2 * key)
    # Of two tensor-parallel ranks each has half of the heads, and the latent vectors of all rows, whose norms see its own rows
    # with sequence parallelism; of keys and values it keeps only those.
    heads = 2 * (2 * key + 2 * key + 8 * 24) + 4 * 8
    whole, rows = (model(tensor=2, sequence_parallel=sequence, **wide).layer(0).attention for sequence in (False, True))
    assert whole == alone - heads / 2
    assert whole - rows == 2 * (64 + 96) / 2 + 2 * (64 + 16 - 64 / 2)


def test_latent_attention_on_cpu_keeps_values_as_they_are():
    mla = MlaShape(q_lora_rank=None, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=48)
    query, output = 8 * 48, 8 * 48
    kept = model(CPU, 4, mla=mla).layer(0).attention
    assert kept == 4 * (64 + 16 + 2 * query + 4 * 16 + 8 * 48 + 2 * output) + 4 * 8


def test_multi_token_prediction_counts_like_the_last_layer():
    moe = MoeShape(16, 4, 256, 0, False, False, (False, True, True, True))
    one = model(moe=moe)
    assert one.layer(-1) == one.layer(3)


def test_values_that_attention_is_called_with_once_more_keep_the_projection():
    """Without norms of queries and keys: 4 heads and 2 groups of 16, in bfloat16; PyTorch's kernel copies the values else."""
    shape = ModelShape(2, 64, 192, 4, 2, 16, 128, 128)

    def attention(recompute):
        layers = ActivationModel(shape, ParallelLayout(1), CUDA, 2, recompute, delta_rule_kernels=False)
        return layers.layer(0).attention

    rotated, output = 64 + 32, 64
    assert attention(Recompute()) == 2 * (rotated + output + 32) + 4 * 4
    assert attention(Recompute("selective")) == 2 * (64 + 2 * 32 + rotated + output)


def test_every_rank_of_a_context_computes_the_whole_stream_of_linear_attention():
    """2 key heads of 3 and 4 value heads of 5: widths 6 and 20, the two and values together 32; in bfloat16."""
    linear = LinearAttentionShape(2, 3, 4, 5, conv_kernel=4, layers=(True,) * 4)

    def attention(kernels=FUSED, context=1, tensor=1, *, delta_rule_kernels=True, compute_bytes=2):
        shape = ModelShape(**SHAPE, linear_attention=linear)
        layout = ParallelLayout(context * tensor, tensor, context=context)
        return (
            ActivationModel(shape, layout, kernels, compute_bytes, Recompute(), delta_rule_kernels=delta_rule_kernels)
            .layer(0)
            .attention
        )

    # The projection with its gates, rates and decays, and of the norm two in bfloat16 and four in float32.
    own = 2 * (32 + 20 + 8 + 2 * 20) + 4 * 4 * 20
    around = 2 * (32 + 32) + 4 * 8 * 4
    kernel = 2 * (20 + 2 * 4 * 3 + 64 * 4)
    # Chunks of 6 · 5 and products of 2 · 64 twice; sides and solutions, 5 · 12 and 3 · 20; four matrices of 4 · 64; states.
    pytorch = 4 * (30 + 256 + 60 + 60 + 1024 + 40 + 2 * 12 * 5 / 64)
    assert attention() == attention(CUDA) == own + around + kernel
    assert attention(context=3) == own + 3 * (around + kernel) == 2 * attention(context=3, tensor=2)
    assert attention(context=3, delta_rule_kernels=False) == own + 3 * (around + pytorch)
    # Kernels are for 16 bits.
    assert attention(compute_bytes=4) == attention(compute_bytes=4, delta_rule_kernels=False)
