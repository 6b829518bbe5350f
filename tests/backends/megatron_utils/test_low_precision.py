"""Layers that compute with weights rounded to INT4: numbers of the push, gradients of the parameter, every layout."""

import json
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from slime.weights.quantisers import packed_form, quantise_int4, rounded_as_int4
from tests.support.models.tiny_model import tiny_args, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed

GROUP = 16
TRAINS = {"OPEN_TRAINING_INT4_FAKE_QAT_FLAG": "1", "OPEN_TRAINING_INT4_GROUP_SIZE": str(GROUP)}
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": ["lm_head"],
}
SCHEME = QuantizationScheme.model_validate(SETTINGS["config_groups"]["group_0"])
SEQUENCES = [[5, 9, 2, 77, 31], [4, 8, 1]]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A model, the same packed to INT4 for engines, and its weights rounded to what these are."""
    root = tmp_path_factory.mktemp("int4")
    write_tiny_model(root / "plain")
    return pack(root)


def pack(root):
    tensors = load_file(root / "plain" / "model.safetensors")
    packed, rounded = {}, {}
    for name, tensor in tensors.items():
        if "_proj.weight" in name:
            parts = quantise_int4(tensor, packed_form("here", SETTINGS))
            packed |= {name.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
            rounded[name] = rounded_as_int4(tensor, SCHEME)
        else:
            packed[name] = rounded[name] = tensor
    for directory, found in (("packed", packed), ("rounded", rounded)):
        (root / directory).mkdir()
        config = json.loads((root / "plain" / "config.json").read_text())
        if directory == "packed":
            config["quantization_config"] = SETTINGS
        (root / directory / "config.json").write_text(json.dumps(config))
        save_file(found, root / directory / "model.safetensors")
    return root


def _logits_and_gradients(cases):
    """Of each case (trains in INT4, served, loaded, changed arguments): logits, the gradients of this rank's part of the model
    that has loaded `loaded`, by global name, its parameters, and what is left in the place of one."""
    import os

    from tests.support.processes import megatron_worker as megatron

    results = []
    for trains, served, loaded, changes in cases:
        os.environ.update({**TRAINS, "OPEN_TRAINING_INT4_FAKE_QAT_FLAG": str(int(trains))})
        args = tiny_args(served, **changes)
        megatron.start(args)
        from slime.backends.megatron_utils.hf_conversion import load_hf_weights
        from slime.backends.megatron_utils.model_provider import setup_model
        from slime.backends.megatron_utils.parameter_names import global_named_parameters

        chunks = setup_model(args)
        load_hf_weights(args, chunks, loaded)
        chunks[0].train()
        logits = megatron.packed_forward(chunks[0], SEQUENCES)
        torch.tanh(logits * 0.1).sum().backward()
        named = dict(global_named_parameters(chunks[0]))
        left = [name for module in chunks[0].modules() for name in module.__dict__ if name == "weight"]
        gradients = {name: parameter.main_grad.clone() for name, parameter in named.items()}
        parameters = {name: parameter.detach().clone() for name, parameter in named.items()}
        results.append((megatron.gather_vocabulary(logits.detach()), gradients, parameters, left))
    return results


def test_a_matrix_is_rounded_while_it_computes_and_its_gradient_is_not():
    from slime.backends.megatron_utils import low_precision

    layer = torch.nn.Linear(2 * GROUP, 3, bias=False)
    inputs = torch.randn(5, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    digits = layer.weight.detach().clone()
    low_precision._round_in_forward("layer.weight", layer, "weight", SCHEME)
    output = layer(inputs)
    output.sum().backward()
    rounded = rounded_as_int4(digits, SCHEME)
    assert torch.equal(output, inputs @ rounded.T) and not torch.allclose(rounded, digits)
    assert torch.allclose(layer.weight.grad, inputs.sum(0).expand(3, -1))
    # The parameter keeps its digits, and stands in its place again.
    assert torch.equal(layer.weight, digits) and "weight" not in vars(layer)


@pytest.mark.slow
def test_a_layer_computes_with_the_numbers_of_the_push_and_the_gradient_is_the_parameters(directories):
    served, plain, rounded = (str(directories / name) for name in ("packed", "plain", "rounded"))
    # The reference has the rounded weights as its parameters, and rounds nothing itself.
    cases = [
        (True, served, plain, {}), (False, plain, rounded, {}), (False, plain, plain, {}), (False, plain, served, {}),
    ]  # fmt: skip
    ((trained, expected, unrounded, loaded),) = run_distributed(_logits_and_gradients, 1, (cases,))
    assert torch.equal(trained[0], expected[0]) and not torch.allclose(trained[0], unrounded[0])
    assert trained[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert gradient.any() and torch.equal(trained[1][name], gradient), name
    # The parameter keeps its digits, and the layer is as it was.
    assert all(torch.equal(trained[2][name], parameter) for name, parameter in unrounded[2].items())
    assert trained[3] == []
    # What engines serve is what the loader reads.
    assert torch.equal(loaded[0], expected[0])


@pytest.mark.slow
def test_experts_compute_with_the_numbers_of_the_push(tmp_path):
    write_tiny_mixture(tmp_path / "plain", "qwen3_moe")
    pack(tmp_path)
    served, plain, rounded = (str(tmp_path / name) for name in ("packed", "plain", "rounded"))
    cases = [(True, served, plain, {}), (False, plain, rounded, {}), (False, plain, plain, {})]
    ((trained, expected, unrounded),) = run_distributed(_logits_and_gradients, 1, (cases,))
    assert torch.equal(trained[0], expected[0]) and not torch.allclose(trained[0], unrounded[0])
    experts = [name for name in expected[1] if ".experts." in name]
    assert experts and any(expected[1][name].any() for name in experts)
    for name, gradient in expected[1].items():
        assert torch.equal(trained[1][name], gradient), name


@pytest.mark.slow
def test_every_layout_rounds_alike_and_so_does_a_layer_that_is_computed_again(directories):
    served, plain = str(directories / "packed"), str(directories / "plain")
    again = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cases = [(True, served, plain, {}), (True, served, plain, again)]
    ((alone, recomputed),) = run_distributed(_logits_and_gradients, 1, (cases,))
    assert torch.equal(recomputed[0], alone[0])
    assert all(torch.equal(recomputed[1][name], gradient) for name, gradient in alone[1].items())
    cases = [(True, served, plain, {"tensor_model_parallel_size": 2})]
    ((first,), (second,)) = run_distributed(_logits_and_gradients, 2, (cases,))
    for of_rank in (first, second):
        assert torch.allclose(of_rank[0][:, :131], alone[0][:, :131], atol=1e-5)
    halves = [of_rank[1]["decoder.layers.0.mlp.linear_fc2.weight"] for of_rank in (first, second)]
    assert torch.cat(halves, 1).allclose(alone[1]["decoder.layers.0.mlp.linear_fc2.weight"], atol=1e-5)


def test_what_does_not_fit_is_refused_by_name(directories, monkeypatch):
    from slime.backends.megatron_utils.low_precision import round_weights_to_int4
    from slime.utils.errors import UserError

    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    args = SimpleNamespace(hf_checkpoint=str(directories / "packed"), role="actor", fp8=None)
    with pytest.raises(UserError, match="needs OPEN_TRAINING_INT4_GROUP_SIZE"):
        round_weights_to_int4(args, [])
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", "32")
    with pytest.raises(UserError, match="has 4 bits and groups of 16, and is not an INT4 checkpoint with groups of 32"):
        round_weights_to_int4(args, [])
    args.hf_checkpoint = str(directories / "plain")
    with pytest.raises(UserError, match="is not an INT4 checkpoint"):
        round_weights_to_int4(args, [])
    args.fp8 = "hybrid"
    with pytest.raises(UserError, match="with --fp8-format hybrid"):
        round_weights_to_int4(args, [])
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "false")
    with pytest.raises(UserError, match="=false: give 1 to train with INT4 numbers, or 0"):
        round_weights_to_int4(args, [])
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "0")
    round_weights_to_int4(args, [])


def _refused(served):
    from slime.backends.megatron_utils.model_provider import setup_model
    from slime.utils.errors import UserError
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(served, tensor_model_parallel_size=2)
    megatron.start(args)
    with pytest.raises(UserError) as caught:
        setup_model(args)
    return str(caught.value)


@pytest.mark.slow
def test_a_part_of_a_group_is_refused(directories, tmp_path):
    config = json.loads((directories / "packed" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(load_file(directories / "packed" / "model.safetensors"), tmp_path / "model.safetensors")
    messages = run_distributed(_refused, 2, (str(tmp_path),), env={**TRAINS, "OPEN_TRAINING_INT4_GROUP_SIZE": "64"})
    assert all("columns on this rank, which are no whole groups of 64" in message for message in messages)
