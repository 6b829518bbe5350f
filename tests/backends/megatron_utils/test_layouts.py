"""Every objective gives in every parallel layout what it gives on one rank, and there what plain loops in float64 give.

What may not depend on the layout: the loss, the gradient norm, advantages and returns, and every number that is logged. The
batches hold what is awkward: a fully masked sample, responses of one token, tokens of tools, prompts longer than a chunk,
executions of several samples, and ranks that own no token of the loss.
"""

import math
import statistics

import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.plain_grid import WITHOUT_LOOPS, PlainGrid, assert_like_loops
from tests.support.oracles.rounding import assert_equal_metrics, bound
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps
from tests.support.processes.objective_grid import (
    CRITIC_OBJECTIVES,
    FULL,
    HIDDEN,
    LAYERS,
    OBJECTIVES,
    PADDED_VOCABULARY,
    ROLES,
    SHARPEST,
    STEPS,
    VOCABULARY,
    assert_like_one_rank,
    columns_of,
    of_step,
    run_layouts,
)

DATA = {"data_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
ZIGZAG = {"context_parallel_size": 2}
GATHERED = {**ZIGZAG, "allgather_cp": True}
TWO_RANKS = {"dp2": DATA, "tp2": TENSOR, "pp2": PIPELINE, "cp2": ZIGZAG, "cp2 gathered": GATHERED}
CONTEXT = ("cp2", "cp2 gathered")
TOKENS_DIVIDED = ("dp2", *CONTEXT)
FOUR_RANKS = {
    "data": {"dp2 cp2": {**DATA, **ZIGZAG}, "dp2 cp2 gathered": {**DATA, **GATHERED}, "dp2 tp2": {**DATA, **TENSOR}},
    "context": {
        "cp4": {"context_parallel_size": 4},
        "cp4 gathered": {"context_parallel_size": 4, "allgather_cp": True},
    },
    "tensor": {"tp2 cp2": {**TENSOR, **ZIGZAG}, "tp2 cp2 gathered": {**TENSOR, **GATHERED}},
    "pipeline": {"pp2 cp2": {**PIPELINE, **ZIGZAG}, "pp2 cp2 gathered": {**PIPELINE, **GATHERED}},
    "virtual": {"vpp2 cp2": {**VIRTUAL, **ZIGZAG}, "vpp2 tp2": {**VIRTUAL, **TENSOR}},
}
ALL = {**OBJECTIVES, **CRITIC_OBJECTIVES}
# Where the tokens of a response are divided most can go wrong: there those objectives alone are left to the slow tests of which
# another one has all that is more than arithmetic of single tokens. Where ranks have all tokens of a response, one objective
# each is enough with statistics over all ranks, ratios of whole sequences, custom functions and kept tokens.
_LIKE_ANOTHER = (
    "grpo per token", "dual clip", "gspo", "sequence mask", "cispo", "ppo", "reinforce_plus_plus",
    "reinforce_plus_plus_baseline", "engine log-probs as old ones", "sft",
)  # fmt: skip
_WHOLE_RESPONSES = (
    "first step", "gspo with sequence mask, per token", "ppo whitened, per token", "masked importance sampling", "top-p",
)  # fmt: skip
ON_EVERY_CHANGE = {
    "dp2": SHARPEST,
    "tp2": _WHOLE_RESPONSES,
    "pp2": _WHOLE_RESPONSES,
    "cp2": tuple(name for name in OBJECTIVES if name not in _LIKE_ANOTHER),
    "cp2 gathered": (*_WHOLE_RESPONSES, "grpo whitened", "reinforce_plus_plus whitened"),
}
OTHERS = {layout: tuple(name for name in OBJECTIVES if name not in names) for layout, names in ON_EVERY_CHANGE.items()}
TRAINED = {"calculate_per_token_loss": True, "padded_vocab_size": PADDED_VOCABULARY}


def write_model(directory, layers):
    write_tiny_model(directory, vocab_size=VOCABULARY, layers=layers, hidden=HIDDEN, head_dim=8)
    return str(directory)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), LAYERS)


@pytest.fixture(scope="module")
def plain(hf_dir):
    return PlainGrid(hf_dir)


def run(hf_dir, batches, layouts, roles, trained=(), chosen=None):
    """The grid, and the weights that some steps end at in the layouts `trained`."""
    cases = {name: layout_args(hf_dir, **TRAINED, **layouts[name]) for name in trained}
    return {"grid": run_layouts(hf_dir, layouts, batches, roles, chosen), "trained": train_steps(cases)}


@pytest.fixture(scope="module")
def one_rank(hf_dir, plain):
    (rank,) = run_distributed(run, 1, (hf_dir, plain.batches, {"one": {}}, tuple(ROLES), ["one"]), timeout=300)
    return {"grid": rank["grid"]["one"], "trained": rank["trained"]["one"]}


