"""Answers of several turns: the model speaks, an environment replies, and so on, all of it one response; and answers of
several contexts, each a sample of its own.

For generate functions of users (`--custom-generate-function-path`). What the environment says is context: it has loss mask 0,
and the model's own tokens and log-probs are never made again from text.
"""

import inspect
import reprlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

from slime.rollout.attempts import new_attempt, prompt_of
from slime.rollout.engine_request import token_budget
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, run_side_by_side
from slime.rollout.generation_call import current_call
from slime.utils.errors import UserError
from slime.utils.misc import unique_hex
from slime.utils.processing_utils import PROBE_ANSWER, REPLIES_WITH_IMAGES, as_data_uri, images_of, render_chat
from slime.utils.sample_fields import held
from slime.utils.types import Sample

Reply = str | dict[str, Any] | list[dict[str, Any]] | None

# This entry of a sample's metadata is the character of the response at which the model's turn begins.
_TURN_START = "turn_start"


async def dialogue(
    args: Any, sample: Sample, sampling_params: dict[str, Any], reply: Callable[[str], Reply | Awaitable[Reply]]
) -> Sample:
    """`sample` after turns of the model and replies to them, until there is none.

    `reply(said)` is given the text of the model's turn. It returns a chat message (`{"role": "tool", "content": …}`) or a list
    of them, which the chat template renders, a text that is put behind the turn as it is, or None: the dialogue is over.
    What waits in it should be `async`: other dialogues go on meanwhile.

    A message may have images, as parts of its content (`{"type": "image", "image": …}`) that are read as those of a prompt are.
    The model is asked about them with those of the prompt, and trained on them.

    Turns end where the model ends them, or by a stop string (`--rollout-stop`). The dialogue is over, too, after
    `--max-turns` turns of the model, and where a length limit cuts one off or leaves no room for the reply: then it is
    TRUNCATED. The number of turns is in `metadata["round_number"]`, the time of replies in `non_generation_time`. One that
    was interrupted (ABORTED) is gone on with where it stopped, with `--partial-rollout`.

    Raises:
        TypeError: `reply` returned something else.
        UserError: the chat template cannot put such a message behind an answer; or it has images that cannot be read, or for
            which the checkpoint has no processor.
    """
    metadata = sample.metadata
    while True:
        if current_call().aborted:
            sample.status = Sample.Status.ABORTED
            return sample
        start = metadata.setdefault(_TURN_START, len(sample.response))
        sample = await generate(args, sample, sampling_params)
        if sample.status is not Sample.Status.COMPLETED:
            return sample
        metadata["round_number"] = metadata.get("round_number", 0) + 1
        del metadata[_TURN_START]
        if args.max_turns is not None and metadata["round_number"] >= args.max_turns:
            return sample
        started = time.monotonic()
        said = reply(sample.response[start:])
        if inspect.isawaitable(said):
            said = await said
        sample.non_generation_time += time.monotonic() - started
        if said is None:
            return sample
        if not await _append(args, sample, sampling_params, said):
            sample.status = Sample.Status.TRUNCATED
            return sample


async def ask(args: Any, sample: Sample, messages: list[dict[str, Any]], sampling_params: dict[str, Any]) -> Sample:
    """The model's answer to `messages`, in a context of its own: another sample, beside `sample`, which stays as it is.

    A function that returns several of them has made one execution with several training samples. Its label and metadata are
    those of `sample`; session, tokens, log-probs and weight versions are its own. ABORTED where the call is being wound
    down, and TRUNCATED by a length limit, as any other answer.
    """
    answer = new_attempt(prompt_of(sample))
    # The caller may go on with the list, and the answer keeps what was asked.
    answer.prompt = [dict(message) for message in messages]
    answer.tokens, answer.session_id = [], unique_hex()
    # The context has the images that stand in its messages, and no others.
    answer.multimodal_inputs = None
    return await generate(args, answer, sampling_params)


