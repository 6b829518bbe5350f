"""Layers that attend to the keys an indexer chooses (`slime_plugins/models/glm5`): what is chosen, and what stands still.

That whole models choose as transformers' do, in every layout, is in test_every_family.py.
"""

import math

import pytest
import torch

from tests.support.models.tiny_model import tiny_args, write_tiny_latent
from tests.support.processes.distributed import run_distributed

HEADS, WIDTH, ROTATED, COUNT = 8, 16, 8, 4
HIDDEN, LATENT = 12, 10
LENGTHS = (9, 3, 1, 14)


def _stream(lengths):
    from slime.training.packed_stream import pack_stream

    return pack_stream([torch.zeros(length, dtype=torch.int64) for length in lengths], [0] * len(lengths), 1)


def _indexer(**options):
    from types import SimpleNamespace

    from slime_plugins.models.glm5.glm5 import Indexer

    config = SimpleNamespace(
        dsa_indexer_n_heads=HEADS, dsa_indexer_head_dim=WIDTH, dsa_indexer_topk=COUNT, q_lora_rank=LATENT,
        hidden_size=HIDDEN, params_dtype=torch.float32, sequence_parallel=False,
    )  # fmt: skip
    indexer = Indexer(config, **options)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return indexer


def _frequencies(positions):
    angles = positions[:, None] * 10.0 ** -torch.arange(ROTATED // 2)
    return torch.cat([angles, angles], -1)[:, None, None]


def _rows(count):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, HIDDEN, generator=generator), torch.randn(count, LATENT, generator=generator)


def _chosen(indexer, hidden, latent, lengths):
    stream = _stream(lengths)
    return indexer.choose(indexer(hidden, latent, _frequencies(stream.position_ids), 1.0, stream), stream)


def _by_hand(indexer, hidden, latent, pairs):
    """The sets of keys that the rows of one sequence choose, in float64 and one pair of row and key after the other."""
    state = {name: tensor.double() for name, tensor in indexer.state_dict().items()}
    hidden, latent = hidden.double(), latent.double()

    def rotate(vector, position):
        plain, turned = vector[: WIDTH - ROTATED], vector[WIDTH - ROTATED :]
        half = ROTATED // 2
        first, second = (turned[0::2], turned[1::2]) if pairs else (turned[:half], turned[half:])
        angles = position * 10.0 ** -torch.arange(half).double()
        return torch.cat(
            [
                plain,
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ]
        )

    def key(position):
        vector = state["wk.weight"] @ hidden[position]
        vector = (vector - vector.mean()) / math.sqrt(vector.var(correction=0) + 1e-6)
        return rotate(vector * state["k_norm.weight"] + state["k_norm.bias"], position)

    def score(row, position):
        queries = (state["wq_b.weight"] @ latent[row]).unflatten(0, (HEADS, WIDTH))
        weights = state["weights_proj.weight"] @ hidden[row]
        products = [max(float(rotate(query, row) @ key(position)), 0.0) for query in queries]
        return sum(float(weight) * product for weight, product in zip(weights, products, strict=True))

    found = []
    for row in range(len(hidden)):
        scores = {position: score(row, position) for position in range(row + 1)}
        found.append(set(sorted(scores, key=scores.get, reverse=True)[:COUNT]))
    return found


def choices_worker():
    """[sets by hand, rows chosen of a stream, the same rows sequence by sequence, in blocks of a few, number of blocks], for
    both rotations."""
    from unittest import mock

    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime_plugins.models.glm5 import glm5

    found = []
    for pairs in (False, True):
        indexer = _indexer(rotates_pairs=pairs)
        hidden, latent = _rows(sum(LENGTHS))
        pieces = list(zip(hidden.split(LENGTHS), latent.split(LENGTHS), strict=True))
        few = mock.patch.object(glm5, "_SCORES", 3 * max(LENGTHS))
        with few, mock.patch.object(glm5, "_best", wraps=glm5._best) as best:
            blocks = _chosen(indexer, hidden, latent, LENGTHS)
        found.append(
            (
                [rows for piece in pieces for rows in _by_hand(indexer, *piece, pairs)],
                _chosen(indexer, hidden, latent, LENGTHS),
                torch.cat([_chosen(indexer, *piece, [len(piece[0])]) for piece in pieces]),
                blocks,
                best.call_count,
            )
        )
    return found


def test_rows_choose_the_best_keys_of_their_own_sequence():
    (found,) = run_distributed(choices_worker, 1)
    for by_hand, of_stream, alone, in_blocks, count in found:
        assert of_stream.dtype == torch.int32 and of_stream.shape == (sum(LENGTHS), COUNT)
        assert [set(row.tolist()) - {-1} for row in of_stream] == by_hand
        # What a row sees too little of is no key; no place stands there twice.
        assert [int((row >= 0).sum()) for row in of_stream] == [len(row) for row in by_hand]
        # Of 9, 3, 1 and 14 rows 4, 14, 42 and 3 at once, however many heads there are.
        assert count == 3 + 1 + 1 + 5
        assert of_stream.equal(alone) and of_stream.sort(-1).values.equal(in_blocks.sort(-1).values)
    assert not found[0][1].equal(found[1][1])


