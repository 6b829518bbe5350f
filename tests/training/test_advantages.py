"""What `compute_advantages_and_returns` does around the estimators; their numbers are held against loops in
`test_objective.py`."""

import math
from types import SimpleNamespace

import pytest
import torch

from slime.training.advantages import compute_advantages_and_returns, reported_kl
from slime.training.context_parallel import ContextParallel, slice_response
from slime.training.rollout_batch import split_for_data_parallel, to_tensors, train_batch_from_columns
from slime.training.rollout_data import RolloutData
from slime.utils.errors import UserError
from tests.support.models.grpo_batch import objective_args

CPU = torch.device("cpu")


def data(**columns):
    return RolloutData({
        "tokens": [torch.arange(4), torch.arange(5)], "total_lengths": [4, 5], "response_lengths": [2, 3],
        "loss_masks": [torch.ones(2), torch.ones(3)], "rewards": [0.5, -1.5], **columns,
    })  # fmt: skip


def doubled(args, rollout_data):
    assert [len(kl) for kl in rollout_data["kl"]] == rollout_data["response_lengths"]
    rollout_data["advantages"] = [torch.full((n,), 2.0) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]


def wrong_length(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [torch.ones(2), torch.ones(4)]


def one_number_each(args, rollout_data):
    rollout_data["advantages"] = [1.0, -1.0]


def no_dimension(args, rollout_data):
    rollout_data["advantages"] = list(torch.ones(2))


def one_tensor(args, rollout_data):
    rollout_data["advantages"] = torch.ones(2)


def one_sample(args, rollout_data):
    rollout_data["advantages"] = [torch.ones(2)]


def no_returns(args, rollout_data):
    rollout_data["advantages"] = [torch.ones(2), torch.ones(3)]


def in_other_types(args, rollout_data):
    """Advantages of one kind, and returns of two."""
    rollout_data["advantages"] = [torch.full((n,), 2) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = [torch.ones(2, dtype=torch.float64), torch.ones(3)]


def with_a_number(args, rollout_data):
    doubled(args, rollout_data)
    rollout_data["mean"] = 0.5


def rejects_in_place(args, rollout_data):
    doubled(args, rollout_data)
    rollout_data["loss_masks"][1][0] = 0


def rejects_by_other_masks(args, rollout_data):
    doubled(args, rollout_data)
    rollout_data["loss_masks"] = [torch.ones(2), torch.zeros(3)]


def takes_masks_out(args, rollout_data):
    doubled(args, rollout_data)
    del rollout_data["loss_masks"]


def writes_a_kl(args, rollout_data):
    doubled(args, rollout_data)
    rollout_data["kl"][1][2] = 2.5


def writes_masks_as_they_are(args, rollout_data):
    doubled(args, rollout_data)
    rollout_data["loss_masks"] = tuple(mask.bool() for mask in rollout_data["loss_masks"])


def test_grpo_spreads_the_reward_over_the_response():
    rollout_data = data()
    assert compute_advantages_and_returns(objective_args(), rollout_data) == {}
    assert [a.tolist() for a in rollout_data["advantages"]] == [[0.5, 0.5], [-1.5, -1.5, -1.5]]
    # There is no log-prob of any kind to take a length from.
    assert [k.tolist() for k in rollout_data["kl"]] == [[0, 0], [0, 0, 0]]


def test_custom_function_replaces_the_estimator_and_nothing_else():
    rollout_data = data(log_probs=[-torch.ones(2), -torch.ones(3)], teacher_log_probs=[torch.zeros(2), torch.zeros(3)])
    args = objective_args(custom_advantage_function_path=f"{__file__}:doubled")
    compute_advantages_and_returns(args, rollout_data)
    assert rollout_data["advantages"][1].tolist() == [2, 2, 2]
    args.use_opd = True
    compute_advantages_and_returns(args, rollout_data)
    assert rollout_data["advantages"][1].tolist() == [3, 3, 3] and rollout_data["returns"][1].tolist() == [2, 2, 2]
    args.normalize_advantages = True
    assert compute_advantages_and_returns(args, rollout_data) == {"whiten_empty": 0.0}
    assert rollout_data["advantages"][1].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "function, column, difference",
    [
        ("wrong_length", "advantages", "expected length 3 in place 1, got length 4"),
        ("one_number_each", "advantages", "expected length 2 in place 0, got no tensor of one dimension"),
        ("no_dimension", "advantages", "expected length 2 in place 0, got no tensor of one dimension"),
        ("one_tensor", "advantages", "it is not set, or no list"),
        ("one_sample", "advantages", "expected 2 tensors, got 1"),
        ("no_returns", "returns", "it is not set, or no list"),
    ],
)
def test_custom_function_is_checked(function, column, difference):
    args = objective_args(custom_advantage_function_path=f"{__file__}:{function}")
    with pytest.raises(UserError, match=rf"{function}: rollout_data\['{column}'\] must be a list .*; {difference}$"):
        compute_advantages_and_returns(args, data())


def test_what_a_custom_function_keeps_in_the_data_is_checked():
    """Micro-batches take single entries of every column: an error there would name nobody."""
    args = objective_args(custom_advantage_function_path=f"{__file__}:with_a_number")
    with pytest.raises(
        UserError, match=r"^--custom-advantage-function-path .*left float in rollout_data\['mean'\]; exp"
    ):
        compute_advantages_and_returns(args, data())


def test_what_a_custom_function_computes_elsewhere_goes_to_the_tokens_in_float32():
    """As `doubled`, examples of the docs make tensors on the host, where a GPU has log-probs and tokens."""
    rollout_data = data()
    compute_advantages_and_returns(
        objective_args(custom_advantage_function_path=f"{__file__}:in_other_types"), rollout_data
    )
    found = {name: rollout_data[name] for name in ("advantages", "returns")}
    assert {row.dtype for rows in found.values() for row in rows} == {torch.float32}
    assert [[row.tolist() for row in rows] for rows in found.values()] == [[[2, 2], [2, 2, 2]], [[1, 1], [1, 1, 1]]]
    for function in ("doubled", "in_other_types"):
        args = objective_args(custom_advantage_function_path=f"{__file__}:{function}")
        elsewhere = data(tokens=[torch.empty(4, device="meta"), torch.empty(5, device="meta")])
        compute_advantages_and_returns(args, elsewhere)
        assert {row.device.type for name in found for row in elsewhere[name]} == {"meta"}
        assert [[len(row) for row in elsewhere[name]] for name in found] == [[2, 3], [2, 3]]


@pytest.mark.parametrize("function", ["rejects_in_place", "rejects_by_other_masks", "takes_masks_out"])
def test_a_custom_function_that_changes_masks_is_refused(function):
    """The sums of masks, which the loss is divided by, were made before: they would still count what it rejects."""
    args = objective_args(custom_advantage_function_path=f"{__file__}:{function}")
    with pytest.raises(UserError, match=rf"{function} changed `loss_masks`.* --rollout-data-postprocess-path"):
        compute_advantages_and_returns(args, data())


def test_masks_that_stay_the_same_may_be_set_again():
    rollout_data = data()
    path = f"{__file__}:writes_masks_as_they_are"
    compute_advantages_and_returns(objective_args(custom_advantage_function_path=path), rollout_data)
    assert rollout_data["advantages"][1].tolist() == [2, 2, 2]
    compute_advantages_and_returns(
        objective_args(custom_advantage_function_path=f"{__file__}:doubled"),
        data(**{name: [] for name in ("tokens", "total_lengths", "response_lengths", "loss_masks", "rewards")}),
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kl_coef": 0.1}, "--kl-coef 0.1 needs `log_probs`"),
        ({"advantage_estimator": "ppo"}, "--advantage-estimator ppo needs `values`"),
        ({"advantage_estimator": "reinforce"}, "--advantage-estimator reinforce: unknown"),
    ],
)
def test_a_missing_column_is_named(changes, message):
    with pytest.raises(UserError, match=message):
        compute_advantages_and_returns(objective_args(**changes), data())


