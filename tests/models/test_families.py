"""The flags derived from published configs, against the flags of each model written down by hand."""

import json
import subprocess
import sys

import pytest

from slime.arguments.hf_config import CHOICES, SUPPLEMENTS, text_config_of
from slime.arguments.parser import build_parser, parse_known
from slime.models.families import (
    FAMILIES,
    FAMILIES_BY_NAME,
    MIMO,
    SUPPORTED_MODEL_TYPES,
    family_name,
    model_args_from_hf,
    training_limits,
)
from slime.models.qwen import QWEN2, QWEN3
from slime.utils.errors import UserError
from tests.support.models.args import TINY_QWEN3_CONFIG
from tests.support.tables.model_scripts import script_flags
from tools.published_models import PUBLISHED_MODELS

# transformers has no config class for these; their configs are read as they are published.
WITHOUT_CLASS = {"kimi_k2", "mimo"}
# What the flags of a model set and no config tells.
UNTOLD = {
    "use_gated_attention",
    "seq_length",
    "use_rotary_position_embeddings",
    "custom_model_provider_path",
    "masked_softmax_fusion",
}
WRITTEN_DOWN = script_flags()


@pytest.fixture(scope="module")
def parser():
    return build_parser()


@pytest.fixture(scope="module")
def rows(parser):
    """Name of each model -> the attributes that its written-down flags set."""
    found = {}
    for name, flags in WRITTEN_DOWN.items():
        words = [word for flag, values in flags.items() for word in (flag, *values)]
        args = parse_known(parser, [*words, "--rollout-batch-size", "1"])
        names = args.typed_flags - UNTOLD - {"rollout_batch_size"}
        found[name] = {name: getattr(args, name) for name in names}
    return found


def differences(derived: dict, expected: dict) -> dict:
    """Name -> (derived, expected) where values or types are not the same."""
    return {
        name: (derived.get(name, "missing"), value)
        for name, value in expected.items()
        if derived.get(name, "missing") != value or type(derived[name]) is not type(value)
    }


def differences_from_row(derived: dict, row: dict) -> dict:
    if derived.get("moe_layer_freq") == 1:  # the same as a list of ones
        derived = {**derived, "moe_layer_freq": [1] * derived["num_layers"]}
    if derived["num_experts"] and derived["moe_router_score_function"] == "sigmoid":
        row = {name: value for name, value in row.items() if name != "moe_token_drop_policy"}
    return differences(derived, row)


def as_transformers_writes_it(config: dict) -> dict:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]](**config).to_dict()


def test_every_row_has_a_published_config():
    assert set(WRITTEN_DOWN) == set(PUBLISHED_MODELS) and len(WRITTEN_DOWN) == 52


@pytest.mark.parametrize("name", WRITTEN_DOWN)
def test_published_config_gives_the_row(name, rows):
    derived = model_args_from_hf(text_config_of(PUBLISHED_MODELS[name]))
    assert differences_from_row(derived, rows[name]) == {}


@pytest.mark.parametrize(
    "name", [name for name, config in PUBLISHED_MODELS.items() if config["model_type"] not in WITHOUT_CLASS]
)
def test_config_class_of_transformers_gives_the_row(name, rows):
    config = text_config_of(as_transformers_writes_it(PUBLISHED_MODELS[name]))
    assert differences_from_row(model_args_from_hf(config), rows[name]) == {}


def test_all_types_of_direct_load_are_known():
    assert SUPPORTED_MODEL_TYPES == (
        "deepseek_v3", "deepseek_v32", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "llama", "mimo",
        "minimax_m2", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl",
        "qwen3_vl_moe",
    )  # fmt: skip
    published = {config["model_type"] for config in PUBLISHED_MODELS.values()}
    assert published == set(SUPPORTED_MODEL_TYPES) - {"deepseek_v32", "qwen2_moe"}


def test_every_derived_name_is_an_attribute_of_a_flag_and_has_its_type(parser):
    actions = {action.dest: action for action in parser._actions}
    for config in PUBLISHED_MODELS.values():
        for name, value in model_args_from_hf(text_config_of(config)).items():
            assert name in actions, name
            kind = actions[name].type
            if kind in (int, float) and value is not None:
                assert type(value) is kind, (name, value)
            if actions[name].choices and value is not None:
                assert value in actions[name].choices, (name, value)


