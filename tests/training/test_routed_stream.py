"""Expert choices of the rollout over the rows of a stream: each row has those of its own token, wherever it stands."""

import pytest
import torch

from slime.training.context_parallel import ContextParallel
from slime.training.packed_stream import pack_stream
from slime.training.routing_replay import experts_of_stream

EXPERTS, LAYERS = 64, 3
LENGTHS = (10, 1, 16, 7, 3)
CONTEXTS = [(1, False), (2, False), (3, False), (4, False), (2, True), (3, True)]


def choices(tokens):
    """[tokens − 1, layers, 2]: functions of the token and of the layer."""
    ids = tokens[:-1, None, None] + 20 * torch.arange(LAYERS)[:, None] + torch.tensor([0, 5])
    return ids.remainder(EXPERTS).to(torch.int32)


def batch_of(cp):
    tokens = [1 + 100 * i + torch.arange(length) for i, length in enumerate(LENGTHS)]
    stream = pack_stream(tokens, [0] * len(LENGTHS), 4, cp=cp)
    return {"tokens": tokens, "stream": stream, "rollout_routed_experts": [choices(sample) for sample in tokens]}


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
        stream = pack_stream(tokens, [1], 32, cp=ContextParallel(size, rank, None, all_gather))
        batch = {"stream": stream, "rollout_routed_experts": [torch.tensor([[[3, 4]] * 48], dtype=torch.int32)]}
        chosen = experts_of_stream(batch, [48], experts)
        assert (chosen[:, 0, 0] != chosen[:, 0, 1]).all(), "a token goes to different experts"
        counts += torch.bincount(chosen.flatten().long(), minlength=experts)
        rows += len(stream.tokens)
    counts -= torch.tensor([0, 0, 0, 1, 1, 0, 0, 0])
    assert int(counts.sum()) == topk * (rows - 1)
    assert int(counts.max() - counts.min()) <= 2


def test_a_sample_without_choices_is_padded_as_a_whole():
    stream = pack_stream([torch.tensor([5, 6, 7])], [1], 1)
    nothing = torch.empty(0, LAYERS, 2, dtype=torch.int32)
    experts = experts_of_stream({"stream": stream, "rollout_routed_experts": [nothing]}, [2], 4)
    assert experts[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
