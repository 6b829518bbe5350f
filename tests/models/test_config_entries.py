"""Entries of a config.json whose kind is wrong."""

import pytest

from slime.models.config_entries import wrong_entries
from slime.utils.errors import UserError
from tests.support.models.args import TINY_QWEN3_CONFIG, command_line, parse, write_config
from tools.published_models import PUBLISHED_MODELS


@pytest.mark.parametrize(
    ("entry", "value", "kind"),
    [
        ("num_hidden_layers", 2.5, "a whole number above 0"),
        ("num_hidden_layers", "2", "a whole number above 0"),
        ("num_attention_heads", 0, "a whole number above 0"),
        ("hidden_size", -64, "a whole number above 0"),
        ("vocab_size", True, "a whole number above 0"),
        ("rope_theta", 0, "a number above 0"),
        ("rms_norm_eps", "1e-6", "a number above 0"),
        ("rms_norm_eps", float("nan"), "a number above 0"),
        ("tie_word_embeddings", "false", "true or false"),
        ("first_k_dense_replace", -1, "a whole number, at least 0"),
        ("mlp_only_layers", 3, "a list"),
        ("rope_scaling", "yarn", "an object"),
    ],
)
def test_a_wrong_kind(entry, value, kind):
    assert wrong_entries({**TINY_QWEN3_CONFIG, entry: value}) == [f"{entry} {value!r}, must be {kind}"]


def test_entries_of_rope_parameters():
    config = {**TINY_QWEN3_CONFIG, "rope_parameters": {"rope_theta": "big"}}
    assert wrong_entries(config) == ["rope_parameters: rope_theta 'big', must be a number above 0"]


def test_a_list_that_is_too_short_for_the_layers():
    config = {**TINY_QWEN3_CONFIG, "layer_types": ["full_attention"]}
    assert wrong_entries(config) == ["layer_types has 1 entries, must have one for each of the 2 layers"]


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_configs_have_the_right_kinds(name):
    config = PUBLISHED_MODELS[name]
    assert wrong_entries({**config, **config.get("text_config", {})}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_hidden_layers": "2", "vocab_size": True},
            "num_hidden_layers '2', must be a whole number above 0; vocab_size",
        ),
        ({"intermediate_size": None}, "it lacks intermediate_size"),
        ({"model_type": None}, "it lacks model_type; supported: "),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not known; supported: "),
        ({"model_type": ["qwen3"]}, "model_type ['qwen3'], must be text"),
    ],
)
def test_a_run_is_told_the_file(tmp_path, changes, message):
    command_line(tmp_path)
    broken = write_config(tmp_path / "broken", **changes)
    with pytest.raises(UserError) as error:
        parse(tmp_path, "--hf-checkpoint", str(broken))
    assert f"{broken}/config.json: {message}" in str(error.value)
