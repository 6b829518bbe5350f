import base64
import copy
import itertools
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from slime.utils.errors import UserError
from slime.utils.packed_sample import pack_sample
from slime.utils.types import MultimodalTypes, ParamInfo, Sample, failed_and_masked


def prompt_sample(**fields) -> Sample:
    return Sample(index=3, prompt="p", tokens=[10, 11], **fields)


def test_importing_the_types_needs_neither_torch_nor_transformers():
    code = "import sys, slime.utils.types, slime.utils.misc; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "set()"


class TestPlainDicts:
    def test_round_trip_keeps_fields_and_attributes_of_users(self):
        sample = prompt_sample(label={"any": [1]}, metadata={"a": {"b": 1}}, status=Sample.Status.ABORTED)
        sample.append_response_tokens(
            tokens=[1], log_probs=[-0.5], meta_info={"finish_reason": {"type": "length"}, "weight_version": "7"}
        )
        sample.source = {"file": "x"}
        values = sample.to_dict()
        assert values["status"] == "truncated" and values["source"] == {"file": "x"}
        assert values["spec_info"]["spec_verify_ct"] == 0
        restored = Sample.from_dict(values)
        assert restored == sample and restored.source == sample.source
        assert restored.weight_version_spans == [("7", 0, 1)]

    def test_dicts_share_no_container_with_the_sample(self):
        sample = prompt_sample(metadata={"a": {"b": 1}})
        values = sample.to_dict()
        before = copy.deepcopy(values)
        restored = Sample.from_dict(values)
        restored.tokens.append(5)
        restored.metadata["a"]["b"] = 2
        sample.metadata["a"]["b"] = 3
        assert values == before

    def test_missing_keys_take_their_defaults(self):
        sample = Sample.from_dict({"prompt": "x"})
        assert sample.status is Sample.Status.PENDING and sample.tokens == [] and sample.spec_info.spec_accept_rate == 0

    def test_copies_of_a_packed_sample_share_nothing_that_can_be_changed(self):
        sample = prompt_sample()
        pack_sample(sample)
        for other in (copy.deepcopy(sample), copy.copy(sample), pickle.loads(pickle.dumps(sample))):
            other.tokens.append(12)
            assert sample == prompt_sample() and other.tokens == [10, 11, 12]
            pack_sample(sample)
        assert sample.to_dict()["tokens"] == [10, 11]


class TestReward:
    def test_the_whole_reward_or_the_entry_of_the_reward_key(self):
        sample = prompt_sample(reward={"score": 0.5})
        assert sample.get_reward_value(SimpleNamespace(reward_key="score")) == 0.5
        assert sample.get_reward_value(SimpleNamespace(reward_key=None)) == {"score": 0.5}
        assert prompt_sample().get_reward_value(SimpleNamespace(reward_key="score")) is None

    def test_a_missing_key_names_flag_and_sample(self):
        with pytest.raises(UserError, match="--reward-key acc.*sample 3"):
            prompt_sample(reward={"score": 1}).get_reward_value(SimpleNamespace(reward_key="acc"))


class TestTruncated:
    @pytest.mark.parametrize("status", list(Sample.Status))
    def test_setting_false_completes_only_pending_and_truncated(self, status):
        sample = prompt_sample(status=status)
        sample.truncated = False
        completed = status in (Sample.Status.PENDING, Sample.Status.TRUNCATED)
        assert sample.status is (Sample.Status.COMPLETED if completed else status)
        sample.truncated = True
        assert sample.status is Sample.Status.TRUNCATED and sample.truncated


def one_set_each(count):
    return {"output_token_sampling_mask": [[1]] * count}


def two_ids_at(offsets):
    return {"top_p_token_ids": [1, 1], "top_p_token_offsets": offsets}


