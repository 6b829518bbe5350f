"""What a rank has of a rollout, by name: its part, the whole, single samples; and masks that were edited."""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.training.columns import COLUMNS, Kind, column_of, names_of
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.rollout_data import MicroBatch, RolloutData, refresh_mask_sums, require_entries
from slime.utils.errors import UserError
from tests.support.oracles.device_waits import counted_waits
from tests.support.processes.distributed import run_distributed

LENGTHS = [(10, 4), (16, 10), (8, 6), (2, 1), (9, 0), (3, 2)]


def columns_of():
    totals, responses = (list(lengths) for lengths in zip(*LENGTHS, strict=True))
    return {
        "tokens": [torch.arange(total) for total in totals], "total_lengths": totals, "response_lengths": responses,
        "loss_masks": [torch.arange(response) % 2 for response in responses],
        "advantages": [torch.arange(float(response)) for response in responses],
        "rollout_top_p_token_offsets": [torch.arange(response + 1) for response in responses],
        "raw_reward": [0.5] * 9, "partition": [4, 2, 0, 1, 7, 8], "micro_batch_indices": [[0, 1], [2, 3, 4, 5]],
        "num_microbatches": [2], "global_batch_sizes": [9], "of_a_plug_in": list("abcdef"),
    }  # fmt: skip


def test_lengths_of_the_parts_of_responses():
    def lengths(cp):
        return RolloutData(columns_of(), cp).local_lengths

    assert lengths(NO_CONTEXT_PARALLEL) == [4, 10, 6, 1, 0, 2]
    assert lengths(ContextParallel(2, 0, None)) == [0, 3, 2, 1, 0, 1]
    assert lengths(ContextParallel(2, 1, None)) == [4, 7, 4, 0, 0, 1]
    assert RolloutData(columns_of()).prompt_lengths == [6, 6, 2, 1, 9, 1]


def test_a_rank_has_parts_of_what_is_per_response_token_alone():
    whole = columns_of()
    data = RolloutData.of_rank(whole, ContextParallel(2, 1, None))
    assert [len(rows) for rows in data["advantages"]] == data.local_lengths
    assert data.local("advantages") is data["advantages"]
    assert {name: rows for name, rows in data.items() if rows is not whole[name]}.keys() == {"advantages"}
    assert [mask.tolist() for mask in data.local_masks][:2] == [[0, 1, 0, 1], [0, 1, 0, 1, 0, 1, 0]]
    assert [len(mask) for mask in data["loss_masks"]] == data["response_lengths"]


def gathering():
    dist.init_process_group("gloo")
    data = RolloutData.of_rank(columns_of(), ContextParallel(2, dist.get_rank(), dist.group.WORLD))
    whole = data.with_whole_responses()
    assert whole.cp is NO_CONTEXT_PARALLEL and whole["of_a_plug_in"] is data["of_a_plug_in"]
    assert data.whole("loss_masks") is data["loss_masks"]
    assert [len(rows) for rows in data["advantages"]] == data.local_lengths
    return [rows.tolist() for rows in whole["advantages"]], [rows.tolist() for rows in data.whole("advantages")]


def test_parts_of_all_ranks_make_the_whole():
    expected = [rows.tolist() for rows in columns_of()["advantages"]]
    assert run_distributed(gathering, 2) == [(expected, expected)] * 2


def test_some_of_the_samples():
    cp = ContextParallel(2, 1, None)
    data = RolloutData.of_rank(columns_of(), cp)
    some = data.take([5, 0])
    assert some.cp is cp and some["of_a_plug_in"] == ["f", "a"] and some["total_lengths"] == [3, 10]
    assert some["advantages"][1] is data["advantages"][0]
    assert not some.keys() & {"raw_reward", *names_of(Kind.SCHEDULE)}
    batch = data.micro_batch([5, 0], pad_multiple=8)
    assert batch.stream is batch["stream"] and batch["positions"] == [5, 0] and batch.stream.cp is cp
    assert batch.stream.local_response_lengths == tuple(batch.local_lengths) and len(batch.stream.tokens) == 8
    further = batch.with_columns(step_statistics=None)
    assert type(further) is MicroBatch and further.cp is cp and "step_statistics" not in batch


def test_some_of_the_samples_of_a_micro_batch():
    """What belongs to the micro-batch as a whole stays there."""
    batch = RolloutData(columns_of()).micro_batch([5, 0, 1], pad_multiple=8).with_columns(step_statistics={"sum": 1})
    some = batch.take([2, 0])
    assert some["positions"] == [1, 5] and some["of_a_plug_in"] == ["b", "f"]
    assert not some.keys() & {"stream", "step_statistics"}
    assert batch.micro_batch([1], pad_multiple=1).stream.tokens.tolist() == list(range(10))


def test_a_missing_column_names_who_needs_it():
    data = RolloutData({**columns_of(), "values": None})
    for name in ("values", "returns"):
        with pytest.raises(UserError, match=f"--use-critic needs `{name}`, and the samples of this rollout have none"):
            data.column(name, "--use-critic")
    assert data.flat("advantages").tolist() == [float(t) for _, response in LENGTHS for t in range(response)]
    assert data.column("of_a_plug_in", "nobody") == list("abcdef")


