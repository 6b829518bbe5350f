"""The attention that the FSDP backend gives a model of transformers: which kernel computes it, and what a row sees."""

import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime.backends.fsdp_utils import attention
from slime.backends.fsdp_utils.backend import FSDPBackend
from slime.training import stream_attention
from slime.training.packed_stream import pack_stream
from slime.utils.errors import UserError
from tests.support.models.args import default_args
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed

VOCABULARY = 131
HEADS, GROUPS, DIM = 4, 2, 8
LENGTHS = (9, 1, 4, 13)
# Some are shorter than two ranks have chunks.
SAMPLES = ([5, 9, 7, 3, 11, 2, 8, 30, 4], [1, 2], [8, 8, 4, 11, 2, 7], [9, 4, 1])
NEIGHBOURS = ([77, 1, 50, 60, 3, 3, 9, 100, 12], [1, 2], [61, 5, 90, 2, 44, 31], [70, 2, 9])
WINDOW = 3
ATTENTION = {"sdpa": {"attn_implementation": "sdpa"}, "eager": {"attn_implementation": "eager"}, "auto": {}}
PLUG_INS_OF_ONE = ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], 1)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size
):
    """What the packages document: masks end at the last query and the last key; fewer groups of keys than heads."""
    assert causal and cu_seqlens_q.diff().max() == max_seqlen_q and cu_seqlens_k.diff().max() == max_seqlen_k
    outputs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True):
        keys, values = (rows[k0:k1].repeat_interleave(q.shape[1] // k.shape[1], dim=1) for rows in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * softmax_scale
        last = torch.arange(len(keys) - int(q1 - q0), len(keys))[:, None]
        seen = torch.arange(len(keys)) <= last
        if window_size[0] >= 0:
            seen &= torch.arange(len(keys)) >= last - window_size[0]
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), values))
    return torch.cat(outputs)


def with_further_results(*arguments, **options):
    """As versions of flash-attn-3 give it."""
    return flash_attn_varlen_func(*arguments, **options), "of the backward pass"


def stream_of(lengths):
    return pack_stream([torch.zeros(length, dtype=torch.int64) for length in lengths], [0] * len(lengths), 1)


def tensors(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, sum(lengths), DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS)]


def attend(query, key, value, lengths=LENGTHS, **options):
    kernel = stream_attention.causal_varlen_attention
    given = {"packed_stream": stream_of(lengths), "stream_kernel": kernel, **options}
    return attention.attend(torch.nn.Module(), query, key, value, None, **given)


