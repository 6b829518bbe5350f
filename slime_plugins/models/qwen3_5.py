"""The layers of Qwen3.5, which are those of Qwen3-Next; only their weights are stored in another form."""

from slime_plugins.models.qwen3_next import get_qwen3_next_spec as get_qwen3_5_spec
from slime_plugins.models.qwen3_next import prediction_layer_spec

__all__ = ["get_qwen3_5_spec", "prediction_layer_spec"]
