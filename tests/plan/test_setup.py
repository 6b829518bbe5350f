"""From flags to what the memory model takes, and how long its samples are."""

import importlib.util
from argparse import Namespace

import pytest

from slime.arguments.sizes import longest_sample
from slime.estimates.activations import Kernels
from slime.plan.setup import (
    delta_rule_has_kernels,
    host_copies,
    kernels_of,
    longest_request,
    parallel_layout,
    planned_sample,
    prompt_is_limited,
    recompute_of,
    rounded_parts,
    shape_of,
    state_bytes,
    tokens_of_stream,
    training_setup,
)
from tests.support.tables.plans import SMALL, TWO_NODES, planned


def state(*words):
    args = planned(SMALL, *words)
    return state_bytes(args, kernels_of(args))


def test_precision_of_the_state():
    plain = state()
    assert (plain.weight, plain.gradient, plain.main_parameter, plain.moments, plain.step) == (2, 4, 4, 8, 0)
    assert plain.distributed and plain.offloaded == 0
    assert state("--grad-reduce-in-bf16").gradient == 2 and state("--grad-reduce-in-bf16").step == 4
    assert not state("--no-use-distributed-optimizer").distributed
    assert state("--optimizer-cpu-offload").offloaded == 1
    assert state("--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.5").offloaded == 0.5
    assert state("--transformer-impl", "local").step == 4
    stateless = state("--transformer-impl", "local", "--use-stateless-adam", "--no-save-optim")
    assert (stateless.main_parameter, stateless.moments, stateless.step) == (4, 0, 0)


def test_what_a_checkpoint_holds_of_the_optimizer():
    assert state().saved == 12
    # In float32, whatever it is in memory.
    assert state("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16").saved == 12
    assert state("--no-save-optim").saved == 0
    stateless = ("--transformer-impl", "local", "--use-stateless-adam", "--no-save-optim")
    assert state(*stateless).saved == 4
    assert state("--no-use-distributed-optimizer").saved == 12
    assert state("--optimizer", "sgd", "--transformer-impl", "local", "--no-use-distributed-optimizer").saved == 8


def test_precision_aware_optimizer_keeps_the_lower_half_of_main_parameters():
    aware = "--use-precision-aware-optimizer"
    narrow = state(aware, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16", "--grad-reduce-in-bf16")
    assert (narrow.main_parameter, narrow.moments, narrow.step) == (2, 4, 0)
    assert state(aware, "--no-store-param-remainders").main_parameter == 4
    assert state(aware, "--fp16", "--accumulate-allreduce-grads-in-fp32").main_parameter == 4
    # Without kernels it goes by small parts, and gradients in 16 bits are asked for by a name of their own too.
    by_torch = state(aware, "--main-grads-dtype", "bf16", "--transformer-impl", "local")
    assert (by_torch.gradient, by_torch.step) == (2, 0)


def test_what_the_host_has_of_the_optimizer():
    narrow = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--optimizer-cpu-offload")
    on_host = state(*narrow)
    # The weights are not there, so neither is the upper half of main parameters.
    assert (on_host.main_parameter, on_host.host_main_parameter, on_host.moments, on_host.step) == (2, 4, 6, 0)
    assert state(*narrow, "--main-params-dtype", "fp16").host_main_parameter == 2


def test_moments_of_other_optimizers():
    muon = state("--optimizer", "muon")
    assert (muon.moments, muon.vocabulary_moments, muon.distributed) == (4, 4, False)
    assert state("--optimizer", "dist_muon").distributed
    sgd = ("--optimizer", "sgd", "--no-use-distributed-optimizer", "--transformer-impl")
    by_torch = state(*sgd, "local")
    assert (by_torch.moments, by_torch.vocabulary_moments, by_torch.step) == (4, 0, 4)
    assert state(*sgd, "local", "--weight-decay", "0").step == state(*sgd, "transformer_engine").step == 0
    assert state(*sgd, "local", "--sgd-momentum", "0").moments == 0


def test_sets_of_weights_in_host_memory():
    def copies(*words):
        return host_copies(planned(SMALL.replace("--use-kl-loss", ""), *words))

    assert copies("--kl-coef", "0.1", "--ref-load", "r") == ("reference", "actor put aside")
    teacher = ("--use-opd", "--opd-type", "megatron", "--opd-teacher-load", "t")
    assert copies("--use-kl-loss", "--ref-load", "r", *teacher) == ("reference", "teacher", "actor put aside")
    old = copies("--keep-old-actor")
    assert old[-3:] == ("old actor", "rollout actor", "actor put aside")


def test_layout_of_the_flags():
    layout = parallel_layout(planned(TWO_NODES))
    assert (layout.tensor, layout.pipeline, layout.expert, layout.expert_tensor, layout.data) == (4, 2, 8, 1, 2)
    assert layout.sequence_parallel
    # Unset, experts are cut like everything else.
    words = TWO_NODES.replace("--expert-tensor-parallel-size 1", "").replace("--expert-model-parallel-size 8", "")
    assert parallel_layout(planned(words)).expert_tensor == 4


def test_vocabulary_is_padded_as_the_trainer_pads_it():
    assert shape_of(planned(SMALL)).padded_vocab_size == 152064
    assert shape_of(planned(SMALL, "--padded-vocab-size", "153600")).padded_vocab_size == 153600


def test_stream_is_padded_budget_or_longest_samples():
    args = planned(SMALL, "--max-tokens-per-gpu", "1000")
    assert tokens_of_stream(args, parallel_layout(args)) == 1024
    static = planned(SMALL.replace("--use-dynamic-batch-size --max-tokens-per-gpu 16384", "--micro-batch-size 2"))
    assert tokens_of_stream(static, parallel_layout(static)) == 2 * 8192


def test_kernels_and_recomputation(monkeypatch):
    assert kernels_of(planned(SMALL)) is Kernels.TRANSFORMER_ENGINE
    assert kernels_of(planned(SMALL, "--transformer-impl", "local")) is Kernels.TORCH_CUDA
    full = recompute_of(planned(TWO_NODES))
    assert (full.granularity, full.method, full.num_layers) == ("full", "uniform", 1)
    assert recompute_of(planned(SMALL, "--recompute-activations")).drops("core_attn")
    full_flags = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for words in (["--moe-layer-recompute"], ["--moe-layer-recompute", "--gradient-checkpointing"]):
        selective = recompute_of(planned(TWO_NODES.replace(full_flags, ""), *words))
        assert selective.drops("core_attn") and selective.drops("moe") and not selective.drops("mlp")


def test_int4_training_rounds_what_is_packed_in_the_checkpoint(monkeypatch):
    args = planned(TWO_NODES)
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*self_attn.*"]}
    monkeypatch.setattr("slime.plan.setup.read_hf_config", lambda path: {"quantization_config": config})
    assert rounded_parts(args) == {}
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "32")
    found = rounded_parts(args)
    assert found == {
        "attention": 0.0,
        "linear_attention": 1.0,
        "dense_mlp": 1.0,
        "shared_experts": 1.0,
        "routed_experts": 1.0,
    }
    setup = training_setup(args, parallel_layout(args), 1024, None)
    assert setup.rounded == found
    # No engine serves a critic.
    assert rounded_parts(Namespace(**{**vars(args), "role": "critic"})) == {}


