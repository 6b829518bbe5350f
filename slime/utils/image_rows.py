"""Images of a row: the images in a field, and the placeholders for them in the prompt, become parts of chat messages.

A part is `{"type": "image", "image": source}`, where the source is the absolute path of a file or a data URI, so that no
decoded image is held for a row. Reading the row checks that the file is there and begins as an image.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from slime.utils.data_files import BadRow
from slime.utils.errors import UserError
from slime.utils.processing_utils import (
    as_data_uri,
    decoded_base64,
    image_entries,
    no_source,
    open_image,
    path_of,
    source_of,
)
from slime.utils.types import MultimodalTypes

_IMAGE = MultimodalTypes.IMAGE


def media_keys_problem(keys: Mapping[str, Any]) -> str | None:
    """What is wrong with a value of `--multimodal-keys`; None if rows can be read with it."""
    for name, field in keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            known = ", ".join(each.name for each in MultimodalTypes.all())
            return f"{name!r} is none of {known}; name the field of images under `image`"
        if kind is not _IMAGE:
            return f"rows with {name} are not built, only those with images; leave {name} out"
        if not isinstance(field, str) or not field:
            return f"{name} is {field!r}, expected the name of a field"
    return None


def image_sources(value: Any, folder: str, field: str) -> list[str]:
    """The sources of the images in the field `field` of a row, which holds nothing, an image or a list of images.

    An image is a path or `file://` URI, absolute or relative to `folder`, a data URI, base64, its bytes, or an object with one
    of these under a name of `SOURCES`.

    Raises:
        BadRow: one is missing, or is no image.
    """
    entries = enumerate(image_entries(value))
    return [_source(entry, folder, f"image {number} of {field!r}") for number, entry in entries]


def messages_with_images(
    prompt: str | list[dict[str, Any]], images: list[str], folder: str, fields: tuple[str, str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(messages, sources of their images in order): `prompt` with `images` in the places of its placeholders.

    A placeholder is `<image>` in a text, or a part of the type `image` that names no image. A prompt that is a text becomes
    the message of a user.

    Args:
        fields: names of the fields of prompt and images, for messages.

    Raises:
        BadRow: there are more placeholders than images or fewer, or a part is of another type than text and image.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages = [
        {**message, "content": _parts(message["content"], folder, fields[0])} if "content" in message else message
        for message in messages
    ]
    contents = [content for message in messages if isinstance(content := message.get("content"), list)]
    parts = [part for content in contents for part in content]
    places = [part for part in parts if part["type"] == _IMAGE.name and "image" not in part]
    if len(places) != len(images):
        raise BadRow(
            f"{fields[0]!r} has {len(places)} {_IMAGE.placeholder} placeholders and {fields[1]!r} {len(images)} images; each "
            "placeholder stands for one image"
        )
    for part, source in zip(places, images, strict=True):
        part["image"] = source
    return messages, [part["image"] for part in parts if part["type"] == _IMAGE.name]


def _parts(content: Any, folder: str, field: str) -> Any:
    """A message's content: unchanged if it is text without placeholders, else a new list of parts."""
    if isinstance(content, str):
        return _split(content) if _IMAGE.placeholder in content else content
    if not isinstance(content, Iterable):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts += _split(part["text"])
        elif kind in (_IMAGE.name, "image_url"):
            names_one = source_of(part) is not part
            source = {"image": _source(part, folder, f"an image of {field!r}")} if names_one else {}
            parts.append({"type": _IMAGE.name, **source})
        else:
            raise BadRow(f"a message of {field!r} has a part of the type {kind!r}; only text and image are built")
    return parts


def _split(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for position, piece in enumerate(text.split(_IMAGE.placeholder)):
        parts += [{"type": _IMAGE.name}] if position else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _source(value: Any, folder: str, name: str) -> str:
    value = source_of(value)
    if isinstance(value, Mapping):
        raise BadRow(f"{name} {no_source(value)}")
    try:
        if isinstance(value, bytes):
            return as_data_uri(value)
        if not isinstance(value, str) or not value:
            raise BadRow(f"{name} is {type(value).__name__}, expected a path, a data URI, base64 or bytes")
        if value.startswith("data:") or "://" in path_of(value):
            source = value
        else:
            source = os.path.join(folder, path_of(value))
            if not os.path.isfile(source):
                return as_data_uri(_decoded(value, name, source))
        with open_image(source):
            return source
    except UserError as error:
        raise BadRow(f"{name}: {error}") from error


def _decoded(text: str, name: str, path: str) -> bytes:
    """The bytes that `text` is the base64 of. BadRow if it is not base64; most often it names a file that is not there."""
    content = decoded_base64(text)
    if content is not None:
        return content
    if len(path) < 512 and "\n" not in text:
        raise BadRow(f"{name}: there is no file {path}")
    raise BadRow(f"{name}: {text[:64] + '…'!r} is neither a file nor base64")
