"""Quantised checkpoints as engines' packages read them, the way back, and what is left alone."""

import json
import os

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from slime.utils.errors import RunError, UserError
from slime.weights.hf_reader import Place
from slime.weights.quantised_checkpoint import open_checkpoint
from slime.weights.quantisers import quantise_fp8_blocks, quantiser_of, rounded_as_int4
from tests.support.models.tiny_model import write_tiny_latent
from tools import (
    convert_hf_to_fp8,
    convert_hf_to_int4_direct,
    convert_k2_thinking_int4_to_bf16,
    fp8_cast_bf16,
)
from tools.conversion import hugging_face
from tools.conversion.hugging_face import differences

EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
QUANTISED = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight", EXPERT)


@pytest.fixture
def checkpoint(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator).bfloat16()

    tensors = {name: matrix(64, 96) for name in QUANTISED}
    tensors |= {
        "model.embed_tokens.weight": matrix(40, 64),
        "lm_head.weight": matrix(40, 64),
        "model.layers.1.mlp.gate.weight": matrix(4, 64),
        "model.layers.0.input_layernorm.weight": torch.ones(64).bfloat16(),
        "model.layers.0.self_attn.q_proj.bias": torch.ones(64).bfloat16(),
    }
    directory = tmp_path / "model"
    directory.mkdir()
    names = list(tensors)
    save_file({name: tensors[name] for name in names[:3]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[3:]}, directory / "model-00002-of-00002.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "dtype": "bfloat16"}))
    (directory / "tokenizer.json").write_text("{}")
    return directory, tensors


def read(directory):
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def config_of(directory):
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
def test_blocks_of_fp8_there_and_back(checkpoint, tmp_path, scale_format):
    source, tensors = checkpoint
    target, back = tmp_path / "fp8", tmp_path / "back"
    convert_hf_to_fp8.main(
        ["--model-dir", str(source), "--save-dir", str(target), "--block-size", "32", "64", "--scale-fmt", scale_format]
    )
    stored = read(target)
    for name, tensor in tensors.items():
        if name not in QUANTISED:
            assert stored[name].equal(tensor)
            continue
        quantised, scale = quantise_fp8_blocks(tensor, (32, 64), scale_format)
        assert stored[name + "_scale_inv"].equal(scale)
        assert stored[name].view(torch.uint8).equal(quantised.view(torch.uint8))
    assert (target / "tokenizer.json").exists() and not list(target.glob(".*"))
    config = config_of(target)
    left = ["lm_head", "model.layers.1.mlp.gate"]
    assert sorted(config.pop("modules_to_not_convert")) == left
    assert config.pop("scale_fmt", "float") == scale_format
    assert config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 64],
    }
    # A push to engines that serve it has the same names and bits.
    pushed = dict(quantiser_of(target)(tensors.items()))
    assert pushed.keys() == stored.keys() and all(pushed[name].shape == stored[name].shape for name in stored)
    fp8_cast_bf16.main(["--input-fp8-hf-path", str(target), "--output-bf16-hf-path", str(back)])
    assert "quantization_config" not in json.loads((back / "config.json").read_text())
    plain, opened = read(back), open_checkpoint(target)
    assert plain.keys() == tensors.keys()
    assert all(plain[name].equal(opened.tensor(name)[:].bfloat16()) for name in tensors)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_rows_and_whole_matrices_of_fp8(checkpoint, tmp_path, capsys):
    source, tensors = checkpoint
    weight = tensors[EXPERT].float()
    for strategy, amax in (("channel", weight.abs().amax(1, keepdim=True)), ("tensor", weight.abs().amax())):
        target = tmp_path / strategy
        convert_hf_to_fp8.main(["--model-dir", str(source), "--save-dir", str(target), "--strategy", strategy])
        assert ("channel is for engines alone" in capsys.readouterr().out) == (strategy == "channel")
        stored = read(target)
        assert stored[EXPERT + "_scale"].equal(amax / 448)
        assert (stored[EXPERT].float() * stored[EXPERT + "_scale"] - weight).abs().max() <= amax.max() / 16
    assert config_of(tmp_path / "channel")["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    with pytest.raises(UserError, match="float-quantized"):
        open_checkpoint(tmp_path / "channel")


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_int4_as_the_engines_package_reads_it(checkpoint, tmp_path, is_symmetric):
    source, tensors = checkpoint
    target = tmp_path / "int4"
    words = ["--model-dir", str(source), "--save-dir", str(target), "--ignore-rules", "re:.*self_attn"]
    convert_hf_to_int4_direct.main([*words, *([] if is_symmetric else ["--no-is-symmetric"])])
    stored, config = read(target), config_of(target)
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert stored["model.layers.0.self_attn.q_proj.weight"].equal(tensors["model.layers.0.self_attn.q_proj.weight"])
    for name in QUANTISED[1:]:
        module = name.removesuffix("weight")
        parts = {part.removeprefix(module): value for part, value in stored.items() if part.startswith(module)}
        read_by_package = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert read_by_package.equal(rounded_as_int4(tensors[name], scheme))
        assert open_checkpoint(target).tensor(name)[:].equal(read_by_package)


@pytest.mark.parametrize("at", ["a unit", "the end"])
def test_after_a_power_loss_a_shard_that_is_lost_is_made_again_bitwise(checkpoint, tmp_path, monkeypatch, at):
    source, _ = checkpoint
    words = ["--model-dir", str(source), "--chunk-size", "13000", "--max-workers", "1", "--save-dir"]
    convert_hf_to_int4_direct.main([*words, str(tmp_path / "whole")])
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    count = sum(name.endswith(".safetensors") for name in whole)
    assert count > 2
    write = hugging_face.write_streamed_shard

    def fail(*arguments):
        # When shards have their last names already.
        if at == "the end" or str(arguments[0]).endswith("00002.safetensors"):
            raise OSError(5, "Input/output error")
        return write(*arguments)

    with monkeypatch.context() as patched, pytest.raises(RunError, match="the same command goes on"):
        patched.setattr(hugging_face, "write_streamed_shard" if at == "a unit" else "write_json_atomically", fail)
        convert_hf_to_int4_direct.main([*words, str(tmp_path / "target")])
    shards = sorted((tmp_path / ".target.converting").glob("*.safetensors"))
    shards[0].unlink()
    os.truncate(shards[1], shards[1].stat().st_size // 2)
    made = []
    monkeypatch.setattr(
        hugging_face, "write_streamed_shard", lambda *arguments: made.append(arguments[0].name) or write(*arguments)
    )
    convert_hf_to_int4_direct.main([*words, str(tmp_path / "target")])
    assert made == [hugging_face.shard_name(index) for index in range(2 if at == "the end" else count)]
    assert {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()} == whole


def test_packed_weights_become_those_of_16_bits_in_all_files_or_some(checkpoint, tmp_path, capsys):
    source, tensors = checkpoint
    packed = tmp_path / "packed"
    convert_hf_to_int4_direct.main(["--model-dir", str(source), "--save-dir", str(packed), "--chunk-size", "30000"])
    (tmp_path / "other.json").write_text(json.dumps({"model_type": "other", "quantization_config": {}}))
    convert = convert_k2_thinking_int4_to_bf16.main
    convert(["--model-dir", str(packed), "--config-path", str(tmp_path / "other.json")])
    whole, opened = tmp_path / "packed-bf16", open_checkpoint(packed)
    plain = read(whole)
    assert plain.keys() == tensors.keys()
    assert all(plain[name].equal(opened.tensor(name)[:]) for name in tensors)
    assert json.loads((whole / "config.json").read_text()) == {"model_type": "other"}
    words = ["--model-dir", str(packed)]
    with pytest.raises(UserError, match="exists already"):
        convert(words)
    first = sorted(path.name for path in packed.glob("*.safetensors"))[0]
    convert([*words, "--overwrite", "--files", first])
    some = read(whole)
    assert 0 < len(some) < len(plain) and all(some[name].equal(plain[name]) for name in some)
    with pytest.raises(UserError, match="--files nothing"):
        convert([*words, "--overwrite", "--files", "nothing"])


FUSED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("convert", [convert_hf_to_fp8.main, convert_hf_to_int4_direct.main])
def test_plain_experts_in_one_tensor_stay_so_beside_quantised_weights(checkpoint, tmp_path, convert):
    source, tensors = checkpoint
    quantised, back = tmp_path / "quantised", tmp_path / "back"
    convert(["--model-dir", str(source), "--save-dir", str(quantised)])
    fused = torch.arange(2 * 32 * 8).view(2, 32, 8).bfloat16()
    _add(quantised, FUSED, fused)
    fp8_cast_bf16.main(["--input-fp8-hf-path", str(quantised), "--output-bf16-hf-path", str(back)])
    plain = read(back)
    assert plain.keys() == {*tensors, FUSED} and plain[FUSED].equal(fused)


@pytest.mark.parametrize("convert", [convert_hf_to_fp8.main, convert_hf_to_int4_direct.main])
@pytest.mark.parametrize("model_type, is_exchanged", [("qwen3_5_moe", False), ("qwen3_vl_moe", True)])
def test_experts_in_one_tensor_become_those_of_a_checkpoint_with_a_tensor_for_each(
    tmp_path, convert, model_type, is_exchanged
):
    """Each process makes some experts of a layer. A matrix that is left alone has a tensor of its own all the same."""
    layer, (experts, width, hidden) = "model.language_model.layers.0", (4, 96, 64)
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (
        torch.randn(experts, *sides, generator=generator).bfloat16() for sides in ((2 * width, hidden), (hidden, width))
    )
    others = {f"{layer}.mlp.gate.weight": gate_up[0, :experts].clone(), f"{layer}.self_attn.o_proj.weight": down[0]}
    stacks = {f"{layer}.mlp.experts.gate_up_proj": gate_up, f"{layer}.mlp.experts.down_proj": down}
    plain = dict(others)
    for expert in range(experts):
        parts = {"gate": gate_up[expert, :width], "up": gate_up[expert, width:], "down": down[expert]}
        plain |= {f"{layer}.mlp.experts.{expert}.{part}_proj.weight": matrix for part, matrix in parts.items()}
    stacked = {name: stack.mT if is_exchanged else stack for name, stack in stacks.items()} | others
    found = []
    for name, tensors in {"stacked": stacked, "apart": plain}.items():
        source, target = tmp_path / name, tmp_path / f"{name}-quantised"
        source.mkdir()
        save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, source / "model.safetensors")
        config = {"model_type": model_type, "text_config": {"hidden_size": hidden, "num_experts": experts}}
        (source / "config.json").write_text(json.dumps(config))
        rules = ["--ignore-rules", "experts.1.up_proj"] if convert is convert_hf_to_int4_direct.main else []
        convert(["--model-dir", str(source), "--save-dir", str(target), "--chunk-size", "30000", *rules])
        settings = config_of(target)
        left = settings.pop("ignore", None) or settings.pop("modules_to_not_convert")
        found.append((read(target), settings, sorted(left)))
    files = sorted((tmp_path / "stacked-quantised").glob("*.safetensors"))
    assert len({path.name for path in files for name in load_file(path) if "up_proj" in name}) > 1
    (made, *settings), (expected, *expected_settings) = found
    assert settings == expected_settings and made.keys() == expected.keys()
    for name, tensor in expected.items():
        assert made[name].dtype == tensor.dtype and made[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    opened = open_checkpoint(tmp_path / "stacked-quantised")
    assert opened.names() == plain.keys()
    for name, tensor in plain.items():
        assert (opened.tensor(name)[:] - tensor).abs().max() <= tensor.abs().max() / 14


def test_quantised_experts_in_one_tensor_are_refused(checkpoint, tmp_path):
    source, _ = checkpoint
    convert_hf_to_fp8.main(["--model-dir", str(source), "--save-dir", str(tmp_path / "fp8")])
    _add(tmp_path / "fp8", FUSED, torch.zeros(2, 32, 8, dtype=torch.float8_e4m3fn))
    words = ["--input-fp8-hf-path", str(tmp_path / "fp8"), "--output-bf16-hf-path", str(tmp_path / "back")]
    with pytest.raises(UserError, match=f"{FUSED} has all experts of a layer in one tensor of F8_E4M3"):
        fp8_cast_bf16.main(words)


def _add(directory, name, tensor):
    """Put a further tensor into a checkpoint."""
    save_file({name: tensor}, directory / "more.safetensors")
    index = directory / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    entries["weight_map"][name] = "more.safetensors"
    index.write_text(json.dumps(entries))


def test_without_a_directory_the_target_stands_beside_the_source(checkpoint, tmp_path, monkeypatch):
    source, tensors = checkpoint
    packed = tmp_path / "packed"
    convert_hf_to_int4_direct.main(["--model-dir", str(source), "--save-dir", str(packed)])
    # A path without a name of its own.
    monkeypatch.chdir(packed)
    convert_k2_thinking_int4_to_bf16.main(["--model-dir", "."])
    assert read(tmp_path / "packed-bf16").keys() == tensors.keys()
    # By the name of what a link leads to.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "latest").symlink_to(packed)
    convert_k2_thinking_int4_to_bf16.main(["--model-dir", str(tmp_path / "elsewhere" / "latest"), "--force"])
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["latest"]


def test_differences_of_two_checkpoints(checkpoint, tmp_path):
    source, tensors = checkpoint
    assert list(differences(source, source)) == []
    other = tmp_path / "other"
    other.mkdir()
    names = sorted(tensors)
    changed = {
        **tensors,
        names[0]: tensors[names[0]].clone(),
        names[1]: tensors[names[1]].float(),
        "more": torch.ones(1),
    }
    changed[names[0]].view(torch.int16)[0] += 1
    del changed[names[2]]
    save_file(changed, other / "model.safetensors")
    lines = list(differences(other, source))
    assert [line.split()[0] for line in lines] == ["more", *names[:3]]
    assert len(list(differences(other, source, lambda name: name == names[2]))) == 3


def test_what_cannot_be_converted_is_refused(checkpoint, tmp_path, capsys):
    source, _ = checkpoint

    def message(main, *words):
        with pytest.raises(UserError) as end:
            main(list(words))
        return str(end.value)

    assert "is no directory" in message(
        convert_hf_to_fp8.main, "--model-dir", "/nowhere", "--save-dir", str(tmp_path / "a")
    )
    same = message(convert_hf_to_fp8.main, "--model-dir", str(source), "--save-dir", str(source))
    assert "is the source" in same
    assert "is not quantised" in message(
        fp8_cast_bf16.main, "--input-fp8-hf-path", str(source), "--output-bf16-hf-path", str(tmp_path / "b")
    )
    with pytest.raises(UserError, match=r"--ignore-rules: .* in '\('"):
        from tools.conversion.hugging_face import quantised_matrices

        quantised_matrices({}, ["re:("])
    # In models that are not known rows may come in another order, and tensors of all experts may have other names.
    for model_type, name in (("gpt_oss", "gate_up_proj"), ("qwen3_moe", "w13_weight")):
        other = tmp_path / model_type
        other.mkdir()
        save_file({f"model.layers.0.mlp.experts.{name}": torch.ones(2, 2, 2)}, other / "model.safetensors")
        (other / "config.json").write_text(json.dumps({"model_type": model_type}))
        refused = message(convert_hf_to_fp8.main, "--model-dir", str(other), "--save-dir", str(tmp_path / "d"))
        assert f"experts.{name} has all experts of a layer in one tensor" in refused
    matrix = Place(source / "model.safetensors", 0, 16, "BF16", (2, 4))
    with pytest.raises(UserError, match=r"no weight is left .* or have columns that are no multiple of 3$"):
        quantised_matrices({"model.layers.0.mlp.down_proj.weight": matrix}, [], 3)
    (source / "model-00002-of-00002.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}})
    )
    lost = message(convert_hf_to_fp8.main, "--model-dir", str(source), "--save-dir", str(tmp_path / "c"))
    assert "model-00002-of-00002.safetensors is not there, and the index of the weights in " in lost


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_matrices_of_latent_attention_are_left_as_engines_want_them(tmp_path, kind):
    """They take one of them apart, and join others with what lies beside: packed integers could not be served."""
    write_tiny_latent(tmp_path / "model", "deepseek_v3")
    words = ["--model-dir", str(tmp_path / "model"), "--save-dir", str(tmp_path / kind)]
    if kind == "fp8":
        convert_hf_to_fp8.main([*words, "--block-size", "16", "16"])
    else:
        convert_hf_to_int4_direct.main([*words, "--group-size", "8"])
    plain, stored = read(tmp_path / "model"), read(tmp_path / kind)
    ends = ("kv_b_proj.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
    of_latent = {name for name in plain if name.endswith(ends)}
    kept = {name for name in of_latent if name in stored and stored[name].dtype == plain[name].dtype}
    assert {name.rpartition("self_attn.")[2] for name in of_latent} == set(ends)
    assert kept == (set() if kind == "fp8" else of_latent)
    quantised = {name.removesuffix("_packed") for name in stored if name.endswith("weight_packed")}
    assert kind == "fp8" or quantised >= {name for name in plain if name.endswith(("o_proj.weight", "q_b_proj.weight"))}
    ignored = config_of(tmp_path / kind).get("ignore", [])
    assert {f"{module}.weight" for module in ignored} >= kept
