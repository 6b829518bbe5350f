"""Samples whose prompts have images: what engines are asked, how an interrupted answer goes on, and what is stored of them."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from slime.rollout import on_policy_distillation
from slime.rollout.base_types import leaves
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.dialogue import ask, dialogue
from slime.rollout.evaluation import clear_dataset_cache, eval_rollout
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group, generate_streaming
from slime.rollout.rollout_dump import load_rollout, save_rollout
from slime.utils.dataset import Dataset
from slime.utils.errors import UserError
from slime.utils.eval_config import build_eval_dataset_configs
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.models.rollout_steps import params, run, run_step
from tests.support.models.seen_batch import PROVIDER
from tests.support.models.vision import (
    PLACEHOLDER,
    TOKENS_OF_IMAGE,
    color_of,
    make_seeing_checkpoint,
    save_image,
)

Status = Sample.Status


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def pictures(tmp_path):
    return [save_image(tmp_path / f"{color}.png", color) for color in ("red", "blue")]


@pytest.fixture
def data(tmp_path, pictures):
    """Two rows, of two images and of one."""
    rows = [
        {"prompt": "<image> or <image>?", "images": ["red.png", "blue.png"], "label": "1"},
        {"prompt": "see <image>", "images": ["blue.png"], "label": "2"},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "data.jsonl")


def samples_of(path, tokenizer=None):
    return Dataset(
        path, tokenizer, multimodal_keys={"image": "images"}, apply_chat_template=tokenizer is not None
    ).samples


def ids(args, text):
    return GenerateState(args).tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("rendered", [False, True])
def test_a_request_brings_the_images_and_the_sample_has_their_tokens(server, checkpoint, data, rendered):
    args = make_args(checkpoint, server.port, apply_chat_template=rendered)
    sample = samples_of(data, GenerateState(args).tokenizer if rendered else None)[0]
    run(generate(args, sample, params(args)))
    [request] = server.requests
    assert [color_of(uri) for uri in request["image_data"]] == [(255, 0, 0), (0, 0, 255)]
    text = "<|im_start|>user\n{0} or {0}?<|im_end|>\n<|im_start|>assistant\n"
    # Engines find one placeholder for each image, and expand it themselves.
    assert request["input_ids"] == ids(args, text.format(PLACEHOLDER))
    assert sample.tokens == [*ids(args, text.format(PLACEHOLDER * TOKENS_OF_IMAGE)), 70, 71, 72]
    assert request["sampling_params"]["max_new_tokens"] == 8
    assert {name: list(value.shape) for name, value in sample.multimodal_train_inputs.items()} == {
        "pixel_values": [2, 3, 28, 28]
    }
    assert GenerateState(args).prompt_ids(sample) == sample.tokens[:-3]


def test_d12_an_interrupted_answer_to_images_goes_on_behind_its_tokens(server, checkpoint, data):
    args = make_args(checkpoint, server.port)
    sample = samples_of(data)[1]
    run(generate(args, sample, params(args)))
    first, before = server.requests[0], list(sample.tokens)
    sample.status = Status.ABORTED
    run(generate(args, sample, params(args)))
    second = server.requests[1]
    assert second["input_ids"] == [*first["input_ids"], 70, 71, 72]
    assert second["image_data"] == first["image_data"]
    assert second["sampling_params"]["max_new_tokens"] == 5
    assert sample.tokens == [*before, 70, 71, 72] and sample.response_length == 6


def test_d12_abort_save_and_resume_of_a_whole_step(server, checkpoint, data, tmp_path):
    values = {
        "partial_rollout": True, "rollout_batch_size": 1, "over_sampling_batch_size": 2,
    }  # fmt: skip
    args = make_args(checkpoint, server.port, **values)
    source = data_source(args, data)
    # The first group, whose requests are there before those of the second, which is the whole step.
    server.hold = lambda payload: len(payload["image_data"]) == 2
    run_step(args, source, rollout_id=3)
    server.hold = lambda payload: False
    [group] = source.buffer
    assert [sample.status for sample in group] == [Status.ABORTED] * 2
    before = [list(sample.tokens) for sample in group]
    source.save(3)
    [state] = tmp_path.glob("save/rollout/*/state.json")
    assert "pixel_values" not in state.read_text()
    assert sum(file.stat().st_size for file in state.parent.iterdir()) < 20_000
    resumed = data_source(args, data)
    resumed.load(3)
    server.requests.clear()
    [output] = run_step(args, resumed, rollout_id=4).samples
    assert [sample.tokens for sample in output] == [[*tokens, 70, 71, 72] for tokens in before]
    assert all(sample.multimodal_train_inputs["pixel_values"].shape == (2, 3, 28, 28) for sample in output)
    continued = [request for request in server.requests if request["input_ids"][-1] == 70]
    assert [len(request["image_data"]) for request in continued] == [2, 2]
    assert [request["sampling_params"]["max_new_tokens"] for request in continued] == [7, 7]


@pytest.mark.parametrize("provider", [None, PROVIDER])
@pytest.mark.parametrize("fans_out", [False, True])
def test_an_answer_that_was_finished_before_a_resumption_is_trained_on_its_images(
    server, checkpoint, data, provider, fans_out
):
    args = make_args(checkpoint, server.port, custom_model_provider_path=provider)
    sample = run(generate(args, samples_of(data)[0], params(args)))
    seen, sample.reward = sample.multimodal_train_inputs, 1.0
    # As a checkpoint of the data has it.
    sample.multimodal_train_inputs = None
    text = Sample(prompt="p", tokens=[1, 2], response_length=1, status=Status.COMPLETED, reward=0.0)
    entries = [[sample, text]] if fans_out else [sample, text]
    found = leaves(run(generate_and_rm_group(args, entries, params(args))))
    assert len(server.requests) == 1 and found[1].multimodal_train_inputs is None
    again = found[0].multimodal_train_inputs
    assert again is None if provider is None else again["pixel_values"].equal(seen["pixel_values"])


def data_source(args, path):
    values = dict(
        vars(args), save=None, load=None, fresh_data_state=False, rollout_shuffle=False, buffer_filter_path=None
    )
    directory = path.replace("data.jsonl", "save")
    args = type(args)(**{**values, "save": directory, "load": directory})
    return RolloutDataSourceWithBuffer(Dataset(path, None, multimodal_keys={"image": "images"}), args)


@pytest.mark.parametrize("asks", [generate, generate_streaming])
@pytest.mark.parametrize("takes_images", [True, False])
def test_an_engine_that_leaves_the_images_out_is_told_once(
    server, checkpoint, data, monkeypatch, caplog, takes_images, asks
):
    output = server._output

    def expanding(payload, *told):
        answer = output(payload, *told)
        if takes_images:
            answer["meta_info"]["prompt_tokens"] += len(payload["image_data"]) * (TOKENS_OF_IMAGE - 1)
        return answer

    monkeypatch.setattr(server, "_output", expanding)
    args = make_args(checkpoint, server.port)
    for sample in samples_of(data):
        run(asks(args, sample, params(args)))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [message.startswith("engines count other tokens ") for message in told] == ([] if takes_images else [True])


def test_streams_bring_the_images_too(server, checkpoint, data):
    args = make_args(checkpoint, server.port)
    sample = run(generate_streaming(args, samples_of(data)[1], params(args)))
    [request] = server.requests
    assert len(request["image_data"]) == 1 and request["stream"]
    assert sample.tokens[-3:] == [70, 71, 72]


def test_texts_among_images_are_asked_as_ever(server, checkpoint, data):
    args = make_args(checkpoint, server.port)
    run(generate(args, Sample(prompt=[{"role": "user", "content": "hi"}]), params(args)))
    assert "image_data" not in server.requests[0]
    assert "processor" not in vars(GenerateState(args)) and "_encoder_processor" not in vars(GenerateState(args))


def test_a_context_of_its_own_has_the_images_of_its_messages(server, checkpoint, data, pictures):
    args = make_args(checkpoint, server.port)
    sample = samples_of(data)[0]
    parts = [{"type": "image", "image": Image.open(pictures[1])}, {"type": "text", "text": "?"}]
    run(ask(args, sample, [{"role": "user", "content": parts}], params(args)))
    run(ask(args, sample, [{"role": "user", "content": "and now?"}], params(args)))
    assert [color_of(uri) for uri in server.requests[0]["image_data"]] == [(0, 0, 255)]
    assert "image_data" not in server.requests[1]


def test_contexts_whose_image_is_written_to_one_file_have_each_its_own(server, checkpoint, data, tmp_path):
    args, sample, screen = make_args(checkpoint, server.port), samples_of(data)[0], tmp_path / "screen.png"
    for color in ("red", "blue"):
        parts = [{"type": "image", "image": save_image(screen, color)}, {"type": "text", "text": "?"}]
        run(ask(args, sample, [{"role": "user", "content": parts}], params(args)))
    assert [color_of(request["image_data"][0]) for request in server.requests] == [(255, 0, 0), (0, 0, 255)]


def test_siblings_share_what_the_processor_made(server, checkpoint, data):
    args = make_args(checkpoint, server.port)
    first, other = (run(generate(args, samples_of(data)[0], params(args))) for _ in range(2))
    assert first.multimodal_train_inputs["pixel_values"] is other.multimodal_train_inputs["pixel_values"]


def test_an_image_that_broke_after_its_row_was_read_is_told_with_the_row(server, checkpoint, data, pictures):
    args = make_args(checkpoint, server.port)
    sample = samples_of(data)[1]
    with open(pictures[1], "r+b") as file:
        file.truncate(60)
    with pytest.raises(UserError, match=f"^{data}:2: an image could not be read from {pictures[1]}"):
        run(generate(args, sample, params(args)))
    assert server.requests == []


def test_prompts_and_images_that_do_not_fit_are_refused(server, checkpoint, pictures):
    args = make_args(checkpoint, server.port, apply_chat_template=True)
    sample = Sample(index=7, prompt=f"{PLACEHOLDER}{PLACEHOLDER}", multimodal_inputs={"images": pictures[:1]})
    with pytest.raises(UserError, match="^sample 7: the processor of --hf-checkpoint refused a prompt with 1 images"):
        run(generate(args, sample, params(args)))


def test_a_model_without_processor_is_told(server, tmp_path, data):
    args = make_args(make_checkpoint(tmp_path), server.port)
    sample = Sample(prompt="x", multimodal_inputs={"images": [str(tmp_path / "red.png")]})
    with pytest.raises(UserError, match="has no processor for them .*take a model that sees images"):
        run(generate(args, sample, params(args)))


@pytest.mark.parametrize("asks", [False, True])
def test_user_functions_have_a_processor_where_rows_have_images(server, checkpoint, asks):
    args = make_args(checkpoint, server.port, multimodal_keys={"image": "images"} if asks else None)
    assert (GenerateState(args).processor is not None) == asks


def test_a_teacher_that_would_not_see_the_images_is_not_asked(server, checkpoint, pictures):
    args = make_args(checkpoint, server.port)
    sample = Sample(
        index=4, prompt=PLACEHOLDER, tokens=[1, 2], response_length=1, multimodal_inputs={"images": pictures}
    )
    with pytest.raises(UserError, match="sample 4 has images, and a teacher behind HTTP"):
        run(on_policy_distillation.reward_func(args, sample))


def test_evaluation_on_images(server, checkpoint, data):
    clear_dataset_cache()
    args = make_args(checkpoint, server.port)
    args.eval_datasets = build_eval_dataset_configs(
        args, [{"name": "seen", "path": data, "multimodal_keys": {"image": "images"}}], {}
    )
    samples = run(eval_rollout(args, 0)).data["seen"]["samples"]
    assert sorted(len(request["image_data"]) for request in server.requests) == [1, 2]
    # Nobody trains on them: the pixels of a set would be held, and dumped, for nothing.
    assert [sample.multimodal_train_inputs for sample in samples] == [None, None]
    clear_dataset_cache()


def test_an_evaluation_that_asks_somebody_else_needs_no_processor(server, checkpoint, data, tmp_path, monkeypatch):
    def lacking(*args, **kwargs):
        raise UserError("its processor needs a library that is not here")

    monkeypatch.setattr("slime.rollout.generate_state.load_processor", lacking)
    (tmp_path / "mine.py").write_text(
        "async def generate(args, sample, params):\n"
        "    sample.status, sample.tokens = sample.Status.COMPLETED, [1]\n"
        "    sample.append_response_tokens(args, tokens=[2], log_probs=[-0.5], text='seen')\n"
        "    return sample\n"
    )
    clear_dataset_cache()
    args = make_args(checkpoint, server.port, rm_type="random")
    mine = {"custom_generate_function_path": f"{tmp_path}/mine.py:generate", "multimodal_keys": {"image": "images"}}
    args.eval_datasets = build_eval_dataset_configs(args, [{"name": "seen", "path": data, **mine}], {})
    samples = run(eval_rollout(args, 0)).data["seen"]["samples"]
    assert [sample.response for sample in samples] == ["seen", "seen"]
    clear_dataset_cache()


def test_samples_with_pixels_can_be_compared_and_shown(server, checkpoint, data):
    args = make_args(checkpoint, server.port)
    first, other = (run(generate(args, samples_of(data)[0], params(args))) for _ in range(2))
    other.multimodal_train_inputs = {"pixel_values": first.multimodal_train_inputs["pixel_values"] + 1}
    assert first == other and "tensor(" not in repr(first)
    other.prompt = "another"
    assert first != other


def test_dumps_hold_images_as_text_and_what_the_processor_made(server, checkpoint, data, pictures, tmp_path):
    args = make_args(checkpoint, server.port)
    sample = run(generate_and_rm(args, samples_of(data)[0], params(args)))
    alive = Sample(index=1, prompt="x", tokens=[1, 2], response_length=1)
    alive.multimodal_inputs = {"images": [Image.open(pictures[1])]}
    save_rollout(f"{tmp_path}/{{rollout_id}}.pt", 0, [sample, alive])
    again, other = load_rollout(f"{tmp_path}/{{rollout_id}}.pt", 0)
    assert (again.prompt, again.multimodal_inputs) == (sample.prompt, {"images": pictures})
    assert again.multimodal_train_inputs["pixel_values"].equal(sample.multimodal_train_inputs["pixel_values"])
    assert again.data_place == f"{data}:1"
    assert color_of(other.multimodal_inputs["images"][0]) == (0, 0, 255)


_EXPAND = """
import json, sys
from slime.backends.sglang_utils import cpu_runtime
cpu_runtime.install()
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor
ids, counts, placeholder = json.loads(sys.argv[1])
print(json.dumps(BaseMultimodalProcessor._expand_input_ids(ids, counts, placeholder)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("replies", [False, True])
def test_what_an_engine_makes_of_a_request_are_the_tokens_of_the_sample(server, checkpoint, data, pictures, replies):
    args = make_args(checkpoint, server.port, rollout_max_response_len=200, max_turns=2)
    sample = samples_of(data)[0]
    if replies:
        shown = {"role": "user", "content": [{"type": "image", "image": pictures[0]}]}
        run(dialogue(args, sample, params(args), lambda said: shown))
    for _ in range(1 if replies else 2):
        before = None if not sample.tokens else list(sample.tokens)
        sample.status = Status.PENDING
        run(generate(args, sample, params(args)))
    request = server.requests[-1]
    asked = json.dumps(
        [request["input_ids"], [TOKENS_OF_IMAGE] * len(request["image_data"]), ids(args, PLACEHOLDER)[0]]
    )
    done = subprocess.run([sys.executable, "-c", _EXPAND, asked], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == before
