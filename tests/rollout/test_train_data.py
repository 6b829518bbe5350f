import argparse
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.arguments.groups.training_flags import ALGORITHM
from slime.rollout.train_data import convert_samples_to_train_batch, post_process_rewards
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.args import parse, write_config


def make(rewards, groups, **fields):
    samples = []
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        sample = Sample(index=index, group_index=group, tokens=[1, 2, 3], response_length=2, reward=reward)
        sample.status = Sample.Status.COMPLETED
        samples.append(sample)
    return samples


def objective(**changes):
    values = {
        "custom_reward_post_process_path": None, "custom_convert_samples_to_train_data_path": None, "reward_key": None,
        "advantage_estimator": "grpo", "loss_type": "policy_loss", "use_rollout_routing_replay": False,
        "rewards_normalization": True, "grpo_std_normalization": True, "n_samples_per_prompt": 2,
        "rollout_top_p": 1.0, "rollout_top_k": -1, "http_request_timeout": 60.0,
        "true_on_policy_mode": False, "vocab_size": None, "use_critic": False, **changes,
    }  # fmt: skip
    return SimpleNamespace(**values)


@pytest.mark.parametrize("limit", [{"rollout_top_p": 0.9}, {"rollout_top_k": 5}])
def test_a_batch_without_the_sets_that_sampling_kept_is_refused(limit):
    samples = make([1.0, 0.0], [0, 0])
    with pytest.raises(UserError, match="no sample has `rollout_top_p_token_offsets`"):
        convert_samples_to_train_batch(objective(**limit), samples)
    assert convert_samples_to_train_batch(objective(**limit, loss_type="sft_loss"), samples)
    for sample in samples:
        sample.remove_sample = True
    assert convert_samples_to_train_batch(objective(**limit), samples), "nothing of them is trained"
    for sample in samples:
        sample.remove_sample, sample.rollout_top_p_token_ids = False, [2, 3, 9]
        sample.rollout_top_p_token_offsets = [0, 1, 3]
    batch = convert_samples_to_train_batch(objective(**limit), samples)
    assert [row.tolist() for row in batch["rollout_top_p_token_ids"]] == [[2, 3, 9]] * 2


@pytest.mark.parametrize(
    ("tokens", "wrong"), [((0, 9, 10, 3), "10 at position 2"), ((0, -1, 9, 12), "-1 at position 1")]
)
@pytest.mark.parametrize("columns", [False, True])
def test_a_token_that_the_model_does_not_have_is_refused_by_sample_and_position(tmp_path, tokens, wrong, columns):
    """A row that pads the embedding, or zeros where ranks share the vocabulary, would be trained in silence."""
    path = tmp_path / "columns.py"
    path.write_text(
        "def fn(args, samples):\n"
        "    own = {name: [getattr(sample, field) for sample in samples] for name, field in (('tokens', 'tokens'),\n"
        "        ('response_lengths', 'response_length'), ('sample_indices', 'index'), ('rewards', 'reward'),\n"
        "        ('raw_reward', 'reward'))}\n"
        "    return {**own, 'truncated': [0] * len(samples), 'loss_masks': [[1, 1]] * len(samples)}\n"
    )
    changes = {"custom_convert_samples_to_train_data_path": f"{path}:fn"} if columns else {}
    samples = make([1.0, 0.0], [0, 0])
    samples[1].tokens = list(tokens)
    with pytest.raises(UserError, match=f"sample 1: token id {wrong} is none of the 10 tokens"):
        convert_samples_to_train_batch(objective(vocab_size=10, **changes), samples)
    samples[1].tokens = [0, 9, 9]
    assert convert_samples_to_train_batch(objective(vocab_size=10, **changes), samples)


@pytest.mark.parametrize(("vocabulary", "of"), [(200, "critic"), (400, "model")])
def test_a_token_that_the_critic_does_not_have_is_refused_too(tmp_path, vocabulary, of):
    other = write_config(tmp_path / "other", vocab_size=vocabulary)
    (tmp_path / "roles.yaml").write_text(f"critic: {{hf_checkpoint: {other}}}")
    words = ("--advantage-estimator", "ppo", "--megatron-config-path", f"{tmp_path}/roles.yaml")
    args, samples, size = parse(tmp_path, *words), make([1.0, 0.0], [0, 0]), min(300, vocabulary)
    samples[0].tokens = [0, size - 1, 5]
    assert convert_samples_to_train_batch(args, samples)
    samples[1].tokens = [0, 5, size]
    wrong = f"sample 1: token id {size} at position 2 is none of the {size} tokens of the {of} "
    with pytest.raises(UserError, match=re.escape(wrong)):
        convert_samples_to_train_batch(args, samples)


