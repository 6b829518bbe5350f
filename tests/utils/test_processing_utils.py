import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from slime.utils.child_process import environment_for_python
from slime.utils.errors import UserError
from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    images_of,
    lacks_tokenizer,
    load_processor,
    load_tokenizer,
    process_vision_info,
    render_chat,
    unheard_end_of_turn,
    without_end_mark,
)
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.tokenizer import CHATML_TEMPLATE, build_tokenizer, save_tokenizer


@pytest.mark.parametrize(
    "mark",
    [
        "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>",
        "</s>", "<eos>", "<end_of_turn>", "[e~[", "[EOS]", "[EOT]", "",
    ],
)  # fmt: skip
def test_the_token_that_ended_a_turn_is_cut_off_a_text_once(mark):
    for text in ("It is 4", "It is 4\n", "a <|im_end|> b", "</answer>", "x < y | z >", ""):
        assert without_end_mark(text + mark) == text
        if mark:
            assert without_end_mark(text + mark + mark) == text + mark


# A template in which the next turn's mark ends a turn, as those of GLM; one without special tokens; one that refuses dialogues.
OPEN_TURNS = "{%- for message in messages %}{{ '<|im_start|>' + message.role + message.content }}{% endfor -%}"
PLAIN_WORDS = "{%- for message in messages %}{{ message.role + ': ' + message.content + '. ' }}{% endfor -%}"
REFUSING = "{%- if messages[1] %}{{ raise_exception('one question') }}{% endif %}{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("files", "template", "flags", "end"),
    [
        ({}, CHATML_TEMPLATE, {}, "<|im_end|>"),
        ({"config.json": {"eos_token_id": 264}, "generation_config.json": {}}, CHATML_TEMPLATE, {}, "<|im_end|>"),
        ({}, OPEN_TURNS, {}, "<|im_start|>"),
        ({}, PLAIN_WORDS, {}, None),
        ({}, REFUSING, {}, None),
        ({}, CHATML_TEMPLATE, {"rollout_stop_token_ids": [266]}, None),
        ({}, CHATML_TEMPLATE, {"rollout_stop": ["###", "<|im_end|>"]}, None),
        ({}, CHATML_TEMPLATE, {"rollout_stop": "im_end"}, None),
        ({"config.json": {"eos_token_id": 266}}, CHATML_TEMPLATE, {}, None),
        ({"config.json": {"text_config": {"eos_token_id": [264, 266]}}}, CHATML_TEMPLATE, {}, None),
        ({"generation_config.json": {"eos_token_id": [264, 266]}}, CHATML_TEMPLATE, {}, None),
    ],
)
def test_a_turn_that_ends_where_engines_do_not_is_told(tmp_path, files, template, flags, end):
    tokenizer = build_tokenizer(template)
    tokenizer.eos_token = "<|endoftext|>"
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [264, 265, 266]
    for name, config in files.items():
        (tmp_path / name).write_text(json.dumps(config))
    args = make_args(str(tmp_path), **flags)
    told = unheard_end_of_turn(args, tokenizer)
    if end is None:
        assert told is None
    else:
        token = tokenizer.convert_tokens_to_ids(end)
        assert (
            f"ends a turn of the model with {end} ({token}), and engines end an answer at <|endoftext|> (264) alone"
            in told
        )
        assert told.endswith(f"give --rollout-stop-token-ids {token}")


def test_a_tokenizer_whose_last_token_ends_its_turns_is_heard(tmp_path):
    assert unheard_end_of_turn(make_args(str(tmp_path)), build_tokenizer()) is None


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