def test_distillation_needs_student_and_teacher():
    args = objective_args(use_opd=True)
    with pytest.raises(ValueError, match="log_probs, those of the student"):
        compute_advantages_and_returns(args, data())
    with pytest.raises(ValueError, match="teacher_log_probs, and the batch has none"):
        compute_advantages_and_returns(args, data(log_probs=[torch.zeros(2), torch.zeros(3)]))


def test_nothing_to_whiten_is_told():
    rollout_data = data(loss_masks=[torch.zeros(2), torch.zeros(3)])
    assert compute_advantages_and_returns(objective_args(normalize_advantages=True), rollout_data) == {
        "whiten_empty": 1.0
    }
    assert all(not tokens.any() for tokens in rollout_data["advantages"])


def with_kl(**columns):
    """KL .1, .2 and .3, .4, .5."""
    log_probs = [torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0])]
    reference = [torch.tensor([-1.1, -1.2]), torch.tensor([-1.3, -1.4, -1.5])]
    return data(log_probs=log_probs, ref_log_probs=reference, values=[torch.zeros(2), torch.zeros(3)], **columns)


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_l4_the_logged_kl_is_not_what_shaping_made_of_it(estimator):
    rollout_data = with_kl()
    args = objective_args(advantage_estimator=estimator, kl_coef=0.1, kl_loss_type="k1", normalize_advantages=True)
    compute_advantages_and_returns(args, rollout_data)
    assert torch.cat(rollout_data["kl"]).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize("estimator", ["grpo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_the_kl_of_the_reward_is_zero_where_only_the_loss_has_a_weight_for_it(estimator):
    args = objective_args(advantage_estimator=estimator, kl_coef=0.0, kl_loss_type="k1")
    rollout_data, without = with_kl(), with_kl()
    compute_advantages_and_returns(args, rollout_data)
    assert [kl.tolist() for kl in rollout_data["kl"]] == [[0, 0], [0, 0, 0]]
    kl, is_known = reported_kl(args, rollout_data)
    assert torch.cat(list(kl)).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5]) and is_known
    del without["ref_log_probs"]
    compute_advantages_and_returns(args, without)
    assert not torch.cat(without["kl"]).any()
    for name in ("advantages", "returns"):
        assert torch.equal(torch.cat(rollout_data[name]), torch.cat(without[name]))