def test_a_proof_is_told_which_weights_made_a_token():
    samples = make([1.0, 0.0], [0, 0])
    samples[1].weight_version_spans = [("3", 0, 1), ("4", 1, 2)]
    assert "weight_version_spans" not in convert_samples_to_train_batch(objective(), samples)
    batch = convert_samples_to_train_batch(objective(true_on_policy_mode=True), samples)
    assert batch["weight_version_spans"] == [[], [("3", 0, 1), ("4", 1, 2)]]


# Two groups whose rewards are centred to ±.5 and ±.1; divided by their deviation, all are ±1/√2.
RAW = [1.0, 0.0, 0.4, 0.2]
CENTRED = [0.5, -0.5, 0.1, -0.1]
SCALED = [0.5**0.5, -(0.5**0.5), 0.5**0.5, -(0.5**0.5)]


# With and without division by the standard deviation of the group.
REWARDS_OF_ESTIMATORS = {
    "grpo": (SCALED, CENTRED),
    "gspo": (SCALED, CENTRED),
    "cispo": (SCALED, CENTRED),
    "reinforce_plus_plus_baseline": (CENTRED, CENTRED),
    "reinforce_plus_plus": (RAW, RAW),
    "ppo": (RAW, RAW),
}


@pytest.mark.parametrize("estimator", REWARDS_OF_ESTIMATORS)
def test_l1_each_estimator_has_its_own_normalisation(estimator):
    with_std, without_std = REWARDS_OF_ESTIMATORS[estimator]
    samples = make(RAW, [0, 0, 1, 1])
    for switches, expected in (
        ({}, with_std),
        ({"grpo_std_normalization": False}, without_std),
        ({"rewards_normalization": False}, RAW),
        ({"rewards_normalization": False, "grpo_std_normalization": False}, RAW),
        ({"loss_type": "sft_loss"}, RAW),
    ):
        raw, rewards = post_process_rewards(objective(advantage_estimator=estimator, **switches), samples)
        assert list(rewards) == pytest.approx(expected, abs=1e-5), (estimator, switches)
        assert raw == RAW


def test_l1_every_estimator_that_can_be_chosen_is_in_that_table():
    parser = argparse.ArgumentParser()
    ALGORITHM.add_to(parser)
    choices = next(action.choices for action in parser._actions if action.dest == "advantage_estimator")
    assert set(choices) == set(REWARDS_OF_ESTIMATORS)


def test_l1_groups_of_an_interleaved_uneven_step_with_a_fan_out():
    samples = make([1, 3, 1, 0, 5, 0], [0, 1, 0, 0, 1, 0])
    for position, execution in ((0, 10), (2, 10), (3, 11), (5, 12)):
        samples[position].rollout_id = execution
    rewards = post_process_rewards(objective(n_samples_per_prompt=3), samples)[1]
    expected = [1.154698538, -0.707106281, 1.154698538, -0.577349269, 0.707106281, -0.577349269]
    assert rewards.tolist() == pytest.approx(expected, abs=1e-6)


def test_l2_groups_of_one_have_no_advantage_and_no_nan():
    rewards = post_process_rewards(objective(n_samples_per_prompt=1), make([0.7, -2.0], [0, 1]))[1]
    assert rewards.tolist() == [0.0, 0.0]


def test_g5_a_sample_that_failed_is_no_reward_of_zero_to_its_siblings():
    samples = make([1, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1])
    for position in (3, 6):
        samples[position].status, samples[position].remove_sample = Sample.Status.FAILED, True
    rewards = post_process_rewards(objective(n_samples_per_prompt=4), samples)[1]
    assert rewards.tolist() == pytest.approx([0, 0, 0, 0, 0.5**0.5, -(0.5**0.5), 0], abs=1e-5)
    # A grade of its own counts, trained or not, and so does one that a function of the user's gives to what it calls failed.
    samples[3].status, samples[6].remove_sample = Sample.Status.TRUNCATED, False
    rewards = post_process_rewards(objective(n_samples_per_prompt=4), samples)[1]
    third = 3**-0.5
    assert rewards.tolist() == pytest.approx([0.5, 0.5, 0.5, -1.5, 2 * third, -third, -third], abs=1e-5)
    for sample in samples:
        sample.status, sample.remove_sample = Sample.Status.FAILED, True
    assert not any(post_process_rewards(objective(n_samples_per_prompt=4), samples)[1])


