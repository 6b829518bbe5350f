"""Users' functions that make a sample: generate functions, and the hooks that a sample goes through before it is graded.

`--custom-generate-function-path` names a generate function. It has one of two forms, told apart by its signature:
`fn(args, sample, sampling_params[, evaluation])` for one sample, or `fn(args, samples, evaluation[, sampling_params])` for a
whole group, with one dict of parameters per sample. What it returns is brought into the shape that training needs, or refused
with an error that names flag, path and sample.

`--rollout-sample-hook-path` names functions that every generated sample goes through, in the order of the flags.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slime.rollout.attempts import own_copy
from slime.rollout.base_types import check_fit, check_kinds, check_sample, leaves
from slime.rollout.failures import SampleFailed, neutral_reward
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation_call import current_call
from slime.rollout.rm_hub.grading import checked_reward
from slime.rollout.user_functions import (
    CallKind,
    CallTimedOut,
    call_slots,
    call_user_function,
    call_within_request_time,
    describe_samples,
    is_batch_form,
    wrong_result_error,
)
from slime.training.rollout_batch import correction_flag
from slime.utils.errors import UserError
from slime.utils.http_utils import generation_concurrency
from slime.utils.plugin_loader import accepted_keywords, load_function, user_function_error
from slime.utils.sample_fields import first_not_finite, held
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

GENERATE_FLAG = "--custom-generate-function-path"
HOOK_FLAG = "--rollout-sample-hook-path"


@dataclass(frozen=True)
class GenerateFunction:
    """A user's generate function with the path it was found by."""

    path: str
    function: Callable[..., Any]

    @property
    def takes_group(self) -> bool:
        return is_batch_form(self.function)

    async def call_single(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
    ) -> Sample | list[Any]:
        """The entry for one sample; the function gets a private copy of the sampling parameters."""
        if self.takes_group:
            return (await self.call_group(args, [sample], [sampling_params], evaluation))[0]
        keywords = accepted_keywords(self.function, {"evaluation": evaluation})
        result = await self._call(args, [sample], sample, _own_parameters(sampling_params), keywords=keywords)
        return await self._checked_entry(args, sample, result)

    async def call_group(
        self, args: Any, group: list[Sample], sampling_params: list[dict[str, Any]], evaluation: bool
    ) -> list[Any]:
        """The entries for a group, in its order; a function that takes `sampling_params` gets one private dict per sample."""
        own = [_own_parameters(params) for params in sampling_params]
        keywords = accepted_keywords(self.function, {"evaluation": evaluation, "sampling_params": own})
        result = await self._call(args, group, list(group), keywords=keywords)
        if not isinstance(result, list) or len(result) != len(group):
            expected = f"a list of {len(group)} entries, one per sample, in order"
            raise wrong_result_error(GENERATE_FLAG, self.path, describe_samples(group), result, expected)
        entries = [await self._checked_entry(args, sample, entry) for sample, entry in zip(group, result, strict=True)]
        self._require_objects_of_their_own(group, entries)
        return entries

    async def _call(self, args: Any, samples: list[Sample], *arguments: Any, keywords: dict[str, Any]) -> Any:
        limit = args.http_request_timeout
        try:
            return await call_user_function(
                self.function,
                args,
                *arguments,
                source=f"{GENERATE_FLAG} {self.path}",
                at_a_time=generation_concurrency(args),
                timeout=limit,
                keywords=keywords,
            )
        except CallTimedOut as error:
            reason = f"{GENERATE_FLAG} {self.path} did not return within --http-request-timeout {limit:g} s"
            raise SampleFailed(reason, retryable=False, abandoned=True) from error
        except SampleFailed:
            raise
        except Exception as error:
            if isinstance(error, ExceptionGroup) and error.split(SampleFailed)[1] is None:
                # The function has asked for several answers in a task group of its own.
                first: Exception = error
                while isinstance(first, ExceptionGroup):
                    first = first.exceptions[0]
                raise first from error
            raise user_function_error(GENERATE_FLAG, self.path, describe_samples(samples), error) from error

    async def _checked_entry(self, args: Any, sample: Sample, entry: Any) -> Sample | list[Any]:
        subject = f"sample {sample.index}"
        found = leaves(entry) if isinstance(entry, Sample | list) else []
        if not found or not all(isinstance(leaf, Sample) for leaf in found):
            raise wrong_result_error(GENERATE_FLAG, self.path, subject, entry, "Sample or a non-empty list of Samples")
        for leaf in found:
            _take_over(sample, leaf)
            if _lacks_tokens(leaf):
                await GenerateState(args).in_encoder(complete_sample, args, leaf, f"{GENERATE_FLAG} {self.path}")
            else:
                complete_sample(args, leaf, f"{GENERATE_FLAG} {self.path}")
            _check_own_reward(args, leaf, f"{GENERATE_FLAG} {self.path}")
        if isinstance(entry, list):
            self._require_objects_of_their_own([sample], found)
            share_execution_id(sample, found, f"{GENERATE_FLAG} {self.path}")
        return entry

    def _require_objects_of_their_own(self, samples: list[Sample], entries: list[Any]) -> None:
        """Refuse a Sample that was returned twice: as a list of turns, say, of which each would be what the last one made of
        it."""
        found = leaves(entries)
        if len(set(map(id, found))) < len(found):
            raise UserError(
                f"{GENERATE_FLAG} {self.path} returned one Sample object several times for {describe_samples(samples)}, so "
                "these would be trained as one answer; return objects of their own (copy.deepcopy(sample) keeps one as it is)"
            )


