import json
from types import SimpleNamespace

import pytest

from slime.rollout.base_types import call_rollout_fn
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sft_rollout import generate_rollout
from slime.utils.errors import UserError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer
from tests.support.models.vision import PLACEHOLDER, TOKENS_OF_IMAGE, make_seeing_checkpoint, save_image

USER = {"role": "user", "content": "hello"}
ASSISTANT = {"role": "assistant", "content": "hi"}
PROMPT_TEXT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("model"))


def make_args(checkpoint: str, **changes) -> SimpleNamespace:
    values = dict(
        hf_checkpoint=checkpoint,
        trust_remote_code=False,
        loss_mask_type="qwen3",
        apply_chat_template_kwargs={},
        rollout_batch_size=2,
        n_samples_per_prompt=1,
        rollout_max_context_len=None,
        rollout_shuffle=False,
        rollout_seed=1,
        data_source_path="slime.rollout.data_source.RolloutDataSource",
    )
    return SimpleNamespace(**{**values, **changes})


def rollout(args, prompts, **kwargs):
    return generate_rollout(args, 0, RolloutDataSource(prompts, args), **kwargs)


def test_chats_become_samples(checkpoint):
    output = rollout(
        make_args(checkpoint, n_samples_per_prompt=2), [[USER, ASSISTANT], [USER, ASSISTANT, USER, ASSISTANT]]
    )
    assert [len(group) for group in output.samples] == [2, 2]
    tokenizer = build_tokenizer()
    first, second = output.samples[0][0], output.samples[1][1]
    assert first.tokens == tokenizer(PROMPT_TEXT + "hi<|im_end|>\n")["input_ids"]
    assert first.response == "hi<|im_end|>\n" and first.loss_mask == [1] * first.response_length
    assert first.reward == 0.0 and first.status is Sample.Status.COMPLETED and first.index == 0
    assert second.response == "hi<|im_end|>\n" + PROMPT_TEXT + "hi<|im_end|>\n"
    assert sum(second.loss_mask) == 2 * first.response_length and second.loss_mask[-1] == 1
    assert output.metrics == {"sft_cut_samples": 0, "sft_untrained_samples": 0}


def test_tools_come_from_the_metadata(checkpoint):
    prompt = Sample(prompt=[USER, ASSISTANT], metadata={"tools": [{"name": "calc"}]})
    (group,) = rollout(make_args(checkpoint, rollout_batch_size=1), [prompt]).samples
    assert '{"name": "calc"}' in build_tokenizer().decode(group[0].tokens)


def test_d10_a_chat_without_answers_is_masked_and_counted(checkpoint):
    output = rollout(make_args(checkpoint), [[USER], [USER, ASSISTANT]])
    sample = output.samples[0][0]
    assert (sample.response_length, sample.loss_mask) == (1, [0]) and len(sample.tokens) > 1
    assert output.metrics == {"sft_cut_samples": 0, "sft_untrained_samples": 1}


def test_over_long_chats_are_cut_and_counted(checkpoint):
    prompt_length = len(build_tokenizer()(PROMPT_TEXT)["input_ids"])
    long_answer = {"role": "assistant", "content": "x" * 50}
    prompts = [[USER, ASSISTANT], [USER, long_answer]]
    output = rollout(make_args(checkpoint, rollout_max_context_len=prompt_length + 10), prompts)
    short, cut = (group[0] for group in output.samples)
    assert short.status is Sample.Status.COMPLETED
    assert cut.status is Sample.Status.TRUNCATED and cut.response == "x" * 10 and cut.loss_mask == [1] * 10
    assert output.metrics == {"sft_cut_samples": 1, "sft_untrained_samples": 0}
    # Cut inside the prompt: nothing is left to train.
    output = rollout(make_args(checkpoint, rollout_max_context_len=3), prompts)
    assert [group[0].loss_mask for group in output.samples] == [[0], [0]]
    assert output.metrics == {"sft_cut_samples": 2, "sft_untrained_samples": 2}


