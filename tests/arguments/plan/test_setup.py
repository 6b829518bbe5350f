"""From flags to what the memory model takes."""

import pytest

from slime.arguments.plan.engines import quantised_bytes, serving_setup
from slime.arguments.plan.setup import (
    kernels_of,
    longest_sample,
    parallel_layout,
    prompt_is_limited,
    recompute_of,
    shape_of,
    state_bytes,
    tokens_of_stream,
)
from slime.scheduling.activations import Kernels
from tests.support.plans import SMALL, TWO_NODES, planned


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
    narrow = state("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
    assert (narrow.main_parameter, narrow.moments) == (4, 4)
    assert state("--transformer-impl", "local").step == 4


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


@pytest.mark.parametrize(
    "words, longest, limited",
    [
        ([], 8192, True),
        (["--rollout-max-context-len", "8000"], 8000, True),
        (["--rollout-max-context-len", "10000"], 8192, True),
    ],
)
def test_longest_sample(words, longest, limited):
    args = planned(SMALL, *words)
    assert longest_sample(args) == longest and prompt_is_limited(args) is limited


def test_without_a_prompt_limit_the_response_is_what_is_known():
    args = planned(SMALL.replace("--rollout-max-prompt-len 1024", ""))
    assert longest_sample(args) == 7168 and not prompt_is_limited(args)


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


def test_engine_sizes_and_data_parallel_attention():
    args = planned(
        TWO_NODES, "--sglang-enable-dp-attention", "--sglang-dp-size", "4", "--sglang-kv-cache-dtype", "fp8_e5m2"
    )
    setup = serving_setup(args, None, 80 * 2**30)
    assert (setup.tensor, setup.pipeline, setup.attention_data, setup.cache_bytes) == (8, 1, 4, 1.0)
    assert setup.static_fraction == 0.7 and setup.weight_bytes == 2.0
    two_stages = serving_setup(planned(TWO_NODES, "--sglang-pp-size", "2"), None, 80 * 2**30)
    assert (two_stages.tensor, two_stages.pipeline) == (4, 2)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "group_size": 32}, 0.5625),
        (None, 2.0),
    ],
)
def test_quantised_checkpoints(config, expected):
    assert quantised_bytes(planned(SMALL), {"quantization_config": config}, 2.0) == expected
