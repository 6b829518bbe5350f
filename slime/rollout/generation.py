"""From a prompt to a scored sample, and the same for a group of siblings.

Invariants:
- A request starts only inside the semaphore, and never after the abort flag is set.
- Rewards are computed outside the semaphore.
- Tokens and log-probs are the engine's own; text is never tokenised again to get them.
"""

import asyncio
from typing import Any

from slime.observability.trace_utils import carry_trace, trace_next_attempt, trace_span
from slime.rollout.attempts import (
    FINISHED,
    can_be_continued,
    mask_finished_earlier,
    mask_tokens_before_resumption,
    new_attempt,
    prompt_of,
    tokens_to_continue,
)
from slime.rollout.base_types import leaves
from slime.rollout.custom_generate import (
    GenerateFunction,
    apply_rollout_sample_hooks,
    resolve_generate_function,
)
from slime.rollout.engine_request import (
    ask_engine,
    build_payload,
    check_kept_sets,
    check_prompt_length,
    generated_tokens,
    get_model_url,
    stream_engine,
    token_budget,
)
from slime.rollout.failures import SampleFailed, failing_alone, mark_failed
from slime.rollout.generate_state import GenerateState, deterministic_inference, rollout_sampling_params
from slime.rollout.generation_call import current_call
from slime.rollout.rm_hub.grading import async_rm, batched_async_rm
from slime.training.rollout_batch import takes_images
from slime.utils.engine_protocol import of_another_distribution
from slime.utils.errors import RunError, UserError
from slime.utils.processing_utils import sees_images
from slime.utils.sample_fields import STATUS_OF_FINISH_REASON, finish_type, first_not_finite, held
from slime.utils.types import Sample

Status = Sample.Status


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue `sample` by one request to the default model; a sample without tokens starts from its prompt.

    If no token is left in its budget the sample becomes TRUNCATED and no request is made.

    Raises:
        SampleFailed: the prompt does not fit the context length; or the sample was begun with kept sets and goes on without,
            or the other way round; or it has placeholders of images that it was not shown.
        UserError: an id is outside the vocabulary, or the settings are such that no engine survives them.
        HttpError: the engine refused the request, or did not answer.
    """
    payload = await _next_request(args, sample, sampling_params)
    if payload is not None:
        answer = await ask_engine(args, sample, payload)
        _compare_prompts(args, sample, payload, answer)
        _warn_of_a_short_cache(args, payload, answer["meta_info"])
        append_engine_output(args, sample, answer)
    return sample


async def generate_streaming(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """As `generate`, token by token, for `--custom-generate-function-path`.

    If the connection to the engine breaks, the sample is ABORTED with the tokens that came before, as if the engine had been
    told to abort it. With `--partial-rollout` it is continued from there, while `generate` would ask for all of it again.
    """
    payload = await _next_request(args, sample, sampling_params)
    if payload is None:
        return sample
    stream = _Stream(args, sample, payload)
    await stream_engine(args, sample, payload, stream.append)
    stream.close()
    return sample


async def _next_request(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> dict[str, Any] | None:
    """The request that continues `sample`; None if it is not to be continued, which its status then explains."""
    state, call = GenerateState(args), current_call()
    images, begins = await state.encode_images(sample), not len(held(sample, "tokens"))
    if begins:
        sample.tokens = await state.encode_prompt(sample) if images is None else images.token_ids
    if call.aborted and (begins or images is not None):
        sample.status = Status.ABORTED
        return None
    if images is not None and not call.evaluation:
        sample.multimodal_train_inputs = dict(images.train_inputs)
    context_length = state.context_length(args)
    if sample.response_length == 0:
        check_prompt_length(sample, context_length)
    check_kept_sets(args, sample)
    budget = token_budget(sample, sampling_params, context_length)
    if budget <= 0:
        sample.status = Status.TRUNCATED
        return None
    payload = build_payload(state, sample, sampling_params, budget)
    if not call.evaluation:
        _warn_of_another_distribution(args, sampling_params)
    return payload if images is None else payload | images.request(sample)


def _warn_of_another_distribution(args: Any, sampling_params: dict[str, Any]) -> None:
    """Warn once if a function samples what is to be trained from another distribution than the trainer's log-probs are of."""
    if others := of_another_distribution(sampling_params, rollout_sampling_params(args)):
        GenerateState(args).warn_once(
            f"a function samples with {', '.join(others)}, and the trainer computes log-probs by the flags "
            f"(--rollout-temperature {args.rollout_temperature}, --rollout-top-p {args.rollout_top_p}, --rollout-top-k "
            f"{args.rollout_top_k}): such answers count as the policy's, and are not; give the flags these values, or leave "
            "sampling_params as they come"
        )


