"""The peak of a training rank: against Megatron-LM's published formula, and part by part by hand."""

import dataclasses

import pytest

from slime.estimates.activations import Kernels, Recompute
from slime.estimates.layout import ParallelLayout, split_as_laid_out, split_into_stages
from slime.estimates.parameters import count_parameters
from slime.estimates.shape import IndexerShape, MlaShape, ModelShape, MoeShape
from slime.estimates.training_memory import (
    StateBytes,
    TrainingSetup,
    push_buffers,
    received_buffers,
    training_memory,
    worst_rank,
)

GIB = 2**30
QWEN3_8B = ModelShape(36, 4096, 12288, 32, 8, 128, 151936, 152064, qk_norm="head")
BF16 = StateBytes(weight=2, gradient=4, main_parameter=4, moments=8)
FULL = Recompute("full", "uniform", 1)
# Parameters of a rank of two, of a layer with hidden size 512: a dense MLP, eight experts.
DENSE, EXPERTS = 3 * 512 * 2048 // 2, 8 * 3 * 512 * 1024 // 2


def setup(layout, layers, state=BF16, **changes):
    values = {
        "layout": layout, "stages": split_into_stages(layers, layout.pipeline), "state": state,
        "kernels": Kernels.TRANSFORMER_ENGINE, "recompute": FULL, "stream_tokens": 4096, "micro_batches": 8,
    }  # fmt: skip
    return TrainingSetup(**{**values, **changes})


def published_gib(parameters, tensor, pipeline, data, *, distributed=True):
    """Megatron-LM's theoretical estimate of weights and optimizer for the most loaded shard, without activations."""
    per_parameter = 6 + 12 / data if distributed else 18
    return parameters / (tensor * pipeline) * per_parameter / GIB


def state_gib(memory):
    return (memory.weights + memory.gradients + memory.optimizer) / GIB


@pytest.mark.parametrize("distributed", [True, False])
def test_published_formula_qwen3_8b_on_tp4_dp2(distributed):
    assert count_parameters(QWEN3_8B).total == 8_190_735_360
    state = dataclasses.replace(BF16, distributed=distributed)
    memory = worst_rank(training_memory(QWEN3_8B, setup(ParallelLayout(8, tensor=4), 36, state)))
    in_memory = 8_190_735_360 + 2 * (152064 - 151936) * 4096
    expected = published_gib(in_memory, 4, 1, 2, distributed=distributed)
    # Norms are whole on every rank; the published formula divides everything.
    assert state_gib(memory) == pytest.approx(expected, rel=2e-4) and state_gib(memory) >= expected
    assert not distributed or f"{expected:.2f}" == f"{state_gib(memory):.2f}" == "22.89"


def test_optimizer_state_of_experts_is_divided_over_their_own_replicas():
    moe = MoeShape(8, 2, 1024, 0, False, False, (True,) * 4)
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe)
    memory = training_memory(shape, setup(ParallelLayout(16, tensor=2, expert=4), 4))[0]
    experts = 4 * 8 // 4 * 3 * 512 * 1024
    dense = memory.weights // 2 - experts
    assert memory.optimizer == 12 * (dense / 8 + experts / 4)
    twice = training_memory(shape, setup(ParallelLayout(16, tensor=2, expert=4, optimizers=2), 4))[0]
    assert twice.optimizer == 2 * memory.optimizer