def by_hand(query, key, value, window):
    """Every sequence alone: softmax of the scores of the last `window` keys up to the row itself; [1, T, heads, dim]."""
    outputs = []
    for q, k, v in zip(*(tensor[0].split(LENGTHS, dim=1) for tensor in (query, key, value)), strict=True):
        k, v = (rows.repeat_interleave(HEADS // GROUPS, dim=0) for rows in (k, v))
        rows = torch.arange(q.shape[1])
        seen = (rows <= rows[:, None]) & (rows > rows[:, None] - window)
        scores = (q @ k.transpose(1, 2) / math.sqrt(DIM)).masked_fill(~seen, -math.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)[None]


@pytest.fixture
def installed(monkeypatch):
    """Makes modules of flash attention importable, and others not; they have the function that is given."""

    def install(**functions):
        for name in ("flash_attn", "flash_attn_interface"):
            module = ModuleType(name) if name in functions else None
            if module is not None:
                module.flash_attn_varlen_func = functions[name]
            monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(attention, "get_accelerator", lambda: SimpleNamespace(shares_host_memory=False))


@pytest.mark.parametrize("name, package", [("flash_attention_2", "flash-attn"), ("flash_attention_3", "flash-attn-3")])
def test_a_package_that_is_missing_is_named_with_the_flag(installed, name, package):
    installed()
    with pytest.raises(UserError) as refused:
        FSDPBackend(default_args(train_backend="fsdp", bf16=True, attn_implementation=name)).place()
    assert f"--attn-implementation {name}" in str(refused.value) and f"package {package}," in str(refused.value)


@pytest.mark.parametrize("flags", [{"bf16": False}, {"bf16": True, "on_host": True}])
def test_flash_attention_is_for_16_bits_on_a_gpu(installed, monkeypatch, flags):
    installed(flash_attn=flash_attn_varlen_func)
    place = SimpleNamespace(shares_host_memory=flags.pop("on_host", False))
    monkeypatch.setattr(attention, "get_accelerator", lambda: place)
    with pytest.raises(UserError, match="--attn-implementation flash_attention_2 computes on GPUs and in 16 bits"):
        attention.kernel_of(default_args(attn_implementation="flash_attention_2", **flags))


def third(*arguments, **options):
    return flash_attn_varlen_func(*arguments, **options)


@pytest.mark.parametrize(
    "packages, named, expected",
    [
        ({}, "auto", None),
        ({"flash_attn": flash_attn_varlen_func}, "auto", flash_attn_varlen_func),
        ({"flash_attn": flash_attn_varlen_func, "flash_attn_interface": third}, "auto", third),
        ({"flash_attn": flash_attn_varlen_func, "flash_attn_interface": third}, "sdpa", None),
        ({"flash_attn": flash_attn_varlen_func, "flash_attn_interface": third}, "flash_attention_2", flash_attn_varlen_func),
        ({"flash_attn_interface": third}, "flash_attention_3", third),
    ],
)  # fmt: skip
def test_auto_takes_the_fastest_that_is_installed(installed, on_gpu, packages, named, expected):
    installed(**packages)
    kernel = attention.kernel_of(default_args(attn_implementation=named, bf16=True))()
    if expected is None:
        assert kernel.func.__name__ == "varlen_attn"
    else:
        assert kernel.args == (expected,)


def test_on_a_cpu_auto_does_not_look_for_packages(installed):
    installed(flash_attn=flash_attn_varlen_func)
    kernel = attention.kernel_of(default_args(bf16=True))()
    assert kernel.func.__name__ == "varlen_attn"


@pytest.mark.parametrize("function", [flash_attn_varlen_func, with_further_results])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_flash_attention_is_told_the_lengths_of_the_samples(installed, on_gpu, function, window):
    installed(flash_attn=function)
    kernel = attention.kernel_of(default_args(attn_implementation="flash_attention_2", bf16=True))
    query, key, value = tensors()
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    found = stream_attention._attend_cuda(*rows, stream_of(LENGTHS), DIM**-0.5, None, kernel(), window)
    expected = by_hand(query, key, value, window or max(LENGTHS))
    torch.testing.assert_close(found, expected[0].flatten(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [1, WINDOW, 8, None])
@pytest.mark.parametrize("queries", [4, 512])
def test_a_row_sees_the_last_keys_of_its_sequence(monkeypatch, window, queries):
    monkeypatch.setattr(stream_attention, "_CPU_QUERIES", queries)
    query, key, value = (tensor.requires_grad_() for tensor in tensors())
    found, weights = attend(query, key, value, sliding_window=window, scaling=DIM**-0.5)
    assert weights is None
    doubles = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    expected = by_hand(*doubles, window or max(LENGTHS))
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    gradients = torch.autograd.grad(found.sin().sum(), (query, key, value))
    wanted = torch.autograd.grad(expected.sin().sum(), doubles)
    for gradient, of_hand in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), of_hand, rtol=1e-5, atol=5e-6)


def test_a_window_that_holds_all_is_none():
    assert torch.equal(attend(*tensors(), sliding_window=max(LENGTHS))[0], attend(*tensors())[0])


@pytest.mark.parametrize(
    "given", [{"packed_stream": None}, {"softcap": 30.0}, {"s_aux": torch.zeros(HEADS)}], ids=["stream", "cap", "sinks"]
)
def test_attention_of_another_kind_is_refused(given):
    with pytest.raises(UserError, match="give --attn-implementation eager"):
        attend(*tensors(), **given)


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"attn_implementation": "flash_attention_2"}, "--attn-implementation flash_attention_2: "),
        ({"context_parallel_size": 2}, "--context-parallel-size 2: "),
        ({"attn_implementation": "sdpa"}, None),
        ({}, None),
    ],
)
def test_a_model_with_masks_of_its_own_keeps_them_or_is_refused(flags, words):
    args, model = default_args(**flags), SimpleNamespace(_supports_flash_attn=False)
    if words is None:
        assert attention.attend_to_streams(model, args) is False
    else:
        with pytest.raises(UserError, match=words):
            attention.attend_to_streams(model, args)


