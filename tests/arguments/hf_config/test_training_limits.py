import re

import pytest

from slime.arguments.hf_config import SUPPORTED_MODEL_TYPES, TRAINED_MODEL_TYPES, model_args_from_hf
from slime.arguments.hf_config.reading import text_config_of
from slime.arguments.hf_config.training_limits import training_limits
from tests.support.args import TINY_QWEN3_CONFIG
from tests.support.published_models import PUBLISHED_MODELS


def limits_of(config: dict) -> list[str]:
    return training_limits(config, model_args_from_hf(config))


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_published_models_lack_nothing_but_their_layers(name):
    config = text_config_of(PUBLISHED_MODELS[name])
    if config["model_type"] in TRAINED_MODEL_TYPES:
        assert limits_of(config) == []
    else:
        (message,) = limits_of(config)
        assert message.startswith(f"model_type {config['model_type']!r}")
        assert "planned by --dry-run, but its layers are not built yet" in message and "qwen2 or qwen3" in message


def test_trained_types_are_supported_types():
    assert set(TRAINED_MODEL_TYPES) < set(SUPPORTED_MODEL_TYPES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' cannot be trained; only 'silu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type 'llama3' .* only 'default'"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
    ],
)
def test_what_would_be_built_differently(changes, message):
    (limit,) = limits_of({**TINY_QWEN3_CONFIG, **changes})
    assert re.search(message, limit)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama3.1-8B-Instruct", {"rope_scaling": {"rope_type": "dynamic"}}, "only 'default' or 'llama3' is built"),
        ("deepseek-v3", {"norm_topk_prob": False}, "norm_topk_prob False cannot be trained with a sigmoid router"),
        ("glm5-744B-A40B", {"rope_parameters": {"rope_type": "longrope"}}, "only 'default' or 'yarn' is built"),
    ],
)
def test_limits_of_families_that_are_only_planned(name, changes, expected):
    assert expected in limits_of({**PUBLISHED_MODELS[name], **changes})[1]