@pytest.fixture(scope="module")
def two_ranks(hf_dir, plain):
    """Of the actor: the layouts of the critic on two ranks stand in its own tests."""
    return run_distributed(run, 2, (hf_dir, plain.batches, TWO_RANKS, ["actor"], CONTEXT, ON_EVERY_CHANGE), timeout=500)


@pytest.fixture(scope="module")
def others_on_two_ranks(hf_dir, plain):
    layouts = {layout: TWO_RANKS[layout] for layout in OTHERS}
    return run_distributed(run, 2, (hf_dir, plain.batches, layouts, ["actor"], (), OTHERS), timeout=500)


@pytest.fixture
def on_two_ranks(request, layout, objective):
    """What two ranks found with the objective, among others, in the layout."""
    return request.getfixturevalue("two_ranks" if objective in ON_EVERY_CHANGE[layout] else "others_on_two_ranks")


def grid(*layouts):
    """Cases of layout and objective."""
    return [
        pytest.param(layout, objective, marks=() if objective in ON_EVERY_CHANGE[layout] else pytest.mark.slow)
        for layout in layouts
        for objective in OBJECTIVES
    ]


def rows_of_grid(*layouts):
    """Cases of a layout, the first of its objectives (by which `on_two_ranks` knows where they ran), and all of them."""
    rows = [pytest.param(layout, ON_EVERY_CHANGE[layout][0], ON_EVERY_CHANGE[layout], id=layout) for layout in layouts]
    others = [
        pytest.param(layout, OTHERS[layout][0], OTHERS[layout], id=f"{layout}, others", marks=pytest.mark.slow)
        for layout in layouts
    ]
    return rows + others


@pytest.fixture(scope="module", params=FOUR_RANKS)
def one_and_four_ranks(request, hf_dir, plain, one_rank, tmp_path_factory):
    """What one rank found, what four did, and of how many layers the model was."""
    layers = LAYERS
    if request.param == "virtual":
        # Each of two ranks has two stages, and each of these a layer.
        layers = 2 * LAYERS
        hf_dir = write_model(tmp_path_factory.mktemp("deep"), layers)
        (found,) = run_distributed(run, 1, (hf_dir, plain.batches, {"one": {}}, tuple(ROLES)), timeout=300)
        one_rank = {"grid": found["grid"]["one"]}
    ranks = run_distributed(run, 4, (hf_dir, plain.batches, FOUR_RANKS[request.param], tuple(ROLES)), timeout=600)
    return one_rank, ranks, layers


def of_layout(ranks, layout, objective, batch="full"):
    return [rank["grid"][layout][objective, batch] for rank in ranks]


@pytest.mark.parametrize("objective", [name for name in ALL if name not in WITHOUT_LOOPS])
def test_one_rank_gives_what_loops_give(hf_dir, plain, one_rank, objective):
    assert_like_loops(hf_dir, plain, objective, one_rank["grid"])


def test_the_objectives_reach_every_branch(one_rank):
    """A case in which nothing is clipped, masked, rejected or weighted would prove little."""
    metrics = {name: of_step(one_rank["grid"][name, "full"]["train"], 1) for name in ALL}
    for name, found in metrics.items():
        if name != "first step" and "pg_clipfrac" in found:
            assert found["pg_clipfrac"] > 0, name
    for name in ("sequence mask", "gspo with sequence mask, per token"):
        assert 0 < metrics[name]["opsm_clipfrac"] < 1
    assert 0 < metrics["icepop, per token"]["tis_clipfrac"] < 1
    for name in ("masked importance sampling", "masked importance sampling of sequences"):
        for fraction in ("mask_fraction_low", "mask_fraction_high", "catastrophic_seq_fraction"):
            assert 0 < metrics[name][f"mis_rs_{fraction}"] < 1, (name, fraction)
        assert metrics[name]["mis_batch_norm_factor"] != 1
    assert metrics["mismatch metrics"]["mismatch_max_abs"] == pytest.approx(10, rel=1e-6)
    assert 0 < metrics["value beside given ones"]["value_clipfrac"] < 1
    # How a step is packed, and what is only measured, changes no loss.
    others = [name for name in ALL if "one sample a micro-batch" not in name and name != "mismatch metrics"]
    assert len({round(metrics[name]["loss"], 6) for name in others}) == len(others), "flags without an effect"


@pytest.mark.parametrize("layout, objective", grid(*TWO_RANKS))
def test_two_ranks_give_what_one_rank_gives(one_rank, on_two_ranks, layout, objective):
    assert_like_one_rank(of_layout(on_two_ranks, layout, objective), one_rank["grid"][objective, "full"])


@pytest.mark.parametrize("layout, objective, objectives", rows_of_grid(*TWO_RANKS))
def test_m5_every_rank_logs_the_numbers_of_one_rank(one_rank, on_two_ranks, layout, objectives):
    assert_same_rollout_metrics(one_rank, on_two_ranks, layout, objectives)


