"""What is told of a rollout's data, the same in every parallel layout: metrics, how engine and trainer differ, and the dump.

`--get-mismatch-metrics`: the engine's log-probs against the trainer's, in numbers per step and in the ten worst tokens.

`--save-debug-train-data`: what is trained on, as it is after log-probs and advantages; one file for all ranks, with plain types
and tensors only, so that a `.pt` file loads with `weights_only=True`; one of another name is JSON and safetensors.

Nothing here changes the data. All functions are collective.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.algorithms.mismatch import merge_worst_tokens, mismatch_metrics, mismatch_sums, worst_tokens
from slime.algorithms.reduction import masked_sum, per_token, token_weights
from slime.training.advantages import reported_kl
from slime.training.columns import COLUMNS, Kind, column_of, names_of
from slime.training.metric_reduction import all_reduce_max, all_reduce_sum, trained_tokens
from slime.training.rollout_data import RolloutData, Tensors
from slime.utils.plain_files import write_dump

FORMAT_VERSION = 2
WORST_TOKENS = 10


def rollout_data_metrics(
    args: argparse.Namespace, rollout_data: RolloutData, data_group: dist.ProcessGroup
) -> dict[str, float]:
    """Means over the data of all ranks: per-token columns reduced like the loss, others averaged over samples. There is no
    `kl` where nobody computed one, and no `raw_reward` where all samples failed: it is the mean of those that did not.
    `correct_entropy` is the entropy of samples whose reward is 1, if there are any, over their tokens by the weights that these
    have in the loss.

    Collective over `data_group`, which spans data- and context-parallel ranks; all of them must hold the same columns.
    """
    # Every token is counted by the one rank that owns it; a sample by each rank of its context-parallel group.
    masks = rollout_data.local_masks
    has_entropy = args.log_correct_samples and "entropy" in rollout_data
    tokens_seen = [name for name in names_of(Kind.RESPONSE_PART) if name in rollout_data]
    samples_seen = [name for name, known in COLUMNS.items() if known.reported and name in rollout_data]
    token_count = trained_tokens(masks)
    columns, has_kl = dict(rollout_data), torch.zeros_like(token_count)
    if "kl" in columns:
        columns["kl"], has_kl = reported_kl(args, rollout_data)
    weights = token_weights(masks, None if args.calculate_per_token_loss else rollout_data["rollout_mask_sums"])
    of_tokens = [masked_sum(columns[name], weights) for name in tokens_seen]
    of_correct = _entropy_of_correct(rollout_data, weights) if has_entropy else ()
    # One wait for the device, however many columns and samples there are.
    on_device = torch.stack(
        [value.to(token_count.device, torch.float64) for value in (*of_correct, *of_tokens, token_count, has_kl)]
    ).tolist()
    of_samples = [float(sum(rollout_data[name])) for name in samples_seen]
    local = torch.tensor([*on_device, *of_samples, len(masks)], dtype=torch.float64)
    total = all_reduce_sum(local, data_group).tolist()
    *of_tokens, token_count, ranks_with_kl = total[len(of_correct) : len(on_device)]
    *of_samples, sample_count = total[len(on_device) :]
    rollouts = float(sum(rollout_data["global_batch_sizes"]))
    counted = max(token_count if args.calculate_per_token_loss else rollouts, 1.0)
    metrics = {name: value / counted for name, value in zip(tokens_seen, of_tokens, strict=True)}
    metrics |= {name: value / max(sample_count, 1.0) for name, value in zip(samples_seen, of_samples, strict=True)}
    if not ranks_with_kl:
        metrics.pop("kl", None)
    if has_entropy and total[1]:
        metrics["correct_entropy"] = total[0] / total[1]
    raw = rollout_data["raw_reward"]
    failed = rollout_data.get("failed") or [False] * len(raw)
    if graded := [reward for reward, is_failed in zip(raw, failed, strict=True) if not is_failed]:
        metrics["raw_reward"] = sum(graded) / len(graded)
    return metrics


def _entropy_of_correct(data: RolloutData, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of samples whose reward is 1, the sum of their tokens' entropies by these weights, and the sum of the weights."""
    correct = torch.tensor([float(reward == 1) for reward in data["local_raw_reward"]])
    weights = weights * per_token(correct.to(weights.device, non_blocking=True), list(map(len, data["entropy"])))
    return masked_sum(data["entropy"], weights), weights.sum()


def phase_speeds(seconds: Mapping[str, float], tokens: float, tflops: float | None) -> dict[str, float]:
    """`perf/` metrics of how fast a rollout's phases were, and of the share of its time in which the rank waited for them.

    Args:
        seconds: `perf/{phase}_time` by phase. `train` is all that a rank does with a rollout, `train_wait` the time before it.
        tokens: of all samples, prompts included.
        tflops: 10¹² floating-point operations of this rank in one pass forward over the samples; None: not known.
    """
    found = {}
    passes = {"log_probs": 1, "ref_log_probs": 1, "actor_train": 3}
    for phase, count in passes.items():
        if tflops is not None and seconds.get(f"perf/{phase}_time"):
            found[f"perf/{phase}_tflops"] = count * tflops / seconds[f"perf/{phase}_time"]
    if seconds.get("perf/actor_train_time"):
        found["perf/actor_train_tok_per_s"] = tokens / seconds["perf/actor_train_time"]
    wait, work = seconds["perf/train_wait_time"], seconds["perf/train_time"]
    return {**found, "perf/wait_time_ratio": wait / (wait + work)}