def test_parts_of_a_stage_by_hand():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)
    memory = training_memory(shape, setup(ParallelLayout(1), 4, stream_tokens=1000, overhead=7, rollout_tokens=3))[0]
    assert memory.moment == "backward" and memory.logits == 0
    assert memory.data == 3 * 40 and memory.overhead == 7
    kept_of_layer = 2 * (4 * 512 + (512 + 2 * 256) + (512 + 256) + 512 + 3 * 1536) + 4 * 8
    # That of the first layer is the embedding's output.
    inputs = 4 * 2 * 512
    assert memory.activations == 1000 * (inputs + kept_of_layer + 2 * 2 * 1536 + 2 * 512)
    big = dataclasses.replace(shape, vocab_size=200_000, padded_vocab_size=200_000)
    memory = training_memory(big, setup(ParallelLayout(1), 4, stream_tokens=1000))[0]
    assert memory.moment == "loss"
    # Output and input of the final norm; the last layer's inputs are not those of a recomputed one yet.
    assert memory.activations == 1000 * (inputs + 2 * 2 * 512)
    # Logits and gradient in 16 bits, float32 for 128 MiB of rows, which are taken out of the stream in 16 bits.
    assert memory.logits == 2 * 1000 * 200_000 * 2 + (128 + 64) * 2**20
    # One chunk has all rows: taken out, in float32, and their exponentials.
    one_chunk = training_memory(shape, setup(ParallelLayout(1), 4, stream_tokens=1000, recompute=Recompute()))[0]
    assert one_chunk.moment == "loss" and one_chunk.logits == 1000 * 1024 * (2 + 2 + 4 + 4)


def test_first_stage_holds_most_micro_batches_and_the_last_the_logits():
    shape = ModelShape(8, 512, 1536, 8, 8, 64, 4096, 4096)
    memories = training_memory(shape, setup(ParallelLayout(4, pipeline=4), 8, recompute=Recompute()))
    assert [memory.stage for memory in memories] == [0, 1, 2, 3]
    assert memories[0].activations > memories[1].activations > memories[2].activations
    assert worst_rank(memories).stage == 0
    assert [memory.logits > 0 for memory in memories] == [False, False, False, True]


def test_some_micro_batches_may_keep_everything():
    """Of the four that the first stage holds; the last one holds one."""
    shape = ModelShape(8, 512, 1536, 8, 8, 64, 4096, 4096)

    def activations(recompute, kept_whole=0, virtual=1):
        layout = ParallelLayout(4, pipeline=4, virtual_pipeline=virtual)
        stages = split_into_stages(8, 4, virtual_pipeline=virtual)
        given = {"stages": stages, "recompute": recompute, "kept_whole": kept_whole}
        return [memory.activations for memory in training_memory(shape, setup(layout, 8, **given))]

    again, whole = activations(FULL), activations(Recompute())
    three = activations(FULL, 3)
    layers = 2 * 4096 * (2 * (4 * 512 + 512 + 2 * 512 + 2 * 512 + 512 + 3 * 1536) + 4 * 8)
    inputs = 2 * 4096 * 2 * 512
    assert three[0] - again[0] == 3 * (layers - inputs)
    assert activations(FULL, 1)[3] - again[3] == activations(FULL, 9)[3] - again[3] == layers - inputs
    # Interleaved, a pass goes through half of a stage.
    assert activations(FULL, 2, 2)[0] - activations(FULL, 0, 2)[0] == layers - inputs
    assert whole[0] > three[0]


def test_offloaded_state_goes_to_the_host():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)
    on_gpu = training_memory(shape, setup(ParallelLayout(2), 4))[0]
    state = dataclasses.replace(BF16, offloaded=0.5, host_main_parameter=4)
    half = training_memory(shape, setup(ParallelLayout(2), 4, state))[0]
    assert half.optimizer == on_gpu.optimizer / 2
    shard = on_gpu.weights / 2 / 2
    assert half.host == shard * (12 + 4) * 0.5 and on_gpu.host == 0
    reference = training_memory(shape, setup(ParallelLayout(2), 4, host_copies=2))[0]
    assert reference.host == 2 * reference.weights


