"""Small images, and the checkpoint directory of a small model that sees them, without weights.

Its processor is that of LLaVA over CLIP's image processor, which only needs Pillow. It scales an image to 28 x 28 pixels, which
are four patches, and writes it into a prompt as four tokens `<picture>`.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from PIL import Image

from tests.support.models.rollout_args import CONTEXT_LENGTH, VOCAB_SIZE
from tests.support.models.tokenizer import build_tokenizer

PLACEHOLDER = "<picture>"
TOKENS_OF_IMAGE = 4
# The size of a picture of `save_image`.
SIZE = (40, 30)

# The content of a message is a text or a list of parts.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}{% else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' %}{{ '<picture>' }}{% else %}{{ part.text }}{% endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)


def make_seeing_checkpoint(directory: Path) -> str:
    """Write tokenizer, processor and config. Returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": [PLACEHOLDER]})
    tokenizer.save_pretrained(str(directory))
    side = {"height": 28, "width": 28}
    files = {
        "config.json": {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH},
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": PLACEHOLDER,
        },
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "size": side,
            "crop_size": side,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return str(directory)


def color_of(uri: str) -> tuple[int, int, int]:
    """The colour of a picture of `save_image`, read from the data URI that engines get."""
    head, _, content = uri.partition(",")
    assert head == "data:image/png;base64"
    image = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (image.size, image.mode) == (SIZE, "RGB")
    return image.getpixel((0, 0))


def save_image(path: Path, color: str = "red", size: tuple[int, int] = SIZE) -> str:
    """Save a picture in one colour. Returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)
    return str(path)
