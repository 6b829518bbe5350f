"""One row of a data set: which fields it has, how it becomes a sample, how many tokens its prompt has.

`RowReader` alone knows the rules by which a row becomes a sample: which field is the prompt, whether it is rendered in the chat
template, and which fields are label, tools and metadata. A row that breaks a rule is a `BadRow`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from slime.utils.data_files import BadRow
from slime.utils.errors import UserError
from slime.utils.image_rows import image_sources, messages_with_images
from slime.utils.processing_utils import ANY_KEYS, at_row, encode_with_images, images_of, no_processor, render_chat
from slime.utils.types import Sample

# Our function that trains on given conversations.
SFT_FUNCTION = "slime.rollout.sft_rollout.generate_rollout"


def prompt_limit(args: Any) -> int | None:
    """Tokens of the longest prompt that stays in the training data, `--rollout-max-prompt-len`; None: all prompts stay.

    The chats of supervised fine-tuning all stay, whatever the loss: the rollout cuts them at the context limit.
    """
    takes_chats = args.loss_type == "sft_loss" or args.rollout_function_path == SFT_FUNCTION
    return None if takes_chats else args.rollout_max_prompt_len


@dataclass(frozen=True)
class RowKeys:
    """The names of a row's fields. `Dataset` says which field is taken for a name that is None.

    Attributes:
        flags: the flags that name the prompt's and the label's field, for messages.
        images: the field of the images; None: prompts are text.
        folder: the directory of the file, to which paths of images are relative; `resolve` fills it in.
        fills_fields: whether the file gives every object in a column all fields that any row has there, null in those that the
            row lacks, as Parquet does; `resolve` fills it in.
    """

    prompt: str | None
    label: str | None
    tools: str | None
    metadata: str | None
    flags: tuple[str, str] = ("--input-key", "--label-key")
    images: str | None = None
    folder: str = ""
    fills_fields: bool = False

    def resolve(self, row: dict[str, Any], place: str) -> RowKeys:
        """These names, completed for a file whose first row is `row`. Raises UserError if the row lacks a named field."""
        prompt = self.prompt or next((name for name in ("prompt", "input") if name in row), None)
        has = ", ".join(map(str, row))
        if prompt is None:
            raise UserError(
                f"{place}: the row has neither `prompt` nor `input`, only {has}; name one with {self.flags[0]}"
            )
        for name, flag in zip((prompt, self.label), self.flags, strict=True):
            if name is not None and name not in row:
                raise UserError(f"{place}: there is no field {name!r} ({flag}); the row has {has}")
        file = place.rpartition(":")[0]
        folder = os.path.dirname(os.path.abspath(file))
        return replace(self, prompt=prompt, folder=folder, fills_fields=file.endswith(".parquet"))


class PromptRow(NamedTuple):
    """A row of a file: the names of its fields, its place (`file:line`) and its content; None: it could not be read."""

    keys: RowKeys
    place: str
    content: dict[str, Any] | None


class PreparedRow(NamedTuple):
    """A row and, as far as another process has prepared it, its sample and the number of tokens of its prompt."""

    row: PromptRow
    sample: Sample | None = None
    length: int | None = None


class RowReader:
    """Turns a row into a sample. `tokenizer` is None unless prompts are rendered in its chat template."""

    def __init__(self, tokenizer: Any | None, template_kwargs: dict[str, Any]):
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs

    def read(self, of: PromptRow) -> Sample:
        """The sample of a row. Raises `BadRow` if the row breaks a rule."""
        keys, place, row = of
        if keys.fills_fields:
            row = _without_filled_fields(row, keys)
        metadata = self._metadata(row, keys)
        prompt, images = self._prompt(row, keys), []
        if keys.images is not None:
            images = image_sources(row.get(keys.images), keys.folder, keys.images)
            prompt, images = messages_with_images(prompt, images, keys.folder, (keys.prompt, keys.images))
        sample = Sample(
            prompt=prompt if self._tokenizer is None else self._rendered(prompt, keys, metadata.get("tools")),
            label=self._label(row, keys),
            metadata=metadata,
            apply_chat_template_kwargs=dict(self._template_kwargs),
        )
        if images:
            sample.multimodal_inputs = {"images": images}
            # A damaged image is found only when it is decoded, long after the row was read; the message then names the row.
            sample.data_place = place
        return sample

    def _prompt(self, row: dict[str, Any], keys: RowKeys) -> str | list[dict[str, Any]]:
        if keys.prompt not in row:
            raise BadRow(f"there is no field {keys.prompt!r}; the row has {', '.join(map(str, row))}")
        prompt = row[keys.prompt]
        if isinstance(prompt, list):
            for position, message in enumerate(prompt):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise BadRow(f"message {position} of {keys.prompt!r} is no object with a `role`")
            if not prompt:
                raise BadRow(f"{keys.prompt!r} is an empty list of messages")
        elif not isinstance(prompt, str):
            raise BadRow(f"{keys.prompt!r} is {type(prompt).__name__}, expected a string or a list of messages")
        return prompt

    def _rendered(self, prompt: str | list[dict[str, Any]], keys: RowKeys, tools: list | None) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _in_template(self._tokenizer, messages, tools, self._template_kwargs, repr(keys.prompt))

    def _label(self, row: dict[str, Any], keys: RowKeys) -> Any:
        if keys.label is None:
            return row.get("label")
        if keys.label not in row:
            raise BadRow(f"there is no field {keys.label!r} ({keys.flags[1]})")
        return row[keys.label]

    def _metadata(self, row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
        metadata = row.get(keys.metadata) if keys.metadata else None
        if metadata is None:
            metadata = {}
        if not isinstance(metadata, dict):
            raise BadRow(f"{keys.metadata!r} is {type(metadata).__name__}, expected an object (--metadata-key)")
        tools = row.get(keys.tools) if keys.tools else None
        if tools is not None:
            metadata = {**metadata, "tools": _parse_tools(tools, keys.tools)}
        return metadata


def _without_filled_fields(row: dict[str, Any], keys: RowKeys) -> dict[str, Any]:
    """`row` with messages and tools as a file of lines would have them: a chat template would show the parameters of other
    rows' tools, or take a part of a message for an image. What `content` says may be null."""
    messages, tools, metadata = row.get(keys.prompt), row.get(keys.tools), row.get(keys.metadata)
    own: dict[str | None, Any] = {}
    if isinstance(messages, list):
        own[keys.prompt] = [_without_nulls(message, kept="content") for message in messages]
    if isinstance(tools, list):
        own[keys.tools] = _without_nulls(tools)
    if isinstance(metadata, dict) and isinstance(metadata.get("tools"), list):
        own[keys.metadata] = {**metadata, "tools": _without_nulls(metadata["tools"])}
    return {**row, **own}


