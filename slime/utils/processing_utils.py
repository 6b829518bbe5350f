"""Tokenizers and processors from local directories, the rendering of chat messages, and images in messages."""

from __future__ import annotations

import base64
import io
import json
import os
from typing import TYPE_CHECKING, Any

from slime.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image


def load_tokenizer(path: str, trust_remote_code: bool = False, *, flag: str = "--hf-checkpoint", **kwargs: Any) -> Any:
    """The tokenizer in the directory `path`. Never asks the network.

    `kwargs` go to `AutoTokenizer.from_pretrained`; `flag` is named in messages.

    Raises:
        UserError: no such directory, or no tokenizer that can be loaded in it.
    """
    if not os.path.isdir(path):
        raise UserError(f"{flag} {path}: there is no such directory; give a local Hugging Face checkpoint")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:
        raise UserError(
            f"{flag} {path}: no tokenizer could be loaded from this directory ({type(error).__name__}: {error}); "
            "it needs tokenizer.json and tokenizer_config.json (and --trust-remote-code where its code is its own)"
        ) from error


def require_chat_template(tokenizer: Any, reason: str) -> None:
    """Raise UserError, naming the tokenizer and `reason`, when it has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "of --hf-checkpoint"
        raise UserError(no_chat_template(reason, name))


def no_chat_template(reason: str, name: str) -> str:
    """The message about a tokenizer that has no chat template although `reason`."""
    return f"{reason}, but the tokenizer {name} has no chat template; put one there as chat_template.jinja"


def lacks_chat_template(directory: str) -> bool:
    """Whether the tokenizer in a Hugging Face directory has no chat template for sure, from its files alone.

    Loading the tokenizer takes seconds. Code of its own, or a file of another format, may bring a template along.
    """
    try:
        with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False  # whoever loads the tokenizer says what is wrong with it
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
    elsewhere = any(os.path.exists(os.path.join(directory, name)) for name in named)
    return not elsewhere and not config.get("chat_template") and "auto_map" not in config


def render_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text of `messages` in the tokenizer's chat template, ready to be tokenised without special tokens."""
    return tokenizer.apply_chat_template(
        messages,
        tools=tools or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        **(template_kwargs or {}),
    )


def load_processor(path: str, trust_remote_code: bool = False, **kwargs: Any) -> Any | None:
    """The processor of a model with images in the directory `path`; None where the model has none. Never asks the network.

    Raises:
        UserError: no such directory, or the processor that it names cannot be loaded.
    """
    if not os.path.isdir(path):
        raise UserError(f"--hf-checkpoint {path}: there is no such directory; give a local Hugging Face checkpoint")
    if not any(os.path.exists(os.path.join(path, name)) for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:
        raise UserError(
            f"--hf-checkpoint {path}: its processor could not be loaded ({type(error).__name__}: {error})"
        ) from error


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a processor is called with beside the text: the media that are there, and tensors of torch as its result."""
    media = {name: values for name, values in (multimodal_inputs or {}).items() if values}
    return {**media, "return_tensors": "pt"}


def process_vision_info(prompt: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """`{"images": [PIL images], "videos": None}`: the media in the messages, in their order.

    An image is an entry `{"type": "image", "image": …}` of a message's content: a PIL image, the path of a file, or a data URI.
    `processor` is there for the sake of those that take other media.

    Raises:
        UserError: an image cannot be read, or the messages have a video or an audio.
    """
    images = []
    for message in prompt:
        for part in message["content"] if isinstance(message["content"], list) else ():
            kind = part.get("type")
            if kind in ("image", "image_url"):
                images.append(_image(part.get("image") or part.get("image_url")))
            elif kind != "text":
                raise UserError(f"a message has content of the type {kind!r}; images and text are supported")
    return {"images": images or None, "videos": None}


def _image(source: Any) -> Image.Image:
    from PIL import Image

    source = source["url"] if isinstance(source, dict) else source
    if isinstance(source, Image.Image):
        return source
    try:
        if isinstance(source, str) and source.startswith("data:"):
            source = io.BytesIO(base64.b64decode(source.partition(",")[2], validate=True))
        elif isinstance(source, str) and "://" in source and not source.startswith("file://"):
            raise ValueError("nothing is fetched from a network; store it beside the data")
        with Image.open(source.removeprefix("file://") if isinstance(source, str) else source) as image:
            image.load()
            return image
    except (OSError, ValueError, AttributeError, Image.DecompressionBombError) as error:
        shown = source if isinstance(source, str) else type(source).__name__
        raise UserError(f"an image could not be read from {shown}: {error}") from error


def encode_image_for_rollout_engine(image: Image.Image) -> str:
    """The image as the engines take it: a data URI of a PNG in RGB."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