async def ask_all(
    args: Any, sample: Sample, contexts: list[list[dict[str, Any]]], sampling_params: dict[str, Any]
) -> list[Sample]:
    """`ask` for each of `contexts` at once: the answers in their order. When one raises, the others are cancelled.

    With deterministic inference each has a seed of its own, which no sample of the group has.
    """
    seeds = [
        {"sampling_seed": sampling_params["sampling_seed"] + position * args.n_samples_per_prompt}
        if "sampling_seed" in sampling_params
        else {}
        for position in range(len(contexts))
    ]
    return await run_side_by_side(
        [
            ask(args, sample, messages, {**sampling_params, **seed})
            for messages, seed in zip(contexts, seeds, strict=True)
        ]
    )


async def _append(args: Any, sample: Sample, sampling_params: dict[str, Any], said: Any) -> bool:
    """Put a reply behind what the sample has; False where no room would be left for the model's next token."""
    messages = [said] if isinstance(said, dict) else said
    is_text, are_messages = isinstance(said, str), isinstance(messages, list) and messages
    if not is_text and not (are_messages and all(isinstance(message, dict) for message in messages)):
        raise TypeError(f"reply returned {type(said).__name__}; expected chat messages, one at least, a str or None")
    state = GenerateState(args)
    last_token = int(held(sample, "tokens")[-1])
    template_kwargs = {**(args.apply_chat_template_kwargs or {}), **sample.apply_chat_template_kwargs}
    replying = (_encoded_reply, template_kwargs, messages, last_token)
    text, tokens = await state.with_tokenizer(_characters(messages), *replying)
    sources = [] if is_text else images_of(Sample(prompt=messages))
    if sources:
        images = await state.in_encoder(lambda: [as_data_uri(source) for source in sources])
        tokens = await state.encode_reply(text, images)
    if len(tokens) >= token_budget(sample, sampling_params, state.context_length(args)):
        return False
    if sources:
        seen = {"at": sample.response_length, "text": text, "images": images}
        sample.metadata.setdefault(REPLIES_WITH_IMAGES, []).append(seen)
    sample.append_response_tokens(args, tokens=tokens, trainable=False, text=text)
    return True


def _characters(value: Any) -> int:
    """How many characters the texts within a reply have together."""
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else len(value) if isinstance(value, str) else 0


def _encoded_reply(
    tokenizer: Any, template_kwargs: dict[str, Any] | None, said: str | list[dict[str, Any]], last_token: int
) -> tuple[str, list[int]]:
    """The text that is put behind an answer that ends in `last_token`, and its tokens."""
    is_text = isinstance(said, str)
    text = said if is_text else _rendered_reply(tokenizer, said, template_kwargs)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    if not is_text and tokens[:1] == [last_token]:
        # The model itself has written the mark that ends a turn.
        tokens = tokens[1:]
        text = tokenizer.decode(tokens)
    return text, tokens


def _rendered_reply(tokenizer: Any, messages: list[dict[str, Any]], template_kwargs: dict[str, Any] | None) -> str:
    """What the chat template writes from the end of the model's turn to the begin of its next one."""
    spoken = [{"role": "user", "content": "probe question"}, {"role": "assistant", "content": PROBE_ANSWER}]
    try:
        text = render_chat(tokenizer, [*spoken, *messages], template_kwargs=template_kwargs)
    except Exception as error:  # a template runs arbitrary code over the messages
        raise UserError(
            f"the chat template refused the reply {_shown(messages)} ({type(error).__name__}: {error})"
        ) from error
    _, found, rest = text.partition(PROBE_ANSWER)
    if not found:
        raise UserError(f"the chat template left out the answer before the reply {_shown(messages)}; reply with a str")
    return rest


def _shown(messages: list[dict[str, Any]]) -> str:
    """Messages without images that stand in them, which may have millions of characters."""
    return reprlib.repr(messages[0] if len(messages) == 1 else messages)
