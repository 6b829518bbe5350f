"""Turns the service's groups of items into groups of samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.rollout.failures import mark_failed
from slime.rollout.sft_rollout import fill_sample, mask_generator
from slime.training.rollout_batch import correction_flag
from slime.utils.errors import UserError
from slime.utils.sample_fields import first_not_finite
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.items import Item, ItemError, checked_item

# The field of an item that brings the engine's own tokens, as in `Sample`.
_OWN_TOKENS = "tokens"


@dataclass(frozen=True)
class Group:
    """Samples of one prompt."""

    instance_id: str
    samples: list[Sample]


def samples_of(args: Any, groups: list[dict[str, Any]], counts: Counter[str]) -> list[Group]:
    """The samples of `groups`, which are as the service answers them, in their order.

    If an item has `tokens` (prompt and response), its response is the part that `loss_mask` covers, and `rollout_log_probs`, if
    there are any, have the same length. Otherwise its messages are tokenised (`--loss-mask-type`): what the assistant said is
    trained, and the response begins at the first such token. Samples longer than `--rollout-max-context-len` are cut.
    `extra_info` may have `tools` of the chat, `label`, `truncated`, `weight_versions` (or `weight_version`), and `failed`, the
    reason why the trajectory is not to be trained on; it becomes the metadata.

    `buffer/cut_samples` and `buffer/untrained_samples` are added to `counts`.

    Raises:
        UserError: an item is wrong, or lacks log-probs that the run needs.
    """
    items = [checked(item, group["instance_id"]) for group in groups for item in group["items"]]
    chats = [item for item in items if _OWN_TOKENS not in item]
    _require_log_probs(args, items)
    tokenised = iter(_tokenised(args, chats))
    cuts = {"sft_cut_samples": 0, "sft_untrained_samples": 0}
    made = []
    for item in items:
        sample = Sample(prompt=_prompt(item["messages"]), label=item["extra_info"].get("label"), reward=item["reward"])
        sample.metadata = {**item["extra_info"], "uid": item["uid"], "instance_id": item["instance_id"]}
        if _OWN_TOKENS in item:
            _take_tokens(sample, item)
            if args.rollout_max_context_len is not None:
                _cut_tokens(sample, args.rollout_max_context_len, cuts)
        else:
            fill_sample(sample, *next(tokenised), args.rollout_max_context_len, cuts)
        _take_extra_info(args, sample, item["extra_info"])
        made.append(sample)
    texts = mask_generator(args).tokenizer.batch_decode([sample.tokens[-sample.response_length :] for sample in made])
    for sample, text in zip(made, texts, strict=True):
        sample.response = text
    samples = iter(made)
    counts["buffer/cut_samples"] += cuts["sft_cut_samples"]
    counts["buffer/untrained_samples"] += cuts["sft_untrained_samples"]
    return [Group(group["instance_id"], [next(samples) for _ in group["items"]]) for group in groups]


def checked(item: Any, instance_id: str) -> Item:
    """An item of an answer.

    Raises:
        UserError: it is not a valid item.
    """
    try:
        return checked_item(item)
    except ItemError as error:
        raise UserError(f"--rollout-buffer-url: group {instance_id}: {error}") from error


def _tokenised(args: Any, chats: list[Item]) -> list[tuple[list[int], list[int]]]:
    return mask_generator(args).get_loss_masks([(item["messages"], item["extra_info"].get("tools")) for item in chats])


def _require_log_probs(args: Any, items: list[Item]) -> None:
    needed_by = (correction_flag(args), "--use-rollout-logprobs" if args.use_rollout_logprobs else None)
    names = ", ".join(filter(None, needed_by))
    item = next((item for item in items if _OWN_TOKENS not in item or item.get("rollout_log_probs") is None), None)
    if not names or item is None:
        return
    lacks = "has messages alone, and their text has no log-probs of the engine"
    if _OWN_TOKENS in item:
        lacks = "has tokens and no rollout_log_probs"
    raise UserError(
        f"--rollout-task-type {args.rollout_task_type}: item {item['uid']} {lacks}, which {names} needs; have the generator "
        "send tokens, loss_mask and rollout_log_probs"
    )


def _take_tokens(sample: Sample, item: Item) -> None:
    mask = item.get("loss_mask")
    if not isinstance(mask, list) or not mask:
        raise UserError(
            f"--rollout-buffer-url: item {item['uid']} has tokens and no loss_mask, with a 0 or 1 for each of its response"
        )
    sample.tokens, sample.loss_mask, sample.response_length = item[_OWN_TOKENS], mask, len(mask)
    sample.rollout_log_probs = item.get("rollout_log_probs")
    sample.status = Sample.Status.COMPLETED
    try:
        sample.validate_lengths()
        if sample.rollout_log_probs is not None:
            # None becomes NaN, too. Those of other tokens do not matter: nobody reads them.
            log_probs = np.where(np.asarray(mask) != 0, np.asarray(sample.rollout_log_probs, np.float64), 0.0)
            if (wrong := first_not_finite(log_probs)) is not None:
                given = sample.rollout_log_probs[wrong]
                raise ValueError(
                    f"rollout_log_probs[{wrong}] is {given}, and its token is trained; expected a finite number"
                )
    except (TypeError, ValueError) as error:
        raise UserError(f"--rollout-buffer-url: item {item['uid']}: {error}") from error


def _cut_tokens(sample: Sample, max_length: int, counts: dict[str, int]) -> None:
    """Cut a sample as `fill_sample` cuts a chat: tokens beyond `max_length` go, and a response of which nothing is left becomes
    one masked token."""
    excess = len(sample.tokens) - max_length
    if excess <= 0:
        return
    sample.tokens = sample.tokens[:max_length]
    kept = sample.response_length - excess
    if kept > 0:
        sample.loss_mask = sample.loss_mask[:kept]
    else:
        sample.loss_mask = [0]
        counts["sft_untrained_samples"] += 1
    sample.response_length = len(sample.loss_mask)
    if sample.rollout_log_probs is not None:
        sample.rollout_log_probs = sample.rollout_log_probs[:kept] if kept > 0 else [0.0]
    sample.status = Sample.Status.TRUNCATED
    counts["sft_cut_samples"] += 1


def _take_extra_info(args: Any, sample: Sample, extra_info: dict[str, Any]) -> None:
    if extra_info.get("truncated"):
        sample.status = Sample.Status.TRUNCATED
    versions = extra_info.get("weight_versions", extra_info.get("weight_version"))
    if versions is not None:
        sample.weight_versions = [str(version) for version in (versions if isinstance(versions, list) else [versions])]
    if sample.reward is None or extra_info.get("failed"):
        mark_failed(args, sample, str(extra_info.get("failed") or extra_info.get("error") or "it has no reward"))


def _prompt(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of the chat before its first answer."""
    first = next((number for number, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first]
