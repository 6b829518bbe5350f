"""Rows with images become messages, and what is wrong with them is told by file, row and field."""

import base64
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slime.utils.dataset import Dataset, RowKeys, StreamedDataset, filter_long_prompt
from slime.utils.errors import UserError
from slime.utils.image_rows import media_keys_problem
from slime.utils.processing_utils import load_processor, load_tokenizer, process_vision_info
from tests.support.models.vision import PLACEHOLDER, TOKENS_OF_IMAGE, make_seeing_checkpoint, save_image

KEYS = {"image": "images"}


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows beside a folder of two pictures, `pictures/red.png` and `pictures/blue.png`."""
    for color in ("red", "blue"):
        save_image(tmp_path / "pictures" / f"{color}.png", color)

    def write(*rows: dict, name: str = "data.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


def read(path: str, **options) -> Dataset:
    return Dataset(path, None, multimodal_keys=KEYS, **options)


def test_placeholders_of_a_text_become_images_in_the_folder_of_the_data(write_rows, tmp_path, monkeypatch):
    write_rows({"prompt": "first <image> then <image>?", "images": ["pictures/red.png", "pictures/blue.png"]})
    monkeypatch.chdir(tmp_path.parent)
    [sample] = read(f"{tmp_path.name}/data.jsonl@[0:1]")
    sources = [str(tmp_path / "pictures" / f"{color}.png") for color in ("red", "blue")]
    parts = [
        {"type": "text", "text": "first "},
        {"type": "image", "image": sources[0]},
        {"type": "text", "text": " then "},
        {"type": "image", "image": sources[1]},
        {"type": "text", "text": "?"},
    ]
    assert sample.prompt == [{"role": "user", "content": parts}]
    assert sample.multimodal_inputs == {"images": sources}
    assert sample.data_place == f"{tmp_path.name}/data.jsonl:1"
    images = process_vision_info(sample.prompt, None)["images"]
    assert [image.getpixel((0, 0)) for image in images] == [(255, 0, 0), (0, 0, 255)]


def test_nothing_decoded_is_held_for_a_row(write_rows):
    path = write_rows(*[{"prompt": "<image>", "images": "pictures/red.png"}] * 50)
    dataset = read(path)
    # A picture alone has 3,600 bytes of pixels.
    assert len(pickle.dumps(dataset.samples)) < 50 * 1000


def test_messages_take_images_in_their_order_and_may_name_their_own(write_rows, tmp_path):
    red, blue = (str(tmp_path / "pictures" / f"{color}.png") for color in ("red", "blue"))
    parts = [
        {"type": "text", "text": "look: <image>"},
        {"type": "image"},
        {"type": "image", "image": "pictures/blue.png"},
        {"type": "image_url", "image_url": {"url": "file://" + red}},
    ]
    chat = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": parts},
        {"role": "user", "content": "<image>"},
    ]
    [sample] = read(write_rows({"prompt": chat, "images": [red, {"path": blue, "bytes": None}, red]}))
    assert sample.prompt[0] == {"role": "system", "content": "s"}
    assert sample.multimodal_inputs["images"] == [red, blue, blue, red, red]
    assert [part["type"] for part in sample.prompt[1]["content"]] == ["text", "image", "image", "image", "image"]


def test_images_may_stand_in_the_row_itself(write_rows, tmp_path):
    content = Path(save_image(tmp_path / "x.png", "blue")).read_bytes()
    text = base64.b64encode(content).decode()
    uri = f"data:image/png;base64,{text}"
    [one, other] = read(
        write_rows(
            {"prompt": "<image>", "images": text},
            {"prompt": "<image><image>", "images": [uri, {"bytes": None, "path": uri}]},
        )
    )
    assert one.multimodal_inputs == {"images": [uri]} and other.multimodal_inputs == {"images": [uri, uri]}


def test_base64_may_be_broken_into_lines(write_rows, tmp_path):
    content = Path(save_image(tmp_path / "x.png", "blue")).read_bytes()
    text, lines = base64.b64encode(content).decode(), base64.encodebytes(content).decode()
    [*samples] = read(
        write_rows(
            {"prompt": "<image>", "images": lines},
            {"prompt": "<image>", "images": f"data:image/png;base64,{lines}"},
            {"prompt": [{"role": "user", "content": [{"type": "image", "base64": text}]}]},
        )
    )
    for sample in samples:
        [image] = process_vision_info(sample.prompt, None)["images"]
        assert image.getpixel((0, 0)) == (0, 0, 255)
    assert [sample.multimodal_inputs["images"][0][22:] for sample in samples] == [text, lines, text]


def test_a_file_uri_is_read_as_its_path_is(write_rows, tmp_path, monkeypatch):
    spaced = save_image(tmp_path / "pictures" / "a b.png", "red")
    path = write_rows(
        *[
            {"prompt": "<image>", "images": f"file://{name}"}
            for name in ("pictures/red.png", spaced.replace(" ", "%20"))
        ],
        {"prompt": "<image>", "images": "file://elsewhere.png"},
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    save_image(tmp_path / "elsewhere" / "elsewhere.png")
    sources = [sample.multimodal_inputs["images"] for sample in read(f"{path}@[0:2]")]
    assert sources == [[f"{tmp_path}/pictures/red.png"], [spaced]]
    with pytest.raises(UserError, match=f"{path}:3: image 0 of 'images': there is no file {tmp_path}/elsewhere.png"):
        read(path)


def test_bytes_in_a_column_of_parquet(tmp_path):
    from pyarrow import Table, parquet

    content = Path(save_image(tmp_path / "x.png", "blue")).read_bytes()
    rows = [{"prompt": "<image>", "images": [{"bytes": content, "path": None}]}, {"prompt": "no image", "images": None}]
    parquet.write_table(Table.from_pylist(rows), tmp_path / "data.parquet")
    [sample, text] = read(str(tmp_path / "data.parquet"))
    assert sample.multimodal_inputs == {"images": [f"data:image/png;base64,{base64.b64encode(content).decode()}"]}
    assert text.prompt == [{"role": "user", "content": "no image"}] and text.multimodal_inputs is None


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "<image>", "images": []}, "'prompt' has 1 <image> placeholders and 'images' 0 images"),
        ({"prompt": "<image>"}, "'prompt' has 1 <image> placeholders and 'images' 0 images"),
        ({"prompt": "x", "images": ["pictures/red.png"] * 2}, "'prompt' has 0 <image> placeholders and 'images' 2 images"),
        ({"prompt": "<image>", "images": "pictures/no.png"}, "image 0 of 'images': there is no file {tmp}/pictures/no.png"),
        ({"prompt": "<image>", "images": "https://a.b/c.png"}, "image 0 of 'images': .*nothing is fetched from a network"),
        ({"prompt": "<image>", "images": ["data.jsonl"]}, "an image could not be read from {tmp}/data.jsonl: cannot identify"),
        ({"prompt": "<image>", "images": "data:image/png;base64,AAAA"}, "image 0 of 'images': an image could not be read"),
        ({"prompt": "<image>", "images": [3]}, "image 0 of 'images' is int, expected a path"),
        ({"prompt": "<image>", "images": "file://pipe"}, "image 0 of 'images': there is no file {tmp}/pipe"),
        ({"prompt": "<image>", "images": "A" * 1001}, "image 0 of 'images': 'A{{64}}…' is neither a file nor base64;"),
        ({"prompt": "<image>", "images": {"file": "x", "height": 3}}, "an object with file, height, and none of bytes, path"),
        ({"prompt": "<image>", "images": {}}, "image 0 of 'images' is an object with nothing, and none of bytes, path"),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}]}, "part of the type 'video'; only text and image"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row_is_told_by_file_and_line(write_rows, tmp_path, row, told):
    os.mkfifo(tmp_path / "pipe")
    path = write_rows({"prompt": "<image>", "images": "pictures/red.png"}, row)
    with pytest.raises(UserError, match=f"^{path}:2: .*{told.format(tmp=tmp_path)}"):
        read(path)
    dataset = read(path, allow_bad_rows=True)
    assert (len(dataset), dataset.num_bad_rows) == (1, 1)


def test_streamed_rows_are_the_same(write_rows):
    path = write_rows(
        {"prompt": "a <image>", "images": "pictures/red.png"},
        {"prompt": "text"},
        {"prompt": "<image>", "images": ["no.png"]},
    )
    keys = RowKeys(None, None, None, None, images="images")
    options = {"keys": keys, "seed": 1, "apply_chat_template": False, "apply_chat_template_kwargs": None}
    streamed = StreamedDataset(path, None, None, allow_bad_rows=False, **options)
    whole = read(path + "@[0:2]")
    assert [streamed[0], streamed[1]] == [whole[0], whole[1]] and streamed[0].data_place == f"{path}:1"
    with pytest.raises(UserError, match=f"{path}:3: .*there is no file"):
        streamed[2]


def test_a_template_writes_the_placeholders_of_the_model(write_rows, checkpoint, tmp_path):
    path = write_rows({"prompt": "a <image> b", "images": "pictures/red.png"})
    [sample] = read(path)
    [rendered] = Dataset(path, load_tokenizer(checkpoint), multimodal_keys=KEYS, apply_chat_template=True)
    assert rendered.prompt == f"<|im_start|>user\na {PLACEHOLDER} b<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.multimodal_inputs == sample.multimodal_inputs


@pytest.mark.parametrize("rendered", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
def test_d3_long_prompts_are_measured_with_their_images_and_order_is_kept(write_rows, checkpoint, rendered, streamed):
    rows = [
        {"label": "a", "prompt": "a<image>", "images": "pictures/red.png"},
        {"label": "b", "prompt": "b"},
        {"label": "c", "prompt": "c<image><image>", "images": ["pictures/red.png"] * 2},
        {"label": "d", "prompt": "d" * 6},
        {"label": "e", "prompt": "e<image>", "images": "pictures/blue.png"},
    ]
    path, tokenizer, processor = write_rows(*rows), load_tokenizer(checkpoint), load_processor(checkpoint)
    frame = tokenizer("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    limit = len(frame) + 1 + TOKENS_OF_IMAGE
    common = {"apply_chat_template": rendered, "allow_bad_rows": False}
    if streamed:
        options = {"seed": 1, "apply_chat_template_kwargs": None, "processor": processor, **common}
        keys = RowKeys(None, "label", None, None, images="images")
        dataset = StreamedDataset(path, tokenizer, limit, keys=keys, **options)
        kept = [sample for row in range(5) if (sample := dataset[row]) is not None]
    else:
        kept = list(Dataset(path, tokenizer, processor, limit, multimodal_keys=KEYS, **common))
    assert [sample.label for sample in kept] == ["a", "b", "e"]


def test_an_image_that_is_cut_off_is_told_with_its_row(write_rows, checkpoint, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "half.png")
    content = (tmp_path / "half.png").read_bytes()
    (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
    path = write_rows({"prompt": "<image>", "images": "half.png"})
    dataset = read(path)  # it begins as an image
    with pytest.raises(UserError, match=f"{path}:1: an image could not be read from {tmp_path}/half.png: .*truncated"):
        filter_long_prompt(dataset.samples, load_tokenizer(checkpoint), load_processor(checkpoint), 9)


def test_a_limit_of_length_needs_a_processor(write_rows, checkpoint):
    path = write_rows({"prompt": "<image>", "images": "pictures/red.png"})
    with pytest.raises(
        UserError,
        match=f"^{path}:1: --hf-checkpoint .*has no processor.*preprocessor_config.json.*--multimodal-keys .of an evaluation",
    ):
        Dataset(path, load_tokenizer(checkpoint), None, 9, multimodal_keys=KEYS)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"video": "v"}, "rows with video are not built, only those with images; leave video out"),
        ({"image": "i", "audio": "a"}, "rows with audio are not built"),
        ({"picture": "i"}, "'picture' is none of image, video, audio"),
        ({"image": 3}, "image is 3, expected the name of a field"),
        ({"image": ""}, "image is '', expected the name of a field"),
    ],
)
def test_other_media_are_refused_by_name(write_rows, keys, told):
    assert media_keys_problem(keys).startswith(told)
    with pytest.raises(UserError, match=f"--multimodal-keys: {told}"):
        Dataset(write_rows({"prompt": "x"}), None, multimodal_keys=keys)
    assert media_keys_problem(KEYS) is media_keys_problem({}) is None
