"""The records of routing replay, on a router of three experts whose numbers are worked out by hand."""

import math
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.scheduling.dp_schedule import DPSchedule
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
from slime.training.rollout_data import RolloutData
from slime.training.routing_replay import RoutingReplay, check_routed_experts, experts_of_stream, routed_experts_column
from slime.utils.errors import RunError, UserError
from slime.utils.types import Sample

FIRST, SECOND = {"positions": [0, 2]}, {"positions": [1]}


def take_top_k(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, k=topk, dim=1)


def ask(layer, scores):
    """As Megatron's router does, with two experts per token."""
    return layer.get_replay_topk(scores, 2, None, None, take_top_k)


def scores_of(*rows):
    return torch.tensor(rows, dtype=torch.float64, requires_grad=True)


OLD = scores_of([3.0, 1.0, 2.0], [0.0, 5.0, 4.0])
NEW = scores_of([0.0, 1.0, 2.0], [0.0, 5.0, 4.0])


@pytest.fixture
def replay():
    """Two layers in one model chunk; the first has recorded the micro-batch FIRST, the other nothing."""
    replay = RoutingReplay([[1, 2]])
    with replay.log_prob_pass(), replay.forward(0, FIRST):
        ask(replay.layers[0][0], OLD)
    return replay


def test_the_experts_are_the_recorded_ones_and_the_scores_are_those_of_now(replay):
    with replay.training(), replay.forward(0, FIRST):
        chosen, experts = ask(replay.layers[0][0], NEW)
    # Freely, the first row would have gone to the experts 2 and 1.
    assert experts.tolist() == [[0, 2], [1, 2]] and experts.dtype == torch.int64
    assert chosen.tolist() == [[0.0, 2.0], [5.0, 4.0]]
    gate = chosen[0].softmax(-1)[0]
    gate.backward()
    expected = math.exp(0) / (math.exp(0) + math.exp(2))
    assert gate.item() == pytest.approx(expected)
    slope = expected * (1 - expected)
    assert NEW.grad.tolist() == [pytest.approx([slope, 0, -slope]), [0, 0, 0]]


def test_unchanged_scores_give_the_same_bits(replay):
    with replay.training(), replay.forward(0, FIRST):
        chosen, experts = ask(replay.layers[0][0], OLD)
    free, of_free = take_top_k(OLD, 2)
    assert torch.equal(chosen, free) and torch.equal(experts, of_free)


def test_outside_of_its_passes_nothing_is_recorded_or_replayed(replay):
    layer = replay.layers[0][0]
    with replay.forward(0, SECOND):
        assert os.environ["ROUTING_REPLAY_STAGE"] == "fallthrough"
        assert ask(layer, NEW)[1].tolist() == [[2, 1], [1, 2]]
    assert list(layer.records) == [(0, 2)]


def test_stages_are_told_in_the_environment():
    replay, seen = RoutingReplay([[1]]), []

    def look():
        seen.append(os.environ["ROUTING_REPLAY_STAGE"])

    with replay.log_prob_pass():
        with replay.forward(0, FIRST):
            look()
            ask(replay.layers[0][0], OLD)
        look()
    with replay.training():
        with replay.forward(0, FIRST):
            look()
            ask(replay.layers[0][0], OLD)
        look()
    look()
    assert seen == ["record", "fallthrough", "replay_forward", "replay_backward", "fallthrough"]
    assert os.environ["ENABLE_ROUTING_REPLAY"] == "1"


def test_recomputed_forwards_come_in_the_order_of_the_forwards():
    """One forward, one backward, with two micro-batches under way; and the micro-batches come in another order than before."""
    replay = RoutingReplay([[1]])
    (layer,) = replay.layers[0]
    other = scores_of([9.0, 8.0, 0.0])
    with replay.log_prob_pass():
        for batch, scores in ((FIRST, OLD), (SECOND, other)):
            with replay.forward(0, batch):
                ask(layer, scores)
    with replay.training():
        with replay.forward(0, SECOND):
            assert ask(layer, scores_of([0.0, 0.0, 1.0]))[1].tolist() == [[0, 1]]
        with replay.forward(0, FIRST):
            assert ask(layer, NEW)[1].tolist() == [[0, 2], [1, 2]]
        assert ask(layer, scores_of([0.0, 0.0, 1.0]))[1].tolist() == [[0, 1]]
        assert ask(layer, NEW)[1].tolist() == [[0, 2], [1, 2]]