class TestAppend:
    def test_generated_then_tool_then_generated(self):
        sample = prompt_sample()
        sample.append_response_tokens(tokens=[1, 2], log_probs=[-0.1, -0.2], text="ab")
        sample.append_response_tokens(tokens=[3], trainable=False, text="c")
        sample.append_response_tokens(tokens=[4], log_probs=[-0.4], text="d")
        assert sample.tokens == [10, 11, 1, 2, 3, 4] and sample.response == "abcd" and sample.response_length == 4
        assert sample.loss_mask == [1, 1, 0, 1] and sample.effective_response_length == 3
        assert sample.rollout_log_probs == [-0.1, -0.2, 0.0, -0.4]
        assert sample.status is Sample.Status.PENDING

    @pytest.mark.parametrize("tokens", [None, []])
    def test_without_tokens_an_answer_brings_its_status_and_no_text(self, tokens):
        sample = prompt_sample()
        sample.append_response_tokens(tokens=tokens, text="x", meta_info={"finish_reason": {"type": "abort"}})
        assert (sample.response, sample.response_length, sample.status) == ("", 0, Sample.Status.ABORTED)
        sample.append_response_tokens(text="by hand")
        assert sample.response == "by hand"

    def test_earlier_tokens_without_mask_count_as_trained(self):
        sample = Sample(tokens=[10, 1, 2], response_length=2, rollout_log_probs=[-1.0, -2.0])
        sample.append_response_tokens(tokens=[3], trainable=False)
        assert sample.loss_mask == [1, 1, 0]

    def test_arrays_that_are_appended_stay_their_owners(self):
        tokens, log_probs = np.array([1, 2]), np.array([-1.0, -2.0], np.float32)
        for part in (slice(None), slice(1)):
            sample = prompt_sample()
            sample.append_response_tokens(tokens=tokens[part], log_probs=log_probs[part])
            tokens[0], log_probs[0] = 7, 7.0
            assert sample.rollout_log_probs == [-1.0, -2.0][part] and sample.tokens == [10, 11, *[1, 2][part]]
            tokens[0], log_probs[0] = 1, -1.0

    def test_the_prompt_ids_of_a_group_may_be_one_list(self):
        prompt_ids = [1, 2]
        first, second = Sample(tokens=prompt_ids), Sample(tokens=prompt_ids)
        first.append_response_tokens(tokens=[3], log_probs=[0.0])
        assert second.tokens == [1, 2] == prompt_ids

    @pytest.mark.parametrize(
        "fields, append, message",
        [
            ({}, dict(tokens=[1, 2], log_probs=[0.0]), "1 log_probs for 2 tokens"),
            ({}, dict(log_probs=[0.0]), "1 log_probs for 0 tokens"),
            ({}, dict(tokens=[1]), "require rollout log probabilities"),
            ({}, dict(tokens=[1], log_probs=[0.0], trainable=False), "must not carry log_probs"),
            ({"response_length": 1}, dict(tokens=[1], log_probs=[0.0]), "cannot follow 1 response tokens"),
            (
                {"response_length": 1, "teacher_log_probs": [0.0]},
                dict(tokens=[1], trainable=False),
                "teacher_log_probs",
            ),
            ({"response_length": 3}, dict(text="x"), "response_length 3 does not fit 2 tokens"),
            ({"loss_mask": [1]}, dict(text="x"), "loss_mask has 1 entries, expected 0"),
            ({}, dict(tokens=[1], log_probs=[0.0], meta_info={"top_p_token_ids": [1]}), "without their offsets"),
            ({}, dict(tokens=[1], log_probs=[0.0], meta_info=one_set_each(2)), "3 offsets to 2 ids for 1 tokens"),
            ({}, dict(tokens=[1], log_probs=[0.0], meta_info=two_ids_at([1, 2])), "2 offsets to 2 ids for 1 tokens"),
            ({}, dict(tokens=[1, 2], log_probs=[0.0] * 2, meta_info=two_ids_at([0, 3, 2])), "3 offsets to 2 ids"),
            (
                {"response_length": 1, "rollout_log_probs": [0.0]},
                dict(tokens=[1], log_probs=[0.0], meta_info=one_set_each(1)),
                "cannot follow 1 response tokens without sets",
            ),
            (
                {
                    "response_length": 1,
                    "rollout_log_probs": [0.0],
                    "rollout_top_p_token_ids": [1],
                    "rollout_top_p_token_offsets": [0, 1],
                },
                dict(tokens=[1], log_probs=[0.0]),
                "are missing for 1 trained tokens",
            ),
        ],
    )
    def test_a_refused_call_leaves_the_sample_as_it_was(self, fields, append, message):
        sample = prompt_sample(**fields)
        before = copy.deepcopy(sample)
        with pytest.raises(ValueError, match=message):
            sample.append_response_tokens(**append)
        assert sample == before

    def test_untrained_tokens_may_follow_a_response_without_log_probs(self):
        sample = prompt_sample(response_length=1)
        sample.append_response_tokens(tokens=[1], trainable=False)
        assert sample.rollout_log_probs is None and sample.loss_mask == [1, 0]


