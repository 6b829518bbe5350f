"""Arguments and data of one optimizer step of GRPO on the batch of `grpo_batch`, in any parallel layout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.support.models.grpo_batch import ADVANTAGES, OBJECTIVE, make_samples, old_and_reference
from tests.support.models.tiny_model import tiny_args

if TYPE_CHECKING:
    from slime.training.rollout_data import RolloutData


def make_args(hf_dir: str | Path, **overrides: Any) -> SimpleNamespace:
    """The arguments of the tiny model in `hf_dir`, of the objective and of the schedule."""
    dp = overrides.pop("data_parallel_size", 1)
    model = vars(tiny_args(hf_dir, **overrides))
    return SimpleNamespace(**{**model, **OBJECTIVE, "data_parallel_size": dp, **overrides})


def shard_of(args: SimpleNamespace, data_rank: int) -> RolloutData:
    """The tensors of the batch for this rank, including old and reference log-probs."""
    import torch

    from slime.training.rollout_batch import build_train_batch, split_for_data_parallel, to_tensors
    from slime.training.schedule import schedule_from_args

    samples = make_samples(args.vocab_size)
    batch = build_train_batch(samples, ADVANTAGES, ADVANTAGES)
    schedule = schedule_from_args(
        args, {"dp_size": args.data_parallel_size, "cp_size": 1}, batch["total_lengths"].tolist(),
        global_batch_size=args.global_batch_size, execution_ids=batch["rollout_ids"].tolist(),
    )  # fmt: skip
    data = to_tensors(split_for_data_parallel(batch, schedule)[data_rank], torch.device("cpu"))
    old, reference = old_and_reference(samples)
    data["log_probs"] = [torch.from_numpy(old[i]) for i in data["partition"]]
    data["ref_log_probs"] = [torch.from_numpy(reference[i]) for i in data["partition"]]
    return data
