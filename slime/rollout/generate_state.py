"""The state that all generation calls of one process share: tokenizer, limits, slots, sampling parameters."""

import asyncio
import contextlib
import contextvars
import json
import logging
import marshal
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from slime.rollout.failures import SampleFailed
from slime.rollout.generation_call import current_call
from slime.rollout.user_functions import CallKind, CallSlots
from slime.utils.engine_protocol import longest_input, reserved_for_drafts
from slime.utils.errors import UserError
from slime.utils.http_utils import generation_concurrency, init_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import (
    ANY_KEYS,
    REPLIES_WITH_IMAGES,
    at_row,
    encode_image_for_rollout_engine,
    encode_with_images,
    images_of,
    load_processor,
    load_tokenizer,
    no_processor,
    path_of,
    render_chat,
    require_chat_template,
    sees_images,
    unheard_end_of_turn,
)
from slime.utils.sample_fields import held, read_only, token_array
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

# How many prompts' ids are kept. One job tokenises few texts ahead, so that a caller who asks for another waits only for these.
_PROMPTS_KEPT = 1024
_TEXTS_PER_JOB = 16
# A text of so many characters is encoded in a thread, which is reached sooner than a shorter one is encoded.
_LONG_TEXT = 4096
# The limit of Linux; images that are given as text are longer than any path.
_LONGEST_PATH = 4096


def _of_current_call(name: str) -> property:
    return property(
        lambda state: getattr(current_call(), name), lambda state, value: setattr(current_call(), name, value)
    )


