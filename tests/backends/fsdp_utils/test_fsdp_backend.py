"""The trainer over FSDP: every objective gives on one rank what loops in float64 give, and on two ranks what it gives on one,
whether these have samples of their own or share each sample.

Streams are packed, so a sample that saw its neighbours would not have the log-probs of the loops, which know one sample each.
"""

from unittest import mock

import pytest

from slime.arguments.checkpoints import WeightSource
from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch
from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.plain_grid import PlainGrid, assert_like_loops
from tests.support.oracles.rounding import assert_equal_metrics, assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args, shard
from tests.support.processes.objective_grid import (
    HIDDEN,
    LAYERS,
    OBJECTIVES,
    SHARPEST,
    STEPS,
    VOCABULARY,
    assert_like_one_rank,
    grid_args,
    run_layouts,
)

FSDP = {"train_backend": "fsdp"}
ROLES = ["actor"]
OTHERS = tuple(name for name in OBJECTIVES if name not in SHARPEST)
# One step of warm-up, then down to nothing in four; the decay rises over six steps.
CURVES = {
    "lr_warmup_iters": 1, "lr_decay_style": "linear", "lr_decay_iters": 5, "min_lr": 0.0,
    "start_weight_decay": 0.0, "end_weight_decay": 0.12, "weight_decay_incr_style": "linear", "train_iters": 6,
}  # fmt: skip
GRID = [*SHARPEST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


def run_grid(hf_dir, batches, size, objectives, context=1):
    layouts = {"fsdp": {**FSDP, "data_parallel_size": size, "context_parallel_size": context}}
    return run_layouts(hf_dir, layouts, batches, ROLES, {"fsdp": objectives})["fsdp"]


def worker(hf_dir, other, batches, size, context=1):
    layout = {**FSDP, "data_parallel_size": size, "context_parallel_size": context}
    results = {"grid": run_grid(hf_dir, batches, size, SHARPEST, context)}
    results["states"] = states(grid_args(hf_dir, **layout), other)
    results["made"] = made_logits(grid_args(hf_dir, **layout))
    results["push"] = pushed(grid_args(hf_dir, **layout))
    results["trained"] = trained(layout_args(hf_dir, **layout))
    results["scheduled"] = scheduled(layout_args(hf_dir, **layout, **CURVES))
    return results


def started(args, source):
    from slime.training.backend import make_backend

    backend = make_backend(args)
    backend.place()
    backend.load(source)
    return backend


def log_probs(args, backend):
    """Log-probs of three sequences in one stream, and of each alone."""
    import torch

    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import forward_log_probs

    cp = backend.groups.cp

    sequences = [[5, 9, 7, 3], [1, 2], [8, 8, 4, 11, 2]]

    def data(chosen, indices):
        return RolloutData({
            "tokens": [torch.tensor(s) for s in chosen], "total_lengths": [len(s) for s in chosen],
            "response_lengths": [len(s) - 1 for s in chosen], "micro_batch_indices": indices,
        }, cp)  # fmt: skip

    def of(batches):
        rows = data(sequences, batches)
        found = forward_log_probs(args, backend, rows, with_entropy=False)["log_probs"]
        return [row.tolist() for row in rows.gather(found)]

    return of([[0, 1, 2]]), of([[0], [1], [2]])


def made_logits(args):
    """Rows of logits that a stream of three samples gets, with the shipped losses and with one of the user's."""
    import torch

    from slime.training.rollout_data import RolloutData
    from slime.training.train_step import forward_per_sample

    backend, made = started(args, WeightSource("hf", args.hf_checkpoint)), []
    columns = {"tokens": [torch.arange(4)] * 3, "total_lengths": [4] * 3, "micro_batch_indices": [[0, 1, 2]]}

    def collect(batch, logits):
        made.append(len(logits))
        return {"nothing": [torch.zeros(0)] * 3}

    for responses, loss in (([1, 3, 2], "policy_loss"), ([0] * 3, "policy_loss"), ([1, 3, 2], "custom_loss")):
        args.loss_type = loss
        data = RolloutData({**columns, "response_lengths": responses}, backend.groups.cp)
        forward_per_sample(args, backend, data, collect)
    args.loss_type = "policy_loss"
    return made


def states(args, other):
    """Log-probs of the actor, of a reference in its place, and of the actor again."""
    from slime.training.model_states import REFERENCE, ModelStates

    backend = started(args, WeightSource("hf", other))
    held = ModelStates(backend.live_tensors)
    held.capture(REFERENCE)
    backend.load_weights(WeightSource("hf", args.hf_checkpoint))
    before = log_probs(args, backend)
    with held(REFERENCE):
        during = log_probs(args, backend)
    return {"actor": before, "reference": during, "again": log_probs(args, backend)}


def pushed(args):
    """What a push sends, and what the engines' checkpoint has; and the bytes that were loaded."""
    from slime.weights.hf_reader import StoredTensor

    sizes = []

    class Counted(StoredTensor):
        def __getitem__(self, index):
            sizes.append(super().__getitem__(index).nbytes)
            return super().__getitem__(index)

    with mock.patch("slime.weights.hf_reader.StoredTensor", Counted):
        backend = started(args, WeightSource("hf", args.hf_checkpoint))
    named = {name: tensor.clone().numpy() for name, tensor in backend.stage_tensors()()}
    return {"named": named, "expected": backend.expected_names(), "read": sum(sizes)}


def trained(args):
    """Metrics and weights of two steps that change these, and what the weights may differ by; and what is there before and
    after the optimizer forgets its history."""
    import torch

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import train_one_step

    backend = started(args, WeightSource("hf", args.hf_checkpoint))
    data = shard(args, backend.groups.data_rank, backend.groups.cp)
    data["log_probs"] = data["ref_log_probs"]
    compute_advantages_and_returns(args, data)
    metrics, gradients = [], []
    for _ in range(2):
        metrics.append(train_one_step(args, backend, data, 0, 0))
        entries = torch.cat([p.grad.full_tensor().flatten() for p in backend.model.parameters()])
        gradients.append(float(entries.abs().mean()))

    def state():
        weights = {name: tensor.clone().numpy() for name, tensor in backend.stage_tensors()()}
        return weights, [group["lr"] for group in backend.optimizer.param_groups], len(backend.optimizer.state)

    before = state()
    backend.reset_optimizer()
    bound = bound_of_weights(args, gradients, TRAINED_TOKENS)
    return {"metrics": metrics, "weights": before[0], "bound": bound, "before reset": before, "reset": state()}


def scheduled(args):
    """(learning rates, weight decays) of the parameter groups, before each of three steps."""
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import train_one_step

    backend = started(args, WeightSource("hf", args.hf_checkpoint))
    data = shard(args, backend.groups.data_rank, backend.groups.cp)
    data["log_probs"] = data["ref_log_probs"]
    compute_advantages_and_returns(args, data)
    found = []
    for _ in range(3):
        decays = [group["weight_decay"] for group in backend.optimizer.param_groups]
        metrics = train_one_step(args, backend, data, 0, 0)
        found.append(([metrics["lr-pg_0"], metrics["lr-pg_1"]], decays))
    return found


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, vocab_size=VOCABULARY, layers=LAYERS, hidden=HIDDEN, head_dim=8)
    return str(directory)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    directory = tmp_path_factory.mktemp("other")
    write_tiny_model(directory, vocab_size=VOCABULARY, layers=LAYERS, hidden=HIDDEN, head_dim=8, seed=1)
    return str(directory)