def test_a_checkpoint_that_cannot_be_read_has_nothing_that_is_rounded(monkeypatch):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "32")
    args = planned(TWO_NODES)
    assert rounded_parts(args) == rounded_parts(Namespace(**{**vars(args), "hf_checkpoint": None})) == {}


def test_a_typed_backend_or_its_package_here_decides_who_computes_the_delta_rule(monkeypatch):
    untyped, typed, other = planned(SMALL), planned(SMALL), planned(SMALL)
    typed.typed_flags = typed.typed_flags | {"qwen_gdn_backend"}
    other.qwen_gdn_backend = "flashqla"
    monkeypatch.setattr(importlib.util, "find_spec", {"flash_qla": object()}.get)
    assert [delta_rule_has_kernels(args) for args in (untyped, typed, other)] == [False, True, True]


def lengths(context=None, prompt=None, response=None):
    return Namespace(
        rollout_max_context_len=context,
        rollout_max_prompt_len=prompt,
        rollout_max_response_len=response,
        seq_length=4096,
    )


@pytest.mark.parametrize(
    "flags, longest, limited",
    [
        ((None, 1024, 7168), 8192, True),
        ((8000, 1024, 7168), 8000, True),
        ((10000, 1024, 7168), 8192, True),
        ((8192, 1000, 1000), 2000, True),
        ((None, None, 7168), 7168, False),
        ((None, 1024, None), None, True),
        ((8000, None, None), 8000, True),
        ((None, None, None), None, False),
    ],
)
def test_longest_sample(flags, longest, limited):
    args = lengths(*flags)
    assert longest_sample(args) == longest and prompt_is_limited(args) is limited
    assert planned_sample(args) == (longest or 4096)


@pytest.mark.parametrize(
    ("context", "prompt", "responses", "longest"),
    [
        (None, None, [7168, None], 8192),
        (None, None, [10000, 2000], 10000),
        (None, 1000, [2000, 10000], 11000),
        (9000, None, [2000, 100], 9000),
        (9000, 1000, [7500], 8500),
        (4096, None, [2000], 8192),
    ],
)
def test_the_longest_request_may_be_that_of_an_evaluation(context, prompt, responses, longest):
    args = lengths(None, 1024, 7168)
    args.eval_datasets = [Namespace(max_response_len=length) for length in responses]
    args.eval_max_context_len, args.eval_max_prompt_len, args.eval_interval = context, prompt, 5
    assert longest_request(args) == longest
    args.eval_interval = None
    assert longest_request(args) == 8192
