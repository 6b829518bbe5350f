"""A prompt as it left the data source, and the attempts that are made on it.

Generation, and the users' functions that it calls, work on attempts, which are copies: the prompt stays what it is. An attempt
that failed leaves nothing to the next one, which starts from the prompt. An attempt that was interrupted may be continued in a
later step: it returns to the data source with what it has, and with its prompt beside it. If the run is started again with
other sampling flags, it begins anew: all log-probs of an answer must be those of one distribution. So does one that has a
reward if the run grades in another way, since rewards of a group are compared, and a finished one without the experts of its
tokens if the run replays them now.

Invariants: no prompt is lost; a returned group has as many entries as it was given; finished siblings stay finished.
"""

import copy
import logging
import operator
from typing import Any

import numpy as np

from slime.rollout.base_types import leaves
from slime.rollout.failures import failed_samples
from slime.utils.misc import unique_hex
from slime.utils.sample_fields import read_only, token_array
from slime.utils.types import PrefixCacheInfo, Sample, SpecInfo

logger = logging.getLogger(__name__)

FINISHED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)

# Attributes of an attempt that returned to the data source: its prompt, and the flags that its tokens were sampled under and,
# if it has a reward, graded under. Both are plain values, since a saved state holds them.
PROMPT_BESIDE = "prompt_beside"
SAMPLED_UNDER = "sampled_under"


def new_attempt(entry: Any) -> Any:
    """A copy of `entry`, a prompt or an attempt to continue, that generation may change; in a session of its own.

    An execution that fanned out gives a list of copies.
    """
    if not isinstance(entry, Sample):
        return [new_attempt(inner) for inner in entry]
    attempt = own_copy(entry)
    values = attempt.__dict__
    for name in (PROMPT_BESIDE, SAMPLED_UNDER):
        values.pop(name, None)
    attempt.session_id = attempt.session_id or unique_hex()
    return attempt


def own_copy(sample: Sample) -> Sample:
    """A copy with dicts, lists and sets of its own, also within those; other objects, which may be the user's, are shared.

    So are the events of its trace, but not their list.
    """
    copied, values = object.__new__(type(sample)), sample.__dict__
    trace = values.get("trace")
    if type(trace) is dict and type(trace.get("events")) is list:
        copied.__dict__ = _own_values({**values, "trace": None})
        copied.__dict__["trace"] = {**trace, "events": trace["events"].copy()}
    else:
        copied.__dict__ = _own_values(values)
    return copied


# Values of these types can be shared by copies, and most fields have one.
_WITHOUT_CONTAINERS = frozenset({str, int, float, bool, type(None), np.ndarray, Sample.Status})
# These hold numbers alone, so a copy of their attributes is a whole one.
_COUNTERS = frozenset({SpecInfo, PrefixCacheInfo})


def _own_values(values: dict[Any, Any]) -> dict[Any, Any]:
    own = {**values}
    for name, value in values.items():
        # The usual types are handled here, without a call, which would take longer than the copy itself.
        kind = type(value)
        if kind in _WITHOUT_CONTAINERS:
            continue
        if kind is list and not value:
            own[name] = []
        elif kind is dict:
            own[name] = _own_values(value) if value else {}
        elif kind in _COUNTERS:
            own[name] = counters = object.__new__(kind)
            counters.__dict__ = {**value.__dict__}
        else:
            own[name] = _own_containers(value)
    return own


def _own_containers(value: Any) -> Any:
    if type(value) in _WITHOUT_CONTAINERS:
        return value
    if type(value) is tuple:
        return tuple(map(_own_containers, value))
    if type(value) is list:
        # Lists per token are long and flat.
        flat = _WITHOUT_CONTAINERS.issuperset(map(type, value))
        return value.copy() if flat else [_own_containers(entry) for entry in value]
    if type(value) is dict:
        return _own_values(value)
    if not isinstance(value, dict | list | set | SpecInfo | PrefixCacheInfo):
        return value
    copied = copy.copy(value)
    if isinstance(value, dict):
        for name, entry in value.items():
            copied[name] = _own_containers(entry)
    elif isinstance(value, list):
        copied[:] = [_own_containers(entry) for entry in value]
    return copied


def prompt_of(entry: Any) -> Sample:
    """The prompt that `entry` is, or that it is an attempt on. All samples of an execution have the same.

    An attempt may come without its prompt, say from a user's data source. Then the prompt is what generation and grading do not
    write.
    """
    sample = leaves(entry)[0]
    beside = sample.__dict__.get(PROMPT_BESIDE)
    if beside is not None:
        # Of the user's own class, if the sample is.
        prompt = object.__new__(type(sample))
        prompt.__dict__ = Sample.from_dict(beside).__dict__
        return prompt
    if sample.status is Sample.Status.PENDING and not sample.response_length:
        return sample
    prompt = own_copy(sample)
    prompt.reset_for_retry()
    return prompt


def as_prompts(original: list[Any]) -> list[Sample]:
    """The group that was taken from the data source, as the prompts that it consists of."""
    return [prompt_of(entry) for entry in original]


def group_name(group: list[Any]) -> str:
    """A name of `group`, as it was drawn, that stays the same however often it comes back: its number, else its first
    prompt."""
    number = leaves(group)[0].group_index
    return f"the group of {prompt_of(group[0])!r}" if number is None else f"group {number}"


def can_be_continued(entry: Any) -> bool:
    """Whether `entry` is an attempt that is finished, or that has something to continue from.

    A failed attempt starts again, since what it holds is what went wrong. So does an execution that fanned out, unless all of
    its samples are finished.
    """
    if not isinstance(entry, Sample):
        return all(sample.status in FINISHED for sample in leaves(entry))
    if entry.status is Sample.Status.FAILED:
        return False
    return entry.status in FINISHED or bool(entry.response_length or entry.response)