def test_text_prompts_and_evaluation_are_refused(checkpoint):
    with pytest.raises(UserError, match="the prompt of sample 0 is str.*--input-key"):
        rollout(make_args(checkpoint), ["text"])
    with pytest.raises(UserError, match="no evaluation"):
        rollout(make_args(checkpoint), [[USER]], evaluation=True)


def test_from_a_file_of_messages_through_the_caller_of_rollout_functions(checkpoint, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [USER, ASSISTANT]}) + "\n")
    args = make_args(
        checkpoint,
        prompt_data=str(path),
        input_key="messages",
        label_key=None,
        metadata_key="metadata",
        multimodal_keys=None,
        tool_key="tools",
        apply_chat_template=False,
        rollout_max_prompt_len=4,
        loss_type="sft_loss",
        rollout_global_dataset=True,
        allow_bad_rows=False,
        streaming_data=False,
        num_data_workers=0,
    )
    output = call_rollout_fn(generate_rollout, args, 0, RolloutDataSource(args), evaluation=False)
    assert [group[0].response for group in output.samples] == ["hi<|im_end|>\n"] * 2


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    return make_seeing_checkpoint(directory / "model"), save_image(directory / "red.png")


def asking(image, text="hello"):
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def ids_of(checkpoint, text):
    return load_tokenizer(checkpoint)(text)["input_ids"]


@pytest.mark.parametrize("loss_mask_type", ["qwen", "qwen3", "qwen3_5"])
def test_chats_with_images_have_the_tokens_of_the_processor(seeing, loss_mask_type):
    checkpoint, red = seeing
    args = make_args(checkpoint, rollout_batch_size=3, loss_mask_type=loss_mask_type)
    later = [USER, ASSISTANT, asking(red), ASSISTANT]
    samples = [group[0] for group in rollout(args, [[asking(red), ASSISTANT], [USER, ASSISTANT], later]).samples]
    whole = "<|im_start|>user\n{}hello<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n"
    with_image = whole.format(PLACEHOLDER * TOKENS_OF_IMAGE)
    texts = [with_image, whole.format(""), whole.format("") + with_image]
    assert [sample.tokens for sample in samples] == [ids_of(checkpoint, text) for text in texts]
    answer = ids_of(checkpoint, "hi<|im_end|>\n")
    for sample, answers in zip(samples, (1, 1, 2), strict=True):
        response = sample.tokens[-sample.response_length :]
        trained = [token for token, mask in zip(response, sample.loss_mask, strict=True) if mask]
        assert trained == answer * answers and sample.loss_mask[0] == 1
    shapes = [s.multimodal_train_inputs and s.multimodal_train_inputs["pixel_values"].shape for s in samples]
    assert shapes == [(1, 3, 28, 28), None, (1, 3, 28, 28)]


def test_a_chat_that_is_cut_trains_nothing_where_an_image_may_be_cut_with_it(seeing):
    checkpoint, red = seeing
    long_answer = {"role": "assistant", "content": "x" * 50}
    prompt = len(
        ids_of(checkpoint, "<|im_start|>user\n" + PLACEHOLDER * 4 + "hello<|im_end|>\n<|im_start|>assistant\n")
    )
    args = make_args(checkpoint, rollout_batch_size=3, rollout_max_context_len=prompt + 10)
    chats = [[asking(red), long_answer], [USER, long_answer, asking(red), ASSISTANT], [asking(red), ASSISTANT]]
    output = rollout(args, chats)
    first, behind, whole = (group[0] for group in output.samples)
    assert first.loss_mask == [1] * 10 and first.status is Sample.Status.TRUNCATED
    assert behind.loss_mask == [0] and behind.status is Sample.Status.TRUNCATED
    assert whole.status is Sample.Status.COMPLETED and sum(whole.loss_mask) == len(whole.loss_mask)
    assert output.metrics == {"sft_cut_samples": 2, "sft_untrained_samples": 1}


def test_images_for_a_model_without_processor_are_told(checkpoint, seeing):
    with pytest.raises(UserError, match="has no processor for them .*or drop --multimodal-keys"):
        rollout(make_args(checkpoint), [[asking(seeing[1]), ASSISTANT]])
