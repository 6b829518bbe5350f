"""Attention with learnable sinks: beside loops in float64, and models beside transformers with the attention of GPT-OSS."""

import itertools
import math
from unittest import mock

import pytest
import torch

from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory
from tests.support.models.tiny_families import LAYOUTS, VOCABULARY, ranks_of
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import assert_gives_checkpoint_back, assert_like_reference, reference
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = (7, 1, 16, 3)
SCALE = 0.3
# One that takes nearly all, one that takes nearly nothing.
SINKS = (0.5, -1.0, 6.0, -40.0)
SPEC = ["slime_plugins.models.learnable_softmax_attention", "get_learnable_softmax_spec"]


def _inputs():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS)
    )
    return [query, key, value, torch.tensor(SINKS)]


def _weights():
    return torch.linspace(-1, 1, sum(LENGTHS) * HEADS * DIM).view(sum(LENGTHS), -1)


def _by_hand(query, key, value, sinks):
    """Row by row, head by head, in float64: a softmax with one number more in its denominator."""
    outputs = []
    for start, length in zip(itertools.accumulate((0, *LENGTHS)), LENGTHS, strict=False):
        for row in range(start, start + length):
            heads = []
            for head in range(HEADS):
                group = head * GROUPS // HEADS
                exponents = [(query[row, head] @ key[j, group] * SCALE).exp() for j in range(start, row + 1)]
                total = sum(exponents) + sinks[head].exp()
                heads.append(sum(e * value[j, group] for j, e in enumerate(exponents, start)) / total)
            outputs.append(torch.cat(heads))
    return torch.stack(outputs)