def test_layers_in_fp8_have_their_matrices_twice_more_while_they_compute():
    moe = MoeShape(8, 2, 1024, 0, False, False, (True,) * 4)
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe)
    layout = ParallelLayout(8, tensor=2, expert=4)
    plain = training_memory(shape, setup(layout, 4))[0]
    in_fp8 = training_memory(shape, setup(layout, 4, fp8=True))[0]
    attention, expert = 4 * 512 * 512, 3 * 512 * 1024
    # With one rank per expert-tensor group, each of four expert-parallel ranks has two whole experts of a layer.
    assert in_fp8.buffers - plain.buffers == 2 * 4 * (attention // 2 + 2 * expert)
    assert in_fp8.persistent == plain.persistent and in_fp8.moment == plain.moment


@pytest.mark.parametrize("tied", [True, False])
def test_ranks_that_send_changes_keep_what_engines_have(tied):
    """Whole layers, once over all stages, on one rank of each."""
    moe = MoeShape(8, 2, 1024, 0, False, False, (True,) * 4)
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe, tied_embeddings=tied)
    layout = ParallelLayout(16, tensor=2, pipeline=2, expert=4)
    plain = training_memory(shape, setup(layout, 4))
    first, last = training_memory(shape, setup(layout, 4, push_snapshot=True))
    assert first.host_snapshot + last.host_snapshot == 2 * count_parameters(shape).total
    assert first.host_snapshot - last.host_snapshot == 2 * (1024 * 512 * tied - 512), "the last has the final norm"
    assert first.host == first.host_snapshot and first.total == plain[0].total and plain[0].host == 0
    assert [first.host_of_ranks(ranks, stages) for ranks, stages in ((1, 1), (8, 1), (16, 2))] == [
        first.host,
        first.host,
        2 * first.host,
    ]


@pytest.mark.parametrize("tensor", [1, 2])
def test_each_stage_writes_the_same_in_either_order_of_ranks(tensor):
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024)
    state = dataclasses.replace(BF16, saved=12, distributed=False)
    behind, beside = (
        training_memory(shape, setup(layout, 4, state, saves=True, shares_saves=False))
        for layout in (ParallelLayout(8, tensor=tensor, pipeline=2, stages_beside=value) for value in (False, True))
    )
    assert [memory.stage_savings for memory in beside] == [memory.stage_savings for memory in behind]
    for memory in beside:
        # The first replica of each part of the stage writes it.
        assert memory.stage_savings == (memory.saving,) * tensor + (0,) * (4 - tensor)
        # Four neighbouring ranks are two of each stage, or all of one.
        assert [memory.saving_of_node(4, stages) for stages in (1, 2)] == [
            tensor * memory.saving,
            2 * tensor * memory.saving,
        ]


@pytest.mark.parametrize("distributed", [True, False])
def test_what_a_save_gathers_and_copies(distributed):
    moe = MoeShape(8, 2, 1024, 0, False, False, (True,) * 4)
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe)
    state = dataclasses.replace(BF16, saved=12, distributed=distributed)

    def memory(**changes):
        return training_memory(shape, setup(ParallelLayout(16, tensor=2, expert=4), 4, state, **changes))[0]

    experts = 4 * 8 // 4 * 3 * 512 * 1024
    dense = memory().weights // 2 - experts
    share = dense / 8 + experts / 4
    shared = memory(saves=True)
    assert (shared.saving_optimizer, shared.saving_weights) == (12 * share, 2 * share)
    alone = memory(saves=True, shares_saves=False)
    # A distributed optimizer is divided in any case.
    assert alone.saving_optimizer == 12 * (share if distributed else dense + experts)
    assert alone.saving_weights == 2 * (dense + experts) and memory().saving == 0
    # Ranks 0 and 1 are the first replicas of their halves of the dense weights, 0 to 3 those of their experts.
    weights = [2 * (dense + experts)] * 2 + [2 * experts] * 2 + [0] * 12
    optimizer = [12 * share] * 16 if distributed else [6 * written for written in weights]
    assert alone.stage_savings == tuple(map(sum, zip(weights, optimizer, strict=True)))
    assert alone.saving_beyond(one_memory=False) == sum(alone.stage_savings) / 16
    assert shared.stage_savings == (shared.saving,) * 16
    assert [alone.saving_of_node(ranks, 1) for ranks in (2, 8)] == [2 * alone.saving, sum(alone.stage_savings[:8])]
    # A node with stages beside each other.
    assert alone.saving_of_node(32, 2) == 2 * sum(alone.stage_savings)
    # The memory in which a rank sleeps is kept while it is awake and saves.
    asleep = memory(saves=True, shares_saves=False, sleeps=True)
    assert asleep.host_asleep > 0 and asleep.saving_beyond(one_memory=False) == sum(alone.stage_savings) / 16
    # Written in the background, a checkpoint is there while the rank computes.
    meanwhile = memory(saves=True, shares_saves=False, sleeps=True, saves_in_background=True)
    for one_memory in (False, True):
        assert meanwhile.saving_beyond(one_memory=one_memory) == sum(alone.stage_savings) / 16
    assert (shared.total, shared.host) == (memory().total, 0)
    assert shared.saving_beyond(one_memory=False) == shared.saving
    # Activations are gone then, and leave room where host and device have one memory.
    assert memory(saves=True, stream_tokens=10**6).saving_beyond(one_memory=True) == 0
    small = memory(saves=True, stream_tokens=8)
    assert small.saving_beyond(one_memory=True) == small.saving - (small.total - small.persistent) > 0