def test_the_kl_that_a_custom_function_wrote_is_reported_also_where_another_could_be_computed():
    rollout_data = with_kl()
    args = objective_args(kl_loss_type="k1", custom_advantage_function_path=f"{__file__}:writes_a_kl")
    compute_advantages_and_returns(args, rollout_data)
    kl, is_known = reported_kl(args, rollout_data)
    assert [tokens.tolist() for tokens in kl] == [[0, 0], [0, 0, 2.5]] and is_known


@pytest.mark.parametrize("of_the_tool", [-1.4, math.nan])
def test_the_kl_of_masked_tokens_is_0_for_whoever_reads_it(of_the_tool):
    rollout_data = with_kl(loss_masks=[torch.ones(2), torch.tensor([1, 0, 1])])
    rollout_data["ref_log_probs"][1][1] = of_the_tool
    args = objective_args(kl_coef=0.1, kl_loss_type="k1", custom_advantage_function_path=f"{__file__}:doubled")
    compute_advantages_and_returns(args, rollout_data)
    assert torch.cat(rollout_data["kl"]).tolist() == pytest.approx([0.1, 0.2, 0.3, 0, 0.5])


def test_a_kl_without_weight_shapes_no_reward_even_where_it_is_infinite():
    rollout_data = with_kl()
    rollout_data["ref_log_probs"][1][0] = -torch.inf
    compute_advantages_and_returns(objective_args(advantage_estimator="ppo", kl_loss_type="k1"), rollout_data)
    assert torch.cat(rollout_data["returns"]).tolist() == [0.5, 0.5, -1.5, -1.5, -1.5]


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_l6_the_kl_of_tool_tokens_does_not_leak_into_returns(estimator):
    args = objective_args(advantage_estimator=estimator, kl_coef=0.1, kl_loss_type="k1", gamma=0.9)
    results = []
    for of_the_tool in (-1.4, -70.0):
        rollout_data = with_kl(loss_masks=[torch.ones(2), torch.tensor([1, 0, 1])])
        rollout_data["ref_log_probs"][1][1] = of_the_tool
        compute_advantages_and_returns(args, rollout_data)
        results.append((rollout_data["advantages"][1].tolist(), rollout_data["returns"][1].tolist()))
    assert results[0] == results[1]
    if estimator == "reinforce_plus_plus":
        # −1.5 − .05 at the end, one step later than −.03: the tool's token takes none.
        assert results[0][0] == pytest.approx([-0.03 + 0.9 * -1.55, 0, -1.55])


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_l7_a_removed_sample_gets_zeros(estimator):
    rollout_data = with_kl(loss_masks=[torch.zeros(2), torch.ones(3)])
    args = objective_args(advantage_estimator=estimator, kl_coef=0.1, kl_loss_type="k1")
    compute_advantages_and_returns(args, rollout_data)
    assert rollout_data["advantages"][0].tolist() == rollout_data["returns"][0].tolist() == [0, 0]