def test_every_kind_of_flag_names_flags(parser):
    known = {action.dest for action in parser._actions}
    assert known >= CHOICES | SUPPLEMENTS
    assert not CHOICES & SUPPLEMENTS


@pytest.mark.parametrize("model_type", ["qwen2_moe", "deepseek_v32", "qwen3_vl", "qwen3_vl_moe"])
def test_what_configs_that_say_nothing_mean(model_type):
    from transformers import CONFIG_MAPPING

    args = model_args_from_hf(text_config_of(CONFIG_MAPPING[model_type]().to_dict()))
    expected = {
        # Defaults of transformers' classes.
        "qwen2_moe": {
            "num_layers": 24, "hidden_size": 2048, "num_experts": 60, "moe_router_topk": 4, "moe_ffn_hidden_size": 1408,
            "moe_shared_expert_intermediate_size": 5632, "moe_shared_expert_gate": True, "add_qkv_bias": True,
            "qk_layernorm": False, "moe_router_pre_softmax": True, "moe_layer_freq": 1,
        },
        "deepseek_v32": {
            "num_layers": 61, "dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048,
            "moe_layer_freq": [0] * 3 + [1] * 58, "multi_latent_attention": True, "moe_router_num_groups": 8,
            "spec": ["slime_plugins.models.glm5.glm5", "get_glm5_spec"],
        },
        "qwen3_vl": {
            "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 22016, "num_query_groups": 32, "kv_channels": 128,
            "rotary_base": 500000, "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "spec": None,
        },
        "qwen3_vl_moe": {
            "num_layers": 24, "hidden_size": 2048, "num_experts": 60, "moe_router_topk": 4, "moe_ffn_hidden_size": 1408,
            "moe_layer_freq": 1, "moe_router_pre_softmax": False, "moe_shared_expert_intermediate_size": None,
            "rotary_base": 500000, "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "spec": None,
        },
    }  # fmt: skip
    assert differences(args, expected[model_type]) == {}


def test_dense_layers_among_experts():
    config = {**PUBLISHED_MODELS["qwen3-30B-A3B"], "num_hidden_layers": 6}
    frequency = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_args_from_hf({**config, **frequency})["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, None),
        ({"index_topk_freq": 2}, [1, 1, 0, 1, 0, 1]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": None}, [1, 1, 0, 1, 0, 1]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [1, 1, 1, 0, 1, 0]),
        ({"index_topk_pattern": "FSFSSS"}, [1, 0, 1, 0, 0, 0]),
        ({"indexer_types": ["full", "full", "shared", "full", "shared", "shared"]}, [1, 1, 0, 1, 0, 0]),
    ],
)
def test_layers_that_share_an_indexer(entries, expected):
    config = {**PUBLISHED_MODELS["glm5-744B-A40B"], "num_hidden_layers": 6, **entries}
    assert model_args_from_hf(config).get("dsa_indexer_layers") == expected


def test_irregular_linear_attention_is_one_entry_per_layer():
    kinds = ["full_attention", "linear_attention", "linear_attention"]
    config = {**PUBLISHED_MODELS["qwen3-next-80B-A3B"], "num_hidden_layers": 3, "layer_types": kinds}
    assert model_args_from_hf(config)["linear_attention_freq"] == [0, 1, 1]


