"""The families of models that are known; how the family of a model is found, by its config or by its name; and what of a config
cannot be trained.

Most families stand in this file. Those of Qwen, and those with latent attention, share parts among each other, and have files
beside this one.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from slime.models import config_entries as hf
from slime.models.family import (
    ATTENTION,
    DENSE_LAYER,
    ENDS,
    EXPERT_BIAS,
    LAYER,
    LAYER_NORMS,
    Config,
    Family,
    layer_rule,
    prediction_layer,
    routed_experts,
    shared_experts,
)
from slime.models.latent import LATENT
from slime.models.qwen import QWEN
from slime.models.tensor_layouts import FusedGatedLinear, Replicated, Sharded, SwappedInputs
from slime.utils.errors import UserError

_DENSE = (hf.decoder, hf.grouped_query_attention)
_SIGMOID_MOE = (*_DENSE, hf.experts, hf.sigmoid_router)

# Llama 3 and its kin; the scaling of the rotary embedding came with 3.1.
LLAMA = Family(
    model_types=("llama",),
    names=("llama",),
    other_models=("llama4",),
    parts=(*_DENSE, hf.llama3_rope),
    rope_types=("default", "llama3"),
    rules=ENDS + DENSE_LAYER,
    fsdp=True,
)

# It has the layers of Qwen2, and layers for multi-token prediction beside them. The projection of these takes
# [state; embedding], whereas Megatron's takes [embedding; state].
MIMO = Family(
    model_types=("mimo",),
    names=("mimo",),
    other_models=("mimov2", "mimovl", "mimoaudio"),
    parts=(*_DENSE, hf.mtp_layers),
    constants={"add_qkv_bias": True},
    rules=(
        *ENDS,
        *DENSE_LAYER,
        *prediction_layer(
            DENSE_LAYER,
            f"model.mtp_layers.{LAYER}.",
            ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
            SwappedInputs(),
        ),
    ),
    predictions=re.compile(r"^model\.mtp_layers\."),
    engines_draft=True,
    engines_have_stages=False,
)

# Every layer has experts, and the norms of queries and keys span all heads.
MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    names=("minimaxm2",),
    parts=(*_SIGMOID_MOE, hf.partial_rope),
    constants={
        "qk_layernorm": True,
        "apply_rope_fusion": False,
        "attention_softmax_in_fp32": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    },
    layer_spec="slime_plugins.models.minimax_m2.get_minimax_m2_layer_spec",
    absent={"rope_theta": 5000000},
    engine_flags={
        "rotary_percent": ("rotary_dim", lambda config: hf.rotated_share(config) if "rotary_dim" in config else 1.0),
        "qk_layernorm": ("use_qk_norm", lambda config: config.get("use_qk_norm", False)),
        "moe_router_enable_expert_bias": ("use_routing_bias", lambda config: config.get("use_routing_bias", False)),
    },
    qk_norm_spans_heads=True,
    rules=(
        *ENDS,
        *LAYER_NORMS,
        *ATTENTION,
        *routed_experts("block_sparse_moe", ("w1", "w3", "w2")),
        layer_rule("mlp.router.expert_bias", "block_sparse_moe.e_score_correction_bias", Replicated()),
    ),
    predictions_follow=True,
)

# GLM-4 and GLM-Z1 are dense. They have one tensor for gate and up, and further norms behind attention and MLP of every layer.
_GLM_NORMS = tuple(
    layer_rule(f"{name}.weight", f"{name}.weight", Replicated())
    for name in ("post_self_attn_layernorm", "post_mlp_layernorm")
)
_GLM_MLP = (
    layer_rule("mlp.linear_fc1.weight", "mlp.gate_up_proj.weight", FusedGatedLinear()),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Sharded(dim=1)),
)

GLM4 = Family(
    model_types=("glm4",),
    names=("glm4",),
    other_models=("glm4v",),
    parts=(hf.decoder, hf.grouped_query_attention, hf.qkv_bias, hf.partial_rope),
    constants={
        "post_self_attn_layernorm": True,
        "post_mlp_layernorm": True,
        "rotary_interleaved": True,
        "apply_rope_fusion": False,
    },
    absent={"partial_rotary_factor": 0.5, "attention_bias": True},
    layer_spec="slime_plugins.models.glm4.get_glm_spec",
    rules=ENDS + LAYER_NORMS + ATTENTION + _GLM_NORMS + _GLM_MLP,
    fsdp=True,
)

# GLM-4.5 and later have leading dense layers, then layers with experts.
_GLM_LAYER_WITH_EXPERTS = DENSE_LAYER + routed_experts() + EXPERT_BIAS + shared_experts("mlp.shared_experts")
GLM4_MOE = Family(
    model_types=("glm4_moe",),
    names=("glm4moe",),
    parts=(
        hf.decoder,
        hf.grouped_query_attention,
        hf.experts,
        hf.sigmoid_router,
        hf.frozen_expert_bias,
        hf.qkv_bias,
        hf.qk_norm,
        hf.partial_rope,
    ),
    constants={"moe_token_dispatcher_type": "alltoall"},
    absent={"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    rules=ENDS + _GLM_LAYER_WITH_EXPERTS + prediction_layer(_GLM_LAYER_WITH_EXPERTS),
    predictions_follow=True,
    engines_draft=True,
)

ALL: tuple[Family, ...] = (
    *QWEN,
    MIMO,
    LLAMA,
    GLM4,
    GLM4_MOE,
    *LATENT,
    MINIMAX_M2,
)

FAMILIES: dict[str, Family] = {model_type: family for family in ALL for model_type in family.model_types}
# Types whose layers the trainer builds.
TRAINED_MODEL_TYPES = tuple(name for name, family in FAMILIES.items() if family.is_trained)
# A multimodal model's type stands for that of its language model (`…_text`) too.
SUPPORTED_MODEL_TYPES = tuple(sorted(name for name in FAMILIES if not name.endswith("_text")))

FAMILIES_BY_NAME: dict[str, Family] = {name: family for family in ALL for name in family.names}
_OTHER_MODELS = tuple(name for family in ALL for name in family.other_models)


def model_args_from_hf(config: Config) -> dict[str, Any]:
    """All flags that describe the model of `config` (as `read_hf_config` returns it).

    Raises:
        UserError: the `model_type` is unknown, entries have a wrong type, or entries that every model of this type has are
            missing. The message says `it` for the config, since the caller knows the file.
    """
    family = family_of(config)
    wrong = hf.wrong_entries(config)
    if wrong:
        raise UserError("; ".join(wrong))
    return family.model_args(hf.without_nulls(config))


def family_of(config: Config) -> Family:
    """The family of the config's `model_type`.

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


