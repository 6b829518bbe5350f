"""Which directories and names can be converted."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.hf_conversion import convert_to_hf, expected_hf_names, family_of_directory
from slime.models.qwen import QWEN3
from slime.utils.errors import UserError
from slime.weights.quantisers import quantise_fp8_blocks, quantise_fp8_tensor
from tests.support.models.tiny_model import tiny_args, write_tiny_latent, write_tiny_model
from tests.support.processes.distributed import run_distributed


@pytest.mark.parametrize("name", ["MiMoV2FlashForCausalLM", "Qwen3OmniMoe", "Qwen2VLConfig"])
def test_names_of_other_families_are_refused(name):
    with pytest.raises(UserError, match="qwen2.*qwen3"):
        convert_to_hf(None, name, "decoder.final_layernorm.weight", torch.ones(1))


@pytest.mark.parametrize(
    "settings, quantise, suffix",
    [
        ({"weight_block_size": [8, 16]}, lambda weight: quantise_fp8_blocks(weight, (8, 16)), "weight_scale_inv"),
        ({"modules_to_not_convert": ["lm_head"]}, quantise_fp8_tensor, "weight_scale"),
    ],
    ids=["blocks", "tensor"],
)
def test_a_parameter_is_quantised_as_a_config_asks_for(tmp_path, settings, quantise, suffix):
    write_tiny_model(tmp_path)
    args, settings = tiny_args(tmp_path), {**settings, "quant_method": "fp8"}
    fc1 = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    name = "module.module.decoder.layers.1.mlp.linear_fc1.weight"
    plain = dict(convert_to_hf(args, "qwen3", name, fc1))
    assert list(plain) == ["model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"]
    found = dict(convert_to_hf(args, "qwen3", name, fc1, settings))
    for weight, tensor in plain.items():
        numbers, scale = quantise(tensor)
        assert found.pop(weight).view(torch.uint8).equal(numbers.view(torch.uint8))
        assert found.pop(weight.removesuffix("weight") + suffix).equal(scale)
    assert not found
    norm = torch.ones(48)
    ((_, kept),) = convert_to_hf(args, "qwen3", "decoder.final_layernorm.weight", norm, settings)
    assert kept.equal(norm)


def test_by_directory(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        family_of_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 1}')
    assert family_of_directory(tmp_path) is QWEN3
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match=r"'mamba' is not one of .*mimo.*qwen2.*qwen3"):
        family_of_directory(tmp_path)


def _exported(directory):
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(directory)
    return sorted(megatron.whole_weights(args, megatron.load_model(args)))


def test_layers_behind_the_last_one_are_left_out_where_they_predict_tokens(tmp_path):
    write_tiny_latent(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    names = set(tensors)
    behind = {"model.layers.2.eh_proj.weight", "model.layers.2.self_attn.o_proj.weight"}
    save_file(tensors | {name: torch.zeros(2) for name in behind}, tmp_path / "model.safetensors")
    assert expected_hf_names(tmp_path) == names
    assert run_distributed(_exported, 1, (str(tmp_path),)) == [sorted(names)]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    assert expected_hf_names(tmp_path) == names | behind


def _told_while_loading(directory):
    from tests.support.processes import megatron_worker as megatron

    told, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("slime.backends.megatron_utils.hf_conversion").addHandler(handler)
    megatron.load_model(tiny_args(directory, bf16=True))
    return told


def test_what_is_stored_wider_than_it_is_trained_is_told(tmp_path):
    write_tiny_model(tmp_path)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    (told,) = run_distributed(_told_while_loading, 1, (str(tmp_path),))
    assert len(told) == 1 and "1 tensors (model.norm.weight, …) are stored in float32 and rounded" in told[0]
