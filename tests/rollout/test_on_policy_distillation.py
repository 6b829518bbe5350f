import asyncio
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from slime.rollout import on_policy_distillation
from slime.rollout.failures import SampleFailed, failing_alone
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.rollout.rm_hub import async_rm
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError, close_http_client
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args

MODULE = "slime.rollout.on_policy_distillation"


@pytest.fixture(autouse=True)
def forget_teachers():
    on_policy_distillation._compared.clear()


def teacher_args(checkpoint, url, **changes):
    args = make_args(checkpoint, rm_type=None, rollout_temperature=0.7, custom_rm_path=f"{MODULE}.reward_func")
    values = {
        "rm_url": url, "advantage_estimator": "grpo", "loss_type": "policy_loss", "rewards_normalization": True,
        "grpo_std_normalization": True, "custom_reward_post_process_path": f"{MODULE}.post_process_rewards",
        "custom_convert_samples_to_train_data_path": None, "use_rollout_routing_replay": False,
    }  # fmt: skip
    return SimpleNamespace(**{**vars(args), **values, **changes})


def a_sample(index=0, tokens=(40, 41, 42, 43, 44), response_length=3, **fields):
    sample = Sample(index=index, group_index=0, tokens=list(tokens), response_length=response_length, **fields)
    sample.status = Sample.Status.COMPLETED
    return sample


def run(*coroutines):
    async def together():
        try:
            return [await coroutine for coroutine in coroutines]
        finally:
            await close_http_client()

    return asyncio.run(together())


def with_own_text(server, checkpoint):
    from slime.utils.processing_utils import load_tokenizer

    server.text_of = load_tokenizer(checkpoint).decode


def test_w7_the_teacher_scores_at_the_students_temperature(server, checkpoint):
    with_own_text(server, checkpoint)
    args, samples = teacher_args(checkpoint, f"{server.url}/generate"), [a_sample(0), a_sample(1, (50, 51, 52), 1)]
    assert run(*(async_rm(args, sample) for sample in samples)) == [0.0, 0.0]
    first, second = server.requests
    expected = {
        "input_ids": [40, 41, 42, 43, 44], "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"temperature": 0.7, "max_new_tokens": 0, "skip_special_tokens": False},
    }  # fmt: skip
    assert first == {**expected, "return_text_in_logprobs": True}
    assert second == {**expected, "input_ids": [50, 51, 52]}, "tokenizers are compared once"
    assert samples[0].teacher_log_probs == pytest.approx([-0.2, -0.3, -0.4])
    assert samples[1].teacher_log_probs == pytest.approx([-0.2])


def test_tokenizers_are_compared_beside_the_event_loop(server, checkpoint, monkeypatch):
    threads, load = [], on_policy_distillation.load_tokenizer

    def load_tokenizer(*given):
        threads.append(threading.current_thread())
        return load(*given)

    with_own_text(server, checkpoint)
    monkeypatch.setattr(on_policy_distillation, "load_tokenizer", load_tokenizer)
    run(reward_func(teacher_args(checkpoint, server.url), a_sample(0)))
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


def test_the_token_of_the_service_at_rm_url_is_for_that_service_alone(server, checkpoint, monkeypatch):
    with_own_text(server, checkpoint)
    run(reward_func(teacher_args(checkpoint, server.url), a_sample(0)))
    monkeypatch.setenv("SLIME_RM_API_KEY", "secret")
    run(reward_func(teacher_args(checkpoint, server.url), a_sample(1)))
    assert [of_request.get("Authorization") for of_request in server.headers] == [None, "Bearer secret"]
    served = teacher_args(checkpoint, None)
    monkeypatch.setattr(on_policy_distillation, "router_urls", lambda args: {"teacher": server.url})
    monkeypatch.setattr(on_policy_distillation, "get_model_url", lambda args, name: f"{server.url}/generate")
    run(reward_func(served, a_sample(2)))
    assert "Authorization" not in server.headers[-1]


def test_the_teachers_log_probs_become_a_column_and_the_rewards_zero(server, checkpoint):
    with_own_text(server, checkpoint)
    # The path of a server means its method.
    args, samples = teacher_args(checkpoint, server.url), [a_sample(0), a_sample(1, (50, 51, 52), 1)]
    for sample, reward in zip(samples, run(*(reward_func(args, sample) for sample in samples)), strict=True):
        sample.reward = reward
    batch = convert_samples_to_train_batch(args, samples)
    assert [row.dtype for row in batch["teacher_log_probs"]] == [np.float32] * 2
    assert [row.tolist() for row in batch["teacher_log_probs"]] == [
        pytest.approx([-0.2, -0.3, -0.4]),
        pytest.approx([-0.2]),
    ]
    assert batch["rewards"].tolist() == [0, 0] and batch["raw_reward"].tolist() == [0, 0]


