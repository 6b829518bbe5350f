"""Quantised tensors against the numbers of the formula, and against the engine packages' own de-quantisation."""

import json

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

from slime.utils.errors import RunError, UserError
from slime.weights import quantisers
from slime.weights.hf_writer import write_hf_checkpoint
from slime.weights.quantised_checkpoint import _put_fp8_numbers, open_checkpoint
from slime.weights.quantisers import (
    PackedForm,
    _scale_and_zero,
    loaded_once_on_gpus,
    moves_when_read,
    packed_form,
    quantise_by_names,
    quantise_fp8_blocks,
    quantise_fp8_tensor,
    quantise_int4,
    quantise_integers,
    quantiser_of,
    rounded_as_int4,
)

BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
TENSOR = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def int4(symmetric=True, strategy="group", group_size=32):
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def matrix(rows=200, columns=320):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02


def of_sglang(name):
    # The package asks for CUDA when it is imported: the function, and what it calls, are taken out of its file.
    import ast
    import importlib.util
    from pathlib import Path

    root = Path(importlib.util.find_spec("sglang").origin).parent
    tree = ast.parse((root / "srt/layers/quantization/fp8_utils.py").read_text())
    functions = [node for node in tree.body if getattr(node, "name", None) in (name, "ceil_to_ue8m0")]
    space = {"torch": torch, "List": list, "Tuple": tuple, "ceil_align": lambda x, y: -(-x // y) * y}
    exec(compile(ast.Module(functions, []), "fp8_utils.py", "exec"), space)
    return space[name]


def sglang_block_dequant(*arguments):
    return of_sglang("block_quant_dequant")(*arguments)


def test_s3_blocks_of_fp8_by_hand():
    weight = torch.zeros(3, 4)
    weight[0, 0], weight[1, 1], weight[0, 2] = 448.0, -224.0, 0.5
    weight[2] = torch.tensor([0.0, 0.0, 896.0, 2.0])
    quantised, scale = quantise_fp8_blocks(weight, (2, 2))
    # 0.5 / 448 in the second block of the first rows; a block of zeros below the first one.
    assert scale.equal(torch.tensor([[1.0, 0.5 / 448], [1.0, 2.0]]))
    assert quantised.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    assert quantised.float().tolist() == [[448, 0, 448, 0], [0, -224, 0, 0], [0, 0, 448, 1]]


def test_blocks_of_fp8_as_the_engine_reads_them():
    weight = matrix()
    weight[128:, :128] = 0
    quantised, scale = quantise_fp8_blocks(weight, (128, 128))
    assert scale.shape == (2, 3) and scale[1, 0] == 1
    read = sglang_block_dequant(quantised, scale, [128, 128], torch.float32)
    # Bit for bit what the scales and numbers say, block by block.
    for row in range(2):
        for column in range(3):
            part = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
            assert read[part].equal(quantised[part].float() * scale[row, column])
            # Three bits after the leading one: half a step is a sixteenth; below the normal numbers, half of 2^-9.
            error = (read[part] - weight[part].float()).abs()
            assert (error <= weight[part].float().abs() / 16 + scale[row, column] * 2**-10 + 1e-9).all()
    # What was quantised once stays what it is.
    again, scale_again = quantise_fp8_blocks(read, (128, 128))
    assert sglang_block_dequant(again, scale_again, [128, 128], torch.float32).allclose(read, rtol=1e-6)


def test_scales_that_are_powers_of_two_as_the_engine_makes_them():
    weight = matrix()
    # Above a power of two, at one, and below the least magnitude that engines take.
    weight[:128, :128] *= 1000
    weight[0, 128], weight[128:, 128:256] = 448.0 * 4, 1e-6
    quantised, scale = quantise_fp8_blocks(weight, (128, 128), "ue8m0")
    expected, expected_scale = of_sglang("per_block_cast_to_fp8")(weight)
    assert scale.equal(expected_scale) and quantised.view(torch.uint8).equal(expected.view(torch.uint8))
    assert scale[0, 1] == 4 and scale[1, 1] == 2**-22 and torch.frexp(scale).mantissa.eq(0.5).all()
    assert quantise_fp8_blocks(torch.zeros(2, 2), (2, 2), "ue8m0")[1].item() == 1


def test_every_code_of_fp8_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F]
    # Also zeros of both signs, and the smallest numbers; with a code of no number among them too.
    for read in (numbers, codes, codes[:0]):
        expected = read.view(torch.float8_e4m3fn).float()
        found = torch.empty_like(expected)
        _put_fp8_numbers(read, torch.ones(()), found)
        assert found.view(torch.int32).equal(expected.view(torch.int32))


def test_s3_a_tensor_of_fp8():
    quantised, scale = quantise_fp8_tensor(torch.tensor([[896.0, -2.0], [0.0, 448.0]]))
    assert (scale.item(), quantised.float().tolist()) == (2.0, [[448.0, -1.0], [0.0, 224.0]])
    zeros, scale = quantise_fp8_tensor(torch.zeros(2, 2))
    assert zeros.float().abs().max() == 0 and scale.item() == pytest.approx(1e-12 / 448)


def without(settings, *names):
    weights = settings["config_groups"]["group_0"]["weights"]
    return {**settings, "config_groups": {"only": {"weights": {k: v for k, v in weights.items() if k not in names}}}}


def with_entries(**entries):
    return {**int4(), "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **entries}}}}


WEIGHTS = int4()["config_groups"]["group_0"]["weights"]
USUAL = [
    int4(), int4(symmetric=False), int4(strategy="channel", group_size=None), without(int4(), "type", "symmetric"),
    with_entries(num_bits=8, observer="minmax", observer_kwargs={}, dynamic=False, actorder=None, scale_dtype=None),
]  # fmt: skip


@pytest.mark.parametrize("settings", USUAL)
def test_the_usual_form_is_read_without_the_package_that_knows_all(monkeypatch, settings):
    expected = quantisers.int4_scheme("here", settings).weights
    monkeypatch.setattr(quantisers, "int4_scheme", None)
    found = packed_form("here", settings)
    assert found == PackedForm(expected.num_bits, expected.group_size, expected.symmetric)
    made = quantise_by_names([("model.layers.0.mlp.up_proj.weight", matrix(16, 64))], settings, "here")
    assert "model.layers.0.mlp.up_proj.weight_packed" in dict(made)


@pytest.mark.parametrize(
    "entries",
    [
        {"num_bits": 5}, {"num_bits": True}, {"type": "INT"}, {"symmetric": "false"}, {"dynamic": True},
        {"scale_dtype": "torch.float16"}, {"group_size": -1, "strategy": "channel"},
    ],
)  # fmt: skip
def test_of_another_form_the_package_says_the_meaning(monkeypatch, entries):
    asked, scheme_of = [], quantisers.int4_scheme
    monkeypatch.setattr(quantisers, "int4_scheme", lambda *given: asked.append(given) or scheme_of(*given))
    found, scheme = packed_form("here", with_entries(**entries)), scheme_of("here", with_entries(**entries))
    assert asked
    expected = scheme.weights
    scheme = scheme if "scale_dtype" in entries else None
    assert found == PackedForm(expected.num_bits, expected.group_size, expected.symmetric, scheme)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy, group_size", [("group", 32), ("channel", None)])
def test_int4_as_the_engine_reads_it(symmetric, strategy, group_size):
    settings = int4(symmetric, strategy, group_size)
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    weight = matrix(16, 64).float()
    parts = quantise_int4(weight, packed_form("here", settings))
    names = {"weight_packed", "weight_scale", "weight_shape"} | (set() if symmetric else {"weight_zero_point"})
    assert parts.keys() == names and parts["weight_packed"].shape == (16, 8)
    read = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    # By the definition: the nearest of sixteen steps of each group.
    groups = weight.view(16, -1, group_size or 64)
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    step = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
    zero = torch.zeros_like(step) if symmetric else (-8 - low / step).clamp(-8, 7).round()
    expected = ((groups / step + zero).round().clamp(-8, 7) - zero) * step
    assert read.view_as(expected).allclose(expected, atol=1e-6)
    assert rounded_as_int4(weight, scheme).equal(read)


@pytest.mark.parametrize("symmetric", [True, False])
def test_all_parts_of_a_packed_weight_are_on_its_device(symmetric):
    """A bucket takes the device of its first tensor, and a process group of GPUs sends nothing of the host."""
    parts = quantise_integers(torch.empty(16, 64, device="meta"), 4, 32, symmetric)
    assert {tensor.device.type for tensor in parts.values()} == {"meta"}


@pytest.fixture
def checkpoint(tmp_path):
    def write(settings, dtype=torch.bfloat16, scale_dtype=None):
        """A checkpoint whose maker has quantised one of two matrices."""
        weight = matrix(128, 256).to(dtype)
        tensors = {"norm.weight": torch.ones(256, dtype=dtype), "lm_head.weight": weight.clone()}
        if settings["quant_method"] == "fp8":
            block = settings.get("weight_block_size")
            how = (tuple(block), settings.get("scale_fmt", "float")) if block else ()
            quantised, scale = quantise_fp8_blocks(weight, *how, scale_dtype) if block else quantise_fp8_tensor(weight)
            tensors |= {"up.weight": quantised, "up.weight_scale_inv" if block else "up.weight_scale": scale}
        else:
            parts = quantise_int4(weight, packed_form("here", settings))
            tensors |= {f"up.{name}": tensor for name, tensor in parts.items()}
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
        return tmp_path

    return write


def test_what_engines_with_gpus_load_but_once(checkpoint):
    """Packed layers that are no experts, and FP8 with one scale; no push of these would be taken."""
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    assert loaded_once_on_gpus(checkpoint(int4())) == "up.weight_packed"
    assert loaded_once_on_gpus(checkpoint(fp8)) == "up.weight_scale"
    directory = checkpoint({**fp8, "weight_block_size": [128, 128]})
    assert loaded_once_on_gpus(directory) is None
    save_file({"mlp.experts.0.up_proj.weight_packed": torch.zeros(1)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"quantization_config": int4()}))
    assert loaded_once_on_gpus(directory) is None
    (directory / "config.json").write_text("{}")
    assert loaded_once_on_gpus(directory) is None


def named_weights():
    """What the checkpoint was made of."""
    weight = matrix(128, 256)
    return [("norm.weight", torch.ones(256).bfloat16()), ("lm_head.weight", weight), ("up.weight", weight.clone())]


def read_files(directory):
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("settings", "scale_dtype"),
    [
        (BLOCK, None), (BLOCK, torch.bfloat16), ({**BLOCK, "scale_fmt": "ue8m0"}, None), (TENSOR, None), (int4(), None),
        (int4(symmetric=False), None), ({**BLOCK, "fmt": "float8_e4m3fn"}, None),
    ],
    ids=["block", "block of bfloat16", "powers", "tensor", "int4", "zero", "another word"],
)  # fmt: skip
def test_what_comes_out_is_what_the_checkpoint_has(checkpoint, settings, scale_dtype):
    directory = checkpoint(settings, scale_dtype=scale_dtype)
    found = dict(quantiser_of(directory)(named_weights()))
    stored = read_files(directory)
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.dim() else True, name