def test_l3_siblings_of_a_fan_out_get_the_full_reward_in_the_batch():
    samples = make([1, 1, 0, 0], [0] * 4)
    for sample, execution in zip(samples, [10, 10, 11, 12], strict=True):
        sample.rollout_id = execution
    batch = convert_samples_to_train_batch(objective(), samples)
    assert batch["rewards"].tolist() == pytest.approx([1.154698538, 1.154698538, -0.577349269, -0.577349269], abs=1e-6)
    assert batch["rollout_mask_sums"].tolist() == [4, 4, 2, 2], "the loss averages the siblings"


@pytest.mark.parametrize(("rewards", "is_told"), [([1, 0, 0, 1], True), ([1, 0, 1, 1], False)])
def test_siblings_whose_executions_do_not_differ_are_told_of(rewards, is_told, caplog):
    samples = make(rewards, [0] * 4)
    for sample, execution in zip(samples, [10, 10, 11, 11], strict=True):
        sample.rollout_id = execution
    relative = post_process_rewards(objective(), samples)[1]
    # Executions with means of 1/2 and 1/2 have no deviation but the 1e-6 beside it; those of 1/2 and 1 have one of 0.3536.
    assert max(abs(relative)) == pytest.approx(0.5e6 if is_told else 2.1213, rel=1e-4)
    assert ("--disable-grpo-std-normalization" in caplog.text) == is_told


def test_removed_and_masked_samples_take_part_in_the_statistics_of_their_group():
    samples = make([1, 0, 0, 1], [0] * 4)
    samples[0].remove_sample = True
    samples[1].loss_mask = [0, 0]
    samples[2].remove_sample = True
    batch = convert_samples_to_train_batch(objective(grpo_std_normalization=False), samples)
    assert batch["rewards"].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert [int(mask.sum()) for mask in batch["loss_masks"]] == [0, 0, 0, 2]


@pytest.mark.parametrize("key", [None, "score"])
def test_a_removed_sample_needs_a_reward_unless_it_failed(key):
    """Its siblings are compared with it: a zero that nobody gave would count against them."""
    samples = make([{"score": 1} if key else 1, {"score": 0} if key else 0, None], [0] * 3)
    samples[2].remove_sample = True
    args = objective(grpo_std_normalization=False, reward_key=key)
    with pytest.raises(UserError, match="the reward of sample 2"):
        convert_samples_to_train_batch(args, samples)
    samples[2].status = Sample.Status.FAILED
    assert convert_samples_to_train_batch(args, samples)["rewards"].tolist() == [0.5, -0.5, 0]


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
@pytest.mark.parametrize("reward", [1, True, np.float32(1), np.int64(1), np.array(1.0), torch.tensor(1)])
def test_w4_numbers_of_any_kind_are_rewards(estimator, reward):
    args = objective(advantage_estimator=estimator, grpo_std_normalization=False)
    batch = convert_samples_to_train_batch(args, make([reward, 0], [0, 0]))
    assert batch["raw_reward"].tolist() == [1, 0]
    assert batch["rewards"].tolist() == ([0.5, -0.5] if estimator == "grpo" else [1, 0])


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"])
@pytest.mark.parametrize("reward", [float("nan"), np.float32("inf"), None, "1", [1.0], {"score": 1}])
def test_w5_a_reward_that_is_no_finite_number_names_the_sample_for_all_estimators(estimator, reward):
    with pytest.raises(UserError, match="the reward of sample 1 is"):
        post_process_rewards(objective(advantage_estimator=estimator), make([1, reward], [0, 0]))


def test_w5_so_does_the_entry_of_a_dictionary_and_a_raw_reward():
    samples = make([{"score": 1, "note": "x"}, {"score": float("nan")}], [0, 0])
    with pytest.raises(UserError, match="the reward of sample 1 is nan"):
        post_process_rewards(objective(reward_key="score"), samples)
    with pytest.raises(UserError, match="--reward-key acc: the reward of sample 0"):
        post_process_rewards(objective(reward_key="acc"), samples)
    samples = make([1, 0], [0, 0])
    samples[1].metadata["raw_reward"] = float("nan")
    with pytest.raises(UserError, match=r'metadata\["raw_reward"\] of sample 1 is nan'):
        post_process_rewards(objective(), samples)


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