@pytest.fixture(scope="module")
def plain(hf_dir):
    return PlainGrid(hf_dir)


@pytest.fixture(scope="module")
def one_rank(hf_dir, other, plain):
    return run_distributed(worker, 1, (hf_dir, other, plain.batches, 1), timeout=300)[0]


@pytest.fixture(scope="module")
def two_ranks(hf_dir, other, plain):
    return run_distributed(worker, 2, (hf_dir, other, plain.batches, 2), timeout=300)


@pytest.fixture(scope="module")
def sharing_ranks(hf_dir, other, plain):
    """Two ranks that have parts of every sample."""
    return run_distributed(worker, 2, (hf_dir, other, plain.batches, 1, 2), timeout=300)


@pytest.fixture(scope="module")
def four_ranks(hf_dir, plain):
    """Two pairs of ranks, each of which shares its samples."""
    return run_distributed(run_grid, 4, (hf_dir, plain.batches, 2, (*SHARPEST, *OTHERS), 2), timeout=600)


@pytest.fixture(scope="module")
def others_on_one_rank(hf_dir, plain):
    return run_distributed(run_grid, 1, (hf_dir, plain.batches, 1, OTHERS), timeout=300)[0]


@pytest.fixture(scope="module")
def others_on_sharing_ranks(hf_dir, plain):
    return run_distributed(run_grid, 2, (hf_dir, plain.batches, 1, OTHERS, 2), timeout=300)


