"""Which directories and names can be converted."""

import pytest
import torch

from slime.backends.megatron_utils.hf_conversion import convert_to_hf, family_of_directory
from slime.models.families import TRAINED_MODEL_TYPES
from slime.models.qwen import QWEN3
from slime.utils.errors import UserError


@pytest.mark.parametrize(
    "name", ["MiMoV2FlashForCausalLM", "glm4moe", "qwen3-next-80B", "qwen3_5", "Qwen2VLConfig", "llama"]
)
def test_names_of_other_families_are_refused(name):
    with pytest.raises(UserError, match="qwen2.*qwen3"):
        convert_to_hf(None, name, "decoder.final_layernorm.weight", torch.ones(1))


def test_by_directory(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        family_of_directory(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert family_of_directory(tmp_path) is QWEN3
    for model_type in ("mamba", "llama"):
        (tmp_path / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        with pytest.raises(UserError, match=f"'{model_type}' is not one of .*mimo.*qwen2.*qwen3"):
            family_of_directory(tmp_path)
    assert sorted(TRAINED_MODEL_TYPES) == ["mimo", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