def test_l23_records_that_are_left_over_are_an_error_and_are_cleared(replay):
    with replay.log_prob_pass():
        for batch in (FIRST, SECOND):
            with replay.forward(0, batch):
                for layer in replay.layers[0]:
                    ask(layer, OLD)
    with pytest.raises(RunError, match=r"layer 2: 2 of 2 records were not used$"), replay.training():
        for batch in (FIRST, SECOND):
            with replay.forward(0, batch):
                ask(replay.layers[0][0], NEW)
    assert all(not layer.records and not layer.awaited and layer.forwards == 0 for layer in replay.layers[0])


def test_l23_a_layer_that_recomputes_some_micro_batches_only_is_an_error():
    replay = RoutingReplay([[3]])
    (layer,) = replay.layers[0]
    with replay.log_prob_pass():
        for batch in (FIRST, SECOND):
            with replay.forward(0, batch):
                ask(layer, OLD)
    with pytest.raises(RunError, match="layer 3: 1 of 2 records were not used again"), replay.training():
        for batch in (FIRST, SECOND):
            with replay.forward(0, batch):
                ask(layer, NEW)
        ask(layer, NEW)


def test_an_error_of_training_is_not_hidden_by_the_records_that_it_left(replay):
    with pytest.raises(RuntimeError, match="out of memory"), replay.training():
        raise RuntimeError("out of memory")
    assert not replay.layers[0][0].records


@pytest.mark.parametrize(
    ("batch", "scores", "message"),
    [
        (SECOND, OLD, r"layer 1 has no record of the micro-batch with the samples at \[1\]"),
        (FIRST, scores_of([1.0, 2.0, 3.0]), r"layer 1 routes 1 rows to 2 experts each, but its record .* \(2, 2\)"),
    ],
)
def test_a_micro_batch_that_was_not_recorded_is_an_error(replay, batch, scores, message):
    with pytest.raises(RunError, match=message), replay.training(), replay.forward(0, batch):
        ask(replay.layers[0][0], scores)


def test_a_pass_before_a_step_takes_the_records_of_the_step_and_leaves_them(replay):
    layer = replay.layers[0][0]
    with replay.training():
        with replay.keeping_records(), replay.forward(0, FIRST):
            assert ask(layer, NEW)[1].tolist() == [[0, 2], [1, 2]]
        with replay.forward(0, FIRST):
            assert ask(layer, NEW)[1].tolist() == [[0, 2], [1, 2]]
        # By the repetition of the step's own forward pass, the only one that is awaited.
        assert ask(layer, NEW)[1].tolist() == [[0, 2], [1, 2]]
    assert not layer.records and not layer.awaited


def test_each_record_is_used_once(replay):
    layer = replay.layers[0][0]
    with pytest.raises(RunError, match="no record of the micro-batch"), replay.training():
        for _ in range(2):
            with replay.forward(0, FIRST):
                ask(layer, NEW)


def test_each_record_is_used_once_by_a_recomputed_forward(replay):
    layer = replay.layers[0][0]
    with pytest.raises(RunError, match="no record left for the recomputed forward"), replay.training():
        with replay.forward(0, FIRST):
            ask(layer, NEW)
        for _ in range(2):
            ask(layer, NEW)


def test_a_source_is_asked_in_both_passes():
    """Its layers are those of the chunk; the log-prob pass may see a micro-batch twice, to fill up a group."""
    asked = []

    def source(batch, layer_numbers):
        asked.append((tuple(batch["positions"]), list(layer_numbers)))
        return torch.tensor([[[0, 1], [2, 0]]] * 2, dtype=torch.int16)

    replay = RoutingReplay([[1, 2], []], source)
    with replay.log_prob_pass():
        for _ in range(2):
            with replay.forward(0, FIRST):
                assert [ask(layer, OLD)[1][0].tolist() for layer in replay.layers[0]] == [[0, 1], [2, 0]]
            with replay.forward(1, FIRST):
                pass
    with replay.training(), replay.forward(0, FIRST):
        assert [ask(layer, NEW)[1][0].tolist() for layer in replay.layers[0]] == [[0, 1], [2, 0]]
    assert asked == [((0, 2), [1, 2])] * 3


def test_l23_a_source_whose_experts_a_layer_does_not_take_is_an_error():
    replay = RoutingReplay([[7]], lambda batch, numbers: torch.zeros(2, 1, 2, dtype=torch.int16))
    with pytest.raises(RunError, match="layer 7: 1 of 1 records"), replay.log_prob_pass(), replay.forward(0, FIRST):
        pass
    assert not replay.layers[0][0].records


