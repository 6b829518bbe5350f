"""The Hugging Face config as source and as check of the model's flags. Reads `config.json`; needs no transformers.

`reading` finds and opens the file, `parts` translates groups of its entries into flags, `families` says which parts and
constants make up each model type, `training_limits` knows what cannot be trained yet, `compare` fills and checks `args`.

Invariant: after `apply_hf_config` every flag that the config knows agrees with it, or the run has not started.
"""

from slime.arguments.hf_config.compare import apply_hf_config
from slime.arguments.hf_config.families import SUPPORTED_MODEL_TYPES, model_args_from_hf
from slime.arguments.hf_config.flag_kinds import CHOICES, SUPPLEMENTS
from slime.arguments.hf_config.reading import is_hf_checkpoint, read_hf_config
from slime.arguments.hf_config.training_limits import TRAINED_MODEL_TYPES

__all__ = [
    "CHOICES",
    "SUPPLEMENTS",
    "SUPPORTED_MODEL_TYPES",
    "TRAINED_MODEL_TYPES",
    "apply_hf_config",
    "is_hf_checkpoint",
    "model_args_from_hf",
    "read_hf_config",
]