def mismatch_of_step(step_data: RolloutData, data_group: dist.ProcessGroup) -> dict[str, float]:
    """`mismatch_*` over the trained tokens of an optimizer step, those of all ranks.

    Args:
        step_data: the step's samples that this rank has.

    Raises:
        UserError: the samples have no log-probs of the engine.
    """
    columns = _compared(step_data)
    train, rollout, masks = (torch.cat(rows) if rows else torch.zeros(0) for rows in columns)
    sums, largest = mismatch_sums(train, rollout, masks)
    return mismatch_metrics(all_reduce_sum(sums, data_group), all_reduce_max(largest, data_group))


def worst_token_lines(
    rollout_data: RolloutData, decode: Callable[[list[int]], str], data_group: dist.ProcessGroup
) -> list[str]:
    """A line about each of the ten trained tokens, over all ranks, whose two log-probs differ most; worst first.

    Args:
        decode: text of token ids.
    """
    train, rollout, masks = _compared(rollout_data)
    owned = rollout_data.cut([torch.arange(len(mask)) for mask in rollout_data["loss_masks"]])
    found, prompts = [], rollout_data.prompt_lengths
    for token in worst_tokens(train, rollout, masks, range(len(train)), WORST_TOKENS, owned):
        row = token.sample
        text = decode([int(rollout_data["tokens"][row][prompts[row] + token.position])])
        found.append((dataclasses.replace(token, sample=int(rollout_data["sample_indices"][row])), text))
    shards: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(shards, found, group=data_group)
    texts = {token: text for shard in shards for token, text in shard}
    return [
        f"sample {token.sample}, response token {token.position}, {texts[token]!r}: trainer {token.train_log_prob:.4f}, "
        f"engine {token.rollout_log_prob:.4f}, difference {abs(token.train_log_prob - token.rollout_log_prob):.1e}"
        for token in merge_worst_tokens([texts], WORST_TOKENS)
    ]


def _compared(data: RolloutData) -> tuple[Tensors, Tensors, Tensors]:
    """Log-probs of trainer and engine, and masks, of the tokens that this rank owns."""
    return data["log_probs"], data.column("rollout_log_probs", "--get-mismatch-metrics"), data.local_masks


def save_train_data(
    template: str, rollout_id: int, rollout_data: RolloutData, data_group: dist.ProcessGroup, data_rank: int
) -> None:
    """Gather the shards of all data-parallel ranks and write them, from data rank 0. Collective over `data_group`.

    The file holds `samples`, one dict each, sorted by sample index, and by their place in the rollout where several have one
    index (an execution that fanned out); `dp_shards`, the schedule of every rank;
    `raw_reward` of all samples.

    Raises:
        ValueError: a field does not have one tensor per sample.
    """
    shard = {
        "rank": dist.get_rank(),
        "data_parallel_rank": data_rank,
        "sample_indices": rollout_data["sample_indices"],
        **{name: rollout_data[name] for name in names_of(Kind.SCHEDULE)},
    }
    payload = {"shard": shard, "samples": _samples(rollout_data)}
    gathered: list[Any] = [None] * dist.get_world_size(data_group)
    dist.all_gather_object(gathered, payload, group=data_group)
    if data_rank != 0:
        return
    placed = [pair for part in gathered for pair in zip(part["shard"]["partition"], part["samples"], strict=True)]
    placed.sort(key=lambda pair: (pair[1]["sample_indices"], pair[0]))
    dump = {
        "format_version": FORMAT_VERSION,
        "rollout_id": rollout_id,
        "rank": dist.get_rank(),
        "samples": [sample for _, sample in placed],
        "dp_shards": [part["shard"] for part in gathered],
        "raw_reward": list(rollout_data["raw_reward"]),
    }
    write_dump(Path(template.format(rollout_id=rollout_id, rank=dist.get_rank())), dump)


def _samples(rollout_data: RolloutData) -> list[dict[str, Any]]:
    count = len(rollout_data["tokens"])
    kept = [name for name in rollout_data if column_of(name).is_per_sample and column_of(name).dumped]
    columns = {name: rollout_data[name] for name in kept}
    for name, column in columns.items():
        if len(column) != count:
            raise ValueError(
                f"train dump: `{name}` has {len(column)} entries for {count} samples; one tensor per sample"
            )
    return [{name: _plain(column[i]) for name, column in columns.items()} for i in range(count)]


def _plain(value: Any) -> Any:
    # A clone, because a view would be saved with the storage of its whole column.
    return value.detach().cpu().clone() if torch.is_tensor(value) else value
