import json

import pytest
from PIL import Image

from slime.utils.errors import UserError
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
    render_chat,
)
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer


def test_a_tokenizer_directory_gives_the_same_ids_also_beside_a_model_config(tmp_path):
    directory = save_tokenizer(tmp_path)
    # With a model_type some versions of transformers would choose that family's own tokenizer class.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    text = render_chat(build_tokenizer(), [{"role": "user", "content": "hello a\n\nthis, 12é"}])
    loaded = load_tokenizer(directory)
    assert loaded(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert render_chat(loaded, [{"role": "user", "content": "x"}], add_generation_prompt=False) == (
        "<|im_start|>user\nx<|im_end|>\n"
    )


def test_missing_and_empty_directories_name_the_flag(tmp_path):
    with pytest.raises(UserError, match="--hf-checkpoint /no/such/dir: there is no such directory"):
        load_tokenizer("/no/such/dir")
    with pytest.raises(UserError, match="--ref-load .*: no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path), flag="--ref-load")


def picture(mode="RGB", color=(255, 0, 0)):
    return Image.new(mode, (3, 2), color)


def test_an_image_comes_back_from_what_engines_are_sent():
    for mode, color in (("RGB", (255, 0, 0)), ("RGBA", (255, 0, 0, 255)), ("L", 100)):
        sent = encode_image_for_rollout_engine(picture(mode, color))
        assert sent.startswith("data:image/png;base64,")
        [back] = process_vision_info([{"role": "user", "content": [{"type": "image", "image": sent}]}], None)["images"]
        assert back.size == (3, 2) and back.tobytes() == picture(mode, color).convert("RGB").tobytes()


def test_images_of_messages_are_read_in_their_order(tmp_path):
    picture(color=(0, 255, 0)).save(tmp_path / "green.png")
    content = [
        {"type": "image", "image": picture()},
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/green.png"}},
    ]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    found = process_vision_info(messages, None)
    assert [image.getpixel((0, 0)) for image in found["images"]] == [(255, 0, 0), (0, 255, 0)]
    assert found["videos"] is None
    assert process_vision_info(messages[:1], None) == {"images": None, "videos": None}


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "video", "video": "x.mp4"}, "'video'"),
        ({"type": "image", "image": "/no/such.png"}, "/no/such.png"),
        ({"type": "image", "image": "https://example.org/x.png"}, "network"),
        ({"type": "image", "image": "data:image/png;base64,AAAA"}, "could not be read"),
        ({"type": "image"}, "could not be read"),
    ],
)
def test_what_is_no_image_is_refused_by_name(part, told):
    with pytest.raises(UserError, match=told):
        process_vision_info([{"role": "user", "content": [part]}], None)


def test_a_processor_gets_the_media_that_are_there_and_gives_tensors():
    assert build_processor_kwargs({"images": [1], "videos": None}) == {"images": [1], "return_tensors": "pt"}
    assert build_processor_kwargs() == {"return_tensors": "pt"}


def test_a_model_without_images_has_no_processor(tmp_path):
    assert load_processor(save_tokenizer(tmp_path)) is None
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(UserError, match="its processor could not be loaded"):
        load_processor(str(tmp_path))
    with pytest.raises(UserError, match="no such directory"):
        load_processor("/no/such/dir")


def test_a_processor_that_needs_a_missing_library_names_it(tmp_path, monkeypatch):
    (tmp_path / "preprocessor_config.json").write_text("{}")

    def lacking(*args, **kwargs):
        raise ImportError(
            "\nSomeVideoProcessor requires the Torchvision library but it was not found. Check out\nthe page.\n"
        )

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", lacking)
    with pytest.raises(
        UserError, match=r"requires the Torchvision library but it was not found\); install that library, or"
    ):
        load_processor(str(tmp_path))
