"""Answers without a token, of a model that ends its turn at once: from a request to the train batch."""

from types import SimpleNamespace

import pytest

from slime.rollout.base_types import leaves
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import plugin, prompt_number, run_step


@pytest.mark.parametrize("kept", [False, True], ids=["whole vocabulary", "kept tokens"])
def test_an_empty_answer_is_graded_and_has_its_place_in_the_batch(server, checkpoint, tmp_path, monkeypatch, kept):
    reward = plugin(tmp_path, "def fn(args, sample):\n    return float(len(sample.response))\n")
    limit = {"rollout_top_p": 0.5} if kept else {}
    args = make_args(checkpoint, server.port, custom_rm_path=reward, **limit)
    server.answer = lambda payload: (
        [] if payload["input_ids"] != [0] and prompt_number(payload, args) == 0 else [70, 71]
    )
    output = server._output

    def telling(payload, ids, reason):
        answer = output(payload, ids, reason)
        if payload.get("return_sampling_mask"):
            answer["meta_info"]["output_token_sampling_mask"] = [[token, 9] for token in ids]
            answer["meta_info"]["output_token_sampling_logprobs"] = [-0.25] * len(ids)
        return answer

    monkeypatch.setattr(server, "_output", telling)
    samples = leaves(run_step(args, CountingDataSource(2)).samples)
    assert [sample.response_length for sample in samples] == [0, 0, 2, 2]
    assert {(sample.status, *sample.weight_versions) for sample in samples} == {(Sample.Status.COMPLETED, "1")}
    flags = {
        "custom_convert_samples_to_train_data_path": None, "advantage_estimator": "grpo", "loss_type": "policy_loss",
        "rewards_normalization": True, "grpo_std_normalization": True,
    }  # fmt: skip
    batch = convert_samples_to_train_batch(SimpleNamespace(**{**vars(args), **flags}), samples)
    assert (batch["raw_reward"].tolist(), batch["response_lengths"].tolist()) == ([0, 0, 2, 2], [0, 0, 2, 2])
    log_prob = -0.25 if kept else -0.5
    assert [row.tolist() for row in batch["rollout_log_probs"]] == [[], [], [log_prob] * 2, [log_prob] * 2]
    assert [row.tolist() for row in batch["loss_masks"]] == [[], [], [1, 1], [1, 1]]
    if kept:
        rows = [row.tolist() for row in batch["rollout_top_p_token_offsets"]]
        assert rows == [[0], [0], [0, 2, 4], [0, 2, 4]]