@pytest.fixture(scope="module")
def others_on_two_ranks(hf_dir, plain):
    return run_distributed(run_grid, 2, (hf_dir, plain.batches, 2, OTHERS), timeout=300)


@pytest.fixture
def grid_of_one(request, objective):
    if objective in SHARPEST:
        return request.getfixturevalue("one_rank")["grid"]
    return request.getfixturevalue("others_on_one_rank")


@pytest.fixture
def grid_of_two(request, objective):
    if objective in SHARPEST:
        return [rank["grid"] for rank in request.getfixturevalue("two_ranks")]
    return request.getfixturevalue("others_on_two_ranks")


@pytest.fixture
def grid_of_sharing_ranks(request, objective):
    if objective in SHARPEST:
        return [rank["grid"] for rank in request.getfixturevalue("sharing_ranks")]
    return request.getfixturevalue("others_on_sharing_ranks")


@pytest.mark.parametrize("objective", [case for case in GRID if case != "top-p"])
def test_one_rank_gives_what_loops_give(hf_dir, plain, grid_of_one, objective):
    assert_like_loops(hf_dir, plain, objective, grid_of_one)


@pytest.mark.parametrize("objective", GRID)
def test_two_ranks_give_what_one_rank_gives(grid_of_one, grid_of_two, objective):
    for batch in STEPS:
        ranks = [rank[objective, batch] for rank in grid_of_two]
        assert_like_one_rank(ranks, grid_of_one[objective, batch])


@pytest.mark.parametrize("objective", GRID)
def test_ranks_that_share_samples_give_what_one_rank_gives(grid_of_one, grid_of_sharing_ranks, objective):
    for batch in STEPS:
        ranks = [rank[objective, batch] for rank in grid_of_sharing_ranks]
        assert_like_one_rank(ranks, grid_of_one[objective, batch])


@pytest.mark.slow
@pytest.mark.parametrize("objective", (*SHARPEST, *OTHERS))
def test_pairs_of_ranks_give_what_one_rank_gives(grid_of_one, four_ranks, objective):
    for batch in STEPS:
        assert_like_one_rank([rank[objective, batch] for rank in four_ranks], grid_of_one[objective, batch])


@pytest.mark.parametrize(
    "objective, objectives",
    [
        pytest.param(SHARPEST[0], SHARPEST, id="sharpest"),
        pytest.param(OTHERS[0], OTHERS, id="others", marks=pytest.mark.slow),
    ],
)
def test_every_rank_logs_the_numbers_of_one_rank(grid_of_one, grid_of_two, objectives):
    for objective in objectives:
        for batch in STEPS:
            expected = grid_of_one[objective, batch]
            for rank in grid_of_two:
                found = rank[objective, batch]["rollout"]
                assert_equal_metrics(found, expected["rollout"], expected["bounds"]["rollout"])


def test_two_ranks_train_the_weights_of_one(hf_dir, one_rank, two_ranks, sharing_ranks):
    import numpy as np
    from safetensors.numpy import load_file

    expected = one_rank["trained"]
    for rank in (*two_ranks, *sharing_ranks):
        for step, of_one in zip(rank["trained"]["metrics"], expected["metrics"], strict=True):
            assert_equal_metrics(step, of_one, bounds_of_batch(padded_vocab_size=VOCABULARY))
        assert_equal_weights(rank["trained"]["weights"], expected["weights"], expected["bound"])
    start = load_file(f"{hf_dir}/model.safetensors")
    moved = {name: float(np.abs(weight - start[name]).max()) for name, weight in expected["weights"].items()}
    assert min(moved.values()) > 1e-4


