"""Multi-token prediction: against a float64 implementation per sequence, alone in learning, and the same in every layout."""

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils import prediction_layers
from slime.backends.megatron_utils.prediction_layers import (
    counted_predictions,
    counted_rows,
    predict,
    prediction_loss,
    tokens_ahead,
)
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.packed_stream import pack_stream
from slime.training.rollout_data import RolloutData
from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch, make_samples
from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.plain_prediction import prediction_log_probs
from tests.support.oracles.rounding import assert_equal_gradients, assert_equal_metrics
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args
from tests.support.processes.resumed_run import lines_of_slime

FACTOR = 0.3
TRAINED = {
    "mtp_num_layers": 2, "enable_mtp_training": True, "mtp_loss_scaling_factor": FACTOR, "use_distributed_optimizer": False,
}  # fmt: skip
DISTRIBUTED = {**TRAINED, "use_distributed_optimizer": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
BEFORE = {**PIPELINE, "pipeline_model_parallel_layout": "Ettttmm|L"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
MTP = ("mtp_1_loss", "mtp_2_loss", "mtp_loss")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Per name (directory, transformers model)."""
    root = tmp_path_factory.mktemp("models")
    built = {tied: write_tiny_model(root / tied, tied=tied == "tied", layers=4) for tied in ("tied", "untied")}
    return {name: (str(root / name), model) for name, model in built.items()}


def _one_step(args):
    """Metrics of a step, and by global name weights before it, gradients (of the whole model over tensor-parallel ranks as
    sums of squares) and weights after it."""
    import torch.distributed as dist

    run = LayoutRun(args)
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.parameter_names import global_named_parameters

    named = [pair for chunk in run.model for pair in global_named_parameters(chunk)]
    with torch.no_grad():
        for name, parameter in named:
            if name.startswith("mtp."):
                # Attention that looks somewhere, and norms away from 1.
                parameter.mul_(8) if parameter.ndim == 2 else parameter.add_(torch.arange(len(parameter)).sin() / 5)
    run.optimizer.reload_model_params()
    before = {name: parameter.detach().clone() for name, parameter in named}
    run.prepare()
    metrics = run.step()
    gradients = {name: p.main_grad.clone() for name, p in named if getattr(p, "main_grad", None) is not None}
    squares = {}
    if not args.use_distributed_optimizer:
        for name, parameter in named:
            if name in gradients:
                squares[name] = gradients[name].double().pow(2).sum()
                if getattr(parameter, "tensor_model_parallel", False):
                    dist.all_reduce(squares[name], group=parallel_state.get_tensor_model_parallel_group())
    after = {name: parameter.detach().clone() for name, parameter in named}
    exported = sorted(run.weights())
    return {
        "metrics": metrics, "before": before, "gradients": gradients, "after": after, "exported": exported,
        "squares": {name: float(value) for name, value in squares.items()},
    }  # fmt: skip


def _steps(cases):
    return {name: _one_step(args) for name, args in cases.items()}


@pytest.fixture(scope="module")
def one_rank(models):
    tied, untied = models["tied"][0], models["untied"][0]
    cases = {
        "tied": layout_args(tied, **TRAINED),
        "untied": layout_args(untied, **TRAINED),
        "without": layout_args(untied, use_distributed_optimizer=False),
        "without, tied": layout_args(tied, use_distributed_optimizer=False),
        "frozen": layout_args(untied, **{**TRAINED, "enable_mtp_training": False}),
        "one stream": layout_args(untied, **TRAINED, max_tokens_per_gpu=1000),
        "samples alone": layout_args(untied, **TRAINED, use_dynamic_batch_size=False, micro_batch_size=1),
        "token": layout_args(untied, **TRAINED, calculate_per_token_loss=True),
        "hotter": layout_args(untied, **TRAINED, rollout_temperature=3.0),
        "recomputed": layout_args(
            untied, **TRAINED, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
        ),
    }
    return run_distributed(_steps, 1, (cases,), timeout=240)[0]


def _plain(model, args, weights):
    """Loss of each layer, and gradients of the term that the objective gets."""
    model = model.double()
    weights = {name: w.double().requires_grad_() for name, w in weights.items() if name.startswith("mtp.")}
    sums, counts = [0.0, 0.0], [0, 0]
    for sample in make_samples(args.vocab_size):
        prompt = len(sample.tokens) - sample.response_length
        mask = [0] * prompt + list(sample.loss_mask or [1] * sample.response_length)
        with torch.no_grad():
            hidden = model.model(torch.tensor([sample.tokens])).last_hidden_state[0]
        embedding, output = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
        for i, by_token in enumerate(
            prediction_log_probs(weights, args, embedding, output, hidden, list(sample.tokens))
        ):
            for token, log_prob in by_token.items():
                if mask[token]:
                    sums[i], counts[i] = sums[i] - log_prob, counts[i] + 1
    losses = [total / count for total, count in zip(sums, counts, strict=True)]
    (FACTOR * sum(losses) / len(losses)).backward()
    return [loss.item() for loss in losses], {name: weight.grad for name, weight in weights.items()}, counts


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_losses_and_gradients_are_those_of_one_sequence_after_the_other_in_float64(models, one_rank, name):
    directory, model = models[name]
    case = one_rank[name]
    losses, gradients, counts = _plain(model, layout_args(directory, **TRAINED), case["before"])
    # Of 33 trained tokens the second layer cannot predict those at position 2: it would have to stand before the first.
    assert counts == [33, 30]
    found = [case["metrics"][metric] for metric in MTP]
    assert found == pytest.approx([*losses, sum(losses) / 2], rel=1e-5)
    assert {n for n in case["gradients"] if n.startswith("mtp.")} == set(gradients)
    assert all(expected.abs().max() > 0 for expected in gradients.values())
    assert_equal_gradients(
        {parameter: case["gradients"][parameter] for parameter in gradients}, gradients, TRAINED_TOKENS
    )


@pytest.mark.parametrize("name, without", [("tied", "without, tied"), ("untied", "without")])
def test_nothing_but_the_prediction_layers_learns_from_their_loss(one_rank, name, without):
    trained, plain = one_rank[name], one_rank[without]
    assert set(trained["gradients"]) - set(plain["gradients"]) == {n for n in trained["before"] if n.startswith("mtp.")}
    for parameter, gradient in plain["gradients"].items():
        assert torch.equal(trained["gradients"][parameter], gradient), parameter
        assert torch.equal(trained["after"][parameter], plain["after"][parameter]), parameter
    assert trained["metrics"]["loss"] == plain["metrics"]["loss"]
    assert not any(metric in plain["metrics"] for metric in MTP)


def test_layers_without_training_stay_as_they_are(one_rank):
    frozen, plain = one_rank["frozen"], one_rank["without"]
    layers = [name for name in frozen["before"] if name.startswith("mtp.")]
    assert layers and not any(name in frozen["gradients"] for name in layers)
    assert all(torch.equal(frozen["before"][name], frozen["after"][name]) for name in layers)
    assert frozen["metrics"] == plain["metrics"]


def test_exports_leave_the_layers_out(one_rank):
    assert one_rank["untied"]["exported"] == one_rank["without"]["exported"]


@pytest.mark.parametrize("case", ["one stream", "samples alone", "token", "hotter", "recomputed"])
def test_neither_packing_nor_reduction_nor_temperature_changes_what_the_layers_learn(one_rank, case):
    expected = one_rank["untied"]
    for metric in MTP:
        assert one_rank[case]["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-6)
    for name, gradient in expected["gradients"].items():
        if name.startswith("mtp."):
            assert_equal_gradients({name: one_rank[case]["gradients"][name]}, {name: gradient}, TRAINED_TOKENS)


TWO_RANKS = {
    "dp": ("untied", {"data_parallel_size": 2, **TRAINED, "overlap_grad_reduce": True, "ddp_bucket_size": 2000}),
    "dp, distributed": ("untied", {"data_parallel_size": 2, **DISTRIBUTED}),
    "tp": ("tied", {**TENSOR, **TRAINED}),
    "tp, sequence": ("untied", {**TENSOR, **TRAINED, "sequence_parallel": True}),
    "pp, untied": ("untied", {**PIPELINE, **TRAINED}),
    "pp, tied": ("tied", {**PIPELINE, **DISTRIBUTED}),
    "pp, before the last stage": ("untied", {**BEFORE, **TRAINED}),
    "pp, tied, before the last stage": ("tied", {**BEFORE, **DISTRIBUTED, **RECOMPUTED}),
    "virtual": ("untied", {**PIPELINE, **TRAINED, "virtual_pipeline_model_parallel_size": 2}),
    "cp": ("untied", {**CONTEXT, **TRAINED}),
    "cp, all-gather": ("untied", {**CONTEXT, **TRAINED, "allgather_cp": True}),
}


RESUMING = {
    **DISTRIBUTED, "save_hf": None, "no_save_optim": False, "no_load_optim": False, "no_load_rng": False, "keep_last": None,
    "world_size": 2,
}  # fmt: skip


def _two_ranks(cases, *runs):
    return {**_steps(cases), "resumed": _resume(*runs)}


def _resume(saving, layouts, *refused):
    """Metrics of the step after a checkpoint: of the run that saved it, and of those that load it in other layouts. Then what
    loading it says with arguments that it does not fit."""
    import torch.distributed as dist

    run = LayoutRun(saving)
    from slime.arguments.checkpoints import WeightSource
    from slime.backends.megatron_utils.checkpoint import begin_checkpoint, load_checkpoint, publish_checkpoint
    from slime.utils.errors import UserError

    run.prepare()
    run.step()
    begin_checkpoint(saving, 0, run.model, run.optimizer, run.scheduler).finish()
    if dist.get_rank() == 0:
        publish_checkpoint(saving, 0)
    dist.barrier()
    run.prepare()
    expected = [run.step(), run.step()]
    source = WeightSource("megatron", saving.save, resume=True)
    found = []
    for loading in layouts:
        run = LayoutRun(loading, loads=False)
        load_checkpoint(loading, source, run.model, run.optimizer, run.scheduler)
        run.prepare()
        found.append([run.step(), run.step()])
    messages = []
    for args in refused:
        run = LayoutRun(args, loads=False)
        with pytest.raises(UserError) as refusal:
            load_checkpoint(args, source, run.model, run.optimizer, run.scheduler)
        messages.append(str(refusal.value))
    fewer = SimpleNamespace(**{**vars(saving), "mtp_num_layers": 1, "no_load_optim": True})
    run = LayoutRun(fewer, loads=False)
    with lines_of_slime() as lines:
        load_checkpoint(fewer, source, run.model, run.optimizer, run.scheduler)
    messages.append("\n".join(lines))
    return expected, found, messages


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory):
    cases = {case: layout_args(models[name][0], **layout) for case, (name, layout) in TWO_RANKS.items()}
    options = {**RESUMING, "save": str(tmp_path_factory.mktemp("save"))}
    saving, loading, before, *refused = [
        layout_args(models["untied"][0], **{**options, **changes})
        for changes in (
            TENSOR, PIPELINE, BEFORE, {**TENSOR, "enable_mtp_training": False}, {**TENSOR, "mtp_num_layers": 3}
        )
    ]  # fmt: skip
    return run_distributed(_two_ranks, 2, (cases, saving, [loading, before], *refused), timeout=240)


def test_checkpoints_hold_the_layers_and_their_optimizer_state_for_every_layout(two_ranks):
    for rank in two_ranks:
        expected, loaded, (frozen, deeper, fewer) = rank["resumed"]
        for found in loaded:
            for step, of_saving in zip(found, expected, strict=True):
                assert_equal_metrics(step, of_saving, bounds_of_batch())
        assert expected[1]["mtp_loss"] < expected[0]["mtp_loss"]
        assert "no frozen parameters, this run has --mtp-num-layers without --enable-mtp-training" in frozen
        assert "has fewer layers for multi-token prediction than --mtp-num-layers 3: give the number that" in deeper
    (told, _) = (rank["resumed"][-1][-1] for rank in two_ranks)
    assert "has 2 layers for multi-token prediction, and --mtp-num-layers 1 leaves some out" in told


@pytest.mark.parametrize("case", TWO_RANKS)
def test_every_layout_computes_what_one_rank_does(one_rank, two_ranks, case):
    assert_computed_like_one([rank[case] for rank in two_ranks], one_rank[TWO_RANKS[case][0]])


def assert_computed_like_one(ranks, expected):
    seen = set()
    for found in ranks:
        assert found["exported"] == expected["exported"]
        assert_equal_metrics(found["metrics"], expected["metrics"], bounds_of_batch())
        for name, square in found["squares"].items():
            # Its root is the norm of a gradient.
            assert square == pytest.approx(expected["squares"][name], rel=2e-5), name
        seen |= {name for name in found["before"] if name.startswith("mtp.")}
    assert seen == {name for name in expected["before"] if name.startswith("mtp.")}
    assert np.isfinite(expected["metrics"]["grad_norm"])


def _stages(stages, layout, **options):
    return {"pipeline_model_parallel_size": stages, "pipeline_model_parallel_layout": layout, **options}


# The stage with the layers is neither the first one nor the last.
BETWEEN = {
    3: {
        "untied": ("untied", {**_stages(3, "Ett|ttmm|L"), **TRAINED}),
        "tied, alone": ("tied", {**_stages(3, "Etttt|mm|L"), **DISTRIBUTED}),
        "virtual": ("untied", {**_stages(3, "E|t|t|tt|mm|L", virtual_pipeline_model_parallel_size=2), **TRAINED}),
        "not trained": ("untied", {**_stages(3, "Ett|ttmm|L"), **TRAINED, "enable_mtp_training": False}),
    },
    4: {
        "tensor": ("untied", {**_stages(2, "Ettttmm|L"), **TENSOR, **TRAINED, "sequence_parallel": True}),
        "context": ("tied", {**_stages(2, "Ettttmm|L"), **CONTEXT, **TRAINED}),
        "data": ("untied", {**_stages(2, "Ettttmm|L"), **DISTRIBUTED, "data_parallel_size": 2}),
        "passed on": ("untied", {**_stages(4, "Ett|ttmm||L"), **TRAINED}),
        "virtual": ("tied", {**_stages(2, "Et|t|ttmm|L", virtual_pipeline_model_parallel_size=2), **TENSOR, **TRAINED}),
    },
}


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_before_the_last_stage_compute_what_they_do_on_it(models, one_rank, ranks):
    cases = {name: layout_args(models[model][0], **layout) for name, (model, layout) in BETWEEN[ranks].items()}
    found = run_distributed(_steps, ranks, (cases,), timeout=400)
    for name, (model, layout) in BETWEEN[ranks].items():
        try:
            of_one = one_rank[model if layout["enable_mtp_training"] else "frozen"]
            assert_computed_like_one([rank[name] for rank in found], of_one)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


# Prompts of two and of one token.
TOKENS = [torch.tensor([10, 11, 12, 13, 14]), torch.tensor([20, 21, 22])]
MASKS = [torch.tensor([1, 0, 1]), torch.tensor([1, 1])]


def batch_of(cp=NO_CONTEXT_PARALLEL, pad_multiple=4):
    return data_of(cp).micro_batch([0, 1], pad_multiple)


def data_of(cp=NO_CONTEXT_PARALLEL):
    lengths = {"total_lengths": list(map(len, TOKENS)), "response_lengths": list(map(len, MASKS))}
    return RolloutData({"tokens": TOKENS, "loss_masks": MASKS, **lengths}, cp)


def test_rows_see_and_predict_tokens_of_their_own_sequence():
    batch = batch_of()
    assert batch["stream"].tokens.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert tokens_ahead(batch, 1).tolist() == [11, 12, 13, 14, 0, 21, 22, 0]
    assert tokens_ahead(batch, 2).tolist() == [12, 13, 14, 0, 0, 22, 0, 0]
    assert tokens_ahead(batch, 7).tolist() == [0] * 8


def test_predictions_of_trained_tokens_count_wherever_they_stand():
    batch = batch_of()
    # Trained: positions 2 and 4 of the first sequence, 1 and 2 of the second.
    assert counted_rows(batch, 1).tolist() == [1, 0, 1, 0, 0, 1, 0, 0]
    assert counted_rows(batch, 2).tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert counted_rows(batch, 9).tolist() == [0] * 8


def test_padding_counts_for_nothing():
    batch = batch_of(pad_multiple=16)
    assert counted_rows(batch, 1).tolist() == [1, 0, 1, 0, 0, 1] + [0] * 10
    assert tokens_ahead(batch, 1).tolist()[8:] == [0] * 8


@pytest.mark.parametrize("all_gather", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_stream_hold_what_the_whole_one_does(size, all_gather):
    def predictions(batch, layer):
        rows = zip(
            batch["stream"].tokens.tolist(), tokens_ahead(batch, layer).tolist(),
            tokens_ahead(batch, 1 + layer).tolist(), counted_rows(batch, layer).tolist(), strict=True,
        )  # fmt: skip
        return sorted(row for row in rows if row[0])

    parts = [batch_of(ContextParallel(size, rank, None, all_gather), pad_multiple=2) for rank in range(size)]
    for layer in (1, 2, 3):
        assert sorted(row for part in parts for row in predictions(part, layer)) == predictions(batch_of(), layer)


def test_the_mean_is_over_all_that_counts_in_the_step(monkeypatch):
    monkeypatch.setattr(prediction_layers, "all_reduce_sum", lambda counts, group: counts)
    assert counted_predictions(data_of(), 4, None) == [3.0, 1.0, 1.0, 1.0]
    batch = batch_of()
    assert [counted_rows(batch, layer).sum().item() for layer in (1, 2, 3, 4)] == [3, 1, 1, 0]


def test_the_loss_is_the_sum_of_negative_log_likelihoods_of_what_counts():
    batch = batch_of()
    logits = torch.zeros(8, 32)
    logits[0, 12] = math.log(3.0)
    logits[1] = torch.nan  # does not count
    logits.requires_grad_()
    loss = prediction_loss(batch, logits, 1, None)
    assert loss.item() == pytest.approx(-math.log(3 / 34) - 2 * math.log(1 / 32), rel=1e-6)
    loss.backward()
    assert logits.grad[[3, 4, 6, 7]].abs().sum() == 0 and (logits.grad[[0, 2, 5]].abs().sum(1) > 0).all()


class Output:
    weight = torch.ones(2, 4)

    def __call__(self, hidden, weight):
        return hidden @ weight.T, None


def test_each_layer_makes_logits_of_the_rows_that_predict_something_there(monkeypatch):
    """Of one row where none does: the response is shorter than the layers reach."""
    asked = []

    @contextlib.contextmanager
    def logits_of(rows, layer):
        asked.append(rows.index.tolist())
        yield

    monkeypatch.setattr(prediction_layers, "logits_of", logits_of)
    trunk = prediction_layers._Trunk(torch.zeros(8, 1, 4), {})
    layers = [lambda hidden_states, **_: (hidden_states, None, None)] * 4
    model = SimpleNamespace(
        mtp=SimpleNamespace(trunk=trunk, layers=layers),
        output_layer=Output(),
        predicted=None,
        share_embeddings_and_output_weights=False,
    )
    stream = pack_stream([torch.arange(4), torch.arange(3)], [3, 1], pad_multiple=8)
    assert len(list(predict(model, stream, None))) == 4
    assert asked == [[0, 1, 4], [0], [0], [0]]


def test_a_layer_is_recomputed_whatever_the_decoders_layers_do(monkeypatch):
    layer, kept = prediction_layers.PredictionLayer.__new__(prediction_layers.PredictionLayer), []
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(
        recompute_granularity="full", recompute_method="block", distribute_saved_activations=False, fp8=None
    )
    layer.layer_number, layer._proj_and_transformer_layer = 2, lambda **inputs: inputs["hidden_states"]
    monkeypatch.setattr(prediction_layers.tensor_parallel, "checkpoint", lambda *given: kept.append(given[2:]))
    layer(None, None, hidden_states=1.0, attention_mask=None, embedding=lambda ahead: 10.0 * ahead)
    assert kept == [(1.0, 20.0)]