def test_a8_rope_base_inside_rope_parameters_wins():
    config = {**TINY_QWEN3_CONFIG, "rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5000000.0}}
    assert model_args_from_hf(config)["rotary_base"] == 5000000


@pytest.mark.parametrize(
    ("name", "rope", "base"),
    [
        ("qwen3-4B", {"rope_theta": 1e6, "rope_scaling": {"rope_type": "default", "rope_theta": 5e6}}, 5000000),
        ("qwen3-4B", {"rope_theta": 5e6, "rope_parameters": {"rope_theta": None}}, 5000000),
        ("qwen3-4B", {"rope_parameters": {"rope_theta": None}, "rope_scaling": {"rope_theta": 5e6}}, 5000000),
        ("qwen3-4B", {"rope_theta": None}, 10000),
        ("minimax-m2", {}, 5000000),
        ("qwen3-vl-8B", {}, 500000),
        ("qwen3-vl-30B-A3B", {}, 500000),
    ],
)
def test_where_the_base_is_read_and_what_none_means(name, rope, base):
    config = text_config_of(PUBLISHED_MODELS[name])
    bare = {key: value for key, value in config.items() if not key.startswith("rope_")}
    assert model_args_from_hf({**bare, **rope})["rotary_base"] == base


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_the_rotated_share_may_stand_beside_the_scaling(place):
    bare = {
        key: value for key, value in PUBLISHED_MODELS["glm4-9B"].items() if not key.startswith(("rope_", "partial"))
    }
    rope = {place: {"rope_type": "default", "partial_rotary_factor": 0.75}}
    assert model_args_from_hf({**bare, **rope})["rotary_percent"] == 0.75


@pytest.mark.parametrize(
    ("told", "length"), [({"original_max_position_embeddings": 64}, 64), ({}, 777), ({"beta_fast": None}, 777)]
)
def test_yarn_stretches_from_the_length_of_the_model_unless_another_is_told(told, length):
    yarn = {"rope_type": "yarn", "factor": 4.0, **told}
    found = model_args_from_hf(
        {**PUBLISHED_MODELS["deepseek-v3"], "max_position_embeddings": 777, "rope_scaling": yarn}
    )
    assert found["original_max_position_embeddings"] == length and "beta_fast" not in found


def test_engines_read_of_every_config_that_can_be_trained_what_the_flags_say():
    """Where they would not, the config is refused. The classes of transformers and of SGLang are asked."""
    plain, yarn = {"rope_type": "default", "rope_theta": 5e6}, {"rope_type": "yarn", "factor": 4.0}
    changes = [
        {}, {"rope_theta": 5e6}, {"rope_parameters": plain}, {"rope_scaling": plain},
        {"rope_theta": 1e6, "rope_parameters": plain}, {"rope_theta": 1e6, "rope_scaling": plain},
        {"rope_parameters": {**plain, "partial_rotary_factor": 0.75}}, {"rope_parameters": plain, "rope_scaling": yarn},
        {"rope_theta": 5e6, "partial_rotary_factor": 0.75}, {"rope_theta": 5e6, "rope_scaling": yarn},
        {"rope_theta": 5e6, "rope_scaling": {**yarn, "original_max_position_embeddings": 64}},
    ]  # fmt: skip

    def bare(config):
        return {key: value for key, value in config.items() if not key.startswith(("rope_", "partial"))}

    published = {config["model_type"]: config for config in PUBLISHED_MODELS.values() if config["model_type"] != "mimo"}
    configs = [
        {**config, "text_config": {**bare(config["text_config"]), **change}}
        if "text_config" in config
        else {**bare(config), **change}
        for config in published.values()
        for change in changes
    ]
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.processes.engine_configs"]
    answer = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True, timeout=600)
    assert answer.returncode == 0, answer.stderr[-2000:]
    compared = set()
    for config, read in zip(configs, json.loads(answer.stdout.splitlines()[-1]), strict=True):
        text = text_config_of(config)
        flags = model_args_from_hf(text)
        if not list(training_limits(text, flags)):
            assert {name: flags[name] for name in read} == read, text
            compared |= {text["model_type"], *read}
    assert compared == {*published, "rotary_base", "rotary_percent", "original_max_position_embeddings"}


@pytest.mark.parametrize(("written", "base"), [(1e6, 1000000), (10000.5, 10000.5)])
def test_a_rope_base_is_whole_where_the_config_has_a_whole_one(written, base):
    found = model_args_from_hf({**TINY_QWEN3_CONFIG, "rope_parameters": {"rope_theta": written}})["rotary_base"]
    assert (found, type(found)) == (base, type(base))


def test_unknown_type_lists_the_supported_ones():
    with pytest.raises(UserError, match="'gpt2' .* supported: deepseek_v3, .*qwen3_next"):
        model_args_from_hf({"model_type": "gpt2"})


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("qwen3-4B", "hidden_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("qwen3-30B-A3B", "num_experts"),
        ("glm5-744B-A40B", "index_n_heads"),
    ],
)
def test_incomplete_config_names_what_is_missing(name, entry):
    config = {key: value for key, value in PUBLISHED_MODELS[name].items() if key != entry}
    with pytest.raises(UserError, match=f"lacks .*{entry}"):
        model_args_from_hf(config)


