"""Bytes of one weight, from the quantization_config of published kinds of checkpoints."""

import pytest

from slime.arguments.plan.quantisation import quantisation_of, unknown_format, weight_bytes
from slime.scheduling.model_shape import LinearAttentionShape, ModelShape, MoeShape

MOE = MoeShape(8, 2, 64, 64, False, False, (False, True, True, True))
LINEAR = LinearAttentionShape(4, 32, 4, 32, 4, (True, True, True, False))
SHAPE = ModelShape(4, 512, 1536, 8, 4, 64, 1000, 1000, moe=MOE, linear_attention=LINEAR)


def compressed(form, **weights):
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}},
    }  # fmt: skip


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 1 + 2 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 0.5 + 2 / 64),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "group_size": 32}, 0.5625),
        (compressed("pack-quantized", num_bits=4, group_size=128, strategy="group"), 0.5 + 2 / 128),
        (compressed("pack-quantized", num_bits=8, group_size=None, strategy="channel"), 1.0),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), 1.0),
        (compressed("float-quantized", num_bits=8, strategy="block", block_structure=[128, 128]), 1 + 4 / 16384),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 1.0),
        ({"quant_method": "mxfp4"}, 0.5 + 1 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5 + 4 / 64),
    ],
)
def test_bytes_of_a_weight(config, expected):
    assert quantisation_of(config, None).bytes_per_weight == expected
    assert unknown_format(config, None) is None
    sizes = weight_bytes(SHAPE, 2.0, config, None)
    assert sizes.attention == sizes.routed_experts == expected and sizes.rest == 2.0


def test_a_flag_counts_where_the_checkpoint_is_plain():
    assert weight_bytes(SHAPE, 2.0, None, "fp8").dense_mlp == 1.0
    assert weight_bytes(SHAPE, 2.0, {"quant_method": "gptq", "bits": 4}, "fp8").dense_mlp == 0.5
    plain = weight_bytes(SHAPE, 2.0, None, None)
    assert plain.attention == plain.routed_experts == plain.rest == 2.0 and unknown_format(None, None) is None


@pytest.mark.parametrize(
    "config, name",
    [
        ({"quant_method": "quark"}, "quark"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt (MIXED_PRECISION)"),
        (compressed("marlin-24"), "compressed-tensors (marlin-24)"),
    ],
)
def test_other_formats_are_named(config, name):
    assert unknown_format(config, None) == name
    assert weight_bytes(SHAPE, 2.0, config, None).routed_experts == 2.0


def test_what_is_left_out_counts_plain():
    int4 = compressed("pack-quantized", num_bits=4, group_size=32)
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    sizes = weight_bytes(SHAPE, 2.0, {**int4, "ignore": ignore}, None)
    assert (sizes.attention, sizes.dense_mlp, sizes.shared_experts) == (2.0, 2.0, 2.0)
    assert (sizes.routed_experts, sizes.linear_attention) == (0.5625, 0.5625)


def test_names_with_layers_and_patterns():
    names = ["model.layers.0.linear_attn", "model.language_model.layers.2.mlp.experts", "mlp.shared_expert", "mlp.gate"]
    fp8 = {"quant_method": "fp8", "modules_to_not_convert": names}
    sizes = weight_bytes(SHAPE, 2.0, fp8, None)
    # One of three linear layers, one of three layers with experts; a router is no projection.
    assert sizes.linear_attention == pytest.approx((2 + 1 + 1) / 3) == sizes.routed_experts
    assert (sizes.shared_experts, sizes.dense_mlp) == (2.0, 1.0)
    starred = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "re:broken("]}
    assert weight_bytes(SHAPE, 2.0, starred, None).attention == 2.0