def _compare_prompts(args: Any, sample: Sample, payload: dict[str, Any], answer: dict[str, Any]) -> None:
    """Warn once if an engine made another number of tokens of a prompt with images than `sample` has before the answer."""
    if "image_data" not in payload:
        return
    seen, expected = answer["meta_info"].get("prompt_tokens"), len(held(sample, "tokens"))
    if seen is not None and seen != expected:
        GenerateState(args).warn_once(
            "engines count other tokens in prompts with images than the processor of --hf-checkpoint: they see the images in "
            "another size, or not at all; do their model and their settings for images belong to this checkpoint?"
        )


def _warn_of_a_short_cache(args: Any, payload: dict[str, Any], meta_info: dict[str, Any]) -> None:
    """Warn once if an engine ended an answer by its length before the one that was asked for: SGLang 0.5.21 silently lowers
    that to what its cache has room for."""
    told, asked = meta_info.get("completion_tokens"), payload["sampling_params"]["max_new_tokens"]
    if finish_type(meta_info) == "length" and told is not None and told < asked:
        GenerateState(args).warn_once(
            f"an engine cut an answer off after {told} of {asked} tokens: its KV cache has no room for a longer sample. Such "
            "answers count as truncated; raise --sglang-mem-fraction-static, --sglang-max-total-tokens or "
            "--rollout-num-gpus-per-engine, or lower --rollout-max-response-len"
        )


class _Stream:
    """Appends to a sample what each answer of a stream adds to the one before."""

    # Entries of an answer's `meta_info` that hold one value per token, from the first token of the stream on.
    _PER_TOKEN = ("output_token_logprobs", "output_token_sampling_mask")

    def __init__(self, args: Any, sample: Sample, payload: dict[str, Any]) -> None:
        self._args, self._sample, self._payload = args, sample, payload
        self._text_before = sample.response
        self._tokens = 0
        # The weights that made the tokens so far, in the form in which the end of an answer tells them.
        self._versions: list[dict[str, Any]] = []
        self._unfinished: dict[str, Any] | None = None

    def append(self, output: dict[str, Any]) -> None:
        if not self._tokens:
            _compare_prompts(self._args, self._sample, self._payload, output)
        meta_info = dict(output["meta_info"])
        self._unfinished = None if meta_info.get("finish_reason") else meta_info
        _warn_of_a_short_cache(self._args, self._payload, meta_info)
        for name in self._PER_TOKEN:
            if meta_info.get(name) is not None:
                meta_info[name] = meta_info[name][self._tokens :]
        before, self._tokens = self._tokens, self._tokens + len(meta_info.get("output_token_logprobs") or ())
        append_engine_output(self._args, self._sample, {"meta_info": meta_info}, told_before=before)
        self._note_version(meta_info.get("weight_version"))
        if self._tokens:
            # The whole text is replaced: an engine may change the end of a text whose last character was not complete.
            self._sample.response = self._text_before + (output.get("text") or "")

    def close(self) -> None:
        """End the stream. If the engine did not finish, the sample is ABORTED, with the counters told last, and each token has
        the version of its time."""
        if self._unfinished is not None:
            told = {name: value for name, value in self._unfinished.items() if name not in self._PER_TOKEN}
            versions = told.get("weight_versions") or self._versions
            ended = {"weight_versions": versions, "finish_reason": {"type": "abort"}}
            self._sample.append_response_tokens(self._args, meta_info=told | ended)

    def _note_version(self, version: Any) -> None:
        if self._versions:
            # What came since the answer before counts as made before a push that came since: it may not look newer than it is.
            self._versions[-1]["end"] = self._tokens
        if version is not None and (not self._versions or version != self._versions[-1]["version"]):
            start = self._tokens if self._versions else 0
            self._versions.append({"version": version, "start": start, "end": self._tokens})