def test_scales_of_bfloat16_are_rounded_before_they_divide(checkpoint):
    """So numbers times scales are as near as with scales of float32, and stay what they are when they are quantised again."""
    directory, weight = checkpoint(BLOCK, scale_dtype=torch.bfloat16), matrix(128, 256)
    stored, read = read_files(directory), open_checkpoint(directory).tensor("up.weight")[:]
    scales = torch.stack([half.abs().amax() for half in weight.float().split(128, 1)]).div(448).bfloat16()
    assert stored["up.weight_scale_inv"].equal(scales[None])
    wide = scales.float().repeat_interleave(128)
    numbers = (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert stored["up.weight"].float().equal(numbers) and read.equal(numbers * wide)
    again = dict(quantiser_of(directory)([("up.weight", read)]))
    assert all(stored[name].float().equal(tensor.float()) for name, tensor in again.items()) and len(again) == 2


@pytest.mark.parametrize(
    "settings", [BLOCK, {**BLOCK, "scale_fmt": "ue8m0"}, TENSOR], ids=["block", "powers", "tensor"]
)
def test_o7_an_export_of_fp8_has_plain_scales_and_is_read_again(checkpoint, tmp_path_factory, settings):
    """Some engines keep the scales packed into integers, or in another order: the files have a number for each block."""
    source, export = checkpoint(settings), tmp_path_factory.mktemp("saved") / "hf"
    write_hf_checkpoint(export, quantiser_of(source)(named_weights()), source)
    (scale,) = [tensor for name, tensor in read_files(export).items() if "scale" in name]
    assert (scale.dtype, scale.numel()) == (torch.float32, 2 if "weight_block_size" in settings else 1)
    assert as_the_engine_reads(export, settings).equal(as_the_engine_reads(source, settings))
    for name in ("up.weight", "lm_head.weight", "norm.weight"):
        assert open_checkpoint(export).tensor(name)[:].equal(open_checkpoint(source).tensor(name)[:]), name
    again = dict(quantiser_of(export)(named_weights()))
    assert all(tensor.float().equal(again[name].float()) for name, tensor in read_files(export).items())


LAYER = "model.layers.0."
# By name: what a matrix is for says whether it is quantised.
MATRICES = [f"{LAYER}{name}" for name in (
    "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.indexer.wq_b", "linear_attn.in_proj_qkv", "mlp.down_proj",
    "mlp.experts.1.gate_proj", "mlp.shared_expert.up_proj",
)]  # fmt: skip
LEFT = ["model.embed_tokens", "lm_head", f"{LAYER}mlp.gate", f"{LAYER}mlp.shared_expert_gate", "model.norm"]


# Engines do not take these packed.
OF_LATENT = [f"{LAYER}self_attn.{name}" for name in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "indexer.wk")]


