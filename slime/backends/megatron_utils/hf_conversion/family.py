"""What a family file states: which HF tensors make up each Megatron parameter, and in which layout."""

from __future__ import annotations

import dataclasses
import re

from slime.backends.megatron_utils.hf_conversion.layouts import Layout

_LAYER_NUMBER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_PREDICTION_LAYERS = "mtp."
LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """One kind of Megatron parameter.

    megatron: its names, with `{layer}` for the layer's number; several where the layer specs name it differently.
    hf: the HF tensors it is made of, with `{layer}`, in the order that the layout expects.
    """

    megatron: tuple[str, ...]
    hf: tuple[str, ...]
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    model_types: `model_type` values of the HF configs it loads.
    name_pattern: matches the family's names in lower case without punctuation ("qwen3forcausallm").
    ignored: matches HF tensors that carry no weights of the model.
    predictions: matches HF tensors of layers for multi-token prediction; None where the family's checkpoints have none.
    """

    model_types: tuple[str, ...]
    name_pattern: re.Pattern[str]
    rules: tuple[Rule, ...]
    ignored: re.Pattern[str]
    predictions: re.Pattern[str] | None = None

    def find(self, megatron_name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule for a global Megatron name (wrapper prefixes allowed), and the HF names with the layer's number.

        Raises:
            KeyError: no rule has this name.
        """
        name = strip_wrappers(megatron_name)
        match = _LAYER_NUMBER.search(name)
        layer = match.group() if match else ""
        rule = self._rule(name)
        if rule is None:
            raise KeyError(f"no conversion rule for the Megatron parameter {name}")
        return rule, tuple(hf_name.replace(LAYER, layer) for hf_name in rule.hf)

    def leaves_out(self, megatron_name: str) -> bool:
        """Whether a parameter of a multi-token-prediction layer has no place in the family's HF checkpoints."""
        name = strip_wrappers(megatron_name)
        return name.startswith(_PREDICTION_LAYERS) and self._rule(name) is None

    def is_prediction(self, hf_name: str) -> bool:
        """Whether an HF tensor belongs to a layer for multi-token prediction."""
        return self.predictions is not None and self.predictions.search(hf_name) is not None

    def _rule(self, name: str) -> Rule | None:
        generic = _LAYER_NUMBER.sub(LAYER, name, count=1)
        return next((rule for rule in self.rules if generic in rule.megatron), None)


def strip_wrappers(name: str) -> str:
    """A parameter's name without the `module.` prefixes of data-parallel and mixed-precision wrappers."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name
