import math
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.scheduling.dp_schedule import DPSchedule
from slime.training.columns import COLUMNS
from slime.training.rollout_batch import (
    build_train_batch,
    execution_ids,
    process_rollout_data,
    refuse_images,
    split_for_data_parallel,
    to_tensors,
    train_batch_from_columns,
)
from slime.utils.data import process_rollout_data as public_process_rollout_data
from slime.utils.errors import UserError
from slime.utils.misc import Box
from slime.utils.types import Sample
from tests.support.models.seen_batch import PROVIDER

PLUG_IN = "--custom-convert-samples-to-train-data-path my.convert"


def sample(index, prompt=2, response=3, **fields):
    made = Sample(index=index, group_index=0, tokens=list(range(prompt + response)), response_length=response)
    made.status = Sample.Status.COMPLETED
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def build(samples):
    return build_train_batch(samples, [1.0] * len(samples), [0.5] * len(samples))


@pytest.mark.parametrize(
    "fields",
    [
        {"multimodal_inputs": {"images": ["/x.png"]}},
        {"metadata": {"replies_with_images": [{"at": 0, "text": "x", "images": ["/x.png"]}]}},
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image", "image": "/x.png"}, {"type": "text", "text": "?"}]}
            ]
        },
    ],
)
def test_answers_to_images_are_not_trained_without_them(fields):
    seeing = sample(7)
    vars(seeing).update(fields)
    told = r"1 of 2 samples have images and no `multimodal_train_inputs` \(sample indices \[7\]\)"
    with pytest.raises(UserError, match=told):
        build([sample(6), seeing])
    # What is not trained may go without.
    seeing.remove_sample = True
    assert "multimodal_train_inputs" not in build([sample(6), seeing])


def test_images_of_samples_stay_with_them():
    inputs = {"pixel_values": torch.arange(6.0).view(2, 3), "image_grid_thw": torch.tensor([[1, 1, 2]])}
    removed = sample(3, multimodal_train_inputs=inputs, remove_sample=True)
    seeing = [sample(index, multimodal_train_inputs=dict(inputs)) for index in (1, 4)]
    batch = build([sample(0), seeing[0], sample(2), removed, seeing[1]])
    images = batch["multimodal_train_inputs"]
    assert [one is None for one in images] == [True, False, True, True, False]
    assert images[1]["pixel_values"].tolist() == inputs["pixel_values"].tolist()
    assert images[1]["pixel_values"] is images[4]["pixel_values"]
    schedule = DPSchedule([[4, 0], [2, 1]], [[[0, 1]], [[0, 1]]], [1], [5], 0)
    of_ranks = [to_tensors(shard, "cpu") for shard in split_for_data_parallel(batch, schedule)]
    assert of_ranks[0]["multimodal_train_inputs"] == [images[4], None]
    assert of_ranks[1].micro_batch([1], 1)["multimodal_train_inputs"] == [images[1]]
    assert "multimodal_train_inputs" not in build([sample(0)])


@pytest.mark.parametrize(
    ("backend", "provider", "is_refused"),
    [("megatron", None, True), ("fsdp", "m.provider", True), ("megatron", "m.provider", False)],
)
def test_images_are_for_models_that_take_them(backend, provider, is_refused):
    args = SimpleNamespace(train_backend=backend, custom_model_provider_path=provider)
    refuse_images(args, build([sample(0)]))
    batch = build([sample(0), sample(7, multimodal_train_inputs={"pixel_values": torch.zeros(2, 3)})])
    if not is_refused:
        return refuse_images(args, batch)
    with pytest.raises(UserError, match=rf"1 of 2 samples have images \(sample indices \[7\]\).* {PROVIDER}"):
        refuse_images(args, batch)


def test_columns_have_the_documented_types():
    batch = build([sample(0, rollout_log_probs=[-1.0, -2.0, -3.0]), sample(1, response=1, rollout_log_probs=[-4.0])])
    assert batch["total_lengths"].tolist() == [5, 3] and batch["response_lengths"].tolist() == [3, 1]
    assert batch["rewards"].dtype == np.float32
    assert batch["truncated"].dtype == batch["response_lengths"].dtype == batch["sample_indices"].dtype == np.int64
    shard = split_for_data_parallel(batch, DPSchedule([[0, 1]], [[[0, 1]]], [1], [2], 0))[0]
    assert shard["tokens"].values.dtype == np.int64 and shard["tokens"].lengths.tolist() == [5, 3]
    assert shard["loss_masks"].values.dtype == np.int32
    assert shard["rollout_log_probs"].values.tolist() == [-1, -2, -3, -4]
    assert shard["rollout_log_probs"].values.dtype == np.float32


