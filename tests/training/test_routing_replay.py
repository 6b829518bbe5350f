"""The records of routing replay, on a router of three experts whose numbers are worked out by hand."""

import math
import os

import pytest
import torch

from slime.training.routing_replay import RoutingReplay
from slime.utils.errors import RunError

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
