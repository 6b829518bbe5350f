"""The columns of a train batch, of a rank's data and of a micro-batch, each declared once. Free of torch.

A plug-in may bring columns of its own. Any that is not in the table has one value per sample.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np


class Kind(enum.Enum):
    """What the entries of a column belong to."""

    # One value per sample.
    SAMPLE = enum.auto()
    # One value per response token. A context-parallel rank has those of the tokens that it owns.
    RESPONSE_PART = enum.auto()
    # One value per response token, whole on every rank.
    RESPONSE = enum.auto()
    # One row per sample, about its whole sequence or to be read by offsets; whole on every rank.
    SEQUENCE = enum.auto()
    # About all samples of the rollout, those of other ranks included.
    ROLLOUT = enum.auto()
    # This rank's part of the schedule.
    SCHEDULE = enum.auto()
    # About a micro-batch as a whole, or the optimizer step that it is part of.
    MICRO_BATCH = enum.auto()


@dataclass(frozen=True)
class Column:
    """What is known of a column.

    Attributes:
        dtype: what the rollout brings is made of this type; None: it stays as it comes.
        computed: the trainer makes it; only a batch that a user's function made may bring it.
        required: a plug-in's batch must have it.
        sent_whole: a shard has the entries of all samples, not only those of its rank.
        on_host: it stays on the host, where it is read: it is large, or read by offsets.
        reported: its mean over samples is a metric of the rollout, as that of every column with values per response token is.
        dumped: `--save-debug-train-data` writes it.
    """

    kind: Kind
    dtype: Any = None
    computed: bool = False
    required: bool = False
    sent_whole: bool = False
    on_host: bool = False
    reported: bool = False
    dumped: bool = True

    @property
    def is_per_sample(self) -> bool:
        """Whether it has one entry for each of a rank's samples."""
        return self.kind not in (Kind.ROLLOUT, Kind.SCHEDULE, Kind.MICRO_BATCH)

    @property
    def is_ragged(self) -> bool:
        """Whether the rollout brings one row of numbers per sample, and rows differ in length."""
        return self.dtype is not None and self.kind in (Kind.RESPONSE_PART, Kind.RESPONSE, Kind.SEQUENCE)


IMAGES = "multimodal_train_inputs"
_COMPUTED = Column(Kind.RESPONSE_PART, np.float32, computed=True)
COLUMNS: dict[str, Column] = {
    "tokens": Column(Kind.SEQUENCE, np.int64, required=True),
    "response_lengths": Column(Kind.SAMPLE, np.int64, required=True, reported=True),
    "total_lengths": Column(Kind.SAMPLE, np.int64, sent_whole=True, reported=True),
    "rewards": Column(Kind.SAMPLE, np.float32, required=True, reported=True),
    "raw_reward": Column(Kind.ROLLOUT, np.float64, required=True, sent_whole=True),
    # Whether a sample failed and trains nothing, so that its reward is nobody's judgement. Missing if none did.
    "failed": Column(Kind.ROLLOUT, np.bool_, sent_whole=True),
    "local_raw_reward": Column(Kind.SAMPLE),
    "truncated": Column(Kind.SAMPLE, required=True, reported=True),
    "round_number": Column(Kind.SAMPLE, np.int64, reported=True),
    "sample_indices": Column(Kind.SAMPLE, required=True),
    "rollout_ids": Column(Kind.SAMPLE, np.int64),
    "rollout_mask_sums": Column(Kind.SAMPLE, np.float32),
    "metadata": Column(Kind.SAMPLE),
    "source_names": Column(Kind.SAMPLE),
    # (version of the weights, start, end) in the response; with `--true-on-policy-mode`.
    "weight_version_spans": Column(Kind.SAMPLE, dumped=False),
    # The version under which engines got the weights that the trainer has now; with `--true-on-policy-mode`.
    "live_weight_version": Column(Kind.ROLLOUT),
    # Pixels: large, and a dump of the rollout has the images that they are made of.
    IMAGES: Column(Kind.SAMPLE, dumped=False),
    "loss_masks": Column(Kind.RESPONSE, np.int32, required=True),
    "rollout_log_probs": Column(Kind.RESPONSE_PART, np.float32),
    "teacher_log_probs": Column(Kind.RESPONSE_PART, np.float32),
    "rollout_top_p_token_ids": Column(Kind.SEQUENCE, np.int32, on_host=True),
    "rollout_top_p_token_offsets": Column(Kind.SEQUENCE, np.int32, on_host=True),
    "rollout_routed_experts": Column(Kind.SEQUENCE, np.int32, on_host=True),
    "log_probs": _COMPUTED,
    "ref_log_probs": _COMPUTED,
    "entropy": _COMPUTED,
    "values": _COMPUTED,
    "kl": _COMPUTED,
    "advantages": _COMPUTED,
    "returns": _COMPUTED,
    "opd_reverse_kl": _COMPUTED,
    "partition": Column(Kind.SCHEDULE),
    "micro_batch_indices": Column(Kind.SCHEDULE),
    "num_microbatches": Column(Kind.SCHEDULE),
    "global_batch_sizes": Column(Kind.SCHEDULE),
    "positions": Column(Kind.SAMPLE),
    "stream": Column(Kind.MICRO_BATCH),
    "step_statistics": Column(Kind.MICRO_BATCH),
    "on_policy_proof": Column(Kind.MICRO_BATCH),
}
_OF_A_PLUG_IN = Column(Kind.SAMPLE)


def column_of(name: str) -> Column:
    """What is known of the column `name`."""
    return COLUMNS.get(name, _OF_A_PLUG_IN)


def names_of(kind: Kind) -> tuple[str, ...]:
    """The columns of one kind."""
    return tuple(name for name, known in COLUMNS.items() if known.kind is kind)