_TWO = {
    "tokens": [[1, 2, 3], [1, 2, 3]], "response_lengths": [2, 2], "loss_masks": [[0, 1], [1, 1]],
    "rollout_log_probs": [[-1.0, -1.0], [-1.0, -1.0]],
}  # fmt: skip
WRONG_CONTENT = {
    "`rewards` is nan; expected a finite number": {"rewards": [0.5, float("nan")]},
    "`rewards` is None; expected a finite number": {"rewards": [0.5, None]},
    "`raw_reward` is inf; expected a finite number": {"raw_reward": [0.5, float("inf")]},
    "`response_lengths` is 2 of 2 `tokens`; the first token": {"response_lengths": [2, 2], "loss_masks": [[1, 0], [1, 1]]},
    "`loss_masks` has 2 entries, expected 1: `response_lengths` is 1": {"loss_masks": [[1, 0], [1, 1]]},
    "`loss_masks` is None; expected a row of numbers": {"loss_masks": [[1, 0], None]},
    "`tokens` is no row of numbers": {"tokens": [[1, 2, 3], ["a", "b"]]},
    "`rollout_log_probs` has 3 entries, expected 1": {"rollout_log_probs": [[-1.0, -1.0], [-1.0, -1.0, -1.0]]},
    "`rollout_log_probs` is nan at response token 0": {"rollout_log_probs": [[-1.0, -1.0], [float("nan")]]},
    "`teacher_log_probs` has 0 entries, expected 1": {"teacher_log_probs": [[-1.0, -1.0], []]},
    "`advantages` has 1 entries, expected 2": {**_TWO, "advantages": [[0.5, 0.5], [0.5]]},
    "`returns` has the shape [2, 1]; expected a number for each token": {**_TWO, "returns": [[0.5, 0.5], [[0.5], [0.5]]]},
    "`log_probs` is inf at response token 1": {**_TWO, "log_probs": [[float("inf"), -1.0], [-1.0, float("inf")]]},
    "`values` is no row of numbers": {**_TWO, "values": [[0.5, 0.5], ["a", "b"]]},
    "`rollout_top_p_token_offsets` has 1 entries, expected 2": {
        "rollout_top_p_token_offsets": [[0, 1, 2], [0]], "rollout_top_p_token_ids": [[7, 8], []]
    },
    "`rollout_top_p_token_offsets` ends at 2, and `rollout_top_p_token_ids` has 1 entries": {
        "rollout_top_p_token_offsets": [[0, 1, 2], [0, 2]], "rollout_top_p_token_ids": [[7, 8], [7]]
    },
    "`rollout_top_p_token_offsets` must ascend": {
        "rollout_top_p_token_offsets": [[0, 1, 2], [1, 1]], "rollout_top_p_token_ids": [[7, 8], [7]]
    },
    "`rollout_top_p_token_offsets` must ascend from 0": {
        **_TWO, "rollout_top_p_token_offsets": [[0, 1, 2], [0, 2, 1]], "rollout_top_p_token_ids": [[7, 8], [7]],
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG_CONTENT)
def test_what_a_plug_in_wrote_into_columns_is_checked_before_ranks_get_it(message):
    columns = {
        "tokens": [[1, 2, 3], [1, 2]], "response_lengths": [2, 1], "rewards": [0.5, 0.5], "raw_reward": [1.0, 1.0],
        "truncated": [0, 0], "sample_indices": [4, 9], "loss_masks": [[1, 0], [1]],
        "rollout_log_probs": [[-1.0, float("nan")], [-1.0]],
    }  # fmt: skip
    train_batch_from_columns(columns, PLUG_IN)
    with pytest.raises(UserError, match="^" + re.escape(f"{PLUG_IN}: sample 9: {message}")):
        train_batch_from_columns({**columns, **WRONG_CONTENT[message]}, PLUG_IN)


def test_a_plug_in_that_returns_no_columns_is_named():
    with pytest.raises(UserError, match=f"^{PLUG_IN} returned NoneType; expected a dict of columns"):
        train_batch_from_columns(None, PLUG_IN)


def test_teacher_and_kept_sets_are_columns_of_tensors():
    kept = {"rollout_top_p_token_ids": [5, 6, 7, 8], "rollout_top_p_token_offsets": [0, 1, 3, 4]}
    failed = Sample(index=2, group_index=0, remove_sample=True, status=Sample.Status.FAILED)
    batch = build([sample(0, teacher_log_probs=[-1.0, -2.0, -3.0], **kept), failed])
    shard = split_for_data_parallel(batch, DPSchedule([[0, 1]], [[[0, 1]]], [1], [2], 0))[0]
    data = to_tensors(shard, "cpu")
    assert [t.tolist() for t in data["teacher_log_probs"]] == [[-1, -2, -3], [0]]
    assert data["teacher_log_probs"][0].dtype == torch.float32
    assert [t.tolist() for t in data["rollout_top_p_token_ids"]] == [[5, 6, 7, 8], []]
    assert [t.tolist() for t in data["rollout_top_p_token_offsets"]] == [[0, 1, 3, 4], [0, 0]]
    with pytest.raises(UserError, match=r"1 of 2 samples have no `teacher_log_probs` \(sample indices \[1\]\)"):
        build([sample(0, teacher_log_probs=[-1.0] * 3), sample(1)])


def test_a_rank_fetches_its_shard(monkeypatch):
    batch = build([sample(0), sample(1, response=1)])
    shards = split_for_data_parallel(batch, DPSchedule([[1], [0]], [[[0]], [[0]]], [1], [2], 0))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda ref, timeout: ref))
    args, refs = SimpleNamespace(http_control_timeout=1.0), [Box(shard) for shard in shards]
    data = public_process_rollout_data(args, refs, 0, 2)
    assert data["total_lengths"] == [3] and data["raw_reward"] == [1.0, 1.0] and data["local_raw_reward"] == [1.0]
    with pytest.raises(ValueError, match="cut into 2 shards, and there are 4 data-parallel ranks"):
        process_rollout_data(args, refs, 0, 4)