def worker(directories, context):
    """By model and attention the log-probs of the samples in one stream, among other neighbours, and of each alone."""
    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import forward_log_probs
    from tests.support.processes.megatron_worker import load_backend

    results = {}
    for (model, directory), (name, flags) in itertools.product(directories.items(), ATTENTION.items()):
        if name == "eager" and context > 1:
            continue
        args = default_args(
            train_backend="fsdp", hf_checkpoint=directory, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY,
            context_parallel_size=context, distributed_timeout_minutes=1, num_rollout=0, **flags,
        )  # fmt: skip
        backend = load_backend(args)

        def log_probs(samples, batches, args=args, backend=backend):
            data = RolloutData({
                "tokens": [torch.tensor(s) for s in samples], "total_lengths": [len(s) for s in samples],
                "response_lengths": [len(s) - 1 for s in samples], "micro_batch_indices": batches,
            }, backend.groups.cp)  # fmt: skip
            return data.gather(forward_log_probs(args, backend, data, with_entropy=False)["log_probs"])

        changed = [*NEIGHBOURS[:1], SAMPLES[1], *NEIGHBOURS[2:3], SAMPLES[3]]
        results[model, name] = {
            "packed": log_probs(SAMPLES, [[0, 1, 2, 3]]),
            "alone": log_probs(SAMPLES, [[0], [1], [2], [3]]),
            "among others": log_probs(changed, [[0, 1, 2, 3]]),
            "implementation": backend.model.config._attn_implementation,
            "of plug-ins": as_plug_ins_see_it(),
        }
    backend.close()
    return results, as_plug_ins_see_it()


def as_plug_ins_see_it():
    """Of a response of 5 in 8 tokens what this rank owns, the whole of all parts, and what the loss asks by."""
    from slime.backends.megatron_utils import cp_utils, loss

    own = cp_utils.slice_log_prob_with_cp(torch.arange(5.0), 8, 5)
    whole = cp_utils.all_gather_with_cp(own, 8, 5)
    return own.tolist(), whole.tolist(), loss._context_parallel(default_args()).size


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "mistral")}
    write_tiny_model(found["qwen3"])
    write_tiny_model(found["mistral"], model_type="mistral", sliding_window=WINDOW)
    return {name: str(directory) for name, directory in found.items()}


@pytest.fixture(scope="module")
def one_rank(directories):
    return run_distributed(worker, 1, (directories, 1))[0][0]


@pytest.fixture(scope="module")
def sharing_ranks(directories):
    results, afterwards = zip(*run_distributed(worker, 2, (directories, 2)), strict=True)
    assert afterwards == (PLUG_INS_OF_ONE,) * 2
    return results


@pytest.mark.parametrize("model", ["qwen3", "mistral"])
@pytest.mark.parametrize("name", ATTENTION)
def test_log_probs_are_those_of_the_model_alone(directories, one_rank, model, name):
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(directories[model], attn_implementation="eager", dtype=torch.float64)
    for sample, row in zip(SAMPLES, one_rank[model, name]["packed"], strict=True):
        tokens = torch.tensor(sample)
        expected = plain(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(row.double(), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", ["qwen3", "mistral"])
@pytest.mark.parametrize("name", ATTENTION)
def test_neighbours_in_a_stream_change_nothing(one_rank, sharing_ranks, model, name):
    for rank in (one_rank, *([] if name == "eager" else sharing_ranks)):
        found = rank[model, name]
        for kept in (1, 3):
            assert torch.equal(found["packed"][kept], found["among others"][kept])
        for changed in (0, 2):
            assert not torch.equal(found["packed"][changed], found["among others"][changed])
        # Linear layers of other numbers of rows add up in another order.
        for row, alone in zip(found["packed"], found["alone"], strict=True):
            torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["qwen3", "mistral"])
@pytest.mark.parametrize("name", ["sdpa", "auto"])
def test_ranks_that_share_samples_find_the_log_probs_of_one(one_rank, sharing_ranks, model, name):
    for rank in sharing_ranks:
        for row, expected in zip(rank[model, name]["packed"], one_rank[model, name]["packed"], strict=True):
            torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-6)


def test_helpers_of_plug_ins_know_what_a_rank_owns(one_rank, sharing_ranks):
    whole = [0, 1, 2, 3, 4]
    assert all(found["of plug-ins"] == PLUG_INS_OF_ONE for found in one_rank.values())
    # Of the first rank's logits, at 0, 1, 6 and 7, one predicts a token of the response: the last.
    for rank, own in zip(sharing_ranks, ([4], [0, 1, 2, 3]), strict=True):
        assert all(found["of plug-ins"] == (own, whole, 2) for found in rank.values())


def test_eager_attention_is_the_models_own(one_rank):
    implementations = {key: found["implementation"] for key, found in one_rank.items()}
    assert {name for (_, way), name in implementations.items() if way == "eager"} == {"eager"}
    assert {name for (_, way), name in implementations.items() if way != "eager"} == {"slime_streams"}