def attention_worker():
    from types import SimpleNamespace

    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.training.stream_attention import attend_over_context

    generator = torch.Generator().manual_seed(3)
    rows = sum(LENGTHS)
    query, key, value = (
        torch.randn(rows, 2, width, generator=generator).requires_grad_() for width in (WIDTH, WIDTH, 5)
    )
    stream = _stream(LENGTHS)
    chosen = _chosen(_indexer(rotates_pairs=False), *_rows(rows), LENGTHS)
    output = attend_over_context(query, key, value, stream, 0.3, chosen)
    gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
    everything = torch.arange(max(LENGTHS)).where(torch.arange(max(LENGTHS)) <= stream.position_ids[:, None], -1)
    all_chosen = attend_over_context(query, key, value, stream, 0.3, everything.int())
    dense = attend_over_context(query, key, value, stream, 0.3)
    return SimpleNamespace(
        inputs=[tensor.detach() for tensor in (query, key, value)], chosen=chosen, output=output.detach(),
        gradients=gradients, all_chosen=all_chosen.detach(), dense=dense.detach(),
    )  # fmt: skip


def test_attention_to_chosen_keys_equals_a_masked_product():
    (found,) = run_distributed(attention_worker, 1)
    query, key, value = (tensor.double().requires_grad_() for tensor in found.inputs)
    visible = torch.zeros(len(query), len(query), dtype=torch.bool)
    start = 0
    for length in LENGTHS:
        for row in range(start, start + length):
            visible[row, [start + place for place in found.chosen[row].tolist() if place >= 0]] = True
        start += length
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    output = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), value).flatten(1)
    torch.testing.assert_close(found.output.double(), output, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(output.square().sum(), (query, key, value))
    for gradient, expected in zip(found.gradients, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.all_chosen, found.dense, rtol=0, atol=1e-6)


def masks_worker():
    """Shapes of what is kept for the backward pass, and gradients; then the gradients of calls that keep all."""
    from unittest import mock

    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.training import stream_attention

    generator = torch.Generator().manual_seed(4)
    rows = sum(LENGTHS)
    inputs = [torch.randn(rows, 2, width, generator=generator).requires_grad_() for width in (WIDTH, WIDTH, 5)]
    chosen = _chosen(_indexer(rotates_pairs=False), *_rows(rows), LENGTHS)
    shapes = []

    def keep(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    def gradients():
        output = stream_attention.attend_over_context(*inputs, _stream(LENGTHS), 0.3, chosen)
        return torch.autograd.grad(output.square().sum(), inputs)

    with mock.patch.object(stream_attention, "_CPU_QUERIES", 6):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = gradients()
        with mock.patch.object(stream_attention, "checkpoint", lambda attend, *given, **_: attend(*given)):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                shapes, without = [], shapes
                expected = gradients()
    return without, shapes, all(map(torch.equal, found, expected))


def test_no_mask_is_kept_for_the_backward_pass():
    ((without, with_masks, is_equal),) = run_distributed(masks_worker, 1)
    masks = {(6, 6), (6, 12), (2, 14)}
    assert masks <= {shape[-2:] for shape in with_masks}
    assert not masks & {shape[-2:] for shape in without}
    assert is_equal


def evaluation_worker(directory):
    """Numbers of the layers whose choices a stream has after a pass of training, and after one of evaluation."""
    from slime_plugins.models.glm5.glm5 import SparseLatentAttention
    from tests.support.processes import megatron_worker as megatron

    chunks = megatron.load_model(tiny_args(directory))
    real, streams, found = SparseLatentAttention._chosen, [], []
    SparseLatentAttention._chosen = lambda *given: (streams.append(given[-1]), real(*given))[1]
    for is_training in (True, False):
        chunks[0].train(is_training)
        with torch.no_grad():
            megatron.packed_forward(chunks[0], [list(range(9))])
        found.append(sorted(streams[-1].choices))
    return found


def test_choices_that_no_layer_uses_again_are_dropped(model):
    ((training, evaluation),) = run_distributed(evaluation_worker, 1, (str(model),))
    assert (training, evaluation) == ([0, 2], [2])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    types = ["full", "shared", "full", "shared"]
    options = {"layers": 4, "n_group": 1, "topk_group": 1, "index_topk": 5, "index_n_heads": 8, "index_head_dim": 16}
    write_tiny_latent(directory, model_type="glm_moe_dsa", indexer_types=types, **options)
    return directory


def building_worker(directory):
    """Which parameters are trained, by name, with and without a list; and by case what is refused."""
    from slime.backends.megatron_utils.model_provider import setup_model
    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from slime.utils.errors import UserError
    from tests.support.processes import megatron_worker as megatron

    megatron.start(tiny_args(directory))
    trained = []
    for flags in ({}, {"freeze_params_name_list": ["embedding"]}):
        chunks = setup_model(tiny_args(directory, **flags))
        named = [pair for chunk in chunks for pair in global_named_parameters(chunk)]
        trained.append({name: parameter.requires_grad for name, parameter in named})
    cases = {
        "sizes": {"dsa_indexer_topk": None},
        "few": {"dsa_indexer_layers": [1, 1, 1]},
        "first": {"dsa_indexer_layers": [0, 1, 1, 1]},
    }
    messages = {}
    for name, flags in cases.items():
        try:
            setup_model(tiny_args(directory, **flags))
        except UserError as error:
            messages[name] = str(error)
    return trained, messages


def test_an_indexer_stands_still_whatever_else_is_frozen(model):
    ((trained, messages),) = run_distributed(building_worker, 1, (str(model),))
    for flags in trained:
        indexers = {name for name in flags if ".indexer." in name}
        # Two layers of four have one, of five tensors.
        assert len(indexers) == 10 and not any(flags[name] for name in indexers)
        assert flags["decoder.final_layernorm.weight"]
    assert trained[0]["embedding.word_embeddings.weight"] and not trained[1]["embedding.word_embeddings.weight"]
    assert messages["few"] == "--dsa-indexer-layers has 3 numbers, and the model 4 layers"
    assert "--dsa-indexer-topk" in messages["sizes"] and "--pipeline-model-parallel-size" in messages["first"]