def family_name(model_name: str) -> str | None:
    """The key of `FAMILIES_BY_NAME` that a `--model-name` means, such as "qwen3" for "Qwen3ForCausalLM"; None if none."""
    plain = re.sub(r"[^a-z0-9]", "", model_name.lower())
    longest = max((name for name in (*FAMILIES_BY_NAME, *_OTHER_MODELS) if name in plain), key=len, default=None)
    return longest if longest in FAMILIES_BY_NAME else None


def misnomer(model_name: str, config: Config) -> Iterator[str]:
    """A message if the rules of `--model-name` would give the weights of the config's model wrong names; else nothing."""
    named, family = FAMILIES_BY_NAME.get(family_name(model_name) or ""), family_of(config)
    if named is not None and named.is_trained and named.rules != family.rules:
        yield (
            f"--model-name {model_name} means {named.names[0]}, and config.json of --hf-checkpoint is of type "
            f"{config['model_type']}; drop --model-name, or give {' or '.join(family.names)}"
        )


def training_limits(config: Config, derived: dict[str, Any]) -> Iterator[str]:
    """One message for everything in a config that the trainer would build otherwise than the engines, so that it cannot be
    trained.

    Args:
        config: of a known `model_type`.
        derived: its flags (`model_args_from_hf`).
    """
    config = hf.without_nulls(config)
    model_type, family = config["model_type"], family_of(config)
    if model_type not in TRAINED_MODEL_TYPES:
        yield (
            f"model_type {model_type!r} of --hf-checkpoint is planned by --dry-run, but its layers are not built yet; "
            f"models of type {' or '.join(TRAINED_MODEL_TYPES)} can be trained"
        )
    rope = hf.rope_type(config)
    fixed = hf.FIXED_BY_SCALING.get(rope, {}) if rope in family.rope_types else {}
    told = {"original_max_position_embeddings": hf.unscaled_length(config), **hf.rope_scaling(config)}
    scaling = hf.without_nulls(told)
    attention_bias = bool(config.get("attention_bias", False))
    has_biases = derived["add_qkv_bias"] and not derived["multi_latent_attention"]
    scores = derived.get("moe_router_score_function")
    normalised = (True,) if scores == "sigmoid" else (True, False)
    found = (
        ("hidden_act", config.get("hidden_act", "silu"), ("silu",)),
        ("rope_type", rope, family.rope_types),
        ("use_sliding_window", bool(config.get("use_sliding_window", False)), (False,)),
        ("attention_bias", attention_bias, (True, False) if has_biases else (False,)),
        ("rope_interleave", config.get("rope_interleave", True), (True,)),
        ("mlp_bias", bool(config.get("mlp_bias", False)), (False,)),
        ("scoring_func", scores and config.get("scoring_func") or scores, (scores,)),
        ("norm_topk_prob", config.get("norm_topk_prob") is not False, normalised),
        *((name, scaling.get(name, only), (only,)) for name, only in fixed.items()),
    )
    for name, value, supported in found:
        if value not in supported:
            yield (
                f"config.json of --hf-checkpoint: {name} {value!r} cannot be trained; only "
                f"{' or '.join(repr(option) for option in supported)} is built"
            )
    if hf.ropes_differ(config):
        yield (
            "config.json of --hf-checkpoint: rope_parameters and rope_scaling say different things, and engines may take the "
            "one that the trainer does not; leave one of them, with its rope_theta"
        )
    for flag, (entry, as_engines_read_it) in family.engine_flags.items():
        value = as_engines_read_it(config)
        if value is not None and value != derived[flag]:
            yield (
                f"config.json of --hf-checkpoint: engines read {entry} at its top level alone, which makes {flag} {value!r}, "
                f"and by all its entries the model has {derived[flag]!r}; write a {entry} there that says so"
            )
    groups, of_groups = derived.get("moe_router_num_groups") or 1, derived.get("moe_router_group_topk") or 1
    if groups > 1 and derived["moe_router_topk"] // of_groups != 2:
        # The engines take two experts of each chosen group, Megatron as many as the group gives.
        yield (
            "config.json of --hf-checkpoint: groups of experts are chosen by their best two; num_experts_per_tok "
            f"{derived['moe_router_topk']} of topk_group {of_groups} groups cannot be trained"
        )