def simulate_ranks(monkeypatch, args, full, size):
    """`full` data through every context-parallel rank of `size`; what others would bring to a gather is taken from `full`.

    Returns per name the columns of all ranks, put together again.
    """
    lengths = (full["total_lengths"], full["response_lengths"])
    ranks = []
    for rank in range(size):
        cp = ContextParallel(size, rank, None)
        local = RolloutData.of_rank(full, cp)
        known = {
            "values": full["values"],
            "kl": [a - b for a, b in zip(full["log_probs"], full["ref_log_probs"], strict=True)],
        }

        def gather(column, totals, responses, cp, local=local, known=known):
            return known["values" if column is local["values"] else "kl"]

        monkeypatch.setattr("slime.training.rollout_data.gather_responses", gather)
        compute_advantages_and_returns(args, local)
        ranks.append((cp, local))
    whole = {}
    for name in ("advantages", "returns", "kl"):
        whole[name] = [torch.full((response,), torch.nan) for response in lengths[1]]
        for cp, local in ranks:
            for column, own, total, response in zip(whole[name], local[name], *lengths, strict=True):
                places = slice_response(torch.arange(response), total, response, cp)
                column[places] = own
    return whole


def some_response(total, generator):
    return 1 + int(torch.randint(total - 1, (1,), generator=generator))


def with_tools(response, generator):
    """A mask with tokens of tools, also at the end."""
    return (torch.rand(response, generator=generator) < 0.8).int()


@pytest.mark.parametrize(
    ("size", "longer"),
    [
        (2, range(2, 1001, 7)),
        (8, [*range(2, 130), *range(130, 1001, 7)]),
        pytest.param(8, range(2, 1001), marks=pytest.mark.slow),
    ],
    ids=["2", "8", "8, every length"],
)
@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_l5_the_final_reward_lands_on_the_last_trained_token(monkeypatch, estimator, size, longer):
    """For lengths up to 1000, all of the short ones for 8 ranks, so that the end lies on any of them."""
    generator = torch.Generator().manual_seed(0)
    totals = [100, 100, *longer]
    responses = [50, 50, *(some_response(total, generator) for total in totals[2:])]
    masks = [with_tools(r, generator) if i % 2 else torch.ones(r).int() for i, r in enumerate(responses)]
    assert_rewards_at_the_end(monkeypatch, estimator, size, totals, masks)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus"])