def test_a_prediction_layer_that_is_trained_has_logits_of_its_own():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)

    def logits(predictions):
        return training_memory(
            shape,
            setup(ParallelLayout(1), 4, BF16, predictions=predictions, stream_tokens=2**20, recompute=Recompute()),
        )[0].logits

    assert [logits(count) - logits(0) for count in (1, 2)] == [2**20 * 1024 * 2, 2 * 2**20 * 1024 * 2]


def test_prediction_layers_that_are_not_trained_have_weights_alone():
    """Neither gradients nor a state in the optimizer, nor activations, for they never run; they are saved as they are."""
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)
    frozen = dataclasses.replace(shape, mtp_num_layers=1)
    layer = count_parameters(frozen).mtp[0].total
    state = dataclasses.replace(BF16, saved=12)

    def memory(of, predictions=0):
        given = setup(ParallelLayout(2), 4, state, recompute=Recompute(), predictions=predictions, saves=True)
        return training_memory(of, given)[0]

    without, still, trained = memory(shape), memory(frozen), memory(frozen, 1)
    assert still.weights - without.weights == 2 * layer
    assert (still.gradients, still.optimizer, still.activations, still.logits) == (
        without.gradients, without.optimizer, without.activations, without.logits
    )  # fmt: skip
    assert (still.saving_weights, still.saving_optimizer) == (without.saving_weights + layer, without.saving_optimizer)
    assert (trained.gradients - still.gradients, trained.optimizer - still.optimizer) == (4 * layer, 12 * layer / 2)
    assert trained.activations > still.activations and trained.saving_optimizer - still.saving_optimizer == 6 * layer


@pytest.mark.parametrize("tied", [False, True])
def test_a_last_stage_that_trains_prediction_layers_gets_a_copy_of_the_embedding(tied):
    """Half of its rows with two tensor-parallel ranks. A tied one is there already."""
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024, mtp_num_layers=1, tied_embeddings=tied)
    layout = ParallelLayout(4, tensor=2, pipeline=2)
    first, last = training_memory(shape, setup(layout, 4, predictions=1))
    assert (first.buffers, last.buffers) == (0, 0 if tied else 1024 // 2 * 512 * 2)
    assert [memory.buffers for memory in training_memory(shape, setup(layout, 4))] == [0, 0]


def test_prediction_layers_before_the_last_stage_send_it_their_states():
    """It alone has the logits; the stage with the layers has the copy of the embedding, tied or not."""
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 2**16, 2**16, mtp_num_layers=1, tied_embeddings=True)
    given = setup(ParallelLayout(3, pipeline=3), 3, predictions=1, stream_tokens=1000, recompute=Recompute())

    def memories(layout, **changes):
        return training_memory(shape, dataclasses.replace(given, stages=split_as_laid_out(layout, 3), **changes))

    _, middle, last = memories("Ett|ttm|L")
    _, without, beside = memories("Ett|tt|mL")
    assert (middle.buffers, without.buffers, last.buffers, beside.buffers) == (2**16 * 512 * 2, 0, 0, 0)
    assert middle.weights > without.weights and middle.activations > without.activations
    assert last.logits == beside.logits > 0 and beside.activations > last.activations
    *_, plain = memories("Ett|ttm|L", predictions=0)
    assert last.activations - plain.activations == 1000 * 2 * 512