def test_every_family_says_which_rope_it_knows():
    assert all("default" in family.rope_types for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3", QWEN3), ("Qwen3ForCausalLM", QWEN3), ("qwen3-4B-Instruct-2507", QWEN3), ("qwen2config", QWEN2),
        ("qwen2.5-0.5B", QWEN2), ("mimo", MIMO), ("MiMoForCausalLM", MIMO), ("MiMo-7B-RL", MIMO),
        ("qwen3-next-80B", FAMILIES["qwen3_next"]), ("qwen3_5", FAMILIES["qwen3_5"]), ("Qwen2_moe", FAMILIES["qwen2_moe"]),
        ("qwen3moe", FAMILIES["qwen3_moe"]), ("Glm4MoeLite", FAMILIES["glm4_moe_lite"]), ("glm4moe", FAMILIES["glm4_moe"]),
        ("Qwen3VLForConditionalGeneration", FAMILIES["qwen3_vl"]), ("qwen3-vl-4B", FAMILIES["qwen3_vl"]),
        ("Qwen3VLMoeForConditionalGeneration", FAMILIES["qwen3_vl_moe"]), ("qwen3_vl_moe", FAMILIES["qwen3_vl_moe"]),
        ("DeepseekV32ForCausalLM", FAMILIES["deepseek_v32"]), ("KimiK2", FAMILIES["kimi_k2"]), ("llama", FAMILIES["llama"]),
    ],
)  # fmt: skip
def test_the_family_of_a_name(name, family):
    assert FAMILIES_BY_NAME.get(family_name(name)) is family


def test_a_name_that_models_with_experts_share_with_others():
    """Qwen3.5 has one for both."""
    for name in ("Qwen3.5-35B-A3B", "qwen3_5", "qwen3_5_moe"):
        family = FAMILIES_BY_NAME[family_name(name)]
        for begin, layer in (
            ("decoder.layers.1.", "model.language_model."),
            ("mtp.layers.0.transformer_layer.", "mtp."),
        ):
            _, experts = family.find(f"{begin}mlp.experts.linear_fc2.weight3")
            _, dense = family.find(f"{begin}mlp.linear_fc2.weight")
            place = f"{layer}layers.{begin.split('.')[2]}.mlp."
            assert experts == (f"{place}experts.3.down_proj.weight",) and dense == (f"{place}down_proj.weight",), name


@pytest.mark.parametrize(
    "name",
    [
        "MiMoV2FlashForCausalLM",
        "Qwen2VLConfig",
        "qwen2.5-vl",
        "Qwen3Omni",
        "qwen",
        "mamba",
        "llama4",
        "Glm4vForConditionalGeneration",
        "Kimi-VL",
        "kimi-linear",
    ],
)
def test_names_that_mean_no_family(name):
    assert family_name(name) is None


