import numpy as np
import pytest

from slime.rollout.train_data import convert_samples_to_train_batch, post_process_rewards
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.args import parse


def make(rewards, groups, **fields):
    samples = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        sample = Sample(index=index, group_index=group, tokens=[1, 2, 3], response_length=2, reward=reward)
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    return samples


def test_rewards_are_normalised_within_prompt_groups(tmp_path):
    raw, rewards = post_process_rewards(parse(tmp_path), make([1, 0, 0.2, 0.4], [0, 0, 1, 1]))
    assert list(raw) == [1, 0, 0.2, 0.4]
    half = 0.5 / (np.sqrt(0.5) + 1e-6)
    assert rewards.tolist() == pytest.approx([half, -half, -0.1 / (0.1 * 2**0.5 + 1e-6), 0.1 / (0.1 * 2**0.5 + 1e-6)])


def test_switches_of_normalisation(tmp_path):
    samples = make([1, 0, 0.2, 0.4], [0, 0, 1, 1])
    centred = post_process_rewards(parse(tmp_path, "--disable-grpo-std-normalization"), samples)[1]
    assert centred.tolist() == pytest.approx([0.5, -0.5, -0.1, 0.1])
    assert post_process_rewards(parse(tmp_path, "--disable-rewards-normalization"), samples)[1] == [1, 0, 0.2, 0.4]


def test_dictionary_rewards_need_the_key(tmp_path):
    samples = make([{"score": 1.0}, {"score": 0.0}], [0, 0])
    assert list(post_process_rewards(parse(tmp_path, "--reward-key", "score"), samples)[0]) == [1, 0]
    with pytest.raises(UserError, match="sample 0 is .*give --reward-key"):
        post_process_rewards(parse(tmp_path), samples)


def test_w5_missing_or_infinite_reward_names_the_sample(tmp_path):
    for bad in (None, float("nan")):
        with pytest.raises(UserError, match="the reward of sample 1 is"):
            post_process_rewards(parse(tmp_path), make([1, bad], [0, 0]))


def test_raw_reward_in_the_metadata_wins(tmp_path):
    samples = make([1, 0], [0, 0])
    samples[0].metadata["raw_reward"] = 7
    assert list(post_process_rewards(parse(tmp_path), samples)[0]) == [7, 0]


def halve(args, samples):
    return [1.0] * len(samples), [0.5] * len(samples)


def wrong(args, samples):
    return [1.0]


def columns(args, samples):
    return {
        "tokens": [s.tokens for s in samples], "response_lengths": [2] * len(samples), "rewards": [3.0] * len(samples),
        "raw_reward": [3.0] * len(samples), "truncated": [0] * len(samples),
        "sample_indices": [s.index for s in samples], "loss_masks": [[1, 1]] * len(samples),
    }  # fmt: skip


def test_custom_post_processing(tmp_path):
    args = parse(tmp_path, "--custom-reward-post-process-path", f"{__file__}:halve")
    assert post_process_rewards(args, make([1, 0], [0, 0])) == ([1, 1], [0.5, 0.5])
    args = parse(tmp_path, "--custom-reward-post-process-path", f"{__file__}:wrong")
    with pytest.raises(UserError, match="must return .raw_rewards, rewards., each with 2 numbers; got list"):
        post_process_rewards(args, make([1, 0], [0, 0]))


def test_custom_conversion(tmp_path):
    args = parse(tmp_path, "--custom-convert-samples-to-train-data-path", f"{__file__}:columns")
    assert convert_samples_to_train_batch(args, make([1, 0], [0, 0]))["rewards"].tolist() == [3, 3]