def arrays(args, samples):
    return torch.tensor([sample.reward["text"] == "yes" for sample in samples]), np.arange(len(samples))


def infinite(args, samples):
    return [1.0, 1.0], np.array([0.0, float("inf")])


def words(args, samples):
    return ["1", "0"], [1.0, 0.0]


def never(args, samples):
    args.goes_on.wait(60)


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


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_custom_post_processing_takes_any_reward_and_may_return_arrays(estimator):
    args = objective(advantage_estimator=estimator, custom_reward_post_process_path=f"{__file__}:arrays")
    samples = make([{"text": "yes"}, {"text": "no"}], [0, 0])
    assert post_process_rewards(args, samples) == ([1, 0], [0, 1])


@pytest.mark.parametrize(
    ("function", "message"),
    [("infinite", "returned inf in `rewards` for sample 1"), ("words", "returned '1' in `raw_rewards` for sample 0")],
)
def test_w5_what_custom_post_processing_returns_is_checked(function, message):
    args = objective(custom_reward_post_process_path=f"{__file__}:{function}")
    with pytest.raises(UserError, match=message):
        post_process_rewards(args, make([1, 0], [0, 0]))


@pytest.mark.parametrize("flag", ["--custom-reward-post-process-path", "--custom-convert-samples-to-train-data-path"])
def test_a_function_that_never_returns_ends_the_run_by_its_name(flag):
    path = f"{__file__}:never"
    args = objective(goes_on=threading.Event(), http_request_timeout=0.1, **{flag[2:].replace("-", "_"): path})
    late = f"{flag} {path} did not return within --http-request-timeout 0.1 s; it was called for 2 samples"
    try:
        with pytest.raises(UserError, match="^" + re.escape(late)):
            convert_samples_to_train_batch(args, make([1, 0], [0, 0]))
    finally:
        args.goes_on.set()


def test_the_content_of_a_custom_batch_is_checked(tmp_path):
    path = f"{__file__}:columns"
    args = parse(tmp_path, "--custom-convert-samples-to-train-data-path", path)
    samples = make([1, 0], [0, 0])
    samples[1].tokens = [1, 2]
    wrong = f"--custom-convert-samples-to-train-data-path {path}: sample 1: `response_lengths` is 2 of 2 `tokens`"
    with pytest.raises(UserError, match="^" + re.escape(wrong)):
        convert_samples_to_train_batch(args, samples)


def test_what_is_to_be_left_out_trains_nothing_by_a_custom_batch_either():
    """Its mask is of ones. Rows stand in another order, one is of nobody, and of siblings with one index the second failed."""
    lost = {"status": Sample.Status.FAILED, "remove_sample": True}
    samples = make([1, 0, 1, 0, 1], [0] * 5)
    for position, fields in ((1, lost), (2, {"remove_sample": True}), (4, lost)):
        vars(samples[position]).update(fields)
    samples[3].index = samples[4].index = 9
    args = objective(custom_convert_samples_to_train_data_path=f"{__file__}:reordered", told={})
    batch = convert_samples_to_train_batch(args, samples)
    assert batch["sample_indices"] == [9, 2, 1, 0, 77, 9]
    trains = [bool(mask.any()) for mask in batch["loss_masks"]]
    assert trains == [True, False, False, True, True, False]
    assert batch["failed"].tolist() == [False, False, True, False, False, True]
    assert batch["rollout_mask_sums"].tolist() == [2 * one for one in trains]
    # What the function tells counts.
    args.told = {"failed": [True] * 6}
    assert convert_samples_to_train_batch(args, samples)["failed"].tolist() == [True] * 6
    args.told = {}
    assert "failed" not in convert_samples_to_train_batch(args, make([1, 0], [0, 0]))


def reordered(args, samples):
    """Last sample first, but for the siblings, and a row that is of no sample."""
    siblings = [sample for sample in samples if sample.index == 9]
    others = [sample for sample in reversed(samples) if sample.index != 9]
    extra = make([1], [0])
    extra[0].index = 77
    return {**columns(args, [*siblings[:1], *others, *extra, *siblings[1:]]), **args.told}


def test_custom_conversion(tmp_path):
    args = parse(tmp_path, "--custom-convert-samples-to-train-data-path", f"{__file__}:columns")
    assert convert_samples_to_train_batch(args, make([1, 0], [0, 0]))["rewards"].tolist() == [3, 3]