def test_plug_ins_see_a_dict():
    data = RolloutData(columns_of())
    assert isinstance(data, dict) and {**data}.keys() == columns_of().keys()
    data["mine"] = [1] * 6
    assert data.take([2])["mine"] == [1]


@pytest.mark.parametrize(
    ("name", "rows", "found"),
    [
        ("mine", 3, "int"), ("mine", None, "NoneType"), ("mine", {0: 1}, "dict"), ("mine", torch.ones(()), "Tensor"),
        ("mine", [1] * 9, "9 entries"), ("advantages", None, "NoneType"), ("advantages", [], "0 entries"),
        ("mine", torch.ones(6), None), ("mine", np.ones(6), None), ("mine", tuple("abcdef"), None),
        ("raw_reward", 3, None), ("loss_masks", 3, None),
    ],
)  # fmt: skip
def test_columns_that_micro_batches_could_not_take_entries_of(name, rows, found):
    """But for those about the whole rollout, and for masks, which are looked at on all ranks together."""
    data = RolloutData({**columns_of(), name: rows})
    if found is None:
        require_entries(data, "--flag mine.py:fn")
    else:
        with pytest.raises(
            UserError, match=rf"^--flag mine\.py:fn left {found} in rollout_data\['{name}'\]; .* the 6 samples"
        ):
            require_entries(data, "--flag mine.py:fn")


def test_what_a_function_left_per_token_must_be_tensors_as_long_as_the_ranks_parts():
    cp = ContextParallel(2, 1, None)
    rows = RolloutData.of_rank(columns_of(), cp)["advantages"]
    wrong = {
        "it is not set, or no list": torch.ones(6, 4),
        "expected length 4 in place 0, got no tensor of one dimension": [row.tolist() for row in rows],
        "expected length 7 in place 1, got no tensor of one dimension": [rows[0], rows[1].numpy(), *rows[2:]],
        "expected length 7 in place 1, got length 10": [rows[0], torch.ones(10), *rows[2:]],
        "expected length 1 in place 5, got no tensor of one dimension": [*rows[:5], rows[5][:, None]],
    }
    for name in names_of(Kind.RESPONSE_PART):
        require_entries(RolloutData({**columns_of(), "advantages": rows, name: tuple(rows)}, cp), "--flag mine.py:fn")
        for told, column in wrong.items():
            data = RolloutData({**columns_of(), "advantages": rows, name: column}, cp)
            with pytest.raises(UserError, match=rf"^--flag mine\.py:fn: rollout_data\['{name}'\] must be .*{told}"):
                require_entries(data, "--flag mine.py:fn")


def test_a_copy_is_a_dict_alone(tmp_path):
    """A user's function may keep the data, though the rank's process group can be neither copied nor written."""
    data = RolloutData(columns_of(), ContextParallel(2, 0, group=lambda: None))
    torch.save(data, tmp_path / "data.pt")
    of_file = torch.load(tmp_path / "data.pt", weights_only=True)
    for found in (copy.deepcopy(data), copy.copy(data), pickle.loads(pickle.dumps(data)), of_file):
        assert isinstance(found, dict) and not hasattr(found, "cp") and found["of_a_plug_in"] == list("abcdef")
        assert all(torch.equal(one, other) for one, other in zip(found["tokens"], data["tokens"], strict=True))