def encoded(numbers):
    return base64.b64encode(np.array(numbers, "<i4").tobytes()).decode()


KEPT_FORMS = {
    "stock": lambda sets: {"output_token_sampling_mask": sets},
    "base64": lambda sets: {
        "top_p_token_ids": encoded([i for ids in sets for i in ids]),
        "top_p_token_offsets": encoded([0, *itertools.accumulate(map(len, sets))]),
    },
    "sequences": lambda sets: {
        "top_p_kept_token_ids": [i for ids in sets for i in ids],
        "top_p_kept_token_offsets": [0, *itertools.accumulate(map(len, sets))],
    },
}


@pytest.mark.parametrize("form", KEPT_FORMS)
def test_kept_sets_are_joined_and_empty_at_tokens_of_tools(form):
    sample = prompt_sample()
    sample.append_response_tokens(tokens=[1], trainable=False)
    assert sample.rollout_top_p_token_offsets is None, "nothing is known of sets yet"
    for sets in ([[5, 6], [7]], [], [[8, 9, 10]]):
        tokens = [ids[0] for ids in sets]
        meta_info = KEPT_FORMS[form](sets) if sets else {}
        sample.append_response_tokens(tokens=tokens, log_probs=[-1.0] * len(tokens), meta_info=meta_info)
        sample.append_response_tokens(tokens=[2, 2], trainable=False)
    assert sample.rollout_top_p_token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 0, 2, 3, 3, 3, 3, 3, 6, 6, 6]
    assert {sample.rollout_top_p_token_ids.dtype, sample.rollout_top_p_token_offsets.dtype} == {np.dtype(np.int32)}
    copied = Sample.from_dict(sample.to_dict())
    assert copied.rollout_top_p_token_offsets.tolist() == sample.rollout_top_p_token_offsets.tolist()


def test_log_probs_beside_kept_sets_are_those_among_them():
    meta_info = {"output_token_sampling_mask": [[5, 6], [7]], "output_token_sampling_logprobs": [-0.5, 0.0]}
    sample = prompt_sample()
    with pytest.raises(ValueError, match="of the whole vocabulary"):
        sample.append_response_tokens(tokens=[5, 7], log_probs=[-1.0, -2.0], meta_info=meta_info)
    assert sample.response_length == 0
    sample.append_response_tokens(tokens=[5, 7], log_probs=[-0.5, 0.0], meta_info=meta_info)
    assert sample.response_length == 2


class TestMetaInfo:
    def test_only_metadata_without_tokens(self):
        sample = prompt_sample()
        sample.append_response_tokens(
            meta_info={
                "finish_reason": {"type": "abort"},
                "prompt_tokens": 4,
                "cached_tokens": 3,
                "weight_version": "1",
            }
        )
        assert sample.status is Sample.Status.ABORTED and sample.weight_versions == ["1"]
        assert sample.weight_version_spans == [] and sample.loss_mask is None
        assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.75

    @pytest.mark.parametrize(
        "reason, status",
        [("length", "truncated"), ("abort", "aborted"), ("stop", "completed"), ("other", "pending")],
    )
    def test_finish_reason(self, reason, status):
        sample = prompt_sample()
        sample.append_response_tokens(meta_info={"finish_reason": {"type": reason}})
        assert sample.status.value == status

    @pytest.mark.parametrize("append", [{"update_terminal_info": False}, {}])
    def test_chunks_touch_neither_status_nor_versions_nor_counters(self, append):
        reason = {"finish_reason": {"type": "stop"}} if append else {"finish_reason": None}
        sample = prompt_sample()
        sample.append_response_tokens(
            tokens=[1], log_probs=[0.0], meta_info={"weight_version": "1", "cached_tokens": 2, **reason}, **append
        )
        assert sample.status is Sample.Status.PENDING and sample.weight_versions == []
        assert sample.prefix_cache_info.cached_tokens == 0

    def test_one_span_per_call_without_the_tool_tokens(self):
        sample = prompt_sample()
        final = {"finish_reason": {"type": "stop"}}
        sample.append_response_tokens(tokens=[1, 2], log_probs=[0, 0], meta_info={**final, "weight_version": "1"})
        sample.append_response_tokens(tokens=[3, 3], trainable=False)
        # The second call comes as a stream of two chunks.
        sample.append_response_tokens(tokens=[4], log_probs=[0], meta_info={"weight_version": "2"})
        sample.append_response_tokens(tokens=[5], log_probs=[0], meta_info={**final, "weight_version": "2"})
        assert sample.weight_versions == ["1", "2"]
        assert sample.weight_version_spans == [("1", 0, 2), ("2", 4, 6)]

    def test_spans_of_the_engine_are_shifted_to_the_response(self):
        sample = prompt_sample()
        sample.append_response_tokens(tokens=[9, 9], trainable=False)
        spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
        meta_info = {"finish_reason": {"type": "stop"}, "weight_version": "2", "weight_versions": spans}
        sample.append_response_tokens(tokens=[1, 2, 3], log_probs=[0, 0, 0], meta_info=meta_info)
        assert sample.weight_version_spans == [("1", 2, 3), ("2", 3, 5)]
        with pytest.raises(ValueError, match="weight_versions end at token 3"):
            prompt_sample().append_response_tokens(meta_info=meta_info)

    def test_speculative_counters_only_with_a_speculative_algorithm(self):
        meta_info = {
            "finish_reason": {"type": "stop"},
            "spec_accept_token_num": 6,
            "spec_num_proposed_drafts": 8,
            "spec_verify_ct": 4,
            "completion_tokens": 10,
        }
        sample = prompt_sample()
        sample.append_response_tokens(SimpleNamespace(sglang_speculative_algorithm=None), meta_info=meta_info)
        assert sample.spec_info.spec_verify_ct == 0
        for _ in range(2):
            sample.append_response_tokens(SimpleNamespace(sglang_speculative_algorithm="EAGLE"), meta_info=meta_info)
        assert sample.spec_info.completion_token_num == 20
        assert sample.spec_info.spec_accept_rate == 0.75 and sample.spec_info.spec_accept_length == 2.5