@pytest.mark.parametrize(
    ("files", "lacks"),
    [
        ({}, True),
        # What a download leaves that was broken off; and none to begin with.
        (
            {"tokenizer_config.json": {"tokenizer_class": "Qwen2Tokenizer"}, "config.json": {"model_type": "qwen3"}},
            True,
        ),
        ({"tokenizer_config.json": None, "generation_config.json": {}, "merges.txt": None}, True),
        ({"config.json": {"auto_map": {"AutoConfig": "configuration.Config"}}}, True),
        ({"tokenizer.json": None}, False),
        ({"vocab.json": None}, False),
        ({"tokenizer.model": None}, False),
        ({"tekken.json": None}, False),
        ({"hy.tiktoken": None}, False),
        # Code of its own, or bytes.
        ({"tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}}, False),
        ({"tokenizer_config.json": {"auto_map": ["code.Tokenizer", None]}}, False),
        ({"config.json": {"auto_map": {"AutoTokenizer": "code.Tokenizer"}}}, False),
        ({"tokenizer_config.json": {"tokenizer_class": "ByT5Tokenizer"}}, False),
    ],
)
def test_a_directory_without_a_tokenizer_is_known_by_its_files(tmp_path, files, lacks):
    for name, content in files.items():
        (tmp_path / name).write_text("" if content is None else json.dumps(content))
    assert lacks_tokenizer(str(tmp_path)) is lacks


def test_a_tokenizer_without_a_vocabulary_is_made_all_the_same(tmp_path):
    """As long as this holds, the files alone tell."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    assert load_tokenizer(str(tmp_path)).encode("hello") == []


def test_a_tokenizer_brings_no_compiler_along(tmp_path):
    """Until somebody asks for it; what it then has is what transformers has. The import that makes it necessary is checked by
    the tests of the servers' CPU adapter."""
    program = (
        "import sys\n"
        "from slime.utils.processing_utils import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(save_tokenizer(tmp_path))!r})\n"
        "print([name for name in ('torch._dynamo', 'torch._inductor', 'sympy') if name in sys.modules])\n"
        "import torch\n"
        "print(torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1)).item(), 'sympy' in sys.modules)\n"
        "from transformers import masking_utils\n"
        "from torch._dynamo import _trace_wrapped_higher_order_op as alone\n"
        "print(masking_utils.TransformGetItemToIndex is alone.TransformGetItemToIndex)\n"
    )
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment_for_python(), capture_output=True, text=True, timeout=300)
    assert printed.returncode == 0, printed.stderr[-2000:]
    assert printed.stdout.split("\n")[:3] == ["[]", "2.0 True", "True"]


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


def test_messages_without_content_have_no_images():
    calls = [{"function": {"name": "look", "arguments": {}}}]
    content = [{"type": "image", "image": picture()}]
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": content}]
    assert len(process_vision_info(messages, None)["images"]) == 1


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "video", "video": "x.mp4"}, "'video'"),
        ({"type": "image", "image": "/no/such.png"}, "/no/such.png"),
        ({"type": "image", "image": "https://example.org/x.png"}, "network"),
        ({"type": "image", "image": "data:image/png;base64,AAAA"}, "could not be read"),
        ({"type": "image"}, "could not be read .*: it is an object with type, and none of bytes, path, image"),
        (
            {"type": "image", "image": {"file": "x"}},
            "could not be read .*: it is an object with file, and none of bytes",
        ),
        ({"type": "image", "image": "/dev/zero"}, "could not be read from /dev/zero: it is no regular file"),
        ({"type": "image", "image": "x" * 999}, "could not be read from x{64}…: File name too long$"),
    ],
)
def test_what_is_no_image_is_refused_by_name(part, told):
    with pytest.raises(UserError, match=told):
        process_vision_info([{"role": "user", "content": [part]}], None)


def as_file(path, mode="RGB", color=(255, 0, 0), **options):
    picture(mode, color).save(path, **options)
    return str(path)


def colors(source):
    """The colours of the picture that engines are sent of `source`, which a processor is given too, by place."""
    [image] = process_vision_info([{"role": "user", "content": [{"type": "image", "image": source}]}], None)["images"]
    content = encode_image_for_rollout_engine(image).partition(",")[2]
    sent = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (image.mode, sent.mode, sent.info) == ("RGB", "RGB", {}) and sent.tobytes() == image.tobytes()
    return [[sent.getpixel((x, y)) for x in range(sent.width)] for y in range(sent.height)]