def test_an_optimizer_that_forgets_its_history_leaves_weights_and_learning_rate(one_rank, two_ranks):
    import numpy as np

    for rank in (one_rank, *two_ranks):
        (weights, rates, states), (kept, kept_rates, left) = rank["trained"]["before reset"], rank["trained"]["reset"]
        assert states > 10 and left == 0 and kept_rates == rates and rates[0] > 0
        assert kept.keys() == weights.keys() and all(np.array_equal(kept[name], weights[name]) for name in weights)


def test_learning_rate_and_weight_decay_follow_their_curves(one_rank, two_ranks):
    for rank in (one_rank, *two_ranks):
        rates, decays = zip(*rank["scheduled"], strict=True)
        assert [rate for rate, _ in rates] == pytest.approx([0.0, 1e-3, 0.75e-3])
        assert all(one == other for one, other in rates)
        # Biases and norms have none.
        assert [decay for decay, _ in decays] == pytest.approx([0.0, 0.02, 0.04]) and not any(
            last for _, last in decays
        )


def test_states_take_turns(one_rank, two_ranks, sharing_ranks, plain, hf_dir):
    for rank in (one_rank, *two_ranks, *sharing_ranks):
        states = rank["states"]
        assert states["again"] == states["actor"]
        for actor, reference in zip(states["actor"][0], states["reference"][0], strict=True):
            assert all(abs(a - b) > 1e-3 for a, b in zip(actor, reference, strict=True))
    for name in ("actor", "reference"):
        for rank in (two_ranks[1], *sharing_ranks):
            for packed, of_one in zip(rank["states"][name][0], one_rank["states"][name][0], strict=True):
                assert packed == pytest.approx(of_one, rel=1e-5)


def test_samples_of_a_stream_do_not_see_each_other(one_rank, sharing_ranks):
    for rank in (one_rank, *sharing_ranks):
        packed, apart = rank["states"]["actor"]
        for row, alone in zip(packed, apart, strict=True):
            assert row == pytest.approx(alone, rel=1e-5)


def test_logits_are_made_of_rows_that_predict_a_response_alone(one_rank):
    some, of_none, of_own_loss = one_rank["made"]
    assert (some, of_none) == (6, 1) and of_own_loss >= 12


def test_a_model_that_makes_all_logits_is_not_asked_for_some():
    """As code of a checkpoint's own, written before transformers' models had the word for it."""
    from types import SimpleNamespace

    import torch

    from slime.backends.fsdp_utils.backend import FSDPBackend
    from slime.training.rollout_data import RolloutData
    from tests.support.models.args import default_args

    class Model:
        def forward(self, input_ids, position_ids, attention_mask, use_cache):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 3))

        __call__ = forward

    backend = FSDPBackend(default_args())
    backend.model, backend._attends_to_streams = Model(), False
    data = RolloutData({"tokens": [torch.arange(4)], "response_lengths": [2]})
    assert backend._logits(data.micro_batch([0], pad_multiple=6)).shape == (6, 3)


def test_buffers_and_a_tied_head_of_the_checkpoint_are_not_waited_for(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    from slime.backends.fsdp_utils.backend import FSDPBackend
    from tests.support.models.args import default_args

    write_tiny_model(tmp_path, tied=True)
    stored = load_file(tmp_path / "model.safetensors")
    further = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
    save_file({**stored, **{name: torch.ones(2) for name in further}}, tmp_path / "model.safetensors")
    expected = FSDPBackend(default_args(hf_checkpoint=str(tmp_path))).expected_names()
    assert expected == stored.keys() - {"lm_head.weight"}


def test_a_push_names_the_tensors_of_the_checkpoint(hf_dir, one_rank, two_ranks, sharing_ranks):
    import numpy as np
    from safetensors.numpy import load_file

    stored = load_file(f"{hf_dir}/model.safetensors")
    for rank in (one_rank, *two_ranks, *sharing_ranks):
        named = rank["push"]["named"]
        assert named.keys() == stored.keys() == rank["push"]["expected"]
        assert all(np.array_equal(named[name], tensor) for name, tensor in stored.items())
    # Of two ranks each reads its own rows; those of an odd vocabulary are one more on the first.
    total = sum(tensor.nbytes for tensor in stored.values())
    assert one_rank["push"]["read"] == sum(rank["push"]["read"] for rank in two_ranks) == total
    assert all(0.45 * total < rank["push"]["read"] < 0.55 * total for rank in two_ranks)
