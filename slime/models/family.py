"""What a family of models is: how its config becomes flags, how its weights are called, and what its layers are made of.

Families that train have files beside this one; `families` registers them, and holds those that are planned.

Its config is a list of parts (`config_entries`); its weights are a table of rules over a few layouts (`tensor_layouts`), most
of which all decoder-only families share and stand here. Nobody else compares the names of families.
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
# Experts are modules in the local layer spec; Transformer Engine numbers the weights of one module.
_EXPERT_NUMBER = re.compile(
    r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$|(?<=\.experts\.linear_fc[12]\.bias)\d+$"
)
# Modules of transformers for attention, in layers of either kind: names of parameters of one that runs as it is.
ATTENTION_MODULES = ("self_attn", "linear_attn")
_AS_IN_TRANSFORMERS = re.compile(
    rf"^decoder\.layers\.{re.escape(LAYER)}\.self_attention\.((?:{'|'.join(ATTENTION_MODULES)})\..+)$"
)
_PREDICTION_LAYERS = "mtp."
# Entries of configs that count such layers.
_PREDICTION_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
# Of the model's embedding and output layer.
_COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter.

    megatron: its names, with `{layer}` for the layer's number and `{expert}` for the expert's; several where the layer specs
        name it differently.
    hf: the HF tensors it is made of, with the same numbers, in the order that the layout expects.
    keeps_float32: engines have it in float32 among weights of 16 bits. Where a checkpoint has too, so has the trainer.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout
    keeps_float32: bool = False

    @property
    def of_experts(self) -> bool:
        """Whether each expert has one: they are spread over expert-parallel ranks, and cut as experts are."""
        return EXPERT in self.megatron[0]


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    model_types: `model_type` values of its configs.
    names: what a `--model-name` of it contains, in lower case without punctuation ("qwen3").
    other_models: longer names that contain one of `names` and mean models that nobody here knows.

    parts: functions from a config to flags; later ones win where two say something about one flag.
    constants: flags that hold whatever the config says: true of every published model of the type.
    absent: entries that a config of this type may lack, with the value that it then means.
    rope_types: kinds of RoPE scaling that the family's layers know.

    layer_spec: import path of what builds its decoder layers, which the backend resolves (`--spec`); None: the layers
        that the backend has for every decoder-only model.
    qk_norm_spans_heads: a norm of queries or keys has a weight for each channel of all heads.

    rules: which HF tensors make up each Megatron parameter; a family without is planned and not trained.
    ignored: matches HF tensors that carry no weights of the model.
    not_trained: matches HF tensors of parts of the model that no trainer has: they are not loaded, and exports carry
        them as they are.
    predictions: matches HF tensors of layers for multi-token prediction; None where the family's checkpoints have none. Those
        that `not_trained` matches too are trained where a run asks for such layers.
    predictions_follow: layers for multi-token prediction have the numbers behind the last layer's.
    num_layers: of the model whose names are asked for, where predictions follow (`of_model`).
    engines_draft: SGLang makes a draft model of a layer for multi-token prediction of the family.
    engines_have_stages: SGLang divides models of the family into pipeline stages.
    stages_tie: then the last stage keeps a head that is the embedding equal to it.
    stacks_experts: checkpoints have all experts of a layer in one tensor, as published with rows and columns exchanged, and
        exports have them as the checkpoint that they come from.
    fsdp: the model that transformers makes of its config is trained too: its parameters are called as in checkpoints, and
        samples that share a stream do not see each other.
    """

    model_types: tuple[str, ...]
    names: tuple[str, ...]
    other_models: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default",)
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
        """The family for a model of so many layers: with these, names of layers for multi-token prediction are known."""
        return dataclasses.replace(self, num_layers=num_layers) if self.predictions_follow else self

    @property
    def is_trained(self) -> bool:
        """Whether the trainer builds its layers and converts its weights."""
        return bool(self.rules)

    def model_args(self, config: Config) -> dict[str, Any]:
        """The flags of the model of `config`, under their names and with the types they have in `args`."""
        complete = {**self.absent, **config}
        found: dict[str, Any] = {}
        for part in self.parts:
            found.update(part(complete))
        return {**found, **self.constants, "spec": self.layer_spec.rsplit(".", 1) if self.layer_spec else None}

    def find(self, megatron_name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule for a global Megatron name (wrapper prefixes allowed), and the HF names with layer's and expert's numbers.

        Raises:
            KeyError: no rule has this name.
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
        """Whether a parameter of a multi-token-prediction layer has no place in the family's HF checkpoints."""
        name = strip_wrappers(megatron_name)
        return name.startswith(_PREDICTION_LAYERS) and self._rule(name) is None

    def is_prediction(self, hf_name: str) -> bool:
        """Whether an HF tensor belongs to a layer for multi-token prediction."""
        return self.predictions is not None and self.predictions.search(hf_name) is not None

    def is_stored_prediction(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether an HF tensor is of a layer for multi-token prediction behind the `predictions` that a run has, and no copy of
        the model's embedding or output layer."""
        is_of_layer = self.is_prediction(hf_name) or self._behind(hf_name, num_layers) >= 0
        return is_of_layer and self.is_exported_as_stored(hf_name, num_layers, predictions)

    def drafting_layers(self, config: Config) -> int:
        """Layers for multi-token prediction of which engines can make a draft model, by what `config` says; 1 where it says
        nothing of them."""
        told = (config[name] for name in _PREDICTION_COUNTS if config.get(name) is not None)
        return next(told, 1) if self.engines_draft else 0

    def leaves_alone(self, hf_name: str, predictions: int = 0) -> bool:
        """Whether an HF tensor is of a part that a run with so many layers for multi-token prediction does not train."""
        if self.not_trained is None or (predictions > 0 and self.is_prediction(hf_name)):
            return False
        return self.not_trained.search(hf_name) is not None

    def may_be_left_out(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether an HF tensor is none of the trained weights: a buffer, of another part, or of a layer behind the model's
        `num_layers` and its `predictions` layers for multi-token prediction; or what those have a copy of."""
        is_copy = self._behind(hf_name, num_layers) >= 0 and hf_name.endswith(_COPIES)
        is_of_model = not is_copy and self.ignored.search(hf_name) is None
        return not is_of_model or self.is_exported_as_stored(hf_name, num_layers, predictions)

    def left_out(self, hf_names: Collection[str], config: Config, predictions: int = 0) -> set[str]:
        """Those of the tensors of a checkpoint with `config` that its model can do without: what `may_be_left_out`, and a head
        that is the embedding."""
        tied = {HEAD} if config.get("tie_word_embeddings", False) else set()
        layers = config["num_hidden_layers"]
        return {name for name in hf_names if name in tied or self.may_be_left_out(name, layers, predictions)}

    def is_exported_as_stored(self, hf_name: str, num_layers: int, predictions: int = 0) -> bool:
        """Whether an HF tensor is none of the trained weights, and exports have it as the checkpoint has: one of another part,
        or of a layer behind the model's `num_layers` and its `predictions` layers for multi-token prediction."""
        if self.leaves_alone(hf_name, predictions):
            return True
        if hf_name.endswith(_COPIES) or self.ignored.search(hf_name) is not None:
            return False
        return self._behind(hf_name, num_layers) >= predictions

    def _behind(self, hf_name: str, num_layers: int) -> int:
        """Which of the layers behind the model's `num_layers` an HF tensor is of, from 0 on; a negative number: of none."""
        number = _LAYER_NUMBER.search(hf_name) if self.predictions_follow else None
        return -1 if number is None else int(number.group()) - num_layers

    def _rule(self, name: str) -> Rule | None:
        generic = _EXPERT_NUMBER.sub(EXPERT, _LAYER_NUMBER.sub(LAYER, name, count=1))
        found = next((rule for rule in self.rules if generic in rule.megatron), None)
        return self._passed_through(generic) if found is None else found

    def _passed_through(self, generic: str) -> Rule | None:
        """The rule for a parameter of attention that runs as transformers has it: whole on every rank, and called the same."""
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
    """The name of the same parameter of the expert `steps` further on; a name without an expert's number stays as it is."""
    return _EXPERT_NUMBER.sub(lambda found: str(int(found.group()) + steps), megatron_name)


def _with_numbers(name: str, numbers: list[tuple[str, str]]) -> str:
    for place, number in numbers:
        name = name.replace(place, number)
    return name


def layer_rule(megatron: str | tuple[str, ...], hf: str | tuple[str, ...], layout: Layout) -> Rule:
    """A rule for a parameter of a decoder layer, names given relative to the layer."""
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
        inner: rules of the decoder layer that they have inside.
        hf: what their HF names begin with.
        names: their own HF names there: norms of embedding and state, projection of both, norm of the result.
        projection: layout of that of [embedding; state]; None: as Megatron has it.
        own: what their own HF names begin with, where that is not `hf`.
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

# With the biases that some families have, the norms of queries and keys that others have, and sinks that a layer spec may give
# heads.
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
        hf: what the HF names of both begin with, below the layer.
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
    """The experts that see every token; `hf` is what their HF names begin with, below the layer."""
    gate, up, down = (f"{hf}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        layer_rule("mlp.shared_experts.linear_fc1.weight", (gate, up), GatedLinear()),
        layer_rule("mlp.shared_experts.linear_fc2.weight", down, Sharded(dim=1)),
    )


# A weight that no gradient trains, in float32.
EXPERT_BIAS = (layer_rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Replicated()),)
SHARED_EXPERT_GATE = (layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Replicated()),)
