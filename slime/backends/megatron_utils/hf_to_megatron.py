"""Public import path of the checkpoint loader; only re-exports."""

from slime.backends.megatron_utils.hf_conversion import load_hf_weights as load_hf_weights