def test_an_indexer_has_weights_alone_unless_it_is_trained():
    indexer = IndexerShape(num_heads=2, head_dim=64, topk=16, layers=(True, False, True, False))
    mla = MlaShape(96, kv_lora_rank=64, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64)
    dense = ModelShape(4, 512, 1536, 8, 8, 64, 1024, 1024, mla=mla)
    sparse = dataclasses.replace(dense, mla=dataclasses.replace(mla, indexer=indexer))
    one = count_parameters(sparse).layers[0].indexer
    without, beside = (training_memory(shape, setup(ParallelLayout(2, tensor=2), 4))[0] for shape in (dense, sparse))
    # Whole on each of both ranks, in two layers.
    assert beside.weights - without.weights == 2 * 2 * one
    assert (beside.gradients, beside.optimizer) == (without.gradients, without.optimizer)
    learning = dataclasses.replace(mla, indexer=dataclasses.replace(indexer, is_trained=True))
    trained = training_memory(dataclasses.replace(dense, mla=learning), setup(ParallelLayout(2, tensor=2), 4))[0]
    assert trained.weights == beside.weights and trained.gradients - beside.gradients == 2 * BF16.gradient * one
    assert trained.optimizer > beside.optimizer and trained.activations > beside.activations


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_no_logits_and_one_row_on_its_last_stage(tied):
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 64_000, 64_000, tied_embeddings=tied, value_head=True)
    first, last = training_memory(shape, setup(ParallelLayout(2, pipeline=2), 4))
    assert (first.weights - last.weights) == 2 * (64_000 * 512 - 2 * 512), "an embedding; a final norm and the row"
    assert (first.logits, last.logits) == (0, 0)


def test_moments_between_steps():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)
    parameters = count_parameters(shape).total
    tiny = {"stream_tokens": 8, "kernels": Kernels.TORCH_CPU}
    fp32 = StateBytes(weight=4, gradient=4, main_parameter=0, moments=8, step=4)
    alone = training_memory(shape, setup(ParallelLayout(1), 4, fp32, **tiny))[0]
    assert (alone.moment, alone.buffers) == ("optimizer step", 4 * parameters)
    assert alone.total == 20 * parameters
    assert training_memory(shape, setup(ParallelLayout(1), 4, fp32, gloo=True, **tiny))[0] == alone
    two = training_memory(shape, setup(ParallelLayout(2), 4, fp32, gloo=True, **tiny))[0]
    assert (two.moment, two.buffers) == ("gradient reduction", 4 * parameters)
    # Experts and all else are updated one after the other.
    mixture = dataclasses.replace(shape, moe=MoeShape(8, 2, 1024, 0, False, False, (True,) * 4))
    experts = 4 * 8 * 3 * 512 * 1024
    assert experts > count_parameters(mixture).total / 2
    update = training_memory(mixture, setup(ParallelLayout(1), 4, fp32, **tiny))[0]
    assert (update.moment, update.buffers) == ("optimizer step", 4 * experts)
    half = dataclasses.replace(fp32, offloaded=0.5)
    assert training_memory(shape, setup(ParallelLayout(1), 4, half, **tiny))[0].buffers == 2 * parameters
    pushing = training_memory(shape, setup(ParallelLayout(1), 4, BF16, stream_tokens=8, push_bucket=10**7))[0]
    # Attention has 4 layers of (512 + 2 * 256 + 512) * 512 of the model's parameters.
    rearranged = 4 * 1536 * 512 / parameters
    assert (pushing.moment, pushing.buffers) == ("weight push", round(10**7 * (2 + rearranged)))
    # Larger buckets have no more to take than the weights.
    for bucket in (15 * 10**6, 10**9):
        pushing = setup(ParallelLayout(1), 4, BF16, push_bucket=bucket)
        taken = 2 * parameters + min(bucket, 2 * parameters) * rearranged
        assert push_buffers(shape, pushing, pushing.stages[0]) == round(taken)


