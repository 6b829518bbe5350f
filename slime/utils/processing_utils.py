"""Tokenizers and processors from local directories, the rendering of chat messages, and images in messages."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import json
import os
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from slime.utils.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

    from slime.utils.types import Sample


def load_tokenizer(path: str, trust_remote_code: bool = False, *, flag: str = "--hf-checkpoint", **kwargs: Any) -> Any:
    """The tokenizer in the directory `path`. Never asks the network.

    `kwargs` go to `AutoTokenizer.from_pretrained`; `flag` is named in messages.

    Raises:
        UserError: no such directory, or no tokenizer that can be loaded in it.
    """
    if not os.path.isdir(path):
        raise UserError(f"{flag} {path}: there is no such directory; give a local Hugging Face checkpoint")
    with _compiler_left_out():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:
        raise UserError(
            f"{flag} {path}: no tokenizer could be loaded from this directory ({type(error).__name__}: {error}); "
            "it needs tokenizer.json and tokenizer_config.json (and --trust-remote-code where its code is its own)"
        ) from error


_COMPILER = "torch._dynamo"


@contextlib.contextmanager
def _compiler_left_out() -> Iterator[None]:
    """In the block, an import of transformers' tokenizers does not import torch's compiler, which takes a third of its time.

    With the tokenizers, transformers 5.12.1 imports the code for attention masks, which imports one class of torch 2.13.0's
    compiler, from a module that needs nothing else of the compiler. Here that module is imported alone; a later import of the
    compiler finds all of it. Without torch, as in processes that only prepare rows, tokenizers need none of this.
    """
    if _COMPILER not in sys.modules and importlib.util.find_spec("torch") is not None:
        import torch

        package = types.ModuleType(_COMPILER)
        package.__path__ = [os.path.join(path, "_dynamo") for path in torch.__path__]
        sys.modules[_COMPILER] = package
        try:
            importlib.import_module(f"{_COMPILER}._trace_wrapped_higher_order_op")
        finally:
            del sys.modules[_COMPILER]
    yield


def require_chat_template(tokenizer: Any, reason: str) -> None:
    """Raise UserError, naming the tokenizer and `reason`, when it has no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "of --hf-checkpoint"
        raise UserError(no_chat_template(reason, name))


def no_chat_template(reason: str, name: str) -> str:
    """The message about a tokenizer that has no chat template although `reason`."""
    return f"{reason}, but the tokenizer {name} has no chat template; put one there as chat_template.jinja"


def lacks_chat_template(directory: str) -> bool:
    """Whether the files of a Hugging Face directory show that its tokenizer certainly has no chat template.

    The tokenizer is not loaded, which takes seconds. The answer is False if its own code, or a file of another format, may
    bring a template along.
    """
    try:
        with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return False  # loading the tokenizer will tell what is wrong with it
    named = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
    elsewhere = any(os.path.exists(os.path.join(directory, name)) for name in named)
    return not elsewhere and not config.get("chat_template") and "auto_map" not in config


# Names of the files that hold a tokenizer's vocabulary, for all kinds of tokenizers.
_VOCABULARIES = (
    "tokenizer.json", "*.tok.json", "*vocab*", "*.model", "*.tiktoken", "tekken.json", "encoder.json", "*.spm", "*.bpe",
    "*.codes",
)  # fmt: skip
# Tokenizers of bytes or characters, which have no vocabulary.
_WITHOUT_VOCABULARY = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")


