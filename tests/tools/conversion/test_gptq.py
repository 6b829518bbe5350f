"""GPTQ beside rounding to nearest; what is written is what the package reads, and an interrupted conversion goes on."""

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from slime.utils.errors import RunError, UserError
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.quantised_checkpoint import open_checkpoint
from slime.weights.quantisers import quantise_integers, unpack_integers
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import write_tiny_latent, write_tiny_mixture, write_tiny_model
from tests.support.models.tokenizer import build_tokenizer
from tools import convert_hf_to_int4
from tools.conversion import gptq
from tools.conversion.gptq import Matrix, Moments, round_columns

SIZES = {"vocab_size": 300, "hidden": 64}


def plain(integers, scale, group):
    return (integers.view(*scale.shape, group).to(scale.dtype) * scale[..., None]).view(integers.shape)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_error_of_the_output_is_below_that_of_rounding_to_nearest(bits):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 192, generator=generator).bfloat16()
    # Inputs of few causes, as those of a layer are.
    inputs = torch.randn(2000, 24, generator=generator) @ torch.randn(24, 192, generator=generator)
    inputs += 0.1 * torch.randn(2000, 192, generator=generator)
    integers, scale = round_columns(weight, inputs.T @ inputs, bits, 32, 0.01)
    nearest = quantise_integers(weight, bits, 32, True)
    nearest = plain(unpack_integers(nearest["weight_packed"], bits, 192), nearest["weight_scale"], 32)

    def error(rounded):
        return (inputs @ (rounded.float() - weight.float()).T).square().mean()

    assert error(plain(integers, scale, 32)) < 0.15 * error(nearest)


def test_where_inputs_do_not_depend_on_each_other_it_rounds_to_nearest():
    weight = torch.randn(5, 320, generator=torch.Generator().manual_seed(0))
    moment = torch.diag(torch.arange(320.0))
    integers, scale = round_columns(weight, moment, 4, 64, 0.01)
    nearest = quantise_integers(weight, 4, 64, True)
    assert scale.equal(nearest["weight_scale"])
    assert integers.equal(unpack_integers(nearest["weight_packed"], 4, 320))


def test_moments_are_those_of_the_inputs_and_experts_are_told_apart():
    experts, inputs = torch.randn(3, 4, 6), torch.randn(2, 5, 6)
    other, moments = torch.nn.Linear(6, 4), Moments([Matrix((str(index),), experts[index]) for index in range(3)])
    with moments:
        torch.nn.functional.linear(inputs, experts[torch.tensor(1)])
        torch.nn.functional.linear(inputs[0], experts[2])
        other(inputs)
    flat = inputs.flatten(0, 1)
    torch.testing.assert_close(moments.sums["1",], flat.T @ flat)
    torch.testing.assert_close(moments.sums["2",], inputs[0].T @ inputs[0])
    assert moments.sums["0",].count_nonzero() == 0
    assert dict(moments.tokens) == {("1",): 10, ("2",): 5}


def text_of(number):
    return f"{number} hello this is {number * 17} and then {number * 31} of them"