def test_the_models_own_embedding_and_head_are_copied_where_engines_map_them():
    """If they are larger than a bucket; the first stage sends one and the last stage the other."""
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 10**5)
    plain = setup(ParallelLayout(2, pipeline=2), 4, push_bucket=10**7)
    lending, larger = (dataclasses.replace(plain, push_lends=True, push_bucket=size) for size in (10**7, 2 * 10**8))
    vocabulary, (first, last) = count_parameters(shape, padded_vocabulary=True).embedding * 2, plain.stages
    assert push_buffers(shape, lending, first) == vocabulary > push_buffers(shape, plain, first)
    assert push_buffers(shape, lending, last) == vocabulary + push_buffers(shape, plain, last)
    for stage in plain.stages:
        alone = dataclasses.replace(larger, push_lends=False)
        assert push_buffers(shape, larger, stage) == push_buffers(shape, alone, stage)


def test_buckets_hold_gathered_tensors_of_any_stage():
    """8 experts of 8 ranks, on the second of two stages: a bucket takes what all ranks hold, not a share of one."""
    moe = MoeShape(8, 2, 1024, 0, False, False, (True,) * 4)
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe)
    model = count_parameters(shape).total
    bounded = setup(ParallelLayout(16, pipeline=2, expert=8), 4, push_bucket=10**9)
    # One gather brings gates and ups of 8 experts, 8 * 2 * 512 * 1024 entries of two bytes: more than the head.
    assert push_buffers(shape, bounded, bounded.stages[1]) == 2 * 2 * model + 2 * 2**23
    small = dataclasses.replace(bounded, push_bucket=10**6)
    # As many experts at once as fit into a bucket, two here, or one.
    two = dataclasses.replace(bounded, push_bucket=2 * 2**21)
    assert push_buffers(shape, two, two.stages[0]) == 3 * 2 * 2**21 + 2 * 2**21
    assert push_buffers(shape, small, small.stages[0]) == 3 * 10**6 + 2 * 2**20
    # Halves of an expert are gathered, and put together.
    halves = dataclasses.replace(small, layout=ParallelLayout(16, tensor=2, expert=8, expert_tensor=2))
    assert push_buffers(shape, halves, small.stages[0]) == 3 * 10**6 + 2 * 2**21
    assert push_buffers(shape, dataclasses.replace(bounded, push_bucket=0), bounded.stages[0]) == 0


@pytest.mark.parametrize(
    "vocabulary, tied, gated, beside",
    [
        # 4 * 512 * 1536 of gates and ups; 2 * 512 * 1536 of an output projection.
        (1024, False, True, 3_145_728),
        (1024, False, False, 1_572_864),
        (9_000, False, True, 9_000 * 512),
        # The tied embedding comes alone, before the buckets.
        (9_000, True, True, 3_145_728),
    ],
)
def test_a_push_gathers_one_tensor_beside_its_buckets(vocabulary, tied, gated, beside):
    shape = ModelShape(4, 512, 1536, 8, 4, 64, vocabulary, vocabulary, tied_embeddings=tied, gated_mlp=gated)
    pushing = setup(ParallelLayout(2, tensor=2), 4, push_bucket=10**6)
    assert push_buffers(shape, pushing, pushing.stages[0]) == 3 * 10**6 + 2 * beside
    assert received_buffers(shape, pushing) == max(2 * 10**6, 2 * 512 * vocabulary)


@pytest.mark.parametrize("tied, head", [(False, 2 * 512 * 20_480), (True, 0)])
def test_the_vocabulary_is_pushed_by_the_first_stage_and_the_last(tied, head):
    """Larger than all buckets, and than the MLP of 4 * 512 * 64 parameters; tied, the first stage alone has it."""
    shape = ModelShape(3, 512, 64, 8, 4, 64, 20_480, 20_480, tied_embeddings=tied)
    pushing = setup(ParallelLayout(6, tensor=2, pipeline=3), 3, push_bucket=10**6)
    buffers = [push_buffers(shape, pushing, stage) for stage in pushing.stages]
    layer = 3 * 10**6 + 2 * 4 * 512 * 64
    assert buffers == [2 * 512 * 20_480, layer, max(3 * 10**6 + head, layer)]