def lacks_tokenizer(directory: str) -> bool:
    """Whether the files of a Hugging Face directory show that it certainly has no tokenizer.

    Loading one takes seconds, and does not always tell: transformers 5.12.1 makes a Qwen2Tokenizer without a vocabulary, for
    which no text has any token. A tokenizer with its own code may need no vocabulary.
    """
    if any(any(Path(directory).glob(pattern)) for pattern in _VOCABULARIES):
        return False
    for name in ("tokenizer_config.json", "config.json"):
        try:
            config = json.loads(Path(directory, name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        code = config.get("auto_map") or ()
        # `auto_map` is a list in old directories.
        if "AutoTokenizer" in code or isinstance(code, list) or config.get("tokenizer_class") in _WITHOUT_VOCABULARY:
            return False
    return True


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


# The tokens by which models of the usual families end their turn, as a text has them: `<|im_end|>`, `<｜end▁of▁sentence｜>`.
_END_MARK = re.compile(r"(?:<\|\w{1,40}\|>|<｜[^｜<>]{1,40}｜>|</s>|<eos>|<end_of_turn>|\[e~\[|\[EO[ST]\])\Z")
_LONGEST_END_MARK = 44


def without_end_mark(response: str) -> str:
    """A response without the special token by which the model has ended it.

    The text of an engine has that token as the model's words, unless `--rollout-skip-special-tokens` leaves all of them out.
    """
    mark = _END_MARK.search(response[-_LONGEST_END_MARK:])
    return response[: -len(mark[0])] if mark else response


# An answer that is rendered to see what a chat template puts around one: words that no template changes.
PROBE_ANSWER = "probe answer"
# Tokens of these texts end an answer in SGLang 0.5.21 wherever a tokenizer has added them.
_ENDS_OF_ENGINES = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")


def unheard_end_of_turn(args: Any, tokenizer: Any) -> str | None:
    """`unheard_end` for the prompts and answers of a run."""
    ends = ends_of_turns(tokenizer, args.apply_chat_template_kwargs or {})
    return unheard_end(tokenizer, args.hf_checkpoint, ends, args.rollout_stop, args.rollout_stop_token_ids)


def unheard_end(
    tokenizer: Any,
    checkpoint: str,
    ends: dict[int, str],
    stop: str | list[str] | None,
    stop_token_ids: list[int] | None,
) -> str | None:
    """The warning that engines do not end an answer where the chat template ends a turn of the model, as with base models that
    name another token in their config; None if they do, or if the template shows no token that ends a turn.

    Args:
        checkpoint: the directory whose configuration engines read.
        ends: those of the template (`ends_of_turns`).
        stop, stop_token_ids: what else ends an answer.
    """
    stops = _stop_tokens(checkpoint, tokenizer) | set(stop_token_ids or ())
    strings = [stop] if isinstance(stop, str) else stop or ()
    if not ends or stops & ends.keys() or any(string in text for string in strings for text in ends.values()):
        return None
    token, text = next(iter(ends.items()))
    known = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in sorted(stops)) or "no token"
    return (
        f"the chat template of --hf-checkpoint {checkpoint} ends a turn of the model with {text} ({token}), and "
        f"engines end an answer at {known} alone: a model that ends its turns so goes on to --rollout-max-response-len; for "
        f"such a model give --rollout-stop-token-ids {token}"
    )


def ends_of_turns(tokenizer: Any, template_kwargs: dict[str, Any]) -> dict[int, str]:
    """The special tokens, by id, that follow the model's words in a dialogue: before a further question, and at the end."""
    added, ends = tokenizer.get_added_vocab(), {}
    dialogue = [{"role": "user", "content": "probe question"}, {"role": "assistant", "content": PROBE_ANSWER}]
    for messages in ([*dialogue, dialogue[0]], dialogue):
        try:
            text = render_chat(tokenizer, messages, None, template_kwargs, add_generation_prompt=False)
        except Exception:
            return {}  # The template refuses such a dialogue. It raises whatever its author chose, and says nothing of ends.
        _, said, behind = text.rpartition(PROBE_ANSWER)
        found = [(behind.find(special), special) for special in added if said and special in behind]
        if found:
            # Of two that begin at the same place the longer one is the token.
            _, special = min(found, key=lambda place: (place[0], -len(place[1])))
            ends.setdefault(added[special], special)
    return ends


def _stop_tokens(directory: str, tokenizer: Any) -> set[int]:
    """Ids of the tokens at which an engine of this checkpoint ends every answer."""
    added, stops = tokenizer.get_added_vocab(), {tokenizer.eos_token_id}
    stops |= {added.get(text) for text in _ENDS_OF_ENGINES}
    for name in ("config.json", "generation_config.json"):
        try:
            config = json.loads(Path(directory, name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # Not every checkpoint has both; what cannot be read is told where it is needed.
        for part in (config, config.get("text_config") or {}):
            ids = part.get("eos_token_id")
            stops |= set(ids) if isinstance(ids, list) else {ids}
    return stops - {None}


def load_processor(path: str, trust_remote_code: bool = False, **kwargs: Any) -> Any | None:
    """The processor of a model with images in the directory `path`; None if it has none. Never asks the network.

    Raises:
        UserError: there is no such directory, or its processor cannot be loaded, for example because torchvision is missing.
    """
    if not os.path.isdir(path):
        raise UserError(f"--hf-checkpoint {path}: there is no such directory; give a local Hugging Face checkpoint")
    if not any(os.path.exists(os.path.join(path, name)) for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code, **kwargs)
    except ImportError as error:
        cause = " ".join(str(error).split()).partition(". ")[0]
        raise UserError(
            f"--hf-checkpoint {path}: its processor needs a library that is not here ({cause}); install that library, or take "
            "a model whose images are prepared by Pillow alone"
        ) from error
    except Exception as error:
        raise UserError(
            f"--hf-checkpoint {path}: its processor could not be loaded ({type(error).__name__}: {error})"
        ) from error


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def no_processor(checkpoint: str, keys: str) -> str:
    """The message about a prompt with images, whose field is named by `keys`, for a model that takes none."""
    return (
        f"--hf-checkpoint {checkpoint}: a prompt has images, and the checkpoint has no processor for them "
        f"({' or '.join(_PROCESSOR_FILES)}); take a model that sees images, or drop {keys}"
    )


# What messages say where it is not known whether the flag or the file names the field of a prompt's images.
ANY_KEYS = "--multimodal-keys (of an evaluation set: multimodal_keys in --eval-config)"


def build_processor_kwargs(multimodal_inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """A processor's arguments beside the text: the media that are there, and the wish for tensors of torch as result."""
    media = {name: values for name, values in (multimodal_inputs or {}).items() if values}
    return {**media, "return_tensors": "pt"}


def process_vision_info(prompt: list[dict[str, Any]], processor: Any) -> dict[str, Any]:
    """`{"images": [PIL images in RGB], "videos": None}`: the media in the messages, in their order.

    An image is an entry `{"type": "image", "image": …}` of a message's content, read from the source that `source_of` finds in
    it. `processor` is not used; it is a parameter because functions for other media need it.

    Raises:
        UserError: an image cannot be read, or the messages have a video or an audio.
    """
    images = []
    for message in prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type")
            if kind in ("image", "image_url"):
                images.append(_image(source_of(part)))
            elif kind != "text":
                raise UserError(f"a message has content of the type {kind!r}; images and text are supported")
    return {"images": images or None, "videos": None}


# The keys under which a part of a message, or an entry of a field, may hold its image; the first one that is set counts.
SOURCES = ("bytes", "path", "image", "image_url", "url", "base64")


def source_of(value: Any) -> Any:
    """What an image is read from: `value` itself, or, if it is an object, its value under one of `SOURCES`. An object that has
    none of them is returned itself."""
    while isinstance(value, Mapping):
        held = next((value[name] for name in SOURCES if value.get(name) is not None), None)
        if held is None:
            break
        value = held
    return value


def no_source(value: Mapping[Any, Any]) -> str:
    """The message about an object in which `source_of` finds no source."""
    return f"is an object with {', '.join(map(str, value)) or 'nothing'}, and none of {', '.join(SOURCES)}"


def image_entries(value: Any) -> list[Any]:
    """A list of the images in a field, which holds None, one image or an iterable of images."""
    if value is None:
        return []
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping) and not is_image(value)
    return list(value) if several else [value]


def images_of(sample: Sample) -> list[Any]:
    """The sources of a prompt's images, in their order: those in its messages, else those in `multimodal_inputs`.

    Each is the path of a file, a data URI, base64, bytes or a PIL image.
    """
    if isinstance(sample.prompt, str) and not sample.multimodal_inputs:
        return []
    messages = sample.prompt if isinstance(sample.prompt, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    sources = [(part, source_of(part)) for part in parts if part.get("type") in ("image", "image_url")]
    found = [source for part, source in sources if source is not part]
    return found or [source_of(entry) for entry in image_entries((sample.multimodal_inputs or {}).get("images"))]


# A key of a sample's metadata: the replies of its dialogue that have images, in their order. Each is `{"at": …, "text": …,
# "images": […]}`: the position of its first token in the response, its text in the chat template, and its images as data URIs.
REPLIES_WITH_IMAGES = "replies_with_images"


def sees_images(sample: Sample) -> bool:
    """Whether a sample's prompt, or a reply in its response, has images."""
    return bool(images_of(sample) or sample.metadata.get(REPLIES_WITH_IMAGES))


def as_data_uri(source: Any) -> str:
    """The image at `source` as a data URI, which stays as it is now when the file is overwritten or the PIL image drawn on.

    Raises:
        UserError: it is not there, or is no image.
    """
    if isinstance(source, str) and source.startswith("data:"):
        return source
    if not isinstance(source, str | bytes):
        return encode_image_for_rollout_engine(_image(source))
    with open_image(source) as image:
        kind = image.get_format_mimetype()
    file = _file_of(source)
    content = file.getvalue() if isinstance(file, io.BytesIO) else Path(file).read_bytes()
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


@contextlib.contextmanager
def at_row(sample: Sample) -> Iterator[None]:
    """In the block, errors about the prompt and images of `sample` name its row, if it was read from a file."""
    try:
        yield
    except UserError as error:
        place = getattr(sample, "data_place", None)
        raise UserError(f"{place or f'sample {sample.index}'}: {error}") from error


def encode_with_images(
    processor: Any, text: str, sources: list[Any], *, add_special_tokens: bool
) -> tuple[list[int], dict[str, Any], list[Image.Image]]:
    """(token ids, the processor's other results, the images in RGB).

    Each placeholder of `text` becomes as many tokens as its image has. The other results, for example pixel values, are tensors
    of torch; `attention_mask` is left out.

    Raises:
        UserError: an image cannot be read, or the processor refuses the text with these images.
    """
    images = [_image(source) for source in sources]
    try:
        given = processor(
            text=[text], add_special_tokens=add_special_tokens, **build_processor_kwargs({"images": images})
        )
    except Exception as error:  # a processor may be code of the checkpoint
        raise UserError(
            f"the processor of --hf-checkpoint refused a prompt with {len(images)} images ({type(error).__name__}: {error}); "
            "does the chat template write one placeholder for each?"
        ) from error
    beside = {name: value for name, value in given.items() if name not in ("input_ids", "attention_mask")}
    return given["input_ids"][0].tolist(), beside, images


def is_image(value: Any) -> bool:
    """Whether `value` is a PIL image, without an import of PIL."""
    return any(kind.__module__ == "PIL.Image" and kind.__name__ == "Image" for kind in type(value).__mro__)


# The formats that are decoded. For some others Pillow would run a program on the file (Ghostscript on EPS).
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


def open_image(source: Any) -> Image.Image:
    """The image in a file, a data URI, base64, bytes or a stream, opened and not yet decoded.

    Raises:
        UserError: it is not there, does not begin as an image of a known format, or has too many pixels.
    """
    from PIL import Image

    with _telling(f"an image could not be read from {_shown(source)}"):
        image = Image.open(_file_of(source), formats=_FORMATS)
        # Up to twice the limit Pillow itself only warns. A small file may have far more pixels than there is memory for.
        if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
            raise ValueError(
                f"it has {image.width} x {image.height} pixels, and at most {Image.MAX_IMAGE_PIXELS} are decoded; scale it down"
            )
        return image


def _image(source: Any) -> Image.Image:
    """The image of `source` in RGB, decoded."""
    from PIL import Image

    if isinstance(source, Image.Image):
        with _telling("an image could not be read"):
            return _in_rgb(source)
    with _telling(f"an image could not be read from {_shown(source)}"), open_image(source) as image:
        return _in_rgb(image)


@contextlib.contextmanager
def _telling(what: str) -> Iterator[None]:
    """Errors in the block become a UserError that says `what` happened; each plug-in of Pillow raises other errors."""
    from PIL import UnidentifiedImageError

    try:
        yield
    except (UserError, MemoryError):
        raise
    except UnidentifiedImageError as error:
        raise UserError(f"{what}: cannot identify it as one of {', '.join(_FORMATS)}") from error
    except Exception as error:
        # The error of a system call would repeat the name, which may be long.
        cause = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f"{what}: {cause}") from error


def _in_rgb(image: Image.Image) -> Image.Image:
    """`image` in RGB as a viewer shows it, upright and white where it is transparent; pixels alone, without metadata."""
    from PIL import Image, ImageOps

    image.load()
    if image.mode == "RGB" and not image.info:
        return image
    shown = ImageOps.exif_transpose(image)
    if shown.mode.startswith("I;16"):
        # Pillow itself would clip values above 255. `info` may name a transparent colour, which is another one among 256.
        shown.info.clear()
        shown = shown.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif shown.has_transparency_data:
        shown = shown.convert("RGBA")
        shown = Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown)
    shown = shown.convert("RGB")
    shown.info.clear()
    return shown


def _file_of(source: Any) -> Any:
    """The path or the stream that `source` stands for. Raises ValueError if it stands for none."""
    if isinstance(source, Mapping):
        raise ValueError(f"it {no_source(source)}")
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not isinstance(source, str):
        return source
    if source.startswith("data:"):
        return io.BytesIO(_base64_bytes(source.partition(",")[2]))
    path = path_of(source)
    if "://" in path:
        raise ValueError("nothing is fetched from a network; store it beside the data")
    # Only regular files are read: a read of a pipe might never end.
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("it is no regular file")
    content = None if os.path.exists(path) else decoded_base64(source)
    return path if content is None else io.BytesIO(content)


def path_of(source: str) -> str:
    """The path that `source` is, or that it names as a `file://` URI."""
    return unquote(source.removeprefix("file://")) if source.startswith("file://") else source


def decoded_base64(text: str) -> bytes | None:
    """The bytes that `text`, one or several lines, is the base64 of; None if it is not base64."""
    try:
        # Hardly any image has fewer characters, and few file names have more.
        return _base64_bytes(text) if len(text) > 64 else None
    except ValueError:
        return None


def _base64_bytes(text: str) -> bytes:
    return base64.b64decode("".join(text.split()), validate=True)


def _shown(source: Any) -> str:
    if isinstance(source, bytes | io.IOBase):
        return "its bytes"
    return str(source) if len(str(source)) < 512 else f"{str(source)[:64]}…"


def encode_image_for_rollout_engine(image: Image.Image) -> str:
    """The image as the engines take it: a data URI of a PNG in RGB, as a viewer shows it.

    Raises:
        UserError: it cannot be decoded.
    """
    buffer = io.BytesIO()
    with _telling("an image could not be prepared for the engines"):
        # The usual level takes five times as long, for a fifth of the bytes.
        _in_rgb(image).save(buffer, format="PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