def test_every_column_that_a_rollout_brings_is_declared():
    samples = [sample(0, train_metadata={"a": 1}, metadata={"data_source": "math"}, **COMPLETE), sample(1, **COMPLETE)]
    batch = build(samples)
    shard = split_for_data_parallel(batch, DPSchedule([[0, 1]], [[[0, 1]]], [1], [2], 0))[0]
    data = to_tensors(shard, "cpu")
    assert {"rollout_ids", "rollout_mask_sums", "local_raw_reward", "metadata"} <= data.keys() <= COLUMNS.keys()
    own = train_batch_from_columns({**batch, "rollout_ids": [7, None], "rollout_mask_sums": [2.0, 4.0]}, PLUG_IN)
    assert own["rollout_ids"].tolist() == [7, 8] and own["rollout_mask_sums"].tolist() == [2.0, 4.0]


def test_removed_sample_gets_a_zero_mask():
    batch = build([sample(0, remove_sample=True), sample(1)])
    assert batch["loss_masks"][0].tolist() == [0, 0, 0] and batch["loss_masks"][1].tolist() == [1, 1, 1]
    assert batch["rollout_mask_sums"].tolist() == [0, 3]


def test_failed_sample_without_tokens_keeps_its_place_without_loss():
    failed = Sample(index=0, group_index=0, remove_sample=True, status=Sample.Status.FAILED)
    batch = build([failed, sample(1, rollout_log_probs=[-1.0] * 3)])
    assert batch["total_lengths"].tolist() == [2, 5] and batch["loss_masks"][0].tolist() == [0]
    assert [len(row) for row in batch["rollout_log_probs"]] == [1, 3]


def test_mask_sums_are_those_of_the_whole_execution():
    batch = build([sample(0, rollout_id=7), sample(1, rollout_id=7, loss_mask=[1, 0, 0]), sample(2)])
    assert batch["rollout_mask_sums"].tolist() == [4, 4, 3]


def test_r18_log_probs_missing_in_some_samples_is_an_error():
    with pytest.raises(UserError, match=r"1 of 2 samples have no `rollout_log_probs` \(sample indices \[5\]\)"):
        build([sample(4, rollout_log_probs=[-1.0] * 3), sample(5)])