def assert_same_rollout_metrics(one_rank, ranks, layout, objectives):
    for objective in objectives:
        for batch in STEPS:
            expected, bounds = (one_rank["grid"][objective, batch][key] for key in ("rollout", "bounds"))
            bounds = bounds["rollout"]
            assert len(expected) >= 8
            for rank in of_layout(ranks, layout, objective, batch):
                assert_equal_metrics(rank["rollout"], expected, bounds)


def assert_sparse_like_one_rank(one_rank, ranks, layout, objective):
    assert_like_one_rank(of_layout(ranks, layout, objective, "sparse"), one_rank["grid"][objective, "sparse"])


@pytest.mark.parametrize("layout, objective", grid(*(layout for layout in TWO_RANKS if layout != "cp2 gathered")))
def test_l11_a_rank_without_tokens_joins_every_collective(one_rank, on_two_ranks, layout, objective):
    assert_sparse_like_one_rank(one_rank, on_two_ranks, layout, objective)


@pytest.mark.parametrize("layout, objective", grid("cp2 gathered"))
def test_l12_a_rank_without_loss_tokens_runs_the_backward_pass_of_gathered_rows(
    one_rank, on_two_ranks, layout, objective
):
    assert_sparse_like_one_rank(one_rank, on_two_ranks, layout, objective)


@pytest.mark.parametrize("layout, objective, objectives", rows_of_grid(*TOKENS_DIVIDED))
def test_the_sparse_batch_leaves_a_rank_without_tokens(on_two_ranks, layout, objectives):
    for objective in objectives:
        owned = [rank["owned"] for rank in of_layout(on_two_ranks, layout, objective, "sparse")]
        assert sorted(owned) == [0, 2]


@pytest.mark.parametrize("layout", TOKENS_DIVIDED)
def test_l9_whitening_is_over_data_and_context_ranks(two_ranks, layout):
    """The trained tokens of all ranks together have mean 0 and variance 1."""
    for objective in ("grpo whitened", "ppo whitened, per token", "reinforce_plus_plus whitened"):
        ranks = of_layout(two_ranks, layout, objective)
        assert all(0 < rank["owned"] < sum(sum(mask) for _, mask, _ in FULL) for rank in ranks)
        columns = columns_of(ranks)
        trained = [
            value
            for index, (_, mask, _) in enumerate(FULL)
            for value, counts in zip(columns["advantages", index], mask, strict=True)
            if counts
        ]
        assert math.fsum(trained) == pytest.approx(0, abs=bound(trained))
        assert statistics.variance(trained) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_l18_every_response_token_has_an_entropy(one_rank, two_ranks, layout):
    columns = columns_of(of_layout(two_ranks, layout, "first step"))
    for index, (_, mask, _) in enumerate(FULL):
        entropy = columns["entropy", index]
        assert len(entropy) == len(mask) and min(entropy) > 0
        assert entropy == pytest.approx(one_rank["grid"]["first step", "full"]["columns"]["entropy", index], rel=1e-5)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_l19_the_log_prob_pass_sees_what_training_sees(two_ranks, layout):
    """The policy has not moved: the difference of old and new log-probs is nothing at all."""
    for rank in of_layout(two_ranks, layout, "first step"):
        assert [of_step(rank["train"], number)["ppo_kl"] for number in range(STEPS["full"])] == [0, 0]


@pytest.mark.parametrize("layout, objective, objectives", rows_of_grid("tp2", *CONTEXT))
def test_l21_gradients_are_not_inflated_by_work_that_is_done_twice(one_rank, on_two_ranks, layout, objectives):
    for objective in objectives:
        for number in range(STEPS["full"]):
            expected = of_step(one_rank["grid"][objective, "full"]["train"], number)["grad_norm"]
            for rank in of_layout(on_two_ranks, layout, objective):
                assert of_step(rank["train"], number)["grad_norm"] == pytest.approx(expected, rel=1e-5), objective


@pytest.mark.parametrize("layout", CONTEXT)
def test_l21_context_parallel_ranks_train_the_weights_of_one(one_rank, two_ranks, layout):
    assert_equal_runs([rank["trained"][layout] for rank in two_ranks], one_rank["trained"])


@pytest.mark.slow
def test_four_ranks_give_what_one_rank_gives(one_and_four_ranks):
    one_rank, four_ranks, layers = one_and_four_ranks
    for layout in four_ranks[0]["grid"]:
        for objective in ALL:
            for batch in STEPS:
                try:
                    expected = one_rank["grid"][objective, batch]
                    assert_like_one_rank(of_layout(four_ranks, layout, objective, batch), expected, layers)
                except AssertionError as error:
                    raise AssertionError(f"{layout}, {objective}, {batch}: {error}") from error


@pytest.mark.slow
def test_m5_every_rank_of_a_mixture_logs_the_numbers_of_one_rank(one_and_four_ranks):
    one_rank, four_ranks, _ = one_and_four_ranks
    for layout in four_ranks[0]["grid"]:
        assert_same_rollout_metrics(one_rank, four_ranks, layout, OBJECTIVES)
