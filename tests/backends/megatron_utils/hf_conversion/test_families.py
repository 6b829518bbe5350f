"""How the family of a model is found."""

import pytest

from slime.backends.megatron_utils.hf_conversion.families import (
    MIMO,
    QWEN_DENSE,
    family_of_directory,
    family_of_name,
    supported_model_types,
)
from slime.models.families import TRAINED_MODEL_TYPES
from slime.utils.errors import UserError


@pytest.mark.parametrize("name", ["qwen3", "Qwen3ForCausalLM", "qwen2config", "qwen2.5-0.5B", "qwen3-4B-Instruct-2507"])
def test_dense_qwen_by_name(name):
    assert family_of_name(name) is QWEN_DENSE


@pytest.mark.parametrize("name", ["mimo", "MiMoForCausalLM", "MiMo-7B-RL"])
def test_mimo_by_name(name):
    assert family_of_name(name) is MIMO


@pytest.mark.parametrize(
    "name", ["MiMoV2FlashForCausalLM", "qwen3moe", "qwen3-next-80B", "qwen3_5", "qwen2_moe", "Qwen2VLConfig", "llama"]
)
def test_other_families_are_not_taken_for_it(name):
    with pytest.raises(UserError, match="qwen2.*qwen3"):
        family_of_name(name)


def test_by_directory(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        family_of_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert family_of_directory(tmp_path) is QWEN_DENSE
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match="'mamba'"):
        family_of_directory(tmp_path)
    assert supported_model_types() == ["mimo", "qwen2", "qwen3"] == sorted(TRAINED_MODEL_TYPES)