def test_r18_optional_field_is_not_judged_by_the_first_sample():
    batch = build([sample(0, response=0), sample(1, rollout_log_probs=[-1.0] * 3)])
    assert [len(row) for row in batch["rollout_log_probs"]] == [0, 3]


COMPLETE = {
    "rollout_log_probs": [-1.0, -2.0, -3.0],
    "teacher_log_probs": [-0.5, -0.25, -0.125],
    "rollout_top_p_token_ids": [5, 6, 7, 8],
    "rollout_top_p_token_offsets": [0, 1, 3, 4],
}
NEUTRAL = {
    "rollout_log_probs": [0, 0, 0],
    "teacher_log_probs": [0, 0, 0],
    "rollout_top_p_token_ids": [],
    "rollout_top_p_token_offsets": [0, 0, 0, 0],
}


@pytest.mark.parametrize("nothing_trained", [{"remove_sample": True}, {"loss_mask": [0, 0, 0]}])
@pytest.mark.parametrize("field", COMPLETE)
def test_a_sample_that_trains_nothing_may_lack_what_the_others_have(field, nothing_trained):
    lacking = {**COMPLETE, field: None}
    batch = build([sample(0, **COMPLETE), sample(1, **lacking, **nothing_trained)])
    shard = split_for_data_parallel(batch, DPSchedule([[0, 1]], [[[0, 1]]], [1], [2], 0))[0]
    data = to_tensors(shard, "cpu")
    # Sets of kept tokens are ids with offsets: one is worth nothing without the other.
    neutral = {name for name in COMPLETE if name == field or "top_p" in name and "top_p" in field}
    for name, complete in COMPLETE.items():
        expected = NEUTRAL[name] if name in neutral else complete
        assert [row.tolist() for row in data[name]] == [complete, expected], name


@pytest.mark.parametrize("field", COMPLETE)
def test_a_sample_that_trains_must_have_what_the_others_have(field):
    lacking = {**COMPLETE, field: None}
    removed = sample(6, **lacking, remove_sample=True)
    with pytest.raises(UserError, match=rf"1 of 3 samples have no `{field}` \(sample indices \[5\]\)"):
        build([sample(4, **COMPLETE), sample(5, loss_mask=[0, 0, 1], **lacking), removed])


@pytest.mark.parametrize("field", ["rollout_log_probs", "teacher_log_probs"])
@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_what_belongs_to_a_trained_token_is_a_finite_number(field, number):
    whole, holed = {field: [-1.0, -2.0, -3.0]}, {field: [-1.0, number, -3.0]}
    with pytest.raises(UserError, match=rf"sample 5: `{field}` is {number} at response token 1, which is trained"):
        build([sample(4, **whole), sample(5, **holed)])
    with pytest.raises(UserError, match=rf"sample 5: `{field}` is {number} at response token 2, which is trained"):
        build([sample(5, loss_mask=[1, 0, 1], **{field: [-1.0, number, number]})])
    # Those of other tokens do not matter: nobody reads them.
    batch = build([sample(4, loss_mask=[1, 0, 1], **holed), sample(5, remove_sample=True, **holed), sample(6, **whole)])
    assert len(batch[field]) == 3


def test_what_no_trained_sample_has_is_no_column():
    batch = build([sample(0), sample(1, remove_sample=True, **COMPLETE)])
    assert not set(COMPLETE) & set(batch)
    # Nothing is trained at all: what there is may still be reported.
    batch = build([sample(0, remove_sample=True), sample(1, remove_sample=True, **COMPLETE)])
    assert [row.tolist() for row in batch["teacher_log_probs"]] == [[0, 0, 0], [-0.5, -0.25, -0.125]]


def test_sample_without_prompt_is_refused():
    with pytest.raises(UserError, match="sample 3 has 3 tokens, all of them in the response"):
        build([sample(3, prompt=0)])


def test_r22_train_metadata_becomes_a_column():
    batch = build([sample(0), sample(1, train_metadata={"difficulty": 2})])
    assert batch["metadata"] == [{}, {"difficulty": 2}]