def as_continuable_group(args: Any, original: list[Any], group: list[Any]) -> list[Any]:
    """The attempts `group` on `original`, to be continued: each has its prompt beside it, or is replaced by its prompt if it
    cannot be continued."""
    prompts = as_prompts(original)
    for prompt, entry in zip(prompts, group, strict=True):
        if can_be_continued(entry):
            first = leaves(entry)[0]
            setattr(first, PROMPT_BESIDE, prompt.to_dict())
            flags = _sampling_flags(args)
            if any(sample.reward is not None for sample in leaves(entry)):
                flags |= _reward_flags(args)
            setattr(first, SAMPLED_UNDER, flags)
    return [entry if can_be_continued(entry) else prompt for prompt, entry in zip(prompts, group, strict=True)]


def as_finished_group(args: Any, original: list[Any], group: list[Any]) -> list[Any]:
    """The finished attempts `group` on `original`, to be kept with their rewards. Samples in it that failed start again. With
    `--group-rm` the whole group does, since one verdict graded all answers."""
    if args.group_rm and failed_samples(group):
        return as_prompts(original)
    return as_continuable_group(args, original, group)


def begin_anew_where_sampled_otherwise(args: Any, groups: list[list[Any]], rollout_id: int) -> list[list[Any]]:
    """`groups`, with prompts in place of attempts that an earlier start sampled from another distribution, graded in another
    way, or finished without what this one trains on. A warning tells.

    An attempt that does not say which flags it was sampled under, say from a user's function, stays as it is.
    """
    if not any(SAMPLED_UNDER in sample.__dict__ for sample in leaves(groups)):
        return groups
    flags, others = {**_sampling_flags(args), **_reward_flags(args)}, []

    def usable(entry: Any) -> Any:
        samples = leaves(entry)
        under = samples[0].__dict__.get(SAMPLED_UNDER, {}) if samples else {}
        changed = [f"{flag} {was} → {flags[flag]}" for flag, was in under.items() if flags.get(flag, was) != was]
        if under and args.use_rollout_routing_replay and any(map(_lacks_experts, samples)):
            changed.append("--use-rollout-routing-replay")
        if not changed:
            return entry
        others.append(", ".join(changed))
        return prompt_of(entry)

    pairs = [(group, [usable(entry) for entry in group]) for group in groups]
    if others:
        logger.warning(
            "rollout %d: %d attempts of an earlier start begin anew, from their prompts: they were sampled or graded under "
            "other flags (%s)", rollout_id, len(others), others[0],
        )  # fmt: skip
    # A group without such an attempt stays the same object: by that it is known who has drawn it.
    return [group if all(map(operator.is_, group, own)) else own for group, own in pairs]


def _lacks_experts(sample: Sample) -> bool:
    """Whether no engine will be asked for the experts of its tokens any more."""
    return sample.status in FINISHED and sample.response_length > 0 and sample.rollout_routed_experts is None


def _sampling_flags(args: Any) -> dict[str, Any]:
    """What tells the distribution that training rollouts sample from."""
    return {
        "--rollout-temperature": args.rollout_temperature,
        "--rollout-top-p": args.rollout_top_p,
        "--rollout-top-k": args.rollout_top_k,
    }


def _reward_flags(args: Any) -> dict[str, Any]:
    """What tells how answers are graded."""
    return {
        "--rm-type": args.rm_type,
        "--custom-rm-path": args.custom_rm_path,
        "--rm-url": args.rm_url,
        "--reward-key": args.reward_key,
        "--group-rm": args.group_rm,
    }


def as_partial_group(args: Any, original: list[Any], group: list[Any], rollout_id: int) -> list[Any]:
    """The unfinished `group` with what its samples have so far, to be continued in a later step.

    `metadata["start_rollout_id"]` of an attempt keeps the rollout in which it was returned first.
    """
    for sample in leaves([entry for entry in group if can_be_continued(entry)]):
        sample.metadata.setdefault("start_rollout_id", rollout_id)
    return as_continuable_group(args, original, group)


def mask_finished_earlier(args: Any, sample: Sample) -> None:
    """With `--mask-offpolicy-in-partial-rollout`: mask all of a sibling that was finished before its group came back."""
    if _masking(args) and "start_rollout_id" in sample.metadata:
        sample.loss_mask = np.zeros(sample.response_length, np.int32)


def tokens_to_continue(attempt: Sample) -> np.ndarray | None:
    """Prompt and response so far of an attempt that is continued, int64; None for one that starts from its prompt."""
    return token_array(attempt, "tokens") if attempt.response_length else None


def mask_tokens_before_resumption(args: Any, entry: Any, tokens_before: np.ndarray | None) -> None:
    """With `--mask-offpolicy-in-partial-rollout`: train only what was written after the resumption.

    In each leaf of `entry` the response tokens that it shares with `tokens_before` (`tokens_to_continue`) get mask 0. The mask
    has `response_length` entries afterwards.
    """
    if tokens_before is None or not _masking(args):
        return
    for sample in leaves(entry):
        tokens, mask = token_array(sample, "tokens"), token_array(sample, "loss_mask")
        prompt_length = len(tokens) - sample.response_length
        stale = max(0, _common_prefix_length(tokens, tokens_before) - prompt_length)
        mask = np.ones(sample.response_length, np.int32) if mask is None else mask.copy()
        mask[:stale] = 0
        sample.loss_mask = read_only(mask)


def _masking(args: Any) -> bool:
    return bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)


def _common_prefix_length(left: np.ndarray, right: np.ndarray) -> int:
    shorter = min(len(left), len(right))
    different = left[:shorter] != right[:shorter]
    return int(different.argmax()) if different.any() else shorter