def append_engine_output(args: Any, sample: Sample, output: dict[str, Any], *, told_before: int = 0) -> None:
    """Add the tokens that the engine generated. An answer without token log-probs brings no new tokens, only its status.

    An answer that ended, and for a reason that is not known here, is COMPLETED.

    Args:
        told_before: the number of tokens of this answer that `sample` has already, from a stream.

    Raises:
        SampleFailed: a log-prob is missing, NaN or infinite, so that the token cannot be trained; or the tokens cannot be read,
            or are fewer or more than the engine counts, so that text and tokens are not the same answer.
        UserError: the engine counts generated tokens and tells none.
    """
    meta_info = output["meta_info"]
    if meta_info.get("output_token_logprobs") is None:
        _require_no_tokens(args, meta_info)
    generated, ended_by = generated_tokens(meta_info), finish_type(meta_info)
    told, counted = told_before + len(generated.tokens), meta_info.get("completion_tokens")
    # An answer that was aborted while it waited may have lost some.
    if counted not in (None, told) and ended_by not in (None, "abort"):
        raise SampleFailed(
            f"the engine counts {counted} tokens in its answer to sample {sample.index}, and tells the log-probs of {told}"
        )
    try:
        sample.append_response_tokens(
            args,
            tokens=generated.tokens,
            log_probs=generated.log_probs,
            meta_info=meta_info,
            text=output.get("text") if len(generated.tokens) else None,
        )
    except ValueError as error:
        wrong = first_not_finite(generated.log_probs)
        if wrong is None:
            raise
        position = sample.response_length + wrong
        raise SampleFailed(
            f"the engine gave response token {position} (id {generated.tokens[wrong]}) of sample {sample.index} the "
            f"log-prob {generated.log_probs[wrong]}"
        ) from error
    if ended_by is not None and ended_by not in STATUS_OF_FINISH_REASON:
        GenerateState(args).warn_once(
            f"engines end answers for the reason {ended_by!r}, which is not known here; such answers count as completed"
        )
        sample.status = Status.COMPLETED


def _require_no_tokens(args: Any, meta_info: dict[str, Any]) -> None:
    """Raise UserError if the request of an answer without log-probs had lost its wish for them by the time it reached the
    engine. Only an answer that was aborted while it waited may lack them."""
    count = meta_info.get("completion_tokens")
    if not count or finish_type(meta_info) == "abort":
        return
    raise UserError(
        f"an engine behind {get_model_url(args, 'default', '')} generated {count} tokens and answered without "
        "output_token_logprobs, of which responses are made: the router drops the field return_logprob of requests "
        "(--sglang-router-ip: give one that hands it on, or none), or a function of yours asks without it (set it to true)"
    )


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Any]:
    """An attempt on `sample`, generated and graded; `sample` itself stays unchanged. A list, from a custom function, is one
    execution.

    A generation that fails is tried once more from the prompt; if that fails too the attempt is marked FAILED. If only the
    reward fails, only the reward is asked for once more.
    """
    attempt = new_attempt(sample)
    try:
        return await _generate_and_rm_once(args, attempt, sampling_params, evaluation)
    except SampleFailed as failure:
        if not failure.retryable:
            return _failed(args, sample, attempt, failure)
    prompt = prompt_of(sample)
    attempt = carry_trace(attempt, new_attempt(prompt))
    trace_next_attempt(attempt)
    try:
        return await _generate_and_rm_once(args, attempt, sampling_params, evaluation)
    except SampleFailed as failure:
        return _failed(args, prompt, attempt, failure)


def _failed(args: Any, origin: Sample, attempt: Sample, failure: SampleFailed) -> Sample:
    """The attempt on `origin`, marked as failed. If a function that was given up may still write into it, it is a new one."""
    kept = carry_trace(attempt, new_attempt(origin)) if failure.abandoned else attempt
    return mark_failed(args, kept, failure.reason)


