"""Conversion between Hugging Face checkpoints and Megatron models.

One engine (`loader`, `exporter`) for all families; a family is a table of rules (`families`) over a few layouts
(`layouts`). Loading and exporting again gives the same bits.
"""

from slime.backends.megatron_utils.hf_conversion.exporter import (
    convert_to_hf,
    iter_hf_buckets,
    iter_hf_named_tensors,
    remove_padding,
)
from slime.backends.megatron_utils.hf_conversion.families import supported_model_types
from slime.backends.megatron_utils.hf_conversion.loader import expected_hf_names, load_hf_weights

__all__ = [
    "convert_to_hf",
    "expected_hf_names",
    "iter_hf_buckets",
    "iter_hf_named_tensors",
    "load_hf_weights",
    "remove_padding",
    "supported_model_types",
]