def by_names(settings, weight, names=(*MATRICES, *OF_LATENT, *LEFT)):
    """The tensors in place of `weight`, by module and part."""
    found = {}
    for name, tensor in quantise_by_names([(f"{name}.weight", weight) for name in names], settings, "here"):
        module, _, part = name.rpartition(".")
        found.setdefault(module, {})[part] = tensor
    return found


def of_blocks(weight):
    return dict(zip(("weight", "weight_scale_inv"), quantise_fp8_blocks(weight, (128, 128)), strict=True))


def of_tensor(weight):
    return dict(zip(("weight", "weight_scale"), quantise_fp8_tensor(weight), strict=True))


def of_int4(**options):
    form = packed_form("here", int4(**options))
    return int4(**options), lambda weight: quantise_int4(weight, form)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (BLOCK, of_blocks),
        (TENSOR, of_tensor),
        of_int4(),
        of_int4(symmetric=False),
        of_int4(strategy="channel", group_size=None),
    ],
    ids=["block", "tensor", "int4", "zero", "channel"],
)
def test_without_a_checkpoint_names_say_what_is_quantised(settings, expected):
    weight = matrix()
    found, parts = by_names(settings, weight), expected(weight)
    assert len(found) == len(MATRICES) + len(OF_LATENT) + len(LEFT)
    packed = "config_groups" in settings
    for module in (*MATRICES, *(() if packed else OF_LATENT)):
        assert found[module].keys() == parts.keys(), module
        for part, tensor in parts.items():
            made = found[module][part]
            assert (made.dtype, made.shape) == (tensor.dtype, tensor.shape)
            assert made.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
    left = [*LEFT, *(OF_LATENT if packed else ())]
    assert all(found[module]["weight"] is weight and len(found[module]) == 1 for module in left)


