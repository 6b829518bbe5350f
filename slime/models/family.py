"""A family of models as data: how its config becomes flags, and which Hugging Face tensors its weights are in checkpoints.

Flags come from a list of parts (`config_entries`). Weights are described by a table of rules, each of which names a Megatron
parameter, its HF tensors and one of a few layouts (`tensor_layouts`). Rules that decoder-only families share stand in this
file. `families` registers all families; no other code compares their names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from slime.models.tensor_layouts import GatedLinear, Layout, QueryKeyValue, Replicated, Sharded, Vocabulary

Config = dict[str, Any]
Part = Callable[[Config], dict[str, Any]]

HEAD = "lm_head.weight"
LAYER = "{layer}"
EXPERT = "{expert}"
_LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
# In the local layer spec each expert is a module; in Transformer Engine one module has a numbered weight for each expert.
_EXPERT_NUMBER = re.compile(
    r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
)
# The attention modules of transformers, for softmax and linear attention. A layer may run such a module as it is; the
# parameters are then called as in transformers.
ATTENTION_MODULES = ("self_attn", "linear_attn")
_AS_IN_TRANSFORMERS = re.compile(
    rf"^decoder\.layers\.{re.escape(LAYER)}\.self_attention\.((?:{'|'.join(ATTENTION_MODULES)})\..+)$"
)
_PREDICTION_LAYERS = "mtp."
# Config entries that count layers for multi-token prediction.
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Tensors in which such a layer has a copy of the model's embedding or output layer.
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter.

    megatron: its names, with `{layer}` for the layer's number and `{expert}` for the expert's; several if the layer specs
        name it differently.
    hf: the HF tensors of which it is made, with the same numbers, in the order that the layout expects.
    keeps_float32: engines have it in float32 among weights of 16 bits; the trainer does so if the checkpoint does.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    keeps_float32: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert has such a parameter, which is then spread over expert-parallel ranks and cut as experts are."""
        return EXPERT in self.megatron[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    model_types: `model_type` values of its configs.
    names: a `--model-name` that contains one of these, in lower case without punctuation, means this family ("qwen3").
    other_models: longer names that contain one of `names` but mean models that are not known here.

    parts: functions from a config to flags; if two set the same flag, the later one wins.
    constants: flags that hold for every published model of the type, whatever the config says.
    absent: entries that a config of this type may lack, with the values that are then meant.
    rope_types: types of RoPE scaling that the family's layers implement.
    engine_flags: flags that SGLang 0.5.21 takes from one entry alone where a part reads several: by flag, that entry, and what
        it makes of the config, None if it has engines fail.

    layer_spec: import path of the function that builds its decoder layers, which the backend resolves (`--spec`); None: the
        layers that the backend has for every decoder-only model.
    qk_norm_spans_heads: a norm of queries or keys has a weight for each channel of all heads.

    rules: which HF tensors make up each Megatron parameter; a family without rules is planned and not trained.
    ignored: matches HF tensors that are no weights of the model.
    not_trained: matches HF tensors of parts of the model that are not built: they are not loaded, and exports copy them as
        they are.
    predictions: matches HF tensors of layers for multi-token prediction; None if the family's checkpoints have none. Tensors
        that `not_trained` matches too are trained if a run asks for such layers.
    predictions_follow: layers for multi-token prediction are numbered on, behind the last decoder layer.
    num_layers: how many decoder layers the model at hand has; set by `of_model`, only if predictions follow.
    engines_draft: SGLang can make a draft model of the family's layers for multi-token prediction.
    engines_have_stages: SGLang divides models of the family into pipeline stages.
    stages_tie: with stages and tied embeddings, SGLang keeps the head of the last stage equal to the embedding.
    stacks_experts: checkpoints have all experts of a layer in one tensor, in published ones with rows and columns exchanged;
        exports have them in the same way as the checkpoint from which they come.
    fsdp: the FSDP backend can train the model that transformers makes of its config: the parameters have the names of the
        checkpoint, and samples in one stream do not attend to each other.
    """

    model_types: tuple[str, ...]
    names: tuple[str, ...]
    other_models: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)
    engine_flags: Mapping[str, tuple[str, Callable[[Config], Any]]] = dataclasses.field(default_factory=dict)
    layer_spec: str | None = None
    qk_norm_spans_heads: bool = False
    rules: tuple[Rule, ...] = ()
    ignored: re.Pattern[str] = re.compile(r"\.rotary_emb\.inv_freq$")
    not_trained: re.Pattern[str] | None = None
    predictions: re.Pattern[str] | None = None
    predictions_follow: bool = False
    num_layers: int = 0
    engines_draft: bool = False
    engines_have_stages: bool = True
    stages_tie: bool = False
    stacks_experts: bool = False
    fsdp: bool = False

    def of_model(self, num_layers: int) -> Family:
        """The family for a model of `num_layers` decoder layers, on which names of prediction layers may depend."""
        return dataclasses.replace(self, num_layers=num_layers) if self.predictions_follow else self

    @property
    def is_trained(self) -> bool:
        """Whether the trainer builds its layers and converts its weights."""
        return bool(self.rules)

    def model_args(self, config: Config) -> dict[str, Any]:
        """The flags of the model of `config`, with the names and the types that they have in `args`."""
        complete = {**self.absent, **config}
        found: dict[str, Any] = {}
        for part in self.parts:
            found.update(part(complete))
        return {**found, **self.constants, "spec": self.layer_spec.rsplit(".", 1) if self.layer_spec else None}

    def find(self, megatron_name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule for a global Megatron name (with or without wrapper prefixes), and its HF names with the numbers of layer
        and expert filled in.

        Raises:
            KeyError: there is no rule for this name.
        """
        name = strip_wrappers(megatron_name)
        rule = self._rule(name)
        if rule is None:
            raise KeyError(f"no conversion rule for the Megatron parameter {name}")
        before = self.num_layers if name.startswith(_PREDICTION_LAYERS) else 0
        places = ((LAYER, _LAYER_NUMBER.search(name), before), (EXPERT, _EXPERT_NUMBER.search(name), 0))
        numbers = [(place, str(int(match.group()) + first)) for place, match, first in places if match]
        return rule, tuple(_with_numbers(hf_name, numbers) for hf_name in rule.hf)

    def leaves_out(self, megatron_name: str) -> bool:
        """Whether this is a parameter of a layer for multi-token prediction that the family's HF checkpoints do not have."""
        name = strip_wrappers(megatron_name)
        return name.startswith(_PREDICTION_LAYERS) and self._rule(name) is None

    def is_prediction(self, hf_name: str) -> bool:
        """Whether an HF tensor belongs to a layer for multi-token prediction."""
        return self.predictions is not None and self.predictions.search(hf_name) is not None

    def is_stored_prediction(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether an HF tensor belongs to a prediction layer behind the `predictions` ones that the run has, and is no copy of
        the model's embedding or output layer."""
        is_of_layer = self.is_prediction(hf_name) or self._behind(hf_name, num_layers) >= 0
        return is_of_layer and self.is_exported_as_stored(hf_name, num_layers, predictions)

    def drafting_layers(self, config: Config) -> int:
        """How many layers for multi-token prediction engines can make a draft model of: the number in `config`; 1 if there is
        none."""
        told = (config[name] for name in _PREDICTION_COUNTS if config.get(name) is not None)
        return next(told, 1) if self.engines_draft else 0

    def leaves_alone(self, hf_name: str, predictions: int = 0) -> bool:
        """Whether an HF tensor belongs to a part that a run with `predictions` prediction layers does not train."""
        if self.not_trained is None or (predictions > 0 and self.is_prediction(hf_name)):
            return False
        return self.not_trained.search(hf_name) is not None

    def may_be_left_out(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether the model can do without an HF tensor: a buffer; or a tensor of a part that is not trained, or of a layer
        behind the model's `num_layers` and its `predictions` prediction layers; or a prediction layer's copy of a tensor of
        the model."""
        is_copy = self._behind(hf_name, num_layers) >= 0 and hf_name.endswith(_COPIES)
        is_of_model = not is_copy and self.ignored.search(hf_name) is None
        return not is_of_model or self.is_exported_as_stored(hf_name, num_layers, predictions)

    def left_out(self, hf_names: Collection[str], config: Config, predictions: int = 0) -> set[str]:
        """The tensors out of `hf_names`, those of a checkpoint with `config`, that its model can do without: those that
        `may_be_left_out`, and a tied head."""
        tied = {HEAD} if config.get("tie_word_embeddings", False) else set()
        layers = config["num_hidden_layers"]
        return {name for name in hf_names if name in tied or self.may_be_left_out(name, layers, predictions)}

    def is_exported_as_stored(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether exports copy an HF tensor from the checkpoint, because it is not trained: it belongs to another part, or to a
        layer behind the model's `num_layers` and its `predictions` prediction layers."""
        if self.leaves_alone(hf_name, predictions):
            return True
        if hf_name.endswith(_COPIES) or self.ignored.search(hf_name) is not None:
            return False
        # A run has none of the checkpoint's layers if the family has no rules for them.
        own = 0 if self.leaves_out(f"{_PREDICTION_LAYERS}layers.0.eh_proj.weight") else predictions
        return self._behind(hf_name, num_layers) >= own

    def _behind(self, hf_name: str, num_layers: int) -> int:
        """The number, from 0 on, of the HF tensor's layer among those behind the model's `num_layers`; negative if there is
        none."""
        number = _LAYER_NUMBER.search(hf_name) if self.predictions_follow else None
        return -1 if number is None else int(number.group()) - num_layers

    def _rule(self, name: str) -> Rule | None:
        generic = _EXPERT_NUMBER.sub(EXPERT, _LAYER_NUMBER.sub(LAYER, name, count=1))
        found = next((rule for rule in self.rules if generic in rule.megatron), None)
        return self._passed_through(generic) if found is None else found

    def _passed_through(self, generic: str) -> Rule | None:
        """The rule for a parameter of an attention module of transformers: whole on every rank, under the same name."""
        name = _AS_IN_TRANSFORMERS.match(generic)
        if name is None:
            return None
        (norm,) = self._rule(f"decoder.layers.{LAYER}.input_layernorm.weight").hf
        hf_name = norm.removesuffix("input_layernorm.weight") + name[1]
        keeps_float32 = any(rule.keeps_float32 for rule in self.rules if hf_name in rule.hf)
        return Rule((generic,), (hf_name,), Replicated(), keeps_float32)


def strip_wrappers(name: str) -> str:
    """A parameter's name without the `module.` prefixes of data-parallel and mixed-precision wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def next_expert(megatron_name: str, steps: int) -> str:
    """The name of the same parameter in the expert `steps` numbers further on; a name without an expert stays as it is."""
    return _EXPERT_NUMBER.sub(lambda found: str(int(found.group()) + steps), megatron_name)


def _with_numbers(name: str, numbers: list[tuple[str, str]]) -> str:
    for place, number in numbers:
        name = name.replace(place, number)
    return name


def layer_rule(megatron: str | tuple[str, ...], hf: str | tuple[str, ...], layout: Layout) -> Rule:
    """A rule for a parameter of a decoder layer. Names are relative to the layer."""
    megatron = (megatron,) if isinstance(megatron, str) else megatron
    hf = (hf,) if isinstance(hf, str) else hf
    return Rule(
        tuple(f"decoder.layers.{LAYER}.{name}" for name in megatron),
        tuple(f"model.layers.{LAYER}.{name}" for name in hf),
        layout,
    )


def prediction_layer(
    inner: tuple[Rule, ...],
    hf: str = f"model.layers.{LAYER}.",
    names: tuple[str, str, str, str] = ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    projection: Layout | None = None,
    own: str | None = None,
) -> tuple[Rule, ...]:
    """The rules of layers for multi-token prediction.

    Args:
        inner: rules of the decoder layer inside each of them.
        hf: prefix of the HF names of that decoder layer.
        names: HF names of the rest: norms of embedding and state, projection of both, norm of the result.
        projection: layout of the projection of [embedding; state]; None: cut along the rows.
        own: prefix of the HF names of the rest; None: `hf`.
    """
    megatron = f"{_PREDICTION_LAYERS}layers.{LAYER}."

    def inside(rule: Rule) -> Rule:
        renamed = (name.replace(f"decoder.layers.{LAYER}.", f"{megatron}transformer_layer.") for name in rule.megatron)
        there = (name.replace(f"model.layers.{LAYER}.", hf) for name in rule.hf)
        return dataclasses.replace(rule, megatron=tuple(renamed), hf=tuple(there))

    layouts = (Replicated(), Replicated(), projection or Sharded(dim=0), Replicated())
    begin = hf if own is None else own
    parts = zip(("enorm", "hnorm", "eh_proj", "final_layernorm"), names, layouts, strict=True)
    return (
        *(Rule((f"{megatron}{ours}.weight",), (f"{begin}{theirs}.weight",), layout) for ours, theirs, layout in parts),
        *map(inside, inner),
    )


def _query_key_value(kind: str) -> Rule:
    hf = tuple(f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return layer_rule(f"self_attention.linear_qkv.{kind}", hf, QueryKeyValue())


ENDS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Vocabulary()),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Replicated()),
    Rule(("output_layer.weight",), (HEAD,), Vocabulary()),
)

# Transformer Engine fuses a norm with the linear layer behind it and keeps the norm's weight there.
LAYER_NORMS = (
    layer_rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        "input_layernorm.weight",
        Replicated(),
    ),
    layer_rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        "post_attention_layernorm.weight",
        Replicated(),
    ),
)

# Some families have the biases, others the norms of queries and keys, and a layer spec may give sinks to heads. A rule for a
# parameter that a model does not have is not used.
ATTENTION = (
    _query_key_value("weight"),
    _query_key_value("bias"),
    layer_rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight", Sharded(dim=1)),
    layer_rule("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", Replicated()),
    layer_rule("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", Replicated()),
    layer_rule("self_attention.core_attention.softmax_offset", "self_attn.sinks", Sharded(dim=0)),
)

GATED_MLP = (
    layer_rule("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), GatedLinear()),
    layer_rule("mlp.linear_fc2.weight", "mlp.down_proj.weight", Sharded(dim=1)),
)

DENSE_LAYER = LAYER_NORMS + ATTENTION + GATED_MLP


def routed_experts(
    hf: str = "mlp", parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Rule, ...]:
    """The router and the experts of a layer.

    Args:
        hf: prefix of the HF names of both, relative to the layer.
        parts: names of an expert's gate, up and down projection.
    """
    gate, up, down = (f"{hf}.experts.{EXPERT}.{part}.weight" for part in parts)
    return (
        layer_rule("mlp.router.weight", f"{hf}.gate.weight", Replicated()),
        layer_rule(_expert_names("linear_fc1"), (gate, up), GatedLinear()),
        layer_rule(_expert_names("linear_fc2"), down, Sharded(dim=1)),
    )


def _expert_names(module: str) -> tuple[str, str]:
    return (f"mlp.experts.local_experts.{EXPERT}.{module}.weight", f"mlp.experts.{module}.weight{EXPERT}")


def shared_experts(hf: str) -> tuple[Rule, ...]:
    """The experts that see every token; `hf` is the prefix of their HF names, relative to the layer."""
    gate, up, down = (f"{hf}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        layer_rule("mlp.shared_experts.linear_fc1.weight", (gate, up), GatedLinear()),
        layer_rule("mlp.shared_experts.linear_fc2.weight", down, Sharded(dim=1)),
    )


# A float32 weight that no gradient trains.
EXPERT_BIAS = (layer_rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Replicated()),)
SHARED_EXPERT_GATE = (layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Replicated()),)