def test_reset_for_retry_gives_the_bare_prompt():
    def bare() -> Sample:
        return Sample(
            index=1, group_index=0, prompt="p", tokens=[1], label="l", metadata={"mine": 1}, custom_rm_path="m.f",
            train_metadata={"task": "t"},
        )  # fmt: skip

    sample = bare()
    sample.metadata.update(start_rollout_id=3, fail_reason="x", raw_reward=1.0, round_number=2)
    sample.append_response_tokens(tokens=[2], log_probs=[0.0], meta_info={"finish_reason": {"type": "stop"}}, text="t")
    sample.reward, sample.session_id, sample.rollout_id, sample.remove_sample = 1.0, "s", 4, True
    pack_sample(sample)
    sample.reset_for_retry()
    assert sample == bare()


@dataclass
class WithTools(Sample):
    """A sample as a user extends it."""

    tool_calls: list = field(default_factory=list)


def test_a_retry_keeps_the_fields_that_a_subclass_adds():
    sample = WithTools(prompt="p", tokens=[1, 2], response_length=1, response="t", tool_calls=["ls"])
    sample.reset_for_retry()
    assert sample == WithTools(prompt="p", tokens=[1], tool_calls=["ls"])


def test_validate_lengths_covers_every_per_token_field():
    for name, value in {
        "loss_mask": [1],
        "rollout_log_probs": [0.0, 0.0, 0.0],
        "teacher_log_probs": [0.0],
        "rollout_top_p_token_offsets": np.zeros(2, np.int32),
        "rollout_routed_experts": np.zeros((4, 1, 1), np.int32),
    }.items():
        sample = Sample(tokens=[1, 2, 3, 4], response_length=2, **{name: value})
        with pytest.raises(ValueError, match=f"{name} has {len(value)} entries"):
            sample.validate_lengths()


def test_other_types():
    assert [kind.placeholder for kind in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]
    assert MultimodalTypes.get("video") is MultimodalTypes.VIDEO and MultimodalTypes.get("smell") is None
    info = ParamInfo(name="w", dtype="float32", shape=(2, 3), attrs={}, size=24, src_rank=0)
    with pytest.raises(AttributeError):
        info.size = 1


def test_failed_is_an_attribute_of_the_users():
    sample = Sample.from_dict({"failed": True})
    assert sample.failed is True and sample.to_dict()["failed"] is True and not failed_and_masked(sample)
    sample.status = Sample.Status.FAILED
    assert not failed_and_masked(sample)
    sample.remove_sample = True
    assert failed_and_masked(sample)