def test_modules_that_settings_name_are_left_alone():
    weight, query, down, expert = matrix(32, 64), MATRICES[0], MATRICES[4], MATRICES[5]

    def left(settings):
        found = by_names(settings, weight, MATRICES)
        return {
            module for module in MATRICES if found[module].keys() == {"weight"} and found[module]["weight"] is weight
        }

    # FP8 checkpoints name a module or what it lies in, also without `model.`; what begins alike is another module.
    assert left({**BLOCK, "modules_to_not_convert": ["layers.0.self_attn.q_proj", "down_proj", "mlp.expert"]}) == {
        query,
        down,
    }
    assert left({**BLOCK, "ignored_layers": ["model.layers.0.mlp."]}) == {name for name in MATRICES if ".mlp." in name}
    # Packed ones a module, its end, or a pattern: who names a parent does not mean its children.
    assert left({**int4(), "ignore": ["re:.*experts.*", "mlp.down_proj", "model.layers.0"]}) == {expert, down}
    assert left(int4(group_size=48)) == set(MATRICES), "no whole groups"


def test_settings_that_name_their_targets_are_refused_without_a_checkpoint():
    settings = int4()
    settings["config_groups"]["group_0"]["targets"] = ["re:.*experts.*"]
    with pytest.raises(UserError, match=r"^here: .*\(targets re:\.\*experts"):
        by_names(settings, matrix())
    with pytest.raises(UserError, match=r"^here: .*\(quant_method awq"):
        by_names({"quant_method": "awq"}, matrix())
    with pytest.raises(UserError, match=r"^here: .* in '\('"):
        by_names({**int4(), "ignore": ["re:("]}, matrix())