def _without_nulls(value: Any, kept: str = "") -> Any:
    """`value` without fields that are null, at any depth. `kept`: a field that stays, of `value` itself."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None or name == kept}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _parse_tools(tools: Any, key: str) -> list[Any]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRow(f"{key!r} is no valid JSON ({error})") from error
    elif isinstance(tools, np.ndarray):
        tools = tools.tolist()
    if not isinstance(tools, list):
        raise BadRow(f"{key!r} is {type(tools).__name__}, expected a list of tool schemas (--tool-key)")
    return tools


def prompt_lengths(
    samples: list[Sample], tokenizer: Any, processor: Any, add_special_tokens: bool
) -> list[int | BadRow]:
    """The number of tokens of each prompt, measured as `slime.utils.dataset.filter_long_prompt` says; a `BadRow` in the place
    of each prompt that the chat template refuses.

    Raises:
        UserError: a prompt has images and there is no processor, or an image cannot be read.
    """
    lengths: list[int | BadRow] = [0] * len(samples)
    seeing = [bool(images_of(sample)) for sample in samples]
    for chats in (False, True):
        if chats and not getattr(tokenizer, "chat_template", None):
            continue
        texts: dict[int, str] = {}
        for index, sample in enumerate(samples):
            if isinstance(sample.prompt, str) is not chats and not seeing[index]:
                try:
                    texts[index] = _prompt_text(sample, tokenizer)
                except BadRow as refused:
                    lengths[index] = refused
        special = add_special_tokens and not chats
        ids = tokenizer(list(texts.values()), add_special_tokens=special)["input_ids"] if texts else []
        for index, prompt_ids in zip(texts, ids, strict=True):
            lengths[index] = len(prompt_ids)
    for index, sample in enumerate(samples):
        if seeing[index]:
            special = add_special_tokens and isinstance(sample.prompt, str)
            lengths[index] = _length_with_images(sample, tokenizer, processor, special)
    return lengths


def _length_with_images(sample: Sample, tokenizer: Any, processor: Any, add_special_tokens: bool) -> int | BadRow:
    with at_row(sample):
        if processor is None:
            raise UserError(no_processor(getattr(tokenizer, "name_or_path", ""), ANY_KEYS))
        try:
            text = _prompt_text(sample, tokenizer)
        except BadRow as refused:
            return refused
        return len(encode_with_images(processor, text, images_of(sample), add_special_tokens=add_special_tokens)[0])


def _prompt_text(sample: Sample, tokenizer: Any) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    tools = sample.metadata.get("tools")
    return _in_template(tokenizer, sample.prompt, tools, sample.apply_chat_template_kwargs, "the prompt")


def _in_template(tokenizer: Any, messages: list[dict[str, Any]], tools: list | None, keywords: dict, what: str) -> str:
    try:
        return render_chat(tokenizer, messages, tools, keywords)
    except Exception as error:  # a template runs arbitrary code over the row
        raise BadRow(f"the chat template refused {what} ({type(error).__name__}: {error})") from error
