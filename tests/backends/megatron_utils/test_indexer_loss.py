"""The loss that trains indexers: its value and gradients by plain formulas, what it leaves alone, and every layout."""

import math

import numpy as np
import pytest
import torch

from tests.support.models.grpo_batch import TRAINED_TOKENS
from tests.support.models.tiny_model import write_predicting, write_tiny_latent
from tests.support.oracles.rounding import assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps
from tests.support.processes.resumed_run import ResumableRun, resumable_args, resumed

HEADS, WIDTH, ROTATED, COUNT = 4, 16, 8, 4
HIDDEN, LATENT, ATTENDING, SCALE = 12, 10, 3, 0.3
LENGTHS, PADDING = (9, 3, 1, 14), 5
ROWS = sum(LENGTHS) + PADDING


def loss_worker(is_sparse, elements):
    """The loss of a stream with padding and its gradients, in blocks of about `elements` pairs of row and key; what the rows
    chose; and the weights and inputs that the loss was made of."""
    from types import SimpleNamespace
    from unittest import mock

    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import indexer_loss
    from slime.training.packed_stream import pack_stream
    from slime_plugins.models.glm5.glm5 import Indexer

    config = SimpleNamespace(
        dsa_indexer_n_heads=HEADS, dsa_indexer_head_dim=WIDTH, dsa_indexer_topk=COUNT, q_lora_rank=LATENT, hidden_size=HIDDEN,
        params_dtype=torch.float32, sequence_parallel=False, dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=is_sparse,
    )  # fmt: skip
    indexer, generator = Indexer(config, rotates_pairs=False), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = [
        torch.randn(ROWS, *shape, generator=generator)
        for shape in ((HIDDEN,), (LATENT,), (ATTENDING, WIDTH), (ATTENDING, WIDTH))
    ]
    hidden, latent, query, key = inputs
    stream = pack_stream([torch.zeros(length, dtype=torch.int64) for length in LENGTHS], [0] * len(LENGTHS), ROWS)
    angles = stream.position_ids[:, None] * 10.0 ** -torch.arange(ROTATED // 2)
    vectors = indexer(hidden, latent, torch.cat([angles, angles], -1)[:, None, None], 1.0, stream)
    packed = SimpleNamespace(stream=stream, chosen=indexer.choose(vectors, stream))
    loss = indexer_loss.IndexerLoss(config, SCALE)
    loss.scale, loss.divergence = torch.tensor(2.0), torch.tensor(1.0)
    activation = torch.ones(3, requires_grad=True)
    group = SimpleNamespace(size=lambda: 1)
    ours = indexer_loss.parallel_state
    with (
        mock.patch.object(indexer_loss, "_SCORES", elements),
        mock.patch.object(ours, "get_tensor_model_parallel_group", lambda: group),
        mock.patch.object(indexer_loss, "attention_to_keys", wraps=indexer_loss.attention_to_keys) as attended,
    ):
        given = loss(activation, vectors, query, key, packed)
    (given * torch.arange(3)).sum().backward()
    return SimpleNamespace(
        divergence=loss.divergence, activation=given.detach(), of_activation=activation.grad, chosen=packed.chosen,
        state={name: parameter.detach() for name, parameter in indexer.named_parameters()}, inputs=inputs,
        gradients={name: parameter.grad for name, parameter in indexer.named_parameters()}, blocks=attended.call_count,
    )  # fmt: skip


def plain_loss(state, inputs, chosen):
    """Σ_t KL over the rows of the samples, in float64, one row after the other. With `chosen` over the chosen keys alone."""
    hidden, latent, query, key = (tensor.double() for tensor in inputs)

    def rotate(vector, position):
        plain, first, second = vector.split([WIDTH - ROTATED, ROTATED // 2, ROTATED // 2])
        angles = position * 10.0 ** -torch.arange(ROTATED // 2).double()
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([plain, first * cos - second * sin, second * cos + first * sin])

    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in LENGTHS:
        keys = []
        for position in range(length):
            vector = state["wk.weight"] @ hidden[start + position]
            vector = (vector - vector.mean()) / torch.sqrt(vector.var(correction=0) + 1e-6)
            keys.append(rotate(vector * state["k_norm.weight"] + state["k_norm.bias"], position))
        for row in range(length):
            at = start + row
            seen = list(range(row + 1)) if chosen is None else sorted(set(chosen[at].tolist()) - {-1})
            target = torch.zeros(len(seen), dtype=torch.float64)
            for head in range(ATTENDING):
                products = [query[at, head] @ key[start + place, head] * SCALE for place in seen]
                target = target + torch.stack(products).softmax(0)
            target = target / target.sum()
            queries = (state["wq_b.weight"] @ latent[at]).unflatten(0, (HEADS, WIDTH))
            weights = state["weights_proj.weight"] @ hidden[at] / math.sqrt(HEADS * WIDTH)
            scores = [
                sum(weights[head] * torch.relu(rotate(queries[head], row) @ keys[place]) for head in range(HEADS))
                for place in seen
            ]
            total = total + (target * (target / torch.stack(scores).softmax(0)).log()).sum()
        start += length
    return total


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(("elements", "blocks"), [(42, 11), (10**6, 5)])
def test_the_loss_and_its_gradients_are_those_of_plain_formulas(is_sparse, elements, blocks):
    ((found),) = run_distributed(loss_worker, 1, (is_sparse, elements))
    assert found.blocks == blocks
    assert found.activation.equal(torch.ones(3)) and found.of_activation.equal(torch.arange(3.0))
    state = {name: tensor.double().requires_grad_() for name, tensor in found.state.items()}
    expected = plain_loss(state, found.inputs, found.chosen if is_sparse else None)
    # What was there is added to.
    assert float(found.divergence) == pytest.approx(1 + expected.item(), rel=1e-6)
    expected.backward()
    assert state.keys() == found.gradients.keys()
    for name, tensor in state.items():
        # Twice, which is the scale of this step.
        torch.testing.assert_close(found.gradients[name].double(), 2 * tensor.grad, rtol=1e-5, atol=2e-5)
        assert tensor.grad.abs().max() > 1e-2, name


LEARNING = {"dsa_indexer_loss_coeff": 0.5}
SPARSE = {**LEARNING, "dsa_indexer_use_sparse_loss": True}
OWNERS = ["full", "shared", "full", "shared"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """With experts in all layers but the first, in none, in all; and with a layer for multi-token prediction."""
    root = tmp_path_factory.mktemp("models")
    options = {
        "layers": 4, "n_group": 1, "topk_group": 1, "index_topk": 5, "index_n_heads": 8, "index_head_dim": 16,
        "indexer_types": OWNERS, "vocab_size": 128,
    }  # fmt: skip
    write_tiny_latent(root / "experts", model_type="glm_moe_dsa", **options)
    write_tiny_latent(root / "dense", model_type="glm_moe_dsa", **options, first_k_dense_replace=4)
    write_tiny_latent(root / "experts everywhere", model_type="glm_moe_dsa", **options, first_k_dense_replace=0)
    of_layers = {"model_type": "glm_moe_dsa", "indexer_types": ["full", "shared", "full"]}
    write_predicting(root / "predicting", write_tiny_latent, **options | of_layers)
    return root


def gradients_worker(cases):
    """By case: metrics and log-probs of a step, and the gradients of all parameters that are trained."""
    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from tests.support.processes.layout_steps import LayoutRun

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        if name == "scaled":
            run.optimizer.scale_loss = lambda loss: 4 * loss
        metrics = run.step()
        named = global_named_parameters(run.model[0])
        gradients = {name: parameter.main_grad.clone() for name, parameter in named if parameter.requires_grad}
        found[name] = metrics, gradients
    return found


def test_only_indexers_learn_from_the_loss_and_from_nothing_else(models):
    cases = {
        "none": {},
        "zero": {"dsa_indexer_loss_coeff": 0.0},
        "half": LEARNING,
        "one": {"dsa_indexer_loss_coeff": 1.0},
        "scaled": LEARNING,
    }
    # Gradients are clipped by the norm of all of them, those of indexers too.
    args = {name: layout_args(models / "dense", **flags, clip_grad=0.0) for name, flags in cases.items()}
    # Other advantages and coefficients give the rest of the model other gradients.
    args["other objective"] = layout_args(models / "dense", **LEARNING, clip_grad=0.0, entropy_coef=0.5)
    (found,) = run_distributed(gradients_worker, 1, (args,))
    plain = found["none"][1]
    assert not any(".indexer." in name for name in plain)
    assert found["zero"][0] == found["none"][0] and "indexer_loss" not in found["none"][0]
    assert found["zero"][1].keys() == plain.keys()
    indexers = {name for name in found["half"][1] if ".indexer." in name}
    assert found["half"][1].keys() - indexers == plain.keys() and len(indexers) == 10
    for name, gradient in plain.items():
        assert all(gradient.equal(found[case][1][name]) for case in ("zero", "half", "one")), name
    assert any(not gradient.equal(found["other objective"][1][name]) for name, gradient in plain.items())
    for name in indexers:
        gradient = found["half"][1][name]
        assert gradient.abs().max() > 0 and gradient.equal(found["other objective"][1][name]), name
        assert found["one"][1][name].equal(2 * gradient), name
    for name, gradient in found["half"][1].items():
        assert found["scaled"][1][name].equal(4 * gradient), name
    # Without its coefficient, and without the scale.
    assert found["scaled"][0]["indexer_loss"] == found["half"][0]["indexer_loss"]
    assert found["half"][0]["indexer_loss"] == found["one"][0]["indexer_loss"] > 0
    assert found["half"][0]["loss"] == found["none"][0]["loss"]
    assert found["half"][0]["grad_norm"] > found["none"][0]["grad_norm"]


PREDICTING = {"mtp_num_layers": 1, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3}


def test_the_indexer_of_a_prediction_layer_learns_if_the_layer_does(models):
    cases = {
        "without": {**LEARNING},
        "still": {**LEARNING, **PREDICTING, "enable_mtp_training": False},
        "no loss": PREDICTING,
        "half": {**LEARNING, **PREDICTING},
        "one": {**PREDICTING, "dsa_indexer_loss_coeff": 1.0},
    }
    args = {name: layout_args(models / "predicting", **flags, clip_grad=0.0) for name, flags in cases.items()}
    (found,) = run_distributed(gradients_worker, 1, (args,))
    metrics, gradients = ({name: of_case[index] for name, of_case in found.items()} for index in range(2))
    # Of two decoder layers one has an indexer. A layer that does not run is not in the mean.
    assert metrics["still"]["indexer_loss"] == metrics["without"]["indexer_loss"] > 0
    assert metrics["half"]["indexer_loss"] == metrics["one"]["indexer_loss"] != metrics["without"]["indexer_loss"]
    assert gradients["still"].keys() == gradients["without"].keys()
    indexers = {name for name in gradients["half"] if ".indexer." in name}
    predicting = {name for name in indexers if name.startswith("mtp.layers.0.")}
    assert (len(indexers), len(predicting)) == (10, 5) and gradients["half"].keys() - indexers == gradients[
        "no loss"
    ].keys()
    for name, gradient in gradients["half"].items():
        assert gradient.abs().max() > 0, name
        assert gradients["one"][name].equal(2 * gradient if name in indexers else gradient), name
    for name, gradient in gradients["no loss"].items():
        assert gradient.equal(gradients["half"][name]), name


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
ONE_RANK = {
    "each alone": {"use_dynamic_batch_size": False, "micro_batch_size": 1},
    "one stream": {"use_dynamic_batch_size": False, "micro_batch_size": 9},
    "recomputed": RECOMPUTED,
    "recomputed attention": {**SELECTIVE, "recompute_modules": ["core_attn", "mla_up_proj"]},
}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
TWO_RANKS = {
    "data": {"data_parallel_size": 2},
    "tensor": TENSOR,
    "recomputed tensor": {**TENSOR, **RECOMPUTED},
    "pipeline": PIPELINE,
    "recomputed pipeline": {**PIPELINE, **RECOMPUTED},
    "zigzag": {**CONTEXT, "allgather_cp": False},
    "gathered": {**CONTEXT, "allgather_cp": True},
    "experts": {"data_parallel_size": 2, "expert_model_parallel_size": 2},
}
FOUR_RANKS = {
    "tensor x pipeline": {**TENSOR, **PIPELINE},
    "tensor x zigzag": {**TENSOR, **CONTEXT, "allgather_cp": False},
    "recomputed tensor x gathered": {**TENSOR, **CONTEXT, **RECOMPUTED, "allgather_cp": True},
    "data x pipeline": {**PIPELINE, "data_parallel_size": 2},
}
LOSSES = {"dense loss": LEARNING, "sparse loss": SPARSE}
# Not with experts.
WHOLE_ROWS = {"tensor, whole rows": {"tensor_model_parallel_size": 2}}
# And with one that has a prediction layer.
PREDICTIONS = {
    "predicting, tensor": {**PREDICTING, **TENSOR},
    "predicting, zigzag": {**PREDICTING, **TWO_RANKS["zigzag"]},
    "predicting, pipeline": {**PREDICTING, **PIPELINE, "pipeline_model_parallel_layout": "Ett|mL"},
    "predicting, virtual": {
        **PREDICTING, **PIPELINE, "pipeline_model_parallel_layout": "E|tt|m|L", "virtual_pipeline_model_parallel_size": 2,
    },
    "predicting, recomputed": {**PREDICTING, **PIPELINE, **RECOMPUTED, "pipeline_model_parallel_layout": "Ettm|L"},
}  # fmt: skip
ON_TWO_RANKS = TWO_RANKS | WHOLE_ROWS | PREDICTIONS
# The layers behind attention have no part in the loss: in most layouts they are dense, which computes less.
WITH_EXPERTS = ("tensor", "gathered", "experts", *FOUR_RANKS)
MODELS = dict.fromkeys(WITH_EXPERTS, "experts") | dict.fromkeys(PREDICTIONS, "predicting")
# Those of every change.
SHARPEST = (
    ("dense loss", "tensor"), ("dense loss", "zigzag"), ("dense loss", "tensor, whole rows"), ("sparse loss", "gathered"),
    ("sparse loss", "recomputed pipeline"), ("sparse loss", "predicting, recomputed"),
)  # fmt: skip
SHARPEST_OF_ONE = (
    ("dense loss", "each alone"), ("dense loss", "recomputed"), ("sparse loss", "one stream"),
    ("sparse loss", "recomputed attention"),
)  # fmt: skip


def grid(layouts, of_every_change=()):
    """Cases of loss and layout."""
    return [
        pytest.param(loss, layout, marks=() if (loss, layout) in of_every_change else pytest.mark.slow)
        for loss in LOSSES
        for layout in layouts
    ]


def args_in(models, loss, layout, sizes):
    return layout_args(models / MODELS.get(layout, "dense"), **LOSSES[loss], **sizes)


@pytest.fixture(scope="module")
def one_rank(models, selected):
    """By loss and model. Only what is compared with is trained."""
    tests = (
        test_packing_and_recomputed_layers_make_no_difference, test_two_ranks_train_indexers_as_one,
        test_four_ranks_train_indexers_as_one,
    )  # fmt: skip
    compared = {(case["loss"], MODELS.get(case["layout"], "dense")) for test in tests for case in selected(test)}
    compared |= {(loss, "dense") for loss in LOSSES}
    cases = {
        (loss, name): layout_args(models / name, **LOSSES[loss], **(PREDICTING if name == "predicting" else {}))
        for loss, name in sorted(compared)
    }
    return run_distributed(train_steps, 1, (cases,), timeout=300)[0]


def test_indexers_learn(one_rank):
    for loss in LOSSES:
        run = one_rank[loss, "dense"]
        values = [step["indexer_loss"] for step in run["steps"]]
        assert values[0] > values[1] > values[2] > 0
        for name, weight in run["weights"].items():
            if ".indexer." in name:
                assert not np.array_equal(weight, run["loaded"][name]), name
    dense, sparse = (one_rank[loss, "dense"]["steps"][0]["indexer_loss"] for loss in LOSSES)
    assert abs(dense - sparse) > 0.01 * dense


@pytest.fixture(scope="module")
def packed(models, selected):
    return train_selected(models, 1, ONE_RANK, selected(test_packing_and_recomputed_layers_make_no_difference))


@pytest.fixture(scope="module")
def on_two_ranks(models, selected):
    return train_selected(models, 2, ON_TWO_RANKS, selected(test_two_ranks_train_indexers_as_one))


@pytest.fixture(scope="module")
def on_four_ranks(models, selected):
    return train_selected(models, 4, FOUR_RANKS, selected(test_four_ranks_train_indexers_as_one))


def train_selected(models, ranks, layouts, chosen):
    pairs = [(case["loss"], case["layout"]) for case in chosen]
    cases = {(loss, layout): args_in(models, loss, layout, layouts[layout]) for loss, layout in pairs}
    return run_distributed(train_steps, ranks, (cases,), timeout=600)


def assert_trained_like_one(one_rank, found, loss, layout):
    assert_equal_runs([rank[loss, layout] for rank in found], one_rank[loss, MODELS.get(layout, "dense")])


@pytest.mark.parametrize(("loss", "layout"), grid(ONE_RANK, SHARPEST_OF_ONE))
def test_packing_and_recomputed_layers_make_no_difference(one_rank, packed, loss, layout):
    assert_trained_like_one(one_rank, packed, loss, layout)


@pytest.mark.parametrize(("loss", "layout"), grid(ON_TWO_RANKS, SHARPEST))
def test_two_ranks_train_indexers_as_one(one_rank, on_two_ranks, loss, layout):
    assert_trained_like_one(one_rank, on_two_ranks, loss, layout)


@pytest.mark.parametrize(("loss", "layout"), grid(FOUR_RANKS))
def test_four_ranks_train_indexers_as_one(one_rank, on_four_ranks, loss, layout):
    assert_trained_like_one(one_rank, on_four_ranks, loss, layout)


def test_an_indexer_learns_alone_if_all_else_is_frozen(models):
    """As before sparse attention is trained itself: then attention is to all keys, here since no sample has more."""
    flags = {**LEARNING, "only_train_params_name_list": [r"\.indexer\."], "dsa_indexer_topk": 64}
    cases = {
        "plain": layout_args(models / "dense", **flags),
        "recomputed": layout_args(models / "dense", **flags, **RECOMPUTED),
    }
    (found,) = run_distributed(train_steps, 1, (cases,))
    run = found["plain"]
    for name, weight in run["weights"].items():
        assert np.array_equal(weight, run["loaded"][name]) != (".indexer." in name), name
    values = [step["indexer_loss"] for step in run["steps"]]
    assert values[0] > values[1] > values[2] > 0
    assert_equal_runs([found["recomputed"]], run)


def save_and_go_on(runs):
    """By name: the weights at a checkpoint after two steps, those that a third step ends at, and the size of its gradient."""
    return {name: go_on(ResumableRun(args), steps=2, saves=True) for name, args in runs.items()}


def resume_and_go_on(runs):
    return {name: go_on(resumed(args, args.save)) for name, args in runs.items()}


def go_on(run, steps=0, saves=False):
    for _ in range(steps):
        run.prepare()
        run.step()
    if saves:
        run.save()
    loaded = run.weights()
    run.prepare()
    run.step()
    return loaded, run.weights(), run.largest_gradient()


STAGES = {"predicting": {"pipeline_model_parallel_layout": "Ettm|L"}}


@pytest.fixture(scope="module")
def gone_on(models, selected, tmp_path_factory):
    """By model: the arguments, and what runs find that save on one rank and that resume on two."""
    names = [case["name"] for case in selected(test_a_checkpoint_holds_what_indexers_have_learnt_and_their_optimizer)]
    root = tmp_path_factory.mktemp("saved")

    def args_of(name, **layout):
        further = {"lr": 1e-3, "clip_grad": 0.0, **LEARNING, **(PREDICTING if name == "predicting" else {}), **layout}
        return resumable_args(models / name, root / name, **further)

    saving = {name: args_of(name) for name in names}
    (saved,) = run_distributed(save_and_go_on, 1, (saving,))
    resuming = {name: args_of(name, **PIPELINE, **STAGES.get(name, {})) for name in names}
    found = run_distributed(resume_and_go_on, 2, (resuming,))[0]
    return {name: (saving[name], saved[name], found[name]) for name in names}


@pytest.mark.parametrize(
    # In the first and in the last one layers differ, and are stored one by one.
    "name",
    [pytest.param("experts", marks=pytest.mark.slow), "experts everywhere", "predicting"],
)
def test_a_checkpoint_holds_what_indexers_have_learnt_and_their_optimizer(gone_on, name):
    args, (at_checkpoint, after, gradient), (loaded, weights, _) = gone_on[name]
    assert all(np.array_equal(loaded[key], weight) for key, weight in at_checkpoint.items())
    assert_equal_weights(weights, after, bound_of_weights(args, [gradient], TRAINED_TOKENS))
    moved = [abs(after[key] - at_checkpoint[key]).max() for key in after if ".indexer." in key]
    assert len(moved) == 10 and min(moved) > 1e-4