def write_samples(directory, count):
    directory.mkdir()
    rows = [{"text": text_of(number)} for number in range(count)]
    rows[1] = {"messages": [{"role": "user", "content": "hello"}]}
    (directory / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def convert(root, name, *words):
    words = ["--input-dir", root / name, "--output-dir", root / f"{name}-int4", "--data-dir", root / "data", *words]
    convert_hf_to_int4.main([str(word) for word in words])
    return root / f"{name}-int4"


def tensors_of(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def logits_of(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.slow
def test_a_model_is_quantised_layer_by_layer_and_an_interrupted_one_goes_on(tmp_path, monkeypatch):
    model = write_tiny_model(tmp_path / "dense", layers=3, **SIZES)
    build_tokenizer().save_pretrained(tmp_path / "dense")
    write_samples(tmp_path / "data", 60)
    target, stored = convert(tmp_path, "dense", "--num-calibration-samples", "50"), tensors_of(tmp_path / "dense")
    found, config = tensors_of(target), json.loads((target / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    opened, rounded = open_checkpoint(target), {}
    assert opened.names() == stored.keys() and (target / "tokenizer.json").exists()
    for name, tensor in stored.items():
        if name in found:
            assert found[name].equal(tensor)
            continue
        module = name.removesuffix("weight")
        parts = {part.removeprefix(module): value for part, value in found.items() if part.startswith(module)}
        rounded[name] = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert opened.tensor(name)[:].equal(rounded[name])
    assert len(rounded) == 7 * 3
    # On such text the model of these numbers is nearer to the one that was given than that of the nearest ones.
    tokens = build_tokenizer()(text_of(1000), return_tensors="pt")["input_ids"]
    expected = logits_of(model, tokens)
    distances = []
    for numbers in (rounded, {name: nearest(stored[name]) for name in rounded}):
        model.load_state_dict({**stored, **numbers}, strict=False)
        distances.append((logits_of(model, tokens) - expected).square().mean())
    assert distances[0] < distances[1]

    shutil.move(target, tmp_path / "whole")
    write = gptq.Calibration.write

    def full(self, draft, unit):
        if unit.index == 2:
            raise OSError(28, "No space left on device")
        return write(self, draft, unit)

    with monkeypatch.context() as patched, pytest.raises(RunError, match="the same command goes on"):
        patched.setattr(gptq.Calibration, "write", full)
        convert(tmp_path, "dense", "--num-calibration-samples", "50")
    done = []
    monkeypatch.setattr(
        gptq.Calibration, "write", lambda self, draft, unit: done.append(unit.index) or write(self, draft, unit)
    )
    again = tensors_of(convert(tmp_path, "dense", "--num-calibration-samples", "50"))
    assert done == [2, 3] and again.keys() == found.keys()
    assert all(again[name].equal(tensor) for name, tensor in found.items())


def nearest(weight):
    parts = quantise_integers(weight, 4, 32, True)
    return plain(unpack_integers(parts["weight_packed"], 4, weight.shape[1]), parts["weight_scale"], 32)


@pytest.mark.slow
def test_experts_that_hardly_a_token_reaches_are_rounded_to_nearest_and_told_once(tmp_path, monkeypatch, caplog):
    write_tiny_mixture(tmp_path / "mixture", "qwen3_moe", moe_intermediate_size=64, **SIZES)
    build_tokenizer().save_pretrained(tmp_path / "mixture")
    write_samples(tmp_path / "data", 8)
    seen = {}
    exit_of = Moments.__exit__
    monkeypatch.setattr(Moments, "__exit__", lambda self, *error: seen.update(self.tokens) or exit_of(self, *error))
    monkeypatch.setattr(gptq, "LEAST_TOKENS", 1)
    convert(tmp_path, "mixture", "--quant-type", "W8A16")
    experts = {name: count for names, count in seen.items() for name in names if ".experts." in name}
    # All experts have been seen one by one, gate and up by the same inputs.
    assert len(experts) == 2 * 4 * 3 and len(set(experts.values())) > 2
    bound = sorted(experts.values())[6]
    monkeypatch.setattr(gptq, "LEAST_TOKENS", bound)
    few = sorted(name for name, count in experts.items() if count < bound)
    assert few
    first = {name for name in few if name.startswith("model.layers.0.")}
    assert first and len(few) > len(first)
    write = gptq.Calibration.write

    def full(self, draft, unit):
        if unit.index == 1:
            raise OSError(28, "No space left on device")
        return write(self, draft, unit)

    with monkeypatch.context() as patched, pytest.raises(RunError, match="the same command goes on"):
        patched.setattr(gptq.Calibration, "write", full)
        convert(tmp_path, "mixture", "--force", "--quant-type", "W8A16")
    # Those of the layer that was written by then are told at the end too.
    with caplog.at_level(logging.WARNING, logger=gptq.__name__):
        target = convert(tmp_path, "mixture", "--force", "--quant-type", "W8A16")
    (record,) = [record for record in caplog.records if record.name == gptq.__name__]
    assert record.args[0] == len(few) and set(record.args[2].split(", ")) <= set(few)
    stored, found = tensors_of(tmp_path / "mixture"), tensors_of(target)
    for name in experts:
        parts = quantise_integers(stored[name], 8, 32, True)
        same = found[name.removesuffix("weight") + "weight_packed"].equal(parts["weight_packed"])
        assert same == (name in few), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_5_moe"])
def test_experts_in_one_tensor_are_rounded_as_those_with_a_tensor_for_each(tmp_path, name):
    """Of models with a vision tower, which is copied."""
    family = TINY_FAMILIES[name]
    entries = {**family.entries, "moe_intermediate_size": 96, **SIZES}
    family.write(tmp_path / "stacked", model_type=name, **entries)
    build_tokenizer().save_pretrained(tmp_path / "stacked")
    shutil.copytree(tmp_path / "stacked", tmp_path / "apart")
    stacked = SafetensorsDirectory(tmp_path / "stacked")
    plain = {tensor: stacked.tensor(tensor)[...].clone() for tensor in stacked.names()}
    save_file(plain, tmp_path / "apart" / "model.safetensors")
    write_samples(tmp_path / "data", 30)
    made, expected = (tensors_of(convert(tmp_path, kind)) for kind in ("stacked", "apart"))
    assert made.keys() == expected.keys() and all(made[key].equal(tensor) for key, tensor in expected.items())
    assert open_checkpoint(tmp_path / "stacked-int4").names() == plain.keys()
    experts = [key.removesuffix("_packed") for key in made if ".experts." in key and key.endswith("_packed")]
    assert len(experts) == 2 * 4 * 3
    assert not all(
        made[f"{key}_packed"].equal(quantise_integers(plain[key], 4, 32, True)["weight_packed"]) for key in experts
    )
    assert all(made[key].equal(tensor) for key, tensor in plain.items() if ".visual." in key)


@pytest.mark.slow
def test_matrices_of_latent_attention_that_engines_do_not_take_packed_stay_as_they_are(tmp_path):
    write_tiny_latent(tmp_path / "latent", "deepseek_v3", **SIZES)
    build_tokenizer().save_pretrained(tmp_path / "latent")
    write_samples(tmp_path / "data", 4)
    target = convert(tmp_path, "latent", "--quant-group-size", "8")
    stored, found = tensors_of(tmp_path / "latent"), tensors_of(target)
    ends = ("kv_b_proj.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    left = [name for name in stored if name.endswith(ends)]
    assert len(left) % 3 == 0 and left and all(found[name].equal(stored[name]) for name in left)
    others = [name for name in stored if name.endswith(("q_b_proj.weight", "o_proj.weight"))]
    assert others and not found.keys() & set(others)
    ignored = json.loads((target / "config.json").read_text())["quantization_config"]["ignore"]
    assert set(ignored) >= {name.removesuffix(".weight") for name in left}


def test_modules_of_the_user_are_left_alone(tmp_path):
    write_tiny_model(tmp_path / "dense", layers=1, **SIZES)
    build_tokenizer().save_pretrained(tmp_path / "dense")
    write_samples(tmp_path / "data", 2)
    found = tensors_of(convert(tmp_path, "dense", "--ignore-rules", "re:.*self_attn", "gate_proj"))
    packed = {name.removesuffix("_packed") for name in found if name.endswith("_packed")}
    assert packed == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("up", "down")}


def test_a_rendered_conversation_gets_no_second_first_token(tmp_path):
    """As of the tokenizers of Llama and GLM, which put a token in front of every text, and whose templates write it too."""
    tokenizer = build_tokenizer("{{ '<|endoftext|>' }}{% for message in messages %}{{ message.content }}{% endfor %}")
    first = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    tokenizer.save_pretrained(tmp_path / "model")
    write_samples(tmp_path / "data", 2)
    options = SimpleNamespace(trust_remote_code=False, num_calibration_samples=2, max_sequence_length=100)
    plain_text, rendered = gptq.read_samples(tmp_path / "data", tmp_path / "model", options)
    hello = tokenizer.convert_tokens_to_ids("hello")
    assert rendered.tolist() == [[first, hello]]
    assert plain_text[0, 0] == first and first not in plain_text[0, 1:]


def test_what_cannot_be_calibrated_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="--input-dir .*model has no config.json"):
        convert(tmp_path, "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds no"):
        convert(tmp_path, "model")
    with pytest.raises(SystemExit):
        convert(tmp_path, "model", "--num-calibration-samples", "0")