def _variable_length_attention(query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale):
    """What kernels on CUDA compute: causal per segment, the last query of which sees all of its keys; of one width."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
    assert query_ends.diff().max() == most_queries and key_ends.diff().max() == most_keys
    outputs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(query_ends), itertools.pairwise(key_ends), strict=True):
        keys, values = (tensor[k0:k1].repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], keys) * scale
        visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(len(keys) - (q1 - q0))
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


def _with_gradients(attend, tensors):
    inputs = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attend(*inputs)
    gradients = torch.autograd.grad((output * _weights().to(output)[: len(output)]).sum(), inputs)
    return output.detach(), gradients


def _attention_worker(directory):
    """Output and gradients of a stream and of its sequences alone; of the stream by a kernel; in bfloat16; and two refusals."""
    from tests.support.processes import megatron_worker as megatron

    megatron.start(tiny_args(directory))
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.attention import StreamParams
    from slime.training import stream_attention
    from slime.training.packed_stream import pack_stream
    from slime_plugins.models.learnable_softmax_attention import LearnableSoftmaxAttention

    stream_attention._CPU_QUERIES = 4
    sizes = {"num_layers": 1, "hidden_size": HEADS * DIM, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    config = TransformerConfig(**sizes, attention_dropout=0.0)
    module = LearnableSoftmaxAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE)
    new = module.softmax_offset.tolist()

    def attend_to(lengths):
        stream = pack_stream([torch.zeros(length, dtype=torch.int64) for length in lengths], [0] * len(lengths), 1)

        def attend(query, key, value, sinks):
            with mock.patch.dict(module._parameters, softmax_offset=sinks):
                return module(query, key, value, None, packed_seq_params=StreamParams(stream=stream))

        return attend

    found = {"new": new, "packed": _with_gradients(attend_to(LENGTHS), _inputs()), "alone": []}
    query, key, value, sinks = _inputs()
    for parts in zip(*(tensor.split(LENGTHS) for tensor in (query, key, value)), strict=True):
        found["alone"].append(attend_to([len(parts[0])])(*parts, sinks).detach())

    def by_kernel(query, key, value, stream, scale, chosen, first, window):
        kernel = _variable_length_attention
        return stream_attention._attend_cuda(query, key, value, stream, scale, first, kernel, window)

    with mock.patch.object(stream_attention, "_attend_each_segment", by_kernel):
        found["kernel"] = _with_gradients(attend_to(LENGTHS), _inputs())
    found["digits"] = (
        module._channels(torch.bfloat16).double().sum(-1),
        module._channels(torch.float32).double().sum(-1),
    )
    with mock.patch.dict(module._parameters, softmax_offset=torch.tensor(SINKS)):
        found["bfloat16"] = module._channels(torch.bfloat16).double().sum(-1) * SCALE
    refusals = []
    boundaries = torch.tensor([0, 7], dtype=torch.int32)
    plain = PackedSeqParams(qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_kv=boundaries)
    chosen = StreamParams(stream=pack_stream([torch.zeros(7, dtype=torch.int64)], [0], 1), chosen=torch.zeros(7, 2))
    for packed, shape in ((plain, (7,)), (chosen, (7,)), (None, (7, 1))):
        tensors = (torch.zeros(*shape, heads, DIM) for heads in (HEADS, GROUPS, GROUPS))
        with pytest.raises(UserError) as caught:
            module(*tensors, None, packed_seq_params=packed)
        refusals.append(str(caught.value))
    return found, refusals


@pytest.fixture(scope="module")
def attended(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    write_tiny_model(directory)
    return run_distributed(_attention_worker, 1, (str(directory),))[0]


@pytest.fixture(scope="module")
def by_hand():
    return _with_gradients(_by_hand, [tensor.double() for tensor in _inputs()])


@pytest.mark.parametrize("way", ["packed", "kernel"])
def test_a_sink_takes_part_in_the_denominator_alone(attended, by_hand, way):
    found, _ = attended
    output, gradients = found[way]
    torch.testing.assert_close(output.double(), by_hand[0], rtol=0, atol=1e-6)
    for name, ours, expected in zip(("query", "key", "value", "sinks"), gradients, by_hand[1], strict=True):
        torch.testing.assert_close(
            ours.double(), expected, rtol=1e-5, atol=5e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    # The head whose sink takes nothing attends as any other, the one whose sink takes most gives little.
    heads = output.unflatten(1, (HEADS, DIM)).abs().mean((0, 2))
    assert heads[2] < 0.2 * heads[3]


def test_packed_sequences_are_attended_to_as_if_alone(attended):
    found, _ = attended
    assert torch.equal(found["packed"][0], torch.cat(found["alone"]))


def test_a_sink_keeps_its_digits_in_16_bits(attended):
    found, _ = attended
    assert found["new"] == [0.0] * HEADS and found["digits"][0].tolist() == found["digits"][1].tolist() == [0.0] * HEADS
    # A quotient of one number of 8 bits would be off by up to 1/512 of it.
    torch.testing.assert_close(found["bfloat16"], torch.tensor(SINKS).double(), rtol=2**-16, atol=0)


def test_what_has_no_sinks_is_refused(attended):
    _, (plain, chosen, batch) = attended
    assert "takes the trainer's packed streams alone" in plain and plain == batch
    assert "keys that an indexer chooses" in chosen


def write_with_sinks(directory, **options):
    """Save a random Qwen3 whose heads have sinks, by the attention of GPT-OSS in transformers, and return it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    model = write_tiny_model(directory, vocab_size=VOCABULARY, **options)
    generator = torch.Generator().manual_seed(5)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.randn(model.config.num_attention_heads, generator=generator))
    model.save_pretrained(directory)
    AttentionInterface.register("sinks_of_gpt_oss", eager_attention_forward)
    AttentionMaskInterface.register("sinks_of_gpt_oss", eager_mask)
    model.config._attn_implementation = "sinks_of_gpt_oss"
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The directory of a tiny model with sinks, and what its reference gives."""
    directory = tmp_path_factory.mktemp("sinks")
    return directory, reference(write_with_sinks(directory), tmp_path_factory.mktemp("gradients"))


def _runs(directory, layouts):
    from tests.support.processes import megatron_worker as megatron
    from tests.support.processes.family_checks import run_family

    found = {}
    for layout, sizes in layouts.items():
        args = tiny_args(directory, spec=SPEC, **sizes)
        megatron.start(args)
        found[layout] = run_family(args)
    return found


@pytest.mark.parametrize("layouts", [("one rank", "recomputed"), ("tp2", "tp2 whole sequence")], ids=["one", "two"])
def test_a_model_with_sinks_is_that_of_transformers(model, layouts):
    directory, expected = model
    cases = {layout: LAYOUTS.get(layout, {}) for layout in layouts}
    for rank in run_distributed(_runs, ranks_of(cases[layouts[0]]), (str(directory), cases)):
        for layout in layouts:
            found = rank[layout]
            assert_like_reference(found, expected)
            assert_gives_checkpoint_back([found], directory)
            assert found.gradients["model.layers.1.self_attn.sinks"].abs().min() > 0


TRAINED = ("tp2", "pp2", "cp2", "cp2 gathered")


def test_layouts_train_sinks_as_one_rank_does(model):
    directory, _ = model
    (one,) = run_distributed(train_steps, 1, ({"one": layout_args(directory, spec=SPEC)},))
    sinks = "model.layers.0.self_attn.sinks"
    assert (one["one"]["loaded"][sinks] != one["one"]["weights"][sinks]).all()
    cases = {layout: layout_args(directory, spec=SPEC, **LAYOUTS[layout]) for layout in TRAINED}
    ranks = run_distributed(train_steps, 2, (cases,), timeout=300)
    for layout in TRAINED:
        assert_equal_runs([rank[layout] for rank in ranks], one["one"])


def _checkpoint(directory, saved):
    """Weights after saving with two tensor-parallel ranks, and after loading that into a model without."""
    from tests.support.processes import megatron_worker as megatron

    megatron.start(tiny_args(directory))
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.parameter_names import unwrap_model

    whole = {"padded_vocab_size": 144, "spec": SPEC}
    args = tiny_args(directory, tensor_model_parallel_size=2, **whole)
    chunks = megatron.load_model(args)
    before = megatron.whole_weights(args, chunks)
    dist_checkpointing.save(unwrap_model(chunks[0]).sharded_state_dict(), saved)
    args = tiny_args(directory, **whole)
    megatron.start(args)
    from slime.backends.megatron_utils.model_provider import setup_model

    chunks = setup_model(args)
    bare = unwrap_model(chunks[0])
    bare.load_state_dict(dist_checkpointing.load(bare.sharded_state_dict(), saved), strict=False)
    return before, megatron.whole_weights(args, chunks)


def test_a_checkpoint_of_our_own_has_sinks_for_any_layout(model, tmp_path):
    directory, _ = model
    saved = tmp_path / "saved"
    saved.mkdir()
    for before, after in run_distributed(_checkpoint, 2, (str(directory), str(saved))):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _refused_loads(without, with_sinks):
    from tests.support.processes import megatron_worker as megatron

    found = []
    for args in (tiny_args(without, spec=SPEC), tiny_args(with_sinks)):
        with pytest.raises(UserError) as caught:
            megatron.load_model(args)
        found.append(str(caught.value))
    return found


def test_sinks_are_neither_made_up_nor_lost(model, tmp_path):
    directory, _ = model
    write_tiny_model(tmp_path, vocab_size=VOCABULARY)
    names = [f"model.layers.{layer}.self_attn.sinks" for layer in range(2)]
    assert SafetensorsDirectory(directory).names() >= set(names)
    ((missing, surplus),) = run_distributed(_refused_loads, 1, (str(tmp_path), str(directory)))
    assert f"2 missing: {', '.join(names)}" in missing
    assert f"2 not in the model: {', '.join(names)}" in surplus
