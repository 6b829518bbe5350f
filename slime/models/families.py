"""One entry per model type: the parts that its config describes, what its config may leave out, and constants.

A constant is true of every published model of the type and stands in no config. To add a family, add an entry here.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.models import config_entries as hf
from slime.models.config_entries import wrong_entries
from slime.utils.errors import UserError

Config = dict[str, Any]
Part = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """How a config of one model type becomes flags.

    parts: later ones win where two say something about one flag.
    constants: flags that hold whatever the config says.
    absent: entries that a config of this type may lack, with the value that it then means.
    rope_types: kinds of RoPE scaling that the family's layers know.
    trained: the trainer builds its layers and converts its weights; else it is only planned.
    """

    parts: tuple[Part, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)
    trained: bool = False

    def model_args(self, config: Config) -> dict[str, Any]:
        """The flags of the model of `config`, under their names and with the types they have in `args`."""
        complete = {**self.absent, **config}
        found: dict[str, Any] = {}
        for part in self.parts:
            found.update(part(complete))
        return {**found, **self.constants}


_DENSE = (hf.decoder, hf.grouped_query_attention)
_SOFTMAX_MOE = (*_DENSE, hf.experts, hf.softmax_router)
_SIGMOID_MOE = (*_DENSE, hf.experts, hf.sigmoid_router)
_LATENT_MOE = (
    hf.decoder, hf.latent_attention, hf.experts, hf.sigmoid_router, hf.frozen_expert_bias,
)  # fmt: skip

_DEEPSEEK = (*_LATENT_MOE, hf.expert_groups, hf.yarn_attention_scale)
_DEEPSEEK_CONSTANTS = {
    "attention_softmax_in_fp32": True,
    "apply_rope_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
}
_GLM5_SPEC = ["slime_plugins.models.glm5.glm5", "get_glm5_spec"]
_QWEN3_NEXT_CONSTANTS = {"qk_layernorm": True, "layernorm_zero_centered_gamma": True}
_QWEN3_5_CONSTANTS = {**_QWEN3_NEXT_CONSTANTS, "spec": ["slime_plugins.models.qwen3_5", "get_qwen3_5_spec"]}

_QWEN3_5 = Family((*_DENSE, hf.partial_rope, hf.linear_attention), _QWEN3_5_CONSTANTS, {"partial_rotary_factor": 0.25})
_QWEN3_5_MOE = Family(
    (*_SOFTMAX_MOE, hf.partial_rope, hf.linear_attention),
    {**_QWEN3_5_CONSTANTS, "moe_shared_expert_gate": True},
    {"partial_rotary_factor": 0.25},
)

FAMILIES: dict[str, Family] = {
    "qwen2": Family(_DENSE, {"add_qkv_bias": True}, trained=True),
    "qwen3": Family(_DENSE, {"qk_layernorm": True}, trained=True),
    "llama": Family((*_DENSE, hf.llama3_rope), rope_types=("default", "llama3")),
    "mimo": Family((*_DENSE, hf.mtp_layers), {"add_qkv_bias": True}, trained=True),
    "glm4": Family(
        (*_DENSE, hf.qkv_bias, hf.partial_rope),
        {
            "spec": ["slime_plugins.models.glm4", "get_glm_spec"],
            "post_self_attn_layernorm": True,
            "post_mlp_layernorm": True,
            "rotary_interleaved": True,
            "apply_rope_fusion": False,
        },
        {"partial_rotary_factor": 0.5, "attention_bias": True},
    ),
    "qwen2_moe": Family(
        (*_SOFTMAX_MOE, hf.qkv_bias),
        {"moe_shared_expert_gate": True},
        {"qkv_bias": True, "norm_topk_prob": False},
    ),
    "qwen3_moe": Family((*_SOFTMAX_MOE, hf.partial_rope), {"qk_layernorm": True}, {"norm_topk_prob": False}),
    "qwen3_next": Family(
        (*_SOFTMAX_MOE, hf.partial_rope, hf.linear_attention),
        {
            **_QWEN3_NEXT_CONSTANTS,
            "moe_shared_expert_gate": True,
            "spec": ["slime_plugins.models.qwen3_next", "get_qwen3_next_spec"],
        },
        {"partial_rotary_factor": 0.25},
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "glm4_moe": Family(
        (*_SIGMOID_MOE, hf.frozen_expert_bias, hf.qkv_bias, hf.qk_norm, hf.partial_rope),
        {"moe_token_dispatcher_type": "alltoall"},
        {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    ),
    "glm4_moe_lite": Family(
        _LATENT_MOE,
        {
            # Of no effect on latent attention; the published launch scripts have it.
            "add_qkv_bias": True,
            "add_position_embedding": False,
            "apply_rope_fusion": False,
            "make_vocab_size_divisible_by": 64,
        },
        {"first_k_dense_replace": 1},
        rope_types=("default", "yarn"),
    ),
    "glm_moe_dsa": Family(
        (*_LATENT_MOE, hf.sparse_attention),
        {
            "spec": _GLM5_SPEC,
            "add_position_embedding": False,
            "enable_experimental": True,
            "allgather_cp": True,
            "make_vocab_size_divisible_by": 16,
        },
        {"first_k_dense_replace": 3},
        rope_types=("default", "yarn"),
    ),
    "deepseek_v3": Family(_DEEPSEEK, _DEEPSEEK_CONSTANTS, {"first_k_dense_replace": 3}, ("default", "yarn")),
    "deepseek_v32": Family(
        (*_DEEPSEEK, hf.sparse_attention),
        {**_DEEPSEEK_CONSTANTS, "spec": _GLM5_SPEC, "enable_experimental": True, "allgather_cp": True},
        {"first_k_dense_replace": 3},
        ("default", "yarn"),
    ),
    "kimi_k2": Family(
        _DEEPSEEK,
        # The width that published launch scripts give; latent attention does not read it.
        {**_DEEPSEEK_CONSTANTS, "kv_channels": 64},
        {"first_k_dense_replace": 1},
        ("default", "yarn"),
    ),
    "minimax_m2": Family(
        (*_SIGMOID_MOE, hf.partial_rope),
        {
            "spec": ["slime_plugins.models.minimax_m2", "get_minimax_m2_layer_spec"],
            "qk_layernorm": True,
            "apply_rope_fusion": False,
            "attention_softmax_in_fp32": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        },
    ),
}

# Text-only checkpoints of multimodal models carry the type of their language model; it is no type of its own.
# Those whose layers the trainer builds.
TRAINED_MODEL_TYPES = tuple(name for name, family in FAMILIES.items() if family.trained)
# What a `--model-name` without punctuation contains, the first that fits.
FAMILY_NAMES = (
    "minimaxm2", "glm4moelite", "deepseekv3", "deepseekv32", "glmmoedsa", "kimi", "glm4moe", "glm4", "qwen3next", "qwen35",
    "qwen3vl", "qwen2moe", "qwen3moe", "qwen2", "qwen3", "llama", "mimo",
)  # fmt: skip
SUPPORTED_MODEL_TYPES = tuple(sorted(name for name in FAMILIES if not name.endswith("_text")))


def model_args_from_hf(config: Config) -> dict[str, Any]:
    """Every flag that says something about the model of `config` (as `read_hf_config` returns it).

    Raises:
        UserError: an unknown `model_type`, entries of the wrong kind, or entries that every model of this type has are
            missing. The message speaks of `it`: who called knows the file.
    """
    family = family_of(config)
    wrong = wrong_entries(config)
    if wrong:
        raise UserError("; ".join(wrong))
    return family.model_args(config)


def family_of(config: Config) -> Family:
    """The entry of the config's `model_type`.

    Raises:
        UserError: there is none; the message lists the supported types.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str | None):
        raise UserError(f"model_type {model_type!r}, must be text")
    if model_type not in FAMILIES:
        given = "it lacks model_type" if model_type is None else f"model_type {model_type!r} is not known"
        raise UserError(f"{given}; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    return FAMILIES[model_type]


def family_name(name: str) -> str | None:
    """The family that a `--model-name` means; None where there is none."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return next((family for family in FAMILY_NAMES if family in plain), None)