@pytest.mark.parametrize(("mode", "color", "transparent"), [("1", 1, 0), ("I;16", 65535, 7), ("L", 255, 3)])
def test_a_transparent_grey_is_no_error_and_nothing_beside_the_pixels_is_sent(tmp_path, mode, color, transparent):
    path = as_file(tmp_path / "x.png", mode, color, transparency=transparent, icc_profile=b"profile" * 99)
    assert colors(path) == colors(Image.open(path)) == [[(255,) * 3] * 3] * 2
    sent = encode_image_for_rollout_engine(Image.open(path))
    assert len(sent) < 400 and colors(sent) == colors(path)


def test_an_image_is_seen_as_a_viewer_shows_it(tmp_path):
    drawn = picture("RGBA", (0, 0, 0, 0))
    drawn.putpixel((0, 0), (0, 0, 0, 255))
    drawn.save(tmp_path / "drawn.png")
    white, black = (255,) * 3, (0,) * 3
    assert colors(f"{tmp_path}/drawn.png") == colors(drawn) == [[black, white, white], [white] * 3]
    assert colors(as_file(tmp_path / "grey.png", "I;16", 128 * 256)) == [[(128,) * 3] * 3] * 2
    turned = picture("RGB", "white")
    turned.putpixel((0, 0), black)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save(tmp_path / "turned.png", exif=exif)
    assert colors(f"{tmp_path}/turned.png") == [[white, black], [white, white], [white, white]]


@pytest.mark.parametrize("step", ["_open", "load"])
def test_errors_of_decoders_are_told_as_those_of_an_image(tmp_path, monkeypatch, step):
    def failing(image):
        raise RuntimeError("Failed to decode image")  # as the decoder of AVIF does, of a damaged one

    path = as_file(tmp_path / "x.png")
    monkeypatch.setattr(PngImagePlugin.PngImageFile, step, failing)
    with pytest.raises(UserError, match="^an image could not be read from .*/x.png: Failed to decode image$"):
        colors(path)


def test_an_image_that_breaks_while_it_is_sent_is_told():
    noise = io.BytesIO()
    Image.effect_noise((64, 64), 80).save(noise, "PNG")
    cut = io.BytesIO(noise.getvalue()[: len(noise.getvalue()) // 2])
    with pytest.raises(UserError, match="^an image could not be prepared for the engines: .*truncated"):
        encode_image_for_rollout_engine(Image.open(cut))


def test_no_program_is_run_on_an_image(tmp_path):
    (tmp_path / "x.eps").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n/x {x} def\n%%EOF\n"
    )
    with pytest.raises(UserError, match="x.eps: cannot identify it as one of PNG, JPEG, WEBP, GIF, BMP, TIFF, AVIF$"):
        colors(f"{tmp_path}/x.eps")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_more_pixels_than_pillow_trusts_is_not_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(UserError, match="x.png: it has 3 x 2 pixels, and at most 5 are decoded; scale it down"):
        colors(as_file(tmp_path / "x.png"))


def test_images_of_samples_from_elsewhere_are_found_where_rows_have_them(tmp_path):
    red = as_file(tmp_path / "a red.png")
    content = Path(red).read_bytes()
    text = base64.b64encode(content).decode()
    sources = [
        picture(), red, f"file://{red.replace(' ', '%20')}", content, text, {"path": red}, {"bytes": content, "path": "x.png"},
        {"url": red}, {"base64": text},
    ]  # fmt: skip
    for source in sources:
        assert colors(source) == colors(red)
        part = {"type": "image", "image": source}
        for sample in (
            Sample(prompt=[{"role": "user", "content": [{"type": "image"}, part]}]),
            Sample(multimodal_inputs={"images": [source]}),
            Sample(multimodal_inputs={"images": source}),
        ):
            [found] = images_of(sample)
            assert colors(found) == colors(red)
    assert images_of(Sample(multimodal_inputs={"images": None})) == images_of(Sample()) == []
    assert len(images_of(Sample(multimodal_inputs={"images": (red, red)}))) == 2


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
