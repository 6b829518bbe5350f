"""Checkpoints of the training ranks: torch_dist directories that exist whole or not at all.

A checkpoint is written whole and synced under a hidden name, and published afterwards. A crash, a full disk or a kill at any
byte leaves the previous checkpoint loadable. The common part holds plain values only. Generator states go to safetensors of
their own, one file per rank. Further sets of weights that exist nowhere else, such as a refreshed reference, are torch_dist
directories in `states/` of the checkpoint.
"""

from slime.backends.megatron_utils.checkpoint.gathered_state import putting_copies
from slime.backends.megatron_utils.checkpoint.reading import load_checkpoint, load_stored_state
from slime.backends.megatron_utils.checkpoint.writing import begin_checkpoint
from slime.training.checkpoint_publication import forget_checkpoints, publish_checkpoint, show_checkpoint

__all__ = [
    "begin_checkpoint",
    "forget_checkpoints",
    "load_checkpoint",
    "load_stored_state",
    "publish_checkpoint",
    "putting_copies",
    "show_checkpoint",
]