def _take_over(origin: Sample, sample: Sample) -> None:
    """Give `sample`, which a function made for `origin`, what it lacks of the prompt's: numbers, text, images, label and
    metadata."""
    if sample is origin:
        return
    prompt = own_copy(origin)
    for name in ("group_index", "index", "prompt", "label", "metadata", "train_metadata", "custom_rm_path"):
        value = getattr(sample, name)
        if value is None or (name in ("prompt", "metadata") and not value):
            setattr(sample, name, getattr(prompt, name))
    if not sample.multimodal_inputs and sample.prompt == prompt.prompt:
        # The text stands for these images; a context of its own has others, or none.
        sample.multimodal_inputs = prompt.multimodal_inputs


def _own_parameters(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """A copy for a function to change. Its lists (`stop`, `stop_token_ids`) are copied too: they are those of flags."""
    return {name: list(value) if isinstance(value, list) else value for name, value in sampling_params.items()}


def resolve_generate_function(args: Any, sample: Sample) -> GenerateFunction | None:
    """The user's function for `sample`: its own path (set by the user or an eval set) before the flag; None = default."""
    path = sample.generate_function_path or args.custom_generate_function_path
    return GenerateFunction(path, load_function(path, flag=GENERATE_FLAG)) if path else None


def share_execution_id(origin: Sample, siblings: list[Sample], source: str) -> None:
    """Give the leaves of one execution a common `rollout_id`, that of the sample they came from, if they have none.

    Raises:
        UserError: the ids differ, or only some leaves have one.
    """
    ids = {sample.rollout_id for sample in siblings}
    if ids == {None}:
        execution_id = origin.rollout_id if origin.rollout_id is not None else origin.index
        for sample in siblings:
            sample.rollout_id = execution_id
    elif len(ids) > 1:
        raise UserError(
            f"{source} returned a list with different rollout_id for sample {origin.index}: "
            f"{sorted(ids, key=str)}; a returned list is one execution and shares one rollout_id"
        )


def complete_sample(args: Any, sample: Sample, source: str) -> None:
    """Bring what a custom function returned into the shape of `Sample`.

    Text without tokens is tokenised; a mask over all tokens is cut to the response; an empty mask of a non-empty
    response means all ones; a PENDING sample with a response is COMPLETED. Beside that, what `check_kinds` does.

    Raises:
        UserError: a field is of another kind; the fields do not fit together; or a trained token has a log-prob that is no
            finite number.
    """
    who_did = f"{source} returned"
    check_kinds(sample, who_did)
    if _lacks_tokens(sample):
        _tokenise_response(args, sample, source)
    if held(sample, "loss_mask") is not None and sample.response_length:
        _fit_loss_mask(sample, source)
    if sample.status is Sample.Status.PENDING and sample.response_length:
        sample.status = Sample.Status.COMPLETED
    if sample.status is Sample.Status.PENDING:
        raise UserError(
            f"{source} returned sample {sample.index} without response and with status PENDING; "
            "set tokens, response, response_length and status (append_response_tokens does)"
        )
    if sample.status is Sample.Status.FAILED and sample.response_length == 0:
        sample.remove_sample = True
        sample.reward = neutral_reward(args) if sample.reward is None else sample.reward
    check_fit(sample, who_did)
    try:
        _require_finite_log_probs(sample)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source} returned a sample whose fields do not fit together: {error}") from error