def test_every_column_has_a_kind():
    assert column_of("of_a_plug_in").kind is Kind.SAMPLE
    assert {name for name, known in COLUMNS.items() if not known.is_per_sample} == {
        "raw_reward", "failed", "partition", "micro_batch_indices", "num_microbatches", "global_batch_sizes", "stream",
        "step_statistics", "live_weight_version", "on_policy_proof",
    }  # fmt: skip
    assert {name for name, known in COLUMNS.items() if known.on_host} == {
        "rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    }  # fmt: skip
    assert [name for name, known in COLUMNS.items() if known.required] == [
        "tokens", "response_lengths", "rewards", "raw_reward", "truncated", "sample_indices", "loss_masks",
    ]  # fmt: skip


def refreshed(masks):
    """Trained tokens per execution, or the error, from edited masks of samples that two ranks share; and those of a call that
    edited none, and of one that edited a mask of the second rank."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    results = []
    for of_ranks in masks:
        data = {
            "rollout_ids": [5, rank], "sample_indices": [10 + rank, 20 + rank],
            "loss_masks": of_ranks[rank], "response_lengths": [3 - rank, 1],
            "tokens": [torch.zeros(4), torch.zeros(2)],
        }  # fmt: skip
        try:
            refresh_mask_sums(data, dist.group.WORLD)
            results.append(data["rollout_mask_sums"])
        except UserError as error:
            results.append(str(error))
    of_calls = []
    for masks_of_second in ([[1], [1]], [[1], [0]]):
        before = [torch.tensor([1], dtype=torch.int32)] * 2
        data = {
            "rollout_ids": [5, rank], "sample_indices": [0, 1], "response_lengths": [1, 1], "rollout_mask_sums": [8.0, 8.0],
            "loss_masks": [torch.tensor(mask) for mask in (masks_of_second if rank else [[1], [1]])],
            "tokens": [torch.zeros(2)] * 2,
        }  # fmt: skip
        of_calls.append((refresh_mask_sums(data, dist.group.WORLD, before), data["rollout_mask_sums"]))
    return results, of_calls


GOOD = [[1, 0, 1], [1]]
BAD = {
    "sample 11: `loss_masks` is 0.5 at response token 1": (GOOD, [[1.0, 0.5], [0.0]]),
    "sample 11: `loss_masks` has the shape [3]; the response has 2 tokens": (GOOD, [[1, 0, 1], [1]]),
    "sample 21: `loss_masks` has the shape []; the response has 1 tokens": (GOOD, [[1, 1], 1]),
    "sample 11: `loss_masks` is no row of numbers": (GOOD, [["one", None], [1]]),
    "must be a list of one mask per sample, 2 here, not 1 masks": (GOOD, [[1, 1]]),
    "must be a list of one mask per sample, 2 here, not NoneType": (GOOD, None),
}


def test_edited_masks_are_counted_and_those_that_weigh_are_refused_on_all_ranks():
    good = ([torch.tensor([1, 0, 1]), torch.tensor([1])], [torch.tensor([1.0, 1.0]), torch.tensor([False])])
    plain = ([[1, 0, 1], np.array([1])], [[True, True], np.zeros(1)])
    found, of_calls = zip(*run_distributed(refreshed, 2, ([good, plain, *BAD.values()],)), strict=True)
    assert of_calls == ([(False, [8.0, 8.0]), (True, [2.0, 1.0])], [(False, [8.0, 8.0]), (True, [2.0, 0.0])])
    assert [rank[:2] for rank in found] == [[[4.0, 1.0]] * 2, [[4.0, 0.0]] * 2]
    for rank in found:
        for told, message in zip(BAD, rank[2:], strict=True):
            assert told in message and "--rollout-data-postprocess-path" in message


def edited(samples, masks, device="cpu"):
    return {
        "rollout_ids": [0] * samples, "sample_indices": list(range(samples)), "response_lengths": [2] * samples,
        "loss_masks": masks, "tokens": [torch.zeros(3, device=device)] * samples,
    }  # fmt: skip


def test_masks_of_any_kind_become_whole_numbers_on_the_device_of_the_tokens(alone):
    kinds = [
        [1, 0], np.array([True, True]), torch.tensor([1, 0], dtype=torch.bfloat16), torch.tensor([0, 1]),
        torch.tensor([1.0, 1.0], requires_grad=True), torch.tensor([False, True]),
    ]  # fmt: skip
    data = edited(len(kinds), kinds)
    refresh_mask_sums(data, None)
    assert [mask.tolist() for mask in data["loss_masks"]] == [[1, 0], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]]
    assert data["rollout_mask_sums"] == [8.0] * len(kinds)
    # In the place of a GPU: tensors are there, without entries.
    data = edited(len(kinds), kinds, device="meta")
    refresh_mask_sums(data, None)
    assert {(mask.device.type, mask.dtype, len(mask)) for mask in data["loss_masks"]} == {("meta", torch.int32, 2)}
    nothing = edited(0, [])
    refresh_mask_sums(nothing, None)
    assert nothing["loss_masks"] == nothing["rollout_mask_sums"] == []
    assert not refresh_mask_sums(nothing, None, []) and nothing["loss_masks"] == []


@pytest.mark.parametrize("same", [list, np.array, torch.tensor, lambda mask: torch.tensor(mask, dtype=torch.bfloat16)])
def test_sums_that_a_user_made_stay_where_no_mask_has_changed(alone, same):
    before = [torch.tensor([1, 0], dtype=torch.int32), torch.tensor([1, 1], dtype=torch.int32)]
    data = {**edited(2, [same([1, 0]), same([1, 1])]), "rollout_mask_sums": [8192.0, 8192.0]}
    assert not refresh_mask_sums(data, None, before) and data["rollout_mask_sums"] == [8192.0, 8192.0]
    assert [(mask.tolist(), mask.dtype) for mask in data["loss_masks"]] == [
        ([1, 0], torch.int32), ([1, 1], torch.int32)
    ]  # fmt: skip
    data["loss_masks"] = [same([0, 1]), same([1, 0])]
    assert refresh_mask_sums(data, None, before) and data["rollout_mask_sums"] == [2.0, 2.0]
    assert [mask.tolist() for mask in data["loss_masks"]] == [[0, 1], [1, 0]]


def test_masks_are_checked_and_counted_with_one_wait_for_all_samples(alone):
    def waits(samples, before=None):
        masks = [torch.tensor([1, 0], dtype=torch.int32) for _ in range(samples)]
        with counted_waits() as counted:
            refresh_mask_sums(edited(samples, masks), None, before and before * samples)
        # What is on the host already may be looked at as arrays.
        return counted.total() - counted["numpy"]

    assert waits(2) == waits(40) == 1
    for mask in ([1, 0], [1, 1]):
        assert waits(40, [torch.tensor(mask, dtype=torch.int32)]) == 1