def test_a_reward_beside_the_teacher_is_normalised_as_usual(checkpoint):
    samples = [a_sample(i, reward=reward, teacher_log_probs=[-1.0] * 3) for i, reward in enumerate([1.0, 0.0])]
    raw, rewards = post_process_rewards(teacher_args(checkpoint, "http://t"), samples)
    assert raw == [1.0, 0.0] and rewards == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)
    with pytest.raises(UserError, match="the reward of sample 0 is 'good'"):
        post_process_rewards(teacher_args(checkpoint, "http://t"), [a_sample(reward="good")])


def test_a_removed_sample_needs_a_reward_beside_the_teacher_unless_it_failed(checkpoint):
    """As without a teacher: its siblings are compared with it."""
    rewards = [1.0, 0.0, None]
    samples = [a_sample(i, reward=reward, teacher_log_probs=[-1.0] * 3) for i, reward in enumerate(rewards)]
    samples[2].remove_sample = True
    with pytest.raises(UserError, match="the reward of sample 2 is None"):
        post_process_rewards(teacher_args(checkpoint, "http://t"), samples)
    samples[2].status = Sample.Status.FAILED
    assert post_process_rewards(teacher_args(checkpoint, "http://t"), samples)[0] == [1.0, 0.0, 0.0]


def test_an_answer_as_reward_is_taken_apart(checkpoint):
    entries = [[None, 40, None], [-1.0, 41, None], [-2.0, 42, None], [-3.0, 43, None], [-4.0, 44, None]]
    sample = a_sample(reward={"text": "", "meta_info": {"input_token_logprobs": entries}})
    assert post_process_rewards(teacher_args(checkpoint, "http://t"), [sample]) == ([0.0], [0.0])
    assert sample.teacher_log_probs == [-2.0, -3.0, -4.0]
    empty = a_sample(response_length=0, reward=sample.reward)
    post_process_rewards(teacher_args(checkpoint, "http://t"), [empty])
    assert empty.teacher_log_probs == []


@pytest.mark.parametrize(
    "entries, message",
    [
        (None, "answered without meta_info.input_token_logprobs for sample 0"),
        ([[None, 40], [-1.0, 41]], "too few: 1 of 3"),
        ([[None, 40], [-1.0, 41], [None, 42], [-1.0, 43]], r"no numbers or too few: 3 of 3, 1 of them no numbers"),
        ([[None, 40], [-1.0, 41], [-math.inf, 42], [-1.0, 43]], r"no numbers or too few: 3 of 3, 1 of them no numbers"),
    ],
)
def test_an_answer_without_the_tokens_is_an_error(checkpoint, entries, message):
    sample = a_sample(reward={"meta_info": {"input_token_logprobs": entries}})
    with pytest.raises(HttpError, match=message):
        post_process_rewards(teacher_args(checkpoint, "http://t"), [sample])


def test_a_teacher_that_gives_a_request_up_is_asked_again_and_not_for_ever(checkpoint, monkeypatch):
    """A run that ends a step early, or gives the teacher other weights, has it give up all requests."""
    given_up = {"meta_info": {"finish_reason": {"type": "abort"}, "input_token_logprobs": []}}
    entries = [[None, 40], [-1.0, 41], [-2.0, 42], [-3.0, 43], [-4.0, 44]]
    answers = [
        given_up,
        given_up,
        {"meta_info": {"finish_reason": {"type": "length"}, "input_token_logprobs": entries}},
    ]

    async def answer(*_):
        return answers.pop(0) if len(answers) > 1 else answers[0]

    monkeypatch.setattr(on_policy_distillation, "post_generate", answer)
    monkeypatch.setattr(on_policy_distillation, "_WAIT_S", 0)
    sample = a_sample()
    assert run(reward_func(teacher_args(checkpoint, "http://t"), sample)) == [0.0]
    assert sample.teacher_log_probs == [-2.0, -3.0, -4.0]
    answers[:] = [given_up]
    with pytest.raises(HttpError, match="without meta_info.input_token_logprobs for sample 0"):
        run(reward_func(teacher_args(checkpoint, "http://t"), sample))


def test_an_answer_that_cannot_be_used_fails_its_sample_alone(checkpoint, monkeypatch):
    async def answer(*_):
        return {"meta_info": {"input_token_logprobs": [[None, 40], [-math.inf, 44]]}}

    monkeypatch.setattr(on_policy_distillation, "post_generate", answer)
    args = teacher_args(checkpoint, "http://t", use_fault_tolerance=True)
    with pytest.raises(SampleFailed, match="too few"), failing_alone(args):
        run(async_rm(args, a_sample()))


def test_another_tokenizer_is_noticed(server, checkpoint):
    server.text_of = lambda ids: "x"
    with pytest.raises(UserError, match="the teacher reads token 40 as 'x', the tokenizer of --hf-checkpoint .* as"):
        run(reward_func(teacher_args(checkpoint, server.url), a_sample()))


def test_refusals_and_missing_addresses(server, checkpoint):
    server.refuse = lambda payload: "token id out of range"
    with pytest.raises(HttpError, match="token id out of range"):
        run(reward_func(teacher_args(checkpoint, server.url), a_sample()))
    with pytest.raises(UserError, match="needs --rm-url"):
        run(reward_func(teacher_args(checkpoint, None), a_sample()))