async def _generate_and_rm_once(
    args: Any, attempt: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Any]:
    entry: Sample | list[Any] = attempt
    with trace_span(attempt, "generate_and_rm") as span:
        if attempt.status not in FINISHED:
            entry = await _generate_entry(args, attempt, sampling_params, evaluation)
            entry = await _hook_and_grade(args, entry, evaluation)
        else:
            if not evaluation:
                with failing_alone(args):
                    check_kept_sets(args, attempt)
                    await _look_again(args, attempt)
            mask_finished_earlier(args, attempt)
            await _grade_entry(args, attempt, evaluation)
        if entry is not attempt:
            span.include(carry_trace(attempt, entry))
    return entry


async def _generate_entry(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Any]:
    function = resolve_generate_function(args, sample)
    async with GenerateState(args).semaphore:
        if current_call().aborted:
            sample.status = Status.ABORTED
            return sample
        tokens_before = tokens_to_continue(sample)
        with failing_alone(args):
            if function is None:
                entry: Sample | list[Any] = await generate(args, sample, sampling_params)
            else:
                entry = await function.call_single(args, sample, sampling_params, evaluation)
    mask_tokens_before_resumption(args, entry, tokens_before)
    return entry


async def grade(args: Any, entry: Sample | list[Any], evaluation: bool) -> None:
    """Set the reward of every leaf that has none. An execution with an aborted leaf stays ungraded."""
    if is_aborted(entry):
        return
    if isinstance(entry, Sample):
        if entry.reward is None:
            with trace_span(entry, "reward_model"):
                entry.reward = await async_rm(args, entry, evaluation=evaluation)
        return
    ungraded = [sample for sample in leaves(entry) if sample.reward is None]
    if not ungraded:
        return
    with trace_span(ungraded, "group_reward_model"):
        rewards = await batched_async_rm(args, ungraded, evaluation=evaluation)
    for sample, reward in zip(ungraded, rewards, strict=True):
        sample.reward = reward


async def _grade_entry(args: Any, entry: Sample | list[Any], evaluation: bool) -> None:
    """Grade an entry of a group. With `--group-rm`, which is about training, all of a group are graded at once instead."""
    if evaluation or not args.group_rm:
        await _grade_or_fail(args, entry, evaluation)


async def _grade_or_fail(args: Any, entry: Sample | list[Any], evaluation: bool) -> None:
    """Call `grade`, twice if need be. If there is no reward all leaves of `entry` become FAILED, and keep their tokens."""
    for is_last in (False, True):
        try:
            with failing_alone(args):
                return await grade(args, entry, evaluation)
        except SampleFailed as failure:
            if is_last or not failure.retryable:
                for sample in leaves(entry):
                    mark_failed(args, sample, failure.reason)
                return None


def is_aborted(entry: Any) -> bool:
    """Whether any leaf was interrupted, or never started."""
    if isinstance(entry, Sample):
        return entry.status in (Status.ABORTED, Status.PENDING)
    return any(map(is_aborted, entry))


