"""Geometry3K as prompts and as chats: what a run makes of rows, how answers are graded, and the plans of the scripts."""

import asyncio
import base64
import io
import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from slime.arguments import parse_args
from slime.plan import make_plan, render
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.rm_hub import async_rm
from slime.rollout.sft_rollout import generate_rollout
from slime.utils.data import Dataset
from slime.utils.errors import UserError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.vision import PLACEHOLDER, TOKENS_OF_IMAGE, make_seeing_checkpoint
from tests.support.tables.launch_table import Launch, value_of, write_configs
from tests.support.tables.shell_arrays import bash

EXAMPLE = Path(__file__).parents[3] / "examples/geo3k_vlm"
main, question = (load_function(f"{EXAMPLE}/write_data.py:{name}") for name in ("main", "question"))
REQUEST = "\nThink step by step, then give the answer in \\boxed{}."


def figure(color, form="PNG"):
    buffer = io.BytesIO()
    Image.new("RGB", (40, 30), color).save(buffer, form)
    return {"bytes": buffer.getvalue(), "path": None}


@pytest.fixture
def source(tmp_path):
    """As the data is published: a figure for each problem, of which one does not place it."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"images": [figure("red")], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }"},
        {"images": [figure("blue", "JPEG")], "problem": "Find y.", "answer": "30"},
        {"images": [], "problem": "Find 1+1.", "answer": "2"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    return tmp_path / "train.parquet"


def written(source, tmp_path, *words):
    output = tmp_path / "data" / "train.jsonl"
    main(["--input", str(source), "--output", str(output), *words])
    return output


@pytest.mark.parametrize(
    ("problem", "figures", "asked"),
    [
        ("<image>Find x.", 1, "<image>Find x."),
        ("Find x.", 2, "<image><image>Find x."),
        ("See <image>. Find x.\n", 2, "<image>See <image>. Find x."),
        ("Find x.", 0, "Find x."),
    ],
)
def test_every_figure_has_a_place(problem, figures, asked):
    assert question(problem, figures) == asked + REQUEST


def test_rows_are_prompts_with_their_figures(source, tmp_path):
    path = written(source, tmp_path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["images"] for row in rows] == [["images/train-0-0.png"], ["images/train-1-0.jpeg"], []]
    assert [row["label"] for row in rows] == ["2 \\sqrt { 221 }", "30", "2"]
    samples = Dataset(str(path), None, multimodal_keys={"image": "images"}).samples
    parts = samples[0].prompt[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"] and parts[1]["text"] == f"Find x.{REQUEST}"
    with Image.open(parts[0]["image"]) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)
    assert samples[2].prompt == [{"role": "user", "content": f"Find 1+1.{REQUEST}"}]


def test_figures_that_are_files_already_stay_where_they_are(source, tmp_path):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "mine.png")
    row = {"problem": "Find x.", "images": f"{tmp_path}/mine.png", "answer": "1"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row) + "\n")
    path = written(tmp_path / "mine.jsonl", tmp_path)
    assert json.loads(path.read_text())["images"] == [f"{tmp_path}/mine.png"]
    assert not (path.parent / "images").exists()


@pytest.mark.parametrize("head", ["", "data:image/png;base64,"])
def test_figures_that_are_text_become_files_and_paths_are_those_of_the_input(tmp_path, head):
    """In JSON there are no bytes; and a path lies beside the file that has it, as for a run."""
    folder = tmp_path / "input"
    folder.mkdir()
    Image.new("RGB", (40, 30), "blue").save(folder / "blue.png")
    inline = head + base64.b64encode(figure("red")["bytes"]).decode()
    row = {"problem": "<image><image>", "images": [inline, "blue.png"], "answer": "1"}
    (folder / "mine.jsonl").write_text(json.dumps(row) + "\n")
    path = written(folder / "mine.jsonl", tmp_path)
    assert json.loads(path.read_text())["images"] == ["images/train-0-0.png", f"{folder}/blue.png"]
    [sample] = Dataset(str(path), None, multimodal_keys={"image": "images"}).samples
    with Image.open(sample.prompt[0]["content"][0]["image"]) as image:
        assert image.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"problem": "x", "images": []}, "there is no answer"),
        ({"problem": "x", "images": ["none.png"], "answer": "1"}, "image 0 of 'images': there is no file .*/none.png"),
        (
            {"problem": "<image>", "images": [], "answer": "1"},
            "'problem' has 1 <image> placeholders and 'images' 0 images",
        ),
    ],
)
def test_a_row_that_no_run_could_read_is_told_with_its_place(tmp_path, row, cause):
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "a", "images": [], "answer": "1"}) + "\n")
    with open(tmp_path / "mine.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"mine.jsonl:2: {cause}"):
        written(tmp_path / "mine.jsonl", tmp_path)
    assert not (tmp_path / "data" / "train.jsonl").exists()


def test_of_chats_the_answers_are_trained_and_figures_are_not(source, tmp_path):
    checkpoint = make_seeing_checkpoint(tmp_path / "model")
    path = written(source, tmp_path, "--chats")
    args = make_args(checkpoint, rollout_batch_size=3, n_samples_per_prompt=1)
    vars(args).update(loss_mask_type="qwen3", rollout_shuffle=False)
    data = Dataset(str(path), None, prompt_key="messages", multimodal_keys={"image": "images"})
    samples = [group[0] for group in generate_rollout(args, 0, RolloutDataSource(data, args)).samples]
    answers = ["2 \\sqrt { 221 }", "30", "2"]
    assert [sample.response for sample in samples] == [f"\\boxed{{{answer}}}<|im_end|>\n" for answer in answers]
    assert all(sample.loss_mask == [1] * sample.response_length for sample in samples)
    shapes = [s.multimodal_train_inputs and s.multimodal_train_inputs["pixel_values"].shape for s in samples]
    assert shapes == [(1, 3, 28, 28), (1, 3, 28, 28), None]
    from slime.utils.processing_utils import load_tokenizer

    placeholder = load_tokenizer(checkpoint).convert_tokens_to_ids(PLACEHOLDER)
    assert [list(sample.tokens).count(placeholder) for sample in samples] == [TOKENS_OF_IMAGE, TOKENS_OF_IMAGE, 0]


@pytest.mark.parametrize(
    ("label", "said", "reward"),
    [
        ("2 \\sqrt { 221 }", "So AC is \\boxed{2\\sqrt{221}}.", 1),
        ("30", "\\boxed{30^\\circ}", 1),
        ("\\frac { 5 } { 2 }", "\\boxed{2.5}", 1),
        ("30", "It is 30.", 0),
        ("30", "\\boxed{31}", 0),
    ],
)
def test_answers_of_the_data_are_graded_as_they_are_written(label, said, reward):
    args = SimpleNamespace(**{**vars(make_args("none")), "rm_type": "math"})
    assert asyncio.run(async_rm(args, Sample(index=0, response=said, label=label))) == reward


@pytest.mark.parametrize(
    "name", ["geo3k_vlm/run-qwen3.5-4B", "geo3k_vlm/run-qwen3.5-4B-sft", "geo3k_vlm_multi_turn/run-qwen3.5-4B"]
)
def test_the_scripts_have_a_plan(name, tmp_path, monkeypatch):
    result = bash(f"bash {EXAMPLE.parent}/{name}.sh", HOME=str(tmp_path), PRINT_COMMAND="1")
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)[2:]
    write_configs(words, Launch("qwen3.5-4B", {}))
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    args = parse_args(argv=[*words, "--dry-run", "--dry-run-gpu-memory-gib", "80"])
    assert args.multimodal_keys == {"image": "images"} and args.transformer_impl == "local"
    assert ("--apply-chat-template" in words) == (name == "geo3k_vlm/run-qwen3.5-4B")
    assert "geometry3k/" in value_of(words, "--prompt-data")
    if "multi_turn" in name:
        assert args.max_turns == 3
        assert load_function(f"{args.rollout_interaction_env_path}:build_env").__name__ == "build_env"
    plan = make_plan(args)
    assert render(plan).strip() and not [note for note in args.plan_notes if "not built" in note]
    assert [phase.name for phase in plan.memory.phases if phase.fits is False] == []