def test_without_layers_nothing_happens():
    replay = RoutingReplay()
    with replay.log_prob_pass(), replay.forward(0, {}):
        pass
    with replay.training(), replay.forward(0, {}):
        pass


# The first of three layers is dense.
ARGS = SimpleNamespace(num_layers=3, moe_layer_freq=[0, 1, 1], moe_router_topk=2, num_experts=4)


def a_sample(index=0, tokens=4, **fields):
    generator = np.random.default_rng(index)
    experts = np.argsort(generator.random((tokens - 1, 3, 4)), axis=-1)[..., :2].astype(np.int32)
    experts[:, 0] = 0
    values = {"tokens": list(range(tokens)), "response_length": 2, "rollout_routed_experts": experts, **fields}
    return Sample(index=index, reward=0.0, **values)


def checked_batch(samples, args=ARGS):
    batch = build_train_batch(samples, [0.0] * len(samples), [0.0] * len(samples))
    batch["rollout_routed_experts"] = routed_experts_column(args, samples)
    check_routed_experts(args, batch)
    return batch


def test_rows_reach_the_rank_that_trains_the_sample():
    samples = [a_sample(0, 4), a_sample(1, 6), a_sample(2, 3)]
    schedule = DPSchedule([[2, 0], [1]], [[[0, 1]], [[0]]], [1], [3], 0)
    shards = split_for_data_parallel(checked_batch(samples), schedule)
    for shard, of_rank in zip(shards, ([2, 0], [1]), strict=True):
        column = to_tensors(shard, "cpu")["rollout_routed_experts"]
        for tensor, index in zip(column, of_rank, strict=True):
            np.testing.assert_array_equal(tensor, samples[index].rollout_routed_experts)


@pytest.mark.parametrize("fields", [{"remove_sample": True}, {"response_length": 0}, {"loss_mask": [0, 0]}])
def test_a_sample_that_trains_nothing_needs_no_choices(fields):
    column = checked_batch([a_sample(0), a_sample(1, rollout_routed_experts=None, **fields)])["rollout_routed_experts"]
    assert column[1].shape == (0, 3, 2)


def test_a_sample_that_trains_needs_choices():
    samples = [a_sample(0), a_sample(5, rollout_routed_experts=None)]
    with pytest.raises(UserError, match=r"1 of 2 samples have no `rollout_routed_experts` \(sample indices \[5\]\)"):
        checked_batch(samples)


def test_a_batch_without_the_column_is_refused():
    with pytest.raises(UserError, match="has no `rollout_routed_experts`"):
        check_routed_experts(ARGS, build_train_batch([a_sample()], [0.0], [0.0]))


@pytest.mark.parametrize("shape", [(4, 3, 2), (2, 3, 2), (3, 2, 2), (3, 3, 1), (3, 6), (0, 3, 2)])
def test_wrong_shapes_are_refused(shape):
    samples = [a_sample(7)]
    batch = checked_batch(samples)
    batch["rollout_routed_experts"] = [np.ones(shape, np.int32)]
    with pytest.raises(UserError, match=r"sample 7 has shape .* \[3, 3, 2\]"):
        check_routed_experts(ARGS, batch)


def test_rows_may_lack_behind_the_last_trained_token():
    """What a tool said at the end of an answer was run through no engine."""
    sample = a_sample(7, 6, response_length=4, loss_mask=[1, 1, 0, 0])
    sample.rollout_routed_experts = sample.rollout_routed_experts[:3]
    assert len(checked_batch([sample])["rollout_routed_experts"][0]) == 3
    sample.rollout_routed_experts = sample.rollout_routed_experts[:2]
    with pytest.raises(UserError, match=r"sample 7 has shape .* only rows behind the last trained token may lack"):
        checked_batch([sample])


def test_a_layer_that_was_not_captured_is_refused():
    sample = a_sample(7)
    sample.rollout_routed_experts[:, 2] = 0
    with pytest.raises(UserError, match="sample 7 is all zero in layer 3, which has experts"):
        checked_batch([a_sample(0), sample])


def test_a_row_that_repeats_an_expert_is_refused():
    sample = a_sample(7)
    sample.rollout_routed_experts[1, 1] = 0
    with pytest.raises(UserError, match=r"sample 7 names an expert twice in row 1, layer 2: \[0, 0\]"):
        checked_batch([a_sample(0), sample])