async def generate_and_rm_group(
    args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and grade all entries of a group side by side; with `--group-rm` all are graded at once afterwards.

    Entries that failed before start from their prompts. There may be such, because a group may come from a step that was wound
    down, from an interrupted evaluation, or from anywhere by way of a user's data source. With deterministic inference each
    entry has a seed, by its place in the group.

    Returns:
        One attempt per entry of `group`, in its order: a Sample, or the list of an execution that fanned out. The entries
        stay as they are.
    """
    with trace_span([], "generate_and_rm_group") as span:
        finished = await _finished_group(args, group, sampling_params, evaluation)
        span.include(finished)
    return finished


async def _finished_group(args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool) -> list[Any]:
    group = [entry if can_be_continued(entry) else prompt_of(entry) for entry in group]
    if current_call().aborted:
        return _as_aborted(group)
    params = [dict(sampling_params) for _ in group]
    if deterministic_inference(args):
        for position, own_params in enumerate(params):
            own_params["sampling_seed"] = args.rollout_seed + position
    function = resolve_generate_function(args, group[0]) if isinstance(group[0], Sample) else None
    if function is not None and function.takes_group and _all_need_generation(args, group, function):
        finished = await _generate_batch(args, group, function, params, evaluation)
    else:
        finished = await run_side_by_side(
            [
                generate_and_rm(args, entry, own_params, evaluation=evaluation)
                if isinstance(entry, Sample)
                else _already_finished(args, entry, own_params, evaluation)
                for entry, own_params in zip(group, params, strict=True)
            ]
        )
    if args.group_rm and not evaluation:
        await _grade_or_fail(args, finished, evaluation)
    return finished


def start_group(args: Any, group: list[Any], sampling_params: dict[str, Any]) -> asyncio.Task[list[Any]]:
    """`generate_and_rm_group` as a task that is named after the group's number."""
    coroutine = generate_and_rm_group(args, group, sampling_params)
    return asyncio.create_task(coroutine, name=f"group {leaves(group)[0].group_index}")


def cancelled_error(task: asyncio.Task[Any]) -> RunError:
    """The error that ends a run when `task`, which generates, was cancelled, and not by the run."""
    return RunError(f"{task.get_name()} was cancelled; does a function of yours cancel tasks that are not its own?")


async def _already_finished(
    args: Any, entry: list[Any], sampling_params: dict[str, Any], evaluation: bool
) -> Sample | list[Any]:
    """An execution that fanned out and finished in an earlier step. If images of it are gone, a new one is generated from its
    prompt."""
    attempt = new_attempt(entry)
    try:
        with failing_alone(args):
            for sample in leaves(attempt):
                await _look_again(args, sample)
                mask_finished_earlier(args, sample)
    except SampleFailed:
        return await generate_and_rm(args, prompt_of(entry), sampling_params, evaluation)
    await _grade_entry(args, attempt, evaluation)
    return attempt


async def _look_again(args: Any, sample: Sample) -> None:
    """Encode the images of an answer that was finished in an earlier step: it is trained on the processor's tensors, which
    checkpoints of the data do not hold."""
    if sample.multimodal_train_inputs is None and sees_images(sample) and takes_images(args):
        images = await GenerateState(args).encode_images(sample)
        sample.multimodal_train_inputs = dict(images.train_inputs)


def _as_aborted(group: list[Any]) -> list[Any]:
    """Attempts that are aborted before they begin; entries that are finished already stay finished."""
    attempts = [new_attempt(entry) for entry in group]
    for sample in leaves(attempts):
        sample.status = sample.status if sample.status in FINISHED else Status.ABORTED
    return attempts


def _all_need_generation(args: Any, group: list[Any], function: GenerateFunction) -> bool:
    return all(
        isinstance(entry, Sample)
        and entry.status not in FINISHED
        and resolve_generate_function(args, entry) == function
        for entry in group
    )


async def _generate_batch(
    args: Any, group: list[Sample], function: GenerateFunction, sampling_params: list[dict[str, Any]], evaluation: bool
) -> list[Any]:
    """Call a batch-form function for the whole group, again if it fails; then run hooks and rewards entry by entry."""
    async with GenerateState(args).semaphore:
        attempts = [new_attempt(sample) for sample in group]
        for is_last in (False, True):
            if current_call().aborted:
                return _as_aborted(group)
            tokens_before = [tokens_to_continue(attempt) for attempt in attempts]
            try:
                with failing_alone(args):
                    entries = await function.call_group(args, attempts, sampling_params, evaluation)
                break
            except SampleFailed as failure:
                if is_last or not failure.retryable:
                    pairs = zip(group, attempts, strict=True)
                    return [_failed(args, sample, attempt, failure) for sample, attempt in pairs]
                group = [prompt_of(sample) for sample in group]
                attempts = [carry_trace(a, new_attempt(prompt)) for a, prompt in zip(attempts, group, strict=True)]
                for attempt in attempts:
                    trace_next_attempt(attempt)
    for entry, before in zip(entries, tokens_before, strict=True):
        mask_tokens_before_resumption(args, entry, before)
    return await run_side_by_side([_hook_and_grade(args, entry, evaluation) for entry in entries])


async def _hook_and_grade(args: Any, entry: Sample | list[Any], evaluation: bool) -> Sample | list[Any]:
    if is_aborted(entry):
        return entry
    if args.rollout_sample_hook_path:
        rollout_id = current_call().rollout_id
        entry = await apply_rollout_sample_hooks(args, entry, rollout_id=rollout_id, evaluation=evaluation)
    await _grade_entry(args, entry, evaluation)
    return entry


async def run_side_by_side(coroutines: list[Any]) -> list[Any]:
    """All results in order. If one raises, the others are cancelled, and have ended when the error is raised."""
    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