def test_turns_become_a_column_where_a_sample_has_them():
    assert "round_number" not in build([sample(0)])
    batch = build([sample(0, metadata={"round_number": 3}), sample(1)])
    assert batch["round_number"].tolist() == [3, 1]
    with pytest.raises(UserError, match=r'"round_number"\] of sample 2 is 1.5; expected a whole number'):
        build([sample(2, metadata={"round_number": 1.5})])


def test_the_source_of_samples_becomes_a_column_where_one_has_it():
    assert "source_names" not in build([sample(0)])
    batch = build([sample(0, metadata={"source_name": "gsm8k"}), sample(1)])
    assert batch["source_names"] == ["gsm8k", None]


def test_execution_ids_are_fresh_where_missing():
    assert execution_ids([None, 4, None, 4]).tolist() == [5, 4, 6, 4]


def test_every_rank_knows_which_samples_failed_and_train_nothing():
    failed = {"status": Sample.Status.FAILED}
    batch = build([sample(0), sample(1, remove_sample=True, **failed), sample(2, **failed)])
    for shard in split_for_data_parallel(batch, DPSchedule([[0], [2, 1]], [[[0]], [[0, 1]]], [1], [3], 0)):
        assert to_tensors(shard, "cpu")["failed"] == [False, True, False]
    assert "failed" not in build([sample(0), sample(1, **failed)])


def test_shards_hold_their_rows_and_the_global_lengths():
    batch = build([sample(i, response=i + 1) for i in range(4)])
    schedule = DPSchedule([[0, 3], [2, 1]], [[[0], [1]], [[0], [1]]], [2], [4], 0)
    first, second = (to_tensors(shard, torch.device("cpu")) for shard in split_for_data_parallel(batch, schedule))
    assert [len(tokens) for tokens in second["tokens"]] == [5, 4] == second["total_lengths"]
    assert first["sample_indices"] == [0, 3] and second["sample_indices"] == [2, 1]
    assert first["raw_reward"] == [1.0] * 4 and first["local_raw_reward"] == [1.0] * 2
    assert second["tokens"][0].tolist() == list(range(5)) and second["micro_batch_indices"] == [[0], [1]]


def test_plug_in_columns_are_completed():
    columns = {
        "tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [1, 0], "raw_reward": [1, 0],
        "truncated": [0, 0], "sample_indices": [0, 1], "loss_masks": [[1, 0], [1]],
    }  # fmt: skip
    batch = train_batch_from_columns(columns, PLUG_IN)
    assert batch["rollout_ids"].tolist() == [0, 1] and batch["rollout_mask_sums"].tolist() == [1, 1]
    assert batch["total_lengths"].tolist() == [3, 2]
    with pytest.raises(UserError, match="lacks loss_masks"):
        train_batch_from_columns({name: column for name, column in columns.items() if name != "loss_masks"}, PLUG_IN)
    with pytest.raises(UserError, match="`tokens` has 2 rows, but `rewards` has 1"):
        train_batch_from_columns({**columns, "rewards": [1]}, PLUG_IN)


def test_rows_of_a_plug_in_without_executions_belong_to_those_of_their_samples():
    columns = {
        "tokens": [[1, 2, 3]] * 4, "response_lengths": [2] * 4, "rewards": [1] * 4, "raw_reward": [1] * 4,
        "truncated": [0] * 4, "sample_indices": [4, 4, 5, 6], "loss_masks": [[1, 1], [1, 0], [1, 1], [1, 0]],
    }  # fmt: skip
    samples = [sample(4, rollout_id=7), sample(4, rollout_id=7), sample(5)]
    batch = train_batch_from_columns(columns, PLUG_IN, samples)
    assert batch["rollout_ids"].tolist() == [7, 7, 8, 9], "and a row of no sample is an execution of its own"
    assert batch["rollout_mask_sums"].tolist() == [3, 3, 2, 1]
    own = train_batch_from_columns({**columns, "rollout_ids": [1, None, 1, 2]}, PLUG_IN, samples)
    assert own["rollout_ids"].tolist() == [1, 3, 1, 2]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"tokens": None}, "`tokens` is None; expected columns"),
        ({"step": 7, "scale": np.asarray(0.5)}, r"`step` is 7, `scale` is array\(0.5\); expected columns"),
        ({"rollout_ids": ["a", "b"]}, "`rollout_ids` has other entries than whole numbers and None"),
        ({"round_number": [1, None]}, "`round_number` is no row of numbers"),
        ({"round_number": [1, 1.5]}, "`round_number` is 1.5 at 1; expected whole numbers"),
        ({"tokens": [[1, 2, 3], [4, 5.5]]}, "sample 1: `tokens` is 5.5 at 1; expected whole numbers"),
        ({"truncated": [0, "no"]}, "sample 1: `truncated` is 'no'; expected a finite number"),
        ({"sample_indices": [0, "b"]}, "`sample_indices` has 'b'; expected whole numbers, or None"),
    ],
)
def test_what_is_no_column_of_a_plug_in_is_named(wrong, message):
    columns = {
        "tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [1, 0], "raw_reward": [1, 0],
        "truncated": [0, 0], "sample_indices": [0, 1], "loss_masks": [[1, 0], [1]],
    }  # fmt: skip
    with pytest.raises(UserError, match=f"^{PLUG_IN}: {message}"):
        train_batch_from_columns({**columns, **wrong}, PLUG_IN)


