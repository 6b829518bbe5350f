"""Replies of a dialogue that have images: what engines are asked, what is trained, and what an interruption leaves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slime.rollout.base_types import leaves
from slime.rollout.dialogue import dialogue
from slime.rollout.failures import SampleFailed
from slime.rollout.generate_state import GenerateState, PromptWithImages
from slime.rollout.generation import generate, generate_and_rm_group
from slime.utils.errors import UserError
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import REPLIES_WITH_IMAGES
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.rollout_steps import params, run
from tests.support.models.seen_batch import PROVIDER
from tests.support.models.vision import (
    PLACEHOLDER,
    TOKENS_OF_IMAGE,
    color_of,
    make_seeing_checkpoint,
    save_image,
)

Status = Sample.Status
SAID = [70, 71, 72]
# As the template writes it behind a turn that a stop string has ended.
REPLY = "<|im_end|>\n<|im_start|>user\n{}look<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


@pytest.fixture
def pictures(tmp_path):
    return [save_image(tmp_path / f"{color}.png", color) for color in ("red", "blue")]


def parts(*images):
    return [*({"type": "image", "image": image} for image in images), {"type": "text", "text": "look"}]


def replying(*images):
    """A reply function that shows `images`, and then nothing more."""
    left = [{"role": "user", "content": parts(*images)}, None]
    return lambda said: left.pop(0)


def seen(image=None):
    prompt = [{"role": "user", "content": parts(image) if image is not None else "look"}]
    return Sample(index=3, prompt=prompt, metadata={"own": 1})


def ids(args, text):
    return GenerateState(args).tokenizer.encode(text, add_special_tokens=False)


def of_args(checkpoint, server, **changes):
    return make_args(checkpoint, server.port, **{"rollout_max_response_len": 200, **changes})


def colors(request):
    return [color_of(uri) for uri in request["image_data"]]


def test_a_reply_brings_its_images_behind_those_of_the_prompt(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    red, blue = pictures
    sample = run(dialogue(args, seen(red), params(args), replying(blue, blue)))
    first, second = server.requests
    assert colors(first) == [(255, 0, 0)] and colors(second) == [(255, 0, 0), (0, 0, 255), (0, 0, 255)]
    # Engines find one placeholder for each image, and expand it themselves; the sample has what they make of it.
    assert second["input_ids"] == [*first["input_ids"], *SAID, *ids(args, REPLY.format(PLACEHOLDER * 2))]
    reply = ids(args, REPLY.format(PLACEHOLDER * 2 * TOKENS_OF_IMAGE))
    assert sample.tokens[-sample.response_length :] == [*SAID, *reply, *SAID]
    assert sample.loss_mask == [1] * 3 + [0] * len(reply) + [1] * 3
    assert second["sampling_params"]["max_new_tokens"] == 200 - 3 - len(reply)
    assert sample.response == f"FGH{REPLY.format(PLACEHOLDER * 2)}FGH"
    pixels = sample.multimodal_train_inputs["pixel_values"]
    assert pixels.shape == (3, 3, 28, 28) and pixels[1].equal(pixels[2]) and not pixels[0].equal(pixels[1])


def test_the_mark_that_the_model_wrote_is_not_written_again(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    end = ids(args, "<|im_end|>")
    server.answer = lambda payload: [70, *end]
    server.text_of = GenerateState(args).tokenizer.decode
    sample = run(dialogue(args, seen(), params(args), replying(pictures[1])))
    [prompt, again] = (request["input_ids"] for request in server.requests)
    assert again == [*prompt, 70, *end, *ids(args, REPLY.format(PLACEHOLDER))[1:]]
    assert "image_data" not in server.requests[0] and colors(server.requests[1]) == [(0, 0, 255)]
    assert sample.multimodal_train_inputs["pixel_values"].shape[0] == 1


def test_images_in_memory_are_kept_as_text(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    sample = run(dialogue(args, seen(), params(args), replying(Image.open(pictures[0]), pictures[1])))
    assert colors(server.requests[1]) == [(255, 0, 0), (0, 0, 255)]
    [kept] = json.loads(json.dumps(sample.metadata))[REPLIES_WITH_IMAGES]
    assert [color_of(image) for image in kept["images"]] == [(255, 0, 0), (0, 0, 255)] and kept["at"] == 3


def test_a_file_that_every_reply_is_written_to_anew_is_read_each_time(server, checkpoint, tmp_path):
    """As environments do that show a screen."""
    args, left = of_args(checkpoint, server), ["red", "blue", None]

    def reply(said):
        color = left.pop(0)
        return color and {"role": "user", "content": parts(save_image(tmp_path / "screen.png", color))}

    sample = run(dialogue(args, seen(), params(args), reply))
    red, blue = (255, 0, 0), (0, 0, 255)
    assert [colors(request) for request in server.requests[1:]] == [[red], [red, blue]]
    first, second = sample.multimodal_train_inputs["pixel_values"]
    assert not first.equal(second)


def test_an_answer_that_was_interrupted_behind_a_reply_goes_on_with_all_images(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    sample = run(dialogue(args, seen(pictures[0]), params(args), replying(pictures[1])))
    before = [*server.requests[1]["input_ids"], *SAID]
    # As a checkpoint of the data has it.
    saved = json.loads(json.dumps({**sample.to_dict(), "multimodal_train_inputs": None}))
    sample = Sample.from_dict(saved)
    sample.status = Status.ABORTED
    run(generate(args, sample, params(args)))
    assert server.requests[2]["input_ids"] == before and colors(server.requests[2]) == [(255, 0, 0), (0, 0, 255)]
    assert sample.multimodal_train_inputs["pixel_values"].shape[0] == 2


def test_another_attempt_starts_from_the_prompt_alone(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    sample = run(dialogue(args, seen(pictures[0]), params(args), replying(pictures[1])))
    sample.reset_for_retry()
    assert sample.metadata == {"own": 1}
    run(generate(args, sample, params(args)))
    assert server.requests[2]["input_ids"] == server.requests[0]["input_ids"]
    assert sample.multimodal_train_inputs["pixel_values"].shape[0] == 1


def test_an_answer_that_was_finished_before_a_resumption_is_trained_on_the_images_of_its_replies(
    server, checkpoint, pictures
):
    args = of_args(checkpoint, server, custom_model_provider_path=PROVIDER)
    sample = run(dialogue(args, seen(), params(args), replying(*pictures)))
    trained, sample.reward = sample.multimodal_train_inputs, 1.0
    sample.multimodal_train_inputs = None
    [again] = leaves(run(generate_and_rm_group(args, [sample], params(args))))
    assert again.multimodal_train_inputs["pixel_values"].equal(trained["pixel_values"])


@pytest.mark.parametrize("fans_out", [False, True])
def test_an_answer_whose_images_are_gone_at_a_resumption_fails_alone(server, checkpoint, pictures, fans_out):
    """Those of its prompt, which are read again; of replies an answer has kept what they were."""
    flags = {"custom_model_provider_path": PROVIDER, "rm_type": "random"}
    args = of_args(checkpoint, server, **flags)
    sample = run(dialogue(args, seen(pictures[0]), params(args), replying(pictures[1])))
    sample.multimodal_train_inputs, sample.reward = None, 1.0
    group = [[sample] if fans_out else sample]
    for picture in pictures[:2]:
        Path(picture).unlink()
    # What is encoded once is kept for a while.
    SingletonMeta.clear_instances()
    with pytest.raises(UserError, match=f"could not be read from {pictures[0]}"):
        run(generate_and_rm_group(args, group, params(args)))
    server.requests.clear()
    tolerant = of_args(checkpoint, server, use_fault_tolerance=True, **flags)
    [again] = leaves(run(generate_and_rm_group(tolerant, group, params(args))))
    assert not server.requests and again.status is Status.FAILED
    assert f"could not be read from {pictures[0]}" in again.metadata["fail_reason"]


def test_a_reply_whose_images_leave_no_room_ends_the_dialogue(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    room = 3 + len(ids(args, REPLY.format(PLACEHOLDER * TOKENS_OF_IMAGE))) + 1
    for length, turns in ((room, 2), (room - 1, 1)):
        server.requests.clear()
        short = of_args(checkpoint, server, rollout_max_response_len=length)
        sampling = {**params(args), "max_new_tokens": length}
        sample = run(dialogue(short, seen(), sampling, replying(pictures[0])))
        assert len(server.requests) == turns and (REPLIES_WITH_IMAGES in sample.metadata) == (turns == 2)
    assert sample.status is Status.TRUNCATED and sample.response_length == 3


def test_ids_that_the_user_changed_are_sent_as_they_are(server, checkpoint, pictures):
    args = of_args(checkpoint, server)
    sample = run(dialogue(args, seen(), params(args), replying(pictures[1])))
    sample.tokens[-5] = 65
    sample.status = Status.ABORTED
    run(generate(args, sample, params(args)))
    assert server.requests[2]["input_ids"] == sample.tokens[: -len(SAID)]


@pytest.mark.parametrize("image", [None, 0])
def test_a_placeholder_that_the_model_wrote_ends_its_sample_and_not_the_run(server, checkpoint, pictures, image):
    """Asked to go on, an engine would look for an image of it, and refuse."""
    args, prompt = of_args(checkpoint, server), seen() if image is None else seen(pictures[image])
    server.answer = lambda payload: [70, *ids(args, PLACEHOLDER)]
    server.text_of = GenerateState(args).tokenizer.decode
    with pytest.raises(SampleFailed, match="of images that it was not shown"):
        run(dialogue(args, prompt, params(args), replying(pictures[1])))
    assert len(server.requests) == 1
    # Where it has not to go on, the token is one as any other.
    answer = run(generate(args, seen(pictures[0]), params(args)))
    assert answer.status is Status.COMPLETED and answer.response_length == 2


def test_what_a_processor_writes_around_images_may_stand_elsewhere_too():
    prompt = PromptWithImages(np.array([5, 2, 9, 9, 2]), np.array([5, 9]), {}, ["uri"], placeholder=9)
    answered = Sample(index=0, tokens=[5, 2, 9, 9, 2, 7, 2], response_length=2)
    assert prompt.request(answered)["input_ids"].tolist() == [5, 9, 7, 2]
    answered.tokens = [5, 2, 9, 9, 2, 7, 9]
    with pytest.raises(SampleFailed, match="of images that it was not shown"):
        prompt.request(answered)


def test_an_image_that_cannot_be_read_and_a_model_that_sees_none_are_told(server, checkpoint, tmp_path):
    args = of_args(checkpoint, server)
    with pytest.raises(UserError, match=f"could not be read from {tmp_path}/none.png"):
        run(dialogue(args, seen(), params(args), replying(f"{tmp_path}/none.png")))


def test_what_the_processor_gives_is_put_together_image_behind_image():
    def part(**inputs):
        return PromptWithImages(np.arange(2), np.arange(2), inputs, ["uri"])

    grids = [torch.tensor([[1, 2, 2]]), torch.tensor([[1, 4, 2], [1, 2, 6]])]
    kinds = [torch.zeros(1, 2), torch.zeros(1, 5)]
    first, other = (part(image_grid_thw=g, mm_token_type_ids=k) for g, k in zip(grids, kinds, strict=True))
    joined = first.followed_by([(4, other)])
    assert joined.train_inputs.keys() == {"image_grid_thw"} and joined.image_data == ["uri", "uri"]
    assert joined.train_inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 2], [1, 2, 6]]
    assert first.train_inputs.keys() == {"image_grid_thw", "mm_token_type_ids"}
    with pytest.raises(
        UserError, match="gives pixel_values of different shapes for the images of the prompt and of replies"
    ):
        part(pixel_values=torch.zeros(1, 3, 4, 4)).followed_by([(0, part(pixel_values=torch.zeros(1, 3, 8, 4)))])