class GenerateState(metaclass=SingletonMeta):
    """The state, one per process; `GenerateState.clear_instances()` forgets it.

    Nothing of a step is held here. For plug-ins, `rollout_id`, `remaining_batch_size`, `pendings` and `aborted` are those of
    the call that the asking code works for (`GenerationCall`). A thread of a plug-in's own pool works for a call if it is given
    its context: `pool.submit(contextvars.copy_context().run, function)`.
    """

    rollout_id = _of_current_call("rollout_id")
    remaining_batch_size = _of_current_call("remaining_batch_size")
    pendings = _of_current_call("pendings")
    aborted = _of_current_call("aborted")

    def __init__(self, args: Any) -> None:
        self.args = args
        self.semaphore = CallSlots(CallKind.GENERATE, generation_concurrency(args))
        self.sampling_params = rollout_sampling_params(args)
        # The array, read-only, that was last found to have ids of the vocabulary alone: siblings share that of their prompt.
        self.checked_ids: np.ndarray | None = None
        self._warned: set[str] = set()
        self._looked_at_ends = False
        # One thread is enough. It has a tokenizer of its own, because fast tokenizers refuse to be used by two threads at once,
        # and users use `tokenizer`.
        self._encoding = threading.Lock()
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="slime-tokenize")
        # The siblings of a group share their prompt, which is rendered and tokenised once.
        self._encode_once = lru_cache(maxsize=_PROMPTS_KEPT)(self._encode_marshalled)
        # For most siblings the ids are there, or under way, and to look here is faster than to go through the thread.
        self._ids_of_text: dict[tuple[str, bool], np.ndarray] = {}
        self._text_in_encoder = lru_cache(maxsize=_PROMPTS_KEPT)(self._send_to_encoder)
        # Pixels are large, so only a few prompts are kept; siblings ask for theirs at the same time.
        self._encode_images_once = lru_cache(maxsize=16)(self._encode_marshalled_images)
        init_http_client(args)

    def reset(self) -> None:
        """Call `GenerationCall.reset` for the call that is under way here."""
        current_call().reset()

    def warn_once(self, message: str) -> None:
        """Log a warning, once per process."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer for code that tokenises on the event loop, such as users' functions."""
        return self._load_tokenizer()

    @cached_property
    def processor(self) -> Any:
        """The processor of a model with images, for users' functions and data sets; None if no rows of the run have images, or
        the checkpoint has no processor."""
        rows = [self.args, *self.args.eval_datasets]
        return self._load_processor() if any(one.multimodal_keys for one in rows) else None

    @cached_property
    def _encoder_processor(self) -> Any:
        """The processor that encodes prompts with images, used by one thread at a time."""
        processor = self._load_processor()
        if processor is None:
            raise UserError(no_processor(self.args.hf_checkpoint, ANY_KEYS))
        return processor

    def _load_processor(self) -> Any:
        return load_processor(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)

    @cached_property
    def encoder_tokenizer(self) -> Any:
        """The tokenizer that encodes prompts and texts, used by one thread at a time."""
        tokenizer = self._load_tokenizer()
        if self.args.apply_chat_template:
            self._look_at_ends(tokenizer)
        return tokenizer

    def _look_at_ends(self, tokenizer: Any) -> None:
        """Warn if engines do not end answers where the chat template ends turns; in the first call alone."""
        if not self._looked_at_ends:
            self._looked_at_ends = True
            if unheard := unheard_end_of_turn(self.args, tokenizer):
                self.warn_once(unheard)

    def _load_tokenizer(self) -> Any:
        return load_tokenizer(self.args.hf_checkpoint, trust_remote_code=self.args.trust_remote_code)

    @cached_property
    def _hf_config(self) -> dict[str, Any]:
        path = Path(self.args.hf_checkpoint) / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"--hf-checkpoint: cannot read {path}: {error}") from error
        return {**config, **config.get("text_config", {})}

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids that engines know, which is that of the embedding's rows."""
        try:
            return int(self._hf_config["vocab_size"])
        except KeyError:
            raise UserError(f"--hf-checkpoint {self.args.hf_checkpoint}: config.json has no vocab_size") from None

    def context_length(self, args: Any) -> int | None:
        """How many tokens prompt and response may have together: the smaller of our limit and the engines'; None: no limit.

        Ours is `args.rollout_max_context_len`. It is read from `args` because evaluation passes its own (`evaluation_args`).
        That of the engines is less than their context length, so that they take all of it as an input again.
        """
        limits = [] if args.rollout_max_context_len is None else [args.rollout_max_context_len]
        told = [engine.context_length for engine in args.rollout_external_engine_infos or () if engine.context_length]
        of_engines = min(told, default=args.sglang_context_length or self._hf_config.get("max_position_embeddings"))
        if of_engines:
            limits.append(longest_input(of_engines, self._reserved))
        return min(limits, default=None)

    @cached_property
    def _reserved(self) -> int:
        """The tokens that the engines of the first model add to each input for their drafts."""
        if self.args.sglang_speculative_algorithm is None:
            return 0
        served, steps = self.args.served_models, self.args.sglang_speculative_num_steps
        own = [group.overrides.get("speculative_num_steps", steps) for group in served[0].groups] if served else []
        return max(map(reserved_for_drafts, own or [steps]))

    async def encode_prompt(self, sample: Sample) -> np.ndarray:
        """As `prompt_ids`, off the event loop: a read-only int64 array that siblings share."""
        if type(sample.prompt) is not str or sample.multimodal_inputs:
            return await self.in_encoder(self._prompt_array, sample)
        text, rendered = self._prompt_source(sample)[:2]
        ids = self._ids_of_text.get((text, rendered))
        if ids is not None:
            return ids
        source = asyncio.get_running_loop(), text, rendered
        encoding = self._text_in_encoder(*source)
        if encoding.done() and encoding.exception() is not None:
            # It failed for earlier callers; a new caller gets a new try.
            self._text_in_encoder.cache_clear()
            encoding = self._text_in_encoder(*source)
        # Siblings share the future, so the cancellation of one caller must not cancel it.
        return encoding.result() if encoding.done() else await asyncio.shield(encoding)

    def encode_ahead(self, entries: list[Any]) -> None:
        """Have the encoder's thread make the ids of these prompts, in their order, before they are asked for."""
        prompts = [entry for entry in entries if isinstance(entry, Sample) and not len(held(entry, "tokens"))]
        texts = [self._prompt_source(one)[:2] for one in prompts if type(one.prompt) is str and not images_of(one)]
        if texts:
            self._encoder.submit(self._encode_texts, texts[:_PROMPTS_KEPT])

    def prompt_ids(self, sample: Sample) -> list[int]:
        """Token ids of the prompt. A chat template writes special tokens itself; other text gets those of the tokenizer.

        An image becomes as many placeholder tokens as the model sees of it.
        """
        return self._prompt_array(sample).tolist()

    async def encode_images(self, sample: Sample) -> "PromptWithImages | None":
        """The prompt with its images, encoded off the event loop and shared by siblings; None if there are no images.

        A prompt whose response has replies with images is encoded with these; siblings share the parts.

        Raises:
            UserError: the checkpoint has no processor, an image cannot be read, or a text and its images do not fit together.
        """
        return await self.in_encoder(self._with_replies, sample) if sees_images(sample) else None

    async def encode_reply(self, text: str, images: list[str]) -> list[int]:
        """Token ids, made off the event loop, of a reply with images that the chat template has rendered.

        An image becomes as many placeholder tokens as the model sees of it. `images`: the sources of the images.

        Raises:
            UserError: as `encode_images`.
        """
        return (await self.in_encoder(self._encoded, (text, True, None, {}), images)).token_ids.tolist()

    async def in_encoder(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function`, which may encode and runs in the encoder's thread, for the call that is under way here."""
        work = partial(contextvars.copy_context().run, function, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._encoder, work)

    async def with_tokenizer(self, characters: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `function(tokenizer, *arguments)`, which encodes or decodes so many characters.

        It runs in the encoder's thread if the texts are long: a megabyte takes seconds, and everything else on the event loop
        would wait.
        """
        if characters < _LONG_TEXT:
            return function(self.tokenizer, *arguments)

        def in_turn() -> Any:
            with self._encoding:
                return function(self.encoder_tokenizer, *arguments)

        return await self.in_encoder(in_turn)

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Thread-safe."""
        with self._encoding:
            return self.encoder_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _prompt_source(self, sample: Sample) -> tuple[Any, ...]:
        """Everything on which the prompt's ids depend: (prompt, whether it is rendered, tools, template arguments)."""
        if isinstance(sample.prompt, str):
            rendered = getattr(sample, "prompt_is_rendered", self.args.apply_chat_template)
            return sample.prompt, bool(rendered), None, {}
        require_chat_template(self.encoder_tokenizer, f"the prompt of sample {sample.index} is a list of messages")
        self._look_at_ends(self.encoder_tokenizer)
        template_kwargs = self.args.apply_chat_template_kwargs or {}
        return (
            sample.prompt,
            False,
            sample.metadata.get("tools"),
            {**template_kwargs, **sample.apply_chat_template_kwargs},
        )

    def _prompt_array(self, sample: Sample) -> np.ndarray:
        if images_of(sample):
            return self._with_images(sample).token_ids
        source = self._prompt_source(sample)
        with at_row(sample):
            if not _is_plain(source):
                return self._encode(*source)
            # In version 2 of the format equal values give equal bytes, and come back from them unchanged.
            return self._encode_once(marshal.dumps(source, 2))

    def _send_to_encoder(
        self, loop: asyncio.AbstractEventLoop, text: str, rendered: bool
    ) -> "asyncio.Future[np.ndarray]":
        encoding = loop.run_in_executor(self._encoder, self._encode_text, text, rendered)
        # asyncio would complain of a failure that nobody waited for.
        encoding.add_done_callback(lambda done: done.cancelled() or done.exception())
        return encoding

    def _encode_texts(self, texts: list[tuple[str, bool]]) -> None:
        for source in texts[:_TEXTS_PER_JOB]:
            # The error is raised again when the prompt is asked for.
            with contextlib.suppress(Exception):
                self._encode_text(*source)
        if len(texts) > _TEXTS_PER_JOB:
            self._encoder.submit(self._encode_texts, texts[_TEXTS_PER_JOB:])

    def _encode_text(self, text: str, rendered: bool) -> np.ndarray:
        """The ids of a text. Only the encoder's thread calls this, since nobody else may change `_ids_of_text`."""
        ids, known = self._encode_once(marshal.dumps((text, rendered, None, {}), 2)), self._ids_of_text
        known[text, rendered] = ids
        if len(known) > _PROMPTS_KEPT:
            del known[next(iter(known))]
        return ids

    def _encode_marshalled(self, source: bytes) -> np.ndarray:
        return self._encode(*marshal.loads(source))

    def _encode(self, *source: Any) -> np.ndarray:
        text, rendered = self._text(*source)
        return read_only(np.array(self.encode_text(text, add_special_tokens=not rendered), np.int64))

    def _text(self, prompt: Any, rendered: bool, tools: Any, template_kwargs: dict[str, Any]) -> tuple[str, bool]:
        """The text of a prompt, and whether it was rendered in a chat template."""
        if isinstance(prompt, str):
            return prompt, rendered
        try:
            with self._encoding:
                return render_chat(self.encoder_tokenizer, prompt, tools, template_kwargs), True
        except Exception as error:  # a template runs arbitrary code over the messages
            raise UserError(f"the chat template refused the prompt ({type(error).__name__}: {error})") from error

    def _with_images(self, sample: Sample) -> "PromptWithImages":
        with at_row(sample):
            return self._encoded(self._prompt_source(sample), images_of(sample))

    def _with_replies(self, sample: Sample) -> "PromptWithImages":
        if images_of(sample):
            prompt = self._with_images(sample)
        else:
            ids = self._prompt_array(sample)
            prompt = PromptWithImages(ids, ids, {}, [])
        with at_row(sample):
            replies = [
                (reply["at"], self._encoded((reply["text"], True, None, {}), reply["images"]))
                for reply in sample.metadata.get(REPLIES_WITH_IMAGES, ())
            ]
            return prompt.followed_by(replies) if replies else prompt

    def _encoded(self, source: tuple[Any, ...], images: list[Any]) -> "PromptWithImages":
        if not _is_plain(source) or not _is_plain(images):
            return self._encode_with_images(source, images)
        # A user's function may overwrite a file, so the key has the time of its last change.
        written = [_last_change(image) for image in images]
        return self._encode_images_once(marshal.dumps((source, images, written), 2))

    def _encode_marshalled_images(self, key: bytes) -> "PromptWithImages":
        source, images, _ = marshal.loads(key)
        return self._encode_with_images(source, images)

    def _encode_with_images(self, source: tuple[Any, ...], sources: list[Any]) -> "PromptWithImages":
        text, rendered = self._text(*source)
        with self._encoding:
            token_ids, beside, images = encode_with_images(
                self._encoder_processor, text, sources, add_special_tokens=not rendered
            )
        unexpanded_ids = self.encode_text(text, add_special_tokens=not rendered)
        placeholder = getattr(self._encoder_processor, "image_token_id", None)
        return PromptWithImages(
            read_only(np.array(token_ids, np.int64)),
            read_only(np.array(unexpanded_ids, np.int64)),
            beside,
            [encode_image_for_rollout_engine(image) for image in images],
            placeholder=placeholder if placeholder in unexpanded_ids else None,
        )


@dataclass(frozen=True, eq=False)
class PromptWithImages:
    """A prompt with images, as a model sees it and as it is sent to engines.

    Attributes:
        token_ids: int64, read-only; an image is as many placeholder tokens as the model sees of it.
        unexpanded_ids: the same ids, except that an image is what the chat template wrote for it; engines expand that.
        train_inputs: the processor's other results, tensors of torch such as pixel values and their grids. Those of replies
            follow those of the prompt.
        image_data: data URIs of the images, those of replies after those of the prompt.
        replies: (position in the response, the reply encoded in the same way) of each reply of the dialogue that has images.
        placeholder: the id that the chat template writes for each image, if the processor tells it.
    """

    token_ids: np.ndarray
    unexpanded_ids: np.ndarray
    train_inputs: dict[str, Any]
    image_data: list[str]
    replies: Sequence[tuple[int, "PromptWithImages"]] = ()
    placeholder: int | None = None

    def followed_by(self, replies: Sequence[tuple[int, "PromptWithImages"]]) -> "PromptWithImages":
        """This prompt with `replies` in its response.

        Raises:
            UserError: the processor's tensors for one image cannot be concatenated with those for another.
        """
        import torch

        joined, parts = {}, [self, *(reply for _, reply in replies)]
        for name in dict.fromkeys(name for part in parts for name in part.train_inputs):
            # Token types are left out, since the ids tell them, too.
            if name.endswith("token_type_ids"):
                continue
            values = [part.train_inputs[name] for part in parts if name in part.train_inputs]
            try:
                joined[name] = torch.cat(values)
            except (RuntimeError, TypeError) as error:
                raise UserError(
                    f"the processor of --hf-checkpoint gives {name} of different shapes for the images of the prompt and of "
                    f"replies, which cannot be put together ({error}); scale images of replies to one size, or reply without"
                ) from error
        image_data = [uri for part in parts for uri in part.image_data]
        return replace(self, train_inputs=joined, image_data=image_data, replies=replies)

    def request(self, sample: Sample) -> dict[str, Any]:
        """The fields of a request that continues `sample.tokens`.

        Raises:
            SampleFailed: the model or a reply has written a placeholder, for which the engine would look for an image.
        """
        tokens = token_array(sample, "tokens")
        prompt, response = np.split(tokens, [len(tokens) - sample.response_length])
        # Ids that differ from ours were set by the user, who knows how the engine reads them.
        are_ours = np.array_equal(prompt, self.token_ids)
        ids, written, done = [self.unexpanded_ids if are_ours else prompt], [], 0
        for at, reply in self.replies:
            if np.array_equal(response[at : at + len(reply.token_ids)], reply.token_ids):
                written.append(response[done:at])
                ids += [written[-1], reply.unexpanded_ids]
                done = at + len(reply.token_ids)
            else:
                are_ours = False
        written.append(response[done:])
        placeholders = {part.placeholder for part in (self, *(reply for _, reply in self.replies))} - {None}
        if are_ours and np.isin(np.concatenate(written), list(placeholders)).any():
            raise SampleFailed(
                "it has placeholders of images that it was not shown, which the model or the text of a reply has written: an "
                "engine would look for images of them, so it cannot be gone on with"
            )
        return {"input_ids": np.concatenate([*ids, written[-1]]), "image_data": self.image_data}


def _last_change(image: Any) -> tuple[int, int] | None:
    """(time of the last change, size) of the file from which an image is read; None if it is not in a file."""
    if not isinstance(image, str) or len(image) > _LONGEST_PATH:
        return None
    try:
        state = os.stat(path_of(image))
    except (OSError, ValueError):
        return None
    return state.st_mtime_ns, state.st_size


def _is_plain(value: Any) -> bool:
    """Whether `value` consists only of JSON's types and tuples, and of no subclasses of them."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (str, int, float, bool)


def rollout_sampling_params(args: Any) -> dict[str, Any]:
    """The sampling parameters of training rollouts, as the engine's `/generate` takes them."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def deterministic_inference(args: Any) -> bool:
    """Whether the engines sample by seed."""
    return bool(args.sglang_enable_deterministic_inference)


def samples_among_some(args: Any) -> bool:
    """Whether training rollouts sample among a part of the vocabulary only; the trainer's log-probs then cover that part."""
    return args.rollout_top_p != 1 or args.rollout_top_k != -1