@pytest.mark.parametrize("loss_mask", [[1, 1, 0, 0], [0, 0, 0, 0]])
def test_rows_behind_the_last_trained_token_may_repeat_an_expert(loss_mask):
    sample = a_sample(7, 6, response_length=4, loss_mask=loss_mask)
    sample.rollout_routed_experts[3:] = 0
    checked_batch([sample])
    if any(loss_mask):
        sample.rollout_routed_experts[2, 1] = 0
        with pytest.raises(UserError, match="names an expert twice in row 2"):
            checked_batch([sample])


def test_one_expert_per_token_may_be_expert_0_for_a_whole_sample_and_not_for_all():
    args = SimpleNamespace(**{**vars(ARGS), "moe_router_topk": 1})
    zero, other = np.zeros((3, 3, 1), np.int32), np.ones((3, 3, 1), np.int32)
    checked_batch([a_sample(0, rollout_routed_experts=zero), a_sample(1, rollout_routed_experts=other)], args)
    with pytest.raises(UserError, match="of every sample is all zero in layer 2"):
        checked_batch([a_sample(0, rollout_routed_experts=zero)], args)


@pytest.mark.parametrize("expert", [-1, 4])
def test_ids_that_no_expert_has_are_refused(expert):
    sample = a_sample(7)
    sample.rollout_routed_experts[1, 1, 1] = expert
    with pytest.raises(UserError, match=f"sample 7 has the id {expert}; --num-experts 4 has 0 to 3"):
        checked_batch([sample])


EXPERTS, LAYERS = 64, 3
LENGTHS = (10, 1, 16, 7, 3)
CONTEXTS = [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True)]


def choices(tokens):
    """[tokens − 1, layers, 2]: functions of the token and of the layer."""
    ids = tokens[:-1, None, None] + 20 * torch.arange(LAYERS)[:, None] + torch.tensor([0, 5])
    return ids.remainder(EXPERTS).to(torch.int32)


def batch_of(cp):
    tokens = [1 + 100 * i + torch.arange(length) for i, length in enumerate(LENGTHS)]
    return packed(tokens, [0] * len(LENGTHS), [choices(sample) for sample in tokens], 4, cp)


def packed(tokens, response_lengths, experts, pad_multiple, cp=NO_CONTEXT_PARALLEL):
    columns = {"tokens": tokens, "response_lengths": response_lengths, "rollout_routed_experts": experts}
    return RolloutData(columns, cp).micro_batch(range(len(tokens)), pad_multiple)


@pytest.mark.parametrize(("size", "all_gather"), CONTEXTS)
def test_l22_every_row_has_the_experts_of_its_token(size, all_gather):
    found = 0
    for rank in range(size):
        batch = batch_of(ContextParallel(size, rank, None, all_gather))
        experts = experts_of_stream(batch, [3, 1], EXPERTS)
        tokens = batch["stream"].tokens
        assert experts.shape == (len(tokens), 2, 2)
        last = {int(sample[-1]) for sample in batch["tokens"]}
        for row, token in enumerate(tokens.tolist()):
            if token != 0 and token not in last:
                of_layers = [[(token + 20 * layer) % EXPERTS, (token + 20 * layer + 5) % EXPERTS] for layer in (2, 0)]
                assert experts[row].tolist() == of_layers
                found += 1
    assert found == sum(LENGTHS) - len(LENGTHS)


@pytest.mark.parametrize(("size", "all_gather"), CONTEXTS)
def test_l22_padding_is_spread_over_the_experts(size, all_gather):
    tokens, experts, topk = [torch.tensor([5, 6])], 8, 2
    counts, rows = torch.zeros(experts, dtype=torch.int64), 0
    for rank in range(size):
        chosen_before = [torch.tensor([[[3, 4]] * 48], dtype=torch.int32)]
        batch = packed(tokens, [1], chosen_before, 32, ContextParallel(size, rank, None, all_gather))
        chosen = experts_of_stream(batch, [48], experts)
        assert (chosen[:, 0, 0] != chosen[:, 0, 1]).all(), "a token goes to different experts"
        counts += torch.bincount(chosen.flatten().long(), minlength=experts)
        rows += len(batch.stream.tokens)
    counts -= torch.tensor([0, 0, 0, 1, 1, 0, 0, 0])
    assert int(counts.sum()) == topk * (rows - 1)
    assert int(counts.max() - counts.min()) <= 2


def test_a_sample_without_choices_is_padded_as_a_whole():
    nothing = torch.empty(0, LAYERS, 2, dtype=torch.int32)
    experts = experts_of_stream(packed([torch.tensor([5, 6, 7])], [1], [nothing], 1), [2], 4)
    assert experts[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
