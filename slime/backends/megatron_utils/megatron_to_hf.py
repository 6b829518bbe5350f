"""Public import path of the checkpoint export; only re-exports."""

from slime.backends.megatron_utils.hf_conversion import convert_to_hf, remove_padding  # noqa: F401