def test_l5_for_all_short_responses_and_any_number_of_ranks(monkeypatch, estimator, size):
    """All lengths of prompt and response that make less than 18 tokens, and all totals up to 400; with both kinds of mask."""
    generator = torch.Generator().manual_seed(1)
    rows = [(total, response) for total in range(2, 18) for response in range(1, total)]
    rows += [(total, some_response(total, generator)) for total in range(18, 401)]
    masks = [torch.ones(r).int() for _, r in rows] + [with_tools(r, generator) for _, r in rows]
    assert_rewards_at_the_end(monkeypatch, estimator, size, [total for total, _ in rows] * 2, masks)


def assert_rewards_at_the_end(monkeypatch, estimator, size, totals, masks):
    generator = torch.Generator().manual_seed(2)
    responses = [len(mask) for mask in masks]
    columns = {
        name: [torch.rand(response, generator=generator) for response in responses]
        for name in ("log_probs", "ref_log_probs", "values")
    }
    full = {
        "tokens": [torch.arange(total) for total in totals], "total_lengths": totals, "response_lengths": responses,
        "loss_masks": masks, "rewards": [1000.0 + i for i in range(len(totals))], **columns,
    }  # fmt: skip
    # With γ = 0 what a token gets is its own reward: the sample's stands at one place alone.
    args = objective_args(advantage_estimator=estimator, kl_coef=0.1, kl_loss_type="k1", gamma=0.0, lambd=0.95)
    whole = simulate_ranks(monkeypatch, args, full, size)
    for i, mask in enumerate(masks):
        trained = mask.nonzero()[:, 0]
        expected = -0.1 * (columns["log_probs"][i] - columns["ref_log_probs"][i]) * mask
        expected[trained[-1:]] += 1000.0 + i
        if estimator == "ppo":
            expected = torch.where(mask != 0, expected, columns["values"][i])
        assert torch.allclose(whole["returns"][i], expected, rtol=1e-5, atol=1e-5), (totals[i], responses[i])
    # With a discount, the answer of one rank that has everything.
    few = {name: column[::20] for name, column in full.items()}
    alone = RolloutData(few)
    monkeypatch.undo()
    args.gamma = 0.99
    compute_advantages_and_returns(args, alone)
    whole = simulate_ranks(monkeypatch, args, few, size)
    for name in ("advantages", "returns", "kl"):
        assert all(torch.equal(a, b) for a, b in zip(whole[name], alone[name], strict=True)), name


def test_l25_a_rank_takes_the_rewards_of_its_own_samples():
    """The list of raw rewards is that of all ranks; what a rank computes with is in the order of its samples."""
    columns = {
        "tokens": [[1, 2, 3]] * 4, "response_lengths": [2] * 4, "rewards": [0.0, 1.0, 2.0, 3.0],
        "raw_reward": [10.0, 11.0, 12.0, 13.0], "truncated": [0] * 4, "sample_indices": [0, 1, 2, 3],
        "loss_masks": [[1, 1]] * 4,
    }  # fmt: skip
    schedule = SimpleNamespace(
        partitions=[[3, 0], [2, 1]],
        micro_batch_indices=[[[0, 1]], [[0, 1]]],
        num_microbatches=[1],
        global_batch_sizes=[4],
    )
    shards = [
        to_tensors(s, CPU) for s in split_for_data_parallel(train_batch_from_columns(columns, "columns"), schedule)
    ]
    for shard, expected in zip(shards, ([3.0, 0.0], [2.0, 1.0]), strict=True):
        compute_advantages_and_returns(objective_args(), shard)
        assert [a.tolist() for a in shard["advantages"]] == [[value] * 2 for value in expected]
        assert shard["local_raw_reward"] == [value + 10 for value in expected] and len(shard["raw_reward"]) == 4