def test_muon_leaves_the_vocabulary_to_adam():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 1024, 1024)
    muon = dataclasses.replace(BF16, moments=4, vocabulary_moments=4, distributed=False)
    adam, other = (training_memory(shape, setup(ParallelLayout(2), 4, state))[0] for state in (
        dataclasses.replace(BF16, distributed=False), muon
    ))  # fmt: skip
    matrices = count_parameters(shape).total - (2 * 1024 * 512 + 9 * 512)
    assert adam.optimizer - other.optimizer == 4 * matrices


def test_gathered_sequence_parallel_input_and_few_tokens():
    shape = ModelShape(4, 512, 1536, 8, 4, 64, 64000, 64000)
    memory = training_memory(shape, setup(ParallelLayout(2, tensor=2, sequence_parallel=True), 4))[0]
    assert memory.moment == "loss" and memory.buffers == 4096 * 2 * 512
    # Fewer tokens than hidden channels: the gradient of the head's weight is larger than that of the logits.
    few = training_memory(shape, setup(ParallelLayout(1), 4, stream_tokens=16))[0]
    assert few.logits == 16 * 64000 * 2 + 64000 * 512 * 2


@pytest.mark.parametrize(
    ("recompute", "kept", "again"),
    [
        # Of 4 layers the first has a dense MLP, the others experts: 3 matrices of 512 x 2048, or of 8 x 512 x 1024, which two
        # ranks share.
        (Recompute(), DENSE + 3 * EXPERTS, 0),
        (Recompute("selective", modules=("core_attn",)), DENSE + 3 * EXPERTS, 0),
        (Recompute("selective", modules=("moe",)), DENSE, EXPERTS),
        (Recompute("selective", modules=("mlp",)), 3 * EXPERTS, DENSE),
        (Recompute("full", "uniform", 1), 0, EXPERTS),
        (Recompute("full", "uniform", 2), 0, 2 * EXPERTS),
        (Recompute("full", "block", 2), 2 * EXPERTS, EXPERTS),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_pass_has_copies_of_rounded_weights(recompute, kept, again, share):
    """From forward to backward; those of what is recomputed are there while it is."""
    moe = MoeShape(8, 2, 1024, 0, False, False, (False, True, True, True))
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024, moe=moe)
    layout, rounded = ParallelLayout(2, tensor=2, expert=2), {"dense_mlp": share, "routed_experts": share}
    given = setup(layout, 4, recompute=recompute, stream_tokens=2**16)
    (plain,), (found,) = (training_memory(shape, dataclasses.replace(given, rounded=of)) for of in ({}, rounded))
    assert plain.moment == found.moment == ("backward" if again else "loss")
    assert found.activations - plain.activations == 2 * share * (kept + again)


def test_every_micro_batch_in_flight_has_copies_of_its_own():
    shape = ModelShape(4, 512, 2048, 8, 8, 64, 1024, 1024)
    for recompute, kept, again in ((Recompute(), 2, 0), (FULL, 0, 1)):
        given = setup(ParallelLayout(2, pipeline=2), 4, recompute=recompute, stream_tokens=2**16)
        pairs = zip(
            training_memory(shape, given),
            training_memory(shape, dataclasses.replace(given, rounded={"dense_mlp": 1.0})),
            strict=True,
        )
        # The first of two stages has two micro-batches in flight, and each has two layers.
        more = [found.activations - plain.activations for plain, found in pairs]
        assert more == [2 * 3 * 512 * 2048 * (passes * kept + again) for passes in (2, 1)]
    # Of two passes one is kept whole.
    (first, _), (plain, _) = (
        training_memory(shape, dataclasses.replace(given, kept_whole=1, rounded=of)) for of in ({"dense_mlp": 1.0}, {})
    )
    assert first.activations - plain.activations == 2 * 3 * 512 * 2048 * (2 + 1)