@pytest.mark.parametrize("form", [list, np.array, torch.tensor, lambda row: torch.tensor(row, dtype=torch.bfloat16)])
def test_what_the_trainer_would_compute_may_come_from_a_plug_in_in_any_form(form):
    columns = {
        "tokens": [[1, 2, 3], [4, 5]], "response_lengths": [2, 1], "rewards": [1, 0], "raw_reward": [1, 0],
        "truncated": [0, 0], "sample_indices": [0, 1], "loss_masks": [[1, 0], [1]],
        # Nobody reads what belongs to a token that is not trained.
        "advantages": [form([0.5, float("nan")]), form([-2.0])], "log_probs": [form([-1.0, -0.5]), form([-0.25])],
    }  # fmt: skip
    batch = train_batch_from_columns(columns, PLUG_IN)
    shard = split_for_data_parallel(batch, DPSchedule([[1, 0]], [[[0, 1]]], [1], [2], 0))[0]
    data = to_tensors(shard, "cpu")
    assert [row.nan_to_num(7).tolist() for row in data["advantages"]] == [[-2.0], [0.5, 7.0]]
    assert [row.tolist() for row in data["log_probs"]] == [[-0.25], [-1.0, -0.5]]
    # In the place of a GPU: tensors are there, without entries.
    for name in ("advantages", "log_probs"):
        assert {(row.device.type, row.dtype) for row in to_tensors(shard, "meta")[name]} == {("meta", torch.float32)}


def test_a_plug_in_may_give_tensors_of_any_type_and_samples_without_index():
    columns = {
        "tokens": [torch.tensor([1, 2, 3])], "response_lengths": torch.tensor([2]), "rewards": torch.tensor([0.5]),
        "raw_reward": [torch.tensor(1.0)], "truncated": [True], "sample_indices": [None],
        "loss_masks": [torch.tensor([True, False])], "rollout_log_probs": [torch.tensor([-1.0, -0.5], dtype=torch.bfloat16)],
    }  # fmt: skip
    batch = train_batch_from_columns(columns, PLUG_IN)
    rows = [batch[name][0].tolist() for name in ("tokens", "loss_masks", "rollout_log_probs")]
    assert rows == [[1, 2, 3], [1, 0], [-1.0, -0.5]] and batch["sample_indices"] == [-1]
    with pytest.raises(UserError, match=f"^{PLUG_IN}: the columns are empty"):
        train_batch_from_columns({name: [] for name in columns}, PLUG_IN)


def test_a_mask_that_weighs_tokens_is_refused_from_a_function_of_the_users_too():
    columns = {
        "tokens": [[1, 2, 3], [1, 2]], "response_lengths": [2, 1], "rewards": [0.5, 0.5], "raw_reward": [1.0, 1.0],
        "truncated": [0, 0], "sample_indices": [4, 9], "loss_masks": [[1.0, 0.0], [True]],
    }  # fmt: skip
    batch = train_batch_from_columns(columns, PLUG_IN)
    assert [mask.tolist() for mask in batch["loss_masks"]] == [[1, 0], [1]]
    assert {mask.dtype for mask in batch["loss_masks"]} == {np.dtype(np.int32)}
    columns["loss_masks"][1] = [0.25]
    with pytest.raises(UserError, match="sample 9: `loss_masks` is 0.25 at response token 0"):
        train_batch_from_columns(columns, PLUG_IN)