def test_a_checkpoint_that_is_not_quantised_has_no_quantiser(tmp_path):
    assert quantiser_of(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert quantiser_of(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    assert quantiser_of(tmp_path) is None, "no weights either"


@pytest.mark.parametrize(
    "settings",
    [
        {**BLOCK, "activation_scheme": "static"},
        {**BLOCK, "scale_fmt": "other"},
        {**BLOCK, "fmt": "e5m2"},
        {**TENSOR, "scale_fmt": "ue8m0"},
        {"quant_method": "awq"},
        {**int4(), "format": "float-quantized"},
        {**int4(), "config_groups": {**int4()["config_groups"], "group_1": {}}},
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, settings):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    for use in (quantiser_of, open_checkpoint):
        with pytest.raises(UserError, match=r"neither quantised nor read as its quantization_config asks for"):
            use(tmp_path)


def test_a_config_that_does_not_fit_the_tensors_is_refused(checkpoint):
    directory = checkpoint(BLOCK)
    (directory / "config.json").write_text(
        json.dumps({"quantization_config": {**BLOCK, "weight_block_size": [64, 64]}})
    )
    with pytest.raises(RunError, match=r"up.weight_scale_inv would be F32 \[2, 4\], and is F32 \[1, 2\]"):
        list(quantiser_of(directory)([("up.weight", matrix(128, 256))]))


def as_the_engine_reads(directory, settings):
    """The quantised weight of `checkpoint`, whole, by the engine packages' own functions."""
    parts = {name[3:]: tensor for name, tensor in read_files(directory).items() if name[:3] == "up."}
    if settings["quant_method"] == "compressed-tensors":
        scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
        return PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    block = settings.get("weight_block_size")
    if block is None:
        return parts["weight"].float() * parts["weight_scale"]
    return sglang_block_dequant(parts["weight"], parts["weight_scale_inv"], block, torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        BLOCK,
        {**BLOCK, "weight_block_size": [48, 80]},
        TENSOR,
        int4(),
        int4(symmetric=False),
        int4(strategy="channel", group_size=None, symmetric=False),
    ],
    ids=["block", "odd block", "tensor", "int4", "zero", "channel"],
)
def test_what_is_read_is_what_the_engine_reads(checkpoint, settings):
    directory = checkpoint(settings)
    expected = as_the_engine_reads(directory, settings)
    opened = open_checkpoint(directory)
    assert opened.names() == {"norm.weight", "lm_head.weight", "up.weight"}
    assert opened.tensor("lm_head.weight")[:].equal(matrix(128, 256))
    stored = opened.tensor("up.weight")
    assert tuple(stored.shape) == (128, 256) and stored.dtype == expected.dtype
    for index in (
        (slice(None)),
        slice(7, 90),
        (slice(None), slice(128, 256)),
        (slice(33, 34), slice(3, 201)),
        (slice(130, 131), slice(5, 5)),
    ):
        found = stored[index]
        assert found.equal(expected[index]) and found.dtype == expected.dtype, index
    assert all(list(opened.parts(name)) == list(opened.part_names(name)) for name in opened.names())
    if settings["quant_method"] == "fp8":
        rounded = open_checkpoint(directory, torch.bfloat16).tensor("up.weight")
        assert rounded.dtype == torch.bfloat16 and rounded[7:90].equal(expected[7:90].bfloat16())


def test_a_part_reads_its_own_blocks_alone(checkpoint, monkeypatch):
    from slime.weights.hf_reader import StoredTensor

    read, found = StoredTensor.__getitem__, []

    def counted(stored, index):
        tensor = read(stored, index)
        found.append((stored._name, tuple(tensor.shape)))
        return tensor

    monkeypatch.setattr(StoredTensor, "__getitem__", counted)
    open_checkpoint(checkpoint({**BLOCK, "weight_block_size": [32, 64]})).tensor("up.weight")[32:64, 100:140]
    assert found == [("up.weight", (32, 40)), ("up.weight_scale_inv", (1, 2))]
    found.clear()
    open_checkpoint(checkpoint(int4())).tensor("up.weight")[:64, 96:160]
    assert found == [("up.weight_packed", (64, 8)), ("up.weight_scale", (64, 2))]


@pytest.mark.parametrize(
    ("settings", "largest_move"),
    [(BLOCK, 0), (TENSOR, 0), (int4(symmetric=False), 1 / 15), (int4(), 1 / 15)],
    ids=["block", "tensor", "zero", "int4"],
)
def test_only_int4_moves_when_it_is_read_and_quantised_again(checkpoint, settings, largest_move):
    directory = checkpoint(settings, torch.float32)
    read = open_checkpoint(directory).tensor("up.weight")[:]
    again = dict(quantiser_of(directory)([("up.weight", read)]))
    save_file({**load_file(directory / "model.safetensors"), **again}, directory / "model.safetensors")
    groups = (open_checkpoint(directory).tensor("up.weight")[:] - read).view(128, -1, 32).abs().amax(-1)
    moved = (groups / read.view(128, -1, 32).abs().amax(-1)).amax().item()
    assert moved == pytest.approx(largest_move, rel=1e-2, abs=1e-6)
    assert moves_when_read(directory) == (largest_move > 0)


def test_a_weight_without_its_scale_is_an_error(checkpoint):
    directory = checkpoint(int4())
    tensors = load_file(directory / "model.safetensors")
    del tensors["up.weight_scale"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"up\.weight is quantised, and its weight_scale is missing"):
        open_checkpoint(directory).tensor("up.weight")


@pytest.mark.parametrize(
    "scales", [(0, 2), (2, 2), (1, 3), (2,)], ids=["too few", "of other rows", "of other columns", "flat"]
)
def test_scales_that_are_not_of_the_blocks_are_an_error(checkpoint, scales):
    """No number is made of memory that nobody has written, nor with the scale of another block."""
    directory = checkpoint(BLOCK)
    tensors = {**load_file(directory / "model.safetensors"), "up.weight_scale_inv": torch.ones(scales)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        UserError, match=r"up\.weight is quantised, and has scales .*blocks of \[128, 128\] need \[1, 2\]"
    ):
        open_checkpoint(directory).tensor("up.weight")[:]


def test_a_tensor_with_a_scale_for_each_row_is_an_error(checkpoint):
    """Of a square one they would be taken for those of its columns."""
    directory = checkpoint(TENSOR)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {"up.weight": tensors["up.weight"][:, :128].contiguous(), "up.weight_scale": torch.ones(128)}
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(UserError, match=r"up\.weight is quantised, and has scales \[128\], where a tensor has one"):
        open_checkpoint(directory).tensor("up.weight")[:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_are_those_of_the_package_bit_for_bit(monkeypatch, dtype, bits, symmetric):
    monkeypatch.setattr("slime.weights.quantisers.STRIP_NUMBERS", 300)
    for rows, columns, group in ((1, 32, 32), (37, 96, 32), (5, 24, None), (9, 8, 8), (40, 64, 16)):
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 3
        weight[0, :8], weight[-1] = 0, weight[-1].abs()
        weight = weight.to(dtype)
        strategy = "channel" if group is None else "group"
        weights = {"num_bits": bits, "symmetric": symmetric, "strategy": strategy, "group_size": group}
        scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
        state = dict(zip(("weight_scale", "weight_zero_point"), _scale_and_zero(weight, scheme), strict=True))
        expected = PackedQuantizationCompressor.compress({"weight": weight, **state}, scheme)
        found = quantise_int4(weight, PackedForm(bits, group, symmetric))
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].equal(tensor), (name, rows, columns)


@pytest.mark.parametrize("scale_format", ["float", "ue8m0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strips_change_no_bit_of_fp8_and_leave_the_weight_alone(monkeypatch, dtype, scale_format):
    weight = (torch.randn(150, 200, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    weight[:64, :64] = 0
    weight[64:128, :64] *= 1e-40
    given = weight.clone()
    whole = [*quantise_fp8_blocks(weight, (64, 64), scale_format), *quantise_fp8_tensor(weight)]
    monkeypatch.setattr("slime.weights.quantisers.STRIP_NUMBERS", 64 * 200)
    strips = [*quantise_fp8_blocks(weight, (64, 64), scale_format), *quantise_fp8_tensor(weight)]
    assert all(one.float().equal(other.float()) for one, other in zip(whole, strips, strict=True))
    assert weight.equal(given)
    # Block by block, by the formula alone.
    for row, column in ((0, 0), (64, 64), (128, 192)):
        block = weight[row : row + 64, column : column + 64].float()
        scale = whole[1][row // 64, column // 64]
        if scale_format == "float":
            assert scale == (block.abs().max() / 448 if block.any() else 1)
        expected = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert whole[0][row : row + 64, column : column + 64].float().equal(expected)