def undivided_by_engines(config: Config, stages: int) -> Iterator[str]:
    """Why SGLang 0.5.21 cannot divide the config's model into `stages` pipeline stages, or would go wrong; nothing if it can.

    Either it does not divide models of this type, or there are fewer layers than stages, or the head is tied to the embedding,
    which the first stage has: with most types the last stage then computes with a head that no weight reaches.
    """
    if stages == 1:
        return
    kind, layers = config.get("model_type"), config.get("num_hidden_layers")
    # `wrong_entries` reports entries of a wrong type.
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is not None and not family.engines_have_stages:
        yield f"SGLang does not divide models of type {kind}; leave it out"
    elif config.get("tie_word_embeddings") and not (family is not None and family.stages_tie):
        yield f"SGLang's last stage of a model of type {kind} gets no head that is the embedding; leave it out"
    elif type(layers) is int and layers < stages:
        yield f"the model has {layers} layers; give {layers}, or fewer"


def qk_norm_spans_heads(spec: Sequence[str]) -> bool:
    """Whether norms of queries and keys have a weight for each channel of all heads. No flag says so, only the family.

    Args:
        spec: module and name of a layer spec (`--spec`).
    """
    return any(family.qk_norm_spans_heads for family in ALL if family.layer_spec == ".".join(spec))