def test_yarn_of_latent_attention():
    """Both scales of the softmax, and the kind of rotation wherever a factor changes it."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    plain = PUBLISHED_MODELS["glm4.7-30B-A3B"]
    found = model_args_from_hf({**plain, "rope_parameters": yarn})
    assert [found[name] for name in ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim")] == [
        "yarn",
        4.0,
        0.7,
        0.5,
    ]
    assert "rope_type" not in model_args_from_hf(plain)
    assert "rope_type" not in model_args_from_hf({**plain, "rope_parameters": {**yarn, "factor": 1.0}})


def test_parts_that_are_not_trained_are_left_out():
    """Of a checkpoint with a vision tower and layers for multi-token prediction."""
    families = {name: FAMILIES[name] for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")}
    assert FAMILIES["qwen3_vl"].may_be_left_out("model.visual.blocks.0.norm1.weight", 4)
    for name, family in families.items():
        for tensor in ("mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"):
            assert family.may_be_left_out(tensor, 4) and family.leaves_alone(tensor), name
            assert not family.may_be_left_out(tensor, 4, predictions=1) and not family.leaves_alone(tensor, 1), name
        assert not family.may_be_left_out(family.find("decoder.final_layernorm.weight")[1][0], 4), name
        assert family.may_be_left_out("model.visual.blocks.0.norm1.weight", 4) == (name != "qwen3_next"), name


@pytest.mark.parametrize(
    ("tensor", "exported", "with_predictions"),
    [
        ("model.layers.4.eh_proj.weight", True, False),
        ("model.layers.4.mlp.experts.0.gate_proj.weight_scale_inv", True, False),
        ("model.layers.5.eh_proj.weight", True, True),
        ("model.layers.4.embed_tokens.weight", False, False),
        ("model.layers.5.shared_head.head.weight", False, False),
        ("model.layers.4.self_attn.rotary_emb.inv_freq", False, False),
        ("model.layers.3.input_layernorm.weight", False, False),
        ("model.embed_tokens.weight", False, False),
    ],
)
def test_exports_have_layers_behind_the_models_last_one_that_a_run_has_not(tensor, exported, with_predictions):
    """But no copies of its embedding and head, which are trained."""
    for name in ("glm4_moe", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "minimax_m2"):
        found = [FAMILIES[name].is_exported_as_stored(tensor, 4, predictions) for predictions in (0, 1)]
        # Prediction layers of MiniMax-M2 do not come from its checkpoints.
        assert found == [exported, exported if name == "minimax_m2" else with_predictions], name
    assert not FAMILIES["qwen3_moe"].is_exported_as_stored(tensor, 4)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("glm4_moe_lite", "model.layers.4.eh_proj.weight"),
        ("deepseek_v3", "model.layers.4.mlp.experts.0.gate_proj.weight_scale_inv"),
        ("glm_moe_dsa", "model.layers.4.self_attn.indexer.wk.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_moe", "mtp.layers.0.mlp.experts.0.gate_proj.weight"),
    ],
)
def test_what_engines_draft_with_is_told_from_all_else_that_exports_have_as_it_is_stored(name, tensor):
    family = FAMILIES[name]
    assert [family.is_stored_prediction(tensor, 4, predictions) for predictions in (0, 1)] == [True, False]
    others = [
        "model.visual.blocks.0.norm1.weight", "model.layers.4.embed_tokens.weight", "model.layers.3.input_layernorm.weight",
        "model.layers.5.shared_head.head.weight", "lm_head.weight",
    ]  # fmt: skip
    assert not any(family.is_stored_prediction(other, 4) for other in others)


def test_engines_draft_with_the_layers_that_a_config_counts():
    """SGLang has a draft model of these families alone."""
    drafting = {name for name, family in FAMILIES.items() if family.drafting_layers({})}
    assert drafting == {
        "mimo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "deepseek_v3", "deepseek_v32", "kimi_k2", "qwen3_next", "qwen3_5",
        "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    }  # fmt: skip
    configs = [{"num_nextn_predict_layers": 0}, {"num_nextn_predict_layers": 1}, {"mtp_num_hidden_layers": 2}]
    assert [FAMILIES["deepseek_v3"].drafting_layers(config) for config in configs] == [0, 1, 2]
    assert FAMILIES["minimax_m2"].drafting_layers({"num_nextn_predict_layers": 1}) == 0


@pytest.mark.parametrize(
    ("name", "first"),
    [("mimo", "model.mtp_layers.0."), ("glm4_moe", "model.layers.36."), ("deepseek_v3", "model.layers.36.")],
)
def test_layers_for_multi_token_prediction_are_counted_on_only_where_they_follow(name, first):
    [norm, *_] = FAMILIES[name].of_model(36).find("mtp.layers.0.final_layernorm.weight")[1]
    assert norm.startswith(first)


@pytest.mark.parametrize(
    ("scales", "is_read_in_one_way"),
    [({}, True), ({"mscale": 1.0}, True), ({"mscale": 1.0, "mscale_all_dim": 0.0}, True),
     ({"mscale": 0.7, "mscale_all_dim": 0.5}, True), ({"mscale": 0.7}, False), ({"mscale_all_dim": 0.5}, False),
     ({"mscale": 0.0}, False), ({"mscale": 0.0, "mscale_all_dim": 1.0}, False)],
)  # fmt: skip
def test_scales_of_yarn_that_are_read_in_two_ways_are_refused(scales, is_read_in_one_way):
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, **scales}
    config = {**PUBLISHED_MODELS["glm4.7-30B-A3B"], "rope_parameters": yarn}
    if is_read_in_one_way:
        found = model_args_from_hf(config)
        assert (found["mscale"], found["mscale_all_dim"]) == (scales.get("mscale", 1), scales.get("mscale_all_dim", 0))
    else:
        with pytest.raises(UserError, match="set both"):
            model_args_from_hf(config)


def test_names_of_all_families():
    assert sorted(FAMILIES_BY_NAME) == [
        "deepseekv3", "deepseekv32", "glm4", "glm4moe", "glm4moelite", "glmmoedsa", "kimi", "llama", "mimo", "minimaxm2",
        "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen35moetext", "qwen35text", "qwen3moe", "qwen3next", "qwen3vl",
        "qwen3vlmoe",
    ]  # fmt: skip
    assert all(family.is_trained for family in FAMILIES_BY_NAME.values())