def _check_own_reward(args: Any, sample: Sample, source: str) -> None:
    """Check a reward that a function set, and so replaces the reward function. Where a function of the user's makes the columns
    of the batch, it alone knows what a reward means."""
    evaluation = current_call().evaluation
    if sample.reward is not None and (evaluation or args.custom_convert_samples_to_train_data_path is None):
        sample.reward = checked_reward(args, sample, sample.reward, source, evaluation)


def _lacks_tokens(sample: Sample) -> bool:
    return bool(sample.response) and not len(held(sample, "tokens"))


def _tokenise_response(args: Any, sample: Sample, source: str) -> None:
    """Make tokens from text. They may differ from those that the engine generated, so its log-probs do not belong to them.

    Raises:
        UserError: a flag needs these log-probs, and this is no evaluation, which trains nothing.
    """
    others = {"--use-rollout-logprobs": args.use_rollout_logprobs, "--true-on-policy-mode": args.true_on_policy_mode}
    names = ", ".join(filter(None, (correction_flag(args), *(flag for flag, given in others.items() if given))))
    if names and not current_call().evaluation:
        raise UserError(
            f"{source} returned text without tokens for sample {sample.index}: re-tokenised text has no engine "
            f"log-probs, which {names} needs; return tokens and rollout_log_probs (append_response_tokens)"
        )
    state = GenerateState(args)
    state.warn_once(f"{source} returns text without tokens; it is tokenised again, which makes it slightly off-policy")
    response_ids = state.encode_text(sample.response, add_special_tokens=False)
    sample.tokens = state.prompt_ids(sample) + response_ids
    sample.response_length = len(response_ids)
    sample.loss_mask = [1] * len(response_ids)
    sample.rollout_log_probs = None


def _fit_loss_mask(sample: Sample, source: str) -> None:
    mask = held(sample, "loss_mask")
    if len(mask) == 0:
        sample.loss_mask = None
    elif len(mask) == len(held(sample, "tokens")) != sample.response_length:
        logger.warning("%s: loss_mask covers all tokens; cut to the response (sample %s)", source, sample.index)
        sample.loss_mask = mask[-sample.response_length :]


def _require_finite_log_probs(sample: Sample) -> None:
    """Raise ValueError where a trained token has a log-prob that is no finite number."""
    log_probs, mask = held(sample, "rollout_log_probs"), held(sample, "loss_mask")
    if log_probs is None or sample.remove_sample:
        return
    # Nobody reads the log-prob of a token that is not trained.
    trained = True if mask is None else np.asarray(mask) != 0
    position = first_not_finite(np.where(trained, np.asarray(log_probs, np.float64), 0.0))
    if position is not None:
        raise ValueError(
            f"sample {sample.index}: log_prob {log_probs[position]} of response token {position} is no finite number"
        )


async def apply_rollout_sample_hooks(
    args: Any, sample: Sample | list[Any], *, rollout_id: int | None = None, evaluation: bool = False
) -> Sample | list[Any]:
    """`sample` (or every leaf of a nested list) after all hooks, in the order of the flags.

    Raises:
        TypeError: a hook returned neither a Sample nor None.
        UserError: a hook raised (its traceback is part of the message), or left a status that is none, or lengths that do not
            fit together.
    """
    if isinstance(sample, list):
        return [
            await apply_rollout_sample_hooks(args, entry, rollout_id=rollout_id, evaluation=evaluation)
            for entry in sample
        ]
    for path in args.rollout_sample_hook_path or []:
        sample = await _apply_hook(args, path, sample, rollout_id, evaluation)
    return sample


async def _apply_hook(args: Any, path: str, sample: Sample, rollout_id: int | None, evaluation: bool) -> Sample:
    hook = load_function(path, flag=HOOK_FLAG)
    keywords = accepted_keywords(hook, {"rollout_id": rollout_id, "evaluation": evaluation})
    # A hook follows a generation, so as many slots as generations have are enough.
    slots = call_slots(CallKind.HOOK, generation_concurrency(args))
    options = {"at_a_time": slots.size, "keywords": keywords}
    async with slots:
        result = await call_within_request_time(
            args, HOOK_FLAG, path, f"sample {sample.index}", hook, args, sample, **options
        )
    result = sample if result is None else result
    if not isinstance(result, Sample):
        raise TypeError(
            f"{HOOK_FLAG} {path} returned {type(result).__name__} for sample {sample.index}; expected Sample or None"
        )
    _take_over(sample, result)
    check_sample(result, f"{HOOK_FLAG} {path} left")
    _check_own_reward(args, result, f"{HOOK_FLAG} {path}")
    return result
