"""Trained and frozen parameters: chosen by global names, the same in every layout, through training and checkpoints."""

from pathlib import Path

import pytest

from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch
from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.oracles.rounding import assert_equal_metrics, assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.megatron_worker import load_backend

LAYOUTS = {
    "dp2": {"data_parallel_size": 2},
    "dp2_plain": {"data_parallel_size": 2, "use_distributed_optimizer": False},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# As the comparison of layouts wants them: near zero Adam's update would be the gradient's sign, and a vocabulary that is padded
# otherwise has other gradients.
OPTIMIZER = {"lr": 1e-3, "adam_eps": 1e-4, "padded_vocab_size": 144}
# Flags, and which parameters they leave to be trained.
ONE_LAYER = {"only_train_params_name_list": [r"layers\.1\.", "final"]}
SELECTIONS = {
    "only": (ONE_LAYER, lambda name: "layers.1." in name or "final" in name),
    "freeze": (
        # The embedding is tied: with a pipeline its copy on the last stage must not be trained either.
        {"freeze_params_name_list": ["^embedding", r"linear_fc\d"]},
        lambda name: not name.startswith("embedding") and "linear_fc" not in name,
    ),
}
TRAINED_HF = {
    "only": lambda name: "layers.1." in name or name == "model.norm.weight",
    "freeze": lambda name: "embed" not in name and "_proj" not in name.replace("self_attn.", "").split(".")[-2]
    or "self_attn" in name,
}  # fmt: skip


def selection_worker(cases, hf_dir, save) -> dict:
    results = {}
    for name, args in cases.items():
        results[name] = train_selected(args)
    results["resumed"] = resume(cases["dp2/only"], save)
    results["recompute"] = recompute(cases["dp2/freeze"])
    results["errors"] = errors(cases["pp2/only"])
    return results


def train(args, backend) -> dict:
    """Metrics of one step."""
    import torch

    from slime.training.train_step import train_one_step

    data = shard_of(args, backend.groups.data_rank)
    lengths = zip(data["response_lengths"], data["rewards"], strict=True)
    data["advantages"] = [torch.full((length,), reward) for length, reward in lengths]
    return train_one_step(args, backend, data, 0, 0)


def exported(backend) -> dict:
    from tests.support.processes.megatron_worker import whole_weights

    return whole_weights(backend.args, backend.model)


def train_selected(args) -> tuple:
    """Global names that this rank trains; HF names whose tensors two steps changed; weights after them; metrics; the mean
    absolute entry of each step's gradient, over what is trained here."""
    backend = load_backend(args)
    import torch

    from slime.backends.megatron_utils.parameter_names import global_named_parameters

    trained = {name: parameter.requires_grad for name, parameter in global_named_parameters(backend.model[0])}
    before = exported(backend)
    metrics, gradients = [], []
    for _ in range(2):
        metrics.append(train(args, backend))
        # A stage may have none.
        entries = torch.cat(
            [torch.zeros(0), *(p.main_grad.flatten() for p in backend.model[0].parameters() if p.requires_grad)]
        )
        gradients.append(float(entries.abs().mean()))
    after = exported(backend)
    changed = {name for name, tensor in after.items() if not tensor.equal(before[name])}
    return trained, changed, {name: tensor.numpy() for name, tensor in after.items()}, metrics, gradients


def resume(args, save) -> tuple:
    """Weights after two steps, and after one step, a checkpoint, and one step of a run that resumed from it; the message of a
    resume that trains more."""
    from types import SimpleNamespace

    import torch.distributed as dist

    args = SimpleNamespace(**{**vars(args), "save": save, "world_size": 2})
    backend = load_backend(args)
    from slime.arguments.checkpoints import WeightSource
    from slime.training.checkpoint_publication import publish_checkpoint
    from slime.utils.errors import UserError

    train(args, backend)
    backend.save(0).finish()
    if dist.get_rank() == 0:
        publish_checkpoint(args, 0)
    dist.barrier()
    train(args, backend)
    expected = exported(backend)

    source = WeightSource("megatron", save, resume=True)
    backend = load_backend(args)
    backend.load(source)
    train(args, backend)
    resumed = exported(backend)

    args.only_train_params_name_list = None
    backend = load_backend(args)
    try:
        backend.load(source)
        message = None
    except UserError as error:
        message = str(error)
    return all(resumed[name].equal(tensor) for name, tensor in expected.items()), message


def recompute(args) -> tuple[float, float]:
    """Gradient norms with a frozen embedding, kept and recomputed activations."""
    from types import SimpleNamespace

    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    norms = []
    for flags in ({}, full):
        case = SimpleNamespace(**{**vars(args), **flags})
        norms.append(train(case, load_backend(case))["grad_norm"])
    return tuple(norms)


def errors(args) -> dict:
    from types import SimpleNamespace

    from slime.utils.errors import UserError

    wrong = {
        "one of two": {"freeze_params_name_list": [r"layers\.1\.", "linear_fc3"]},
        "only": {"only_train_params_name_list": ["layer.0"]},
        "everything": {"freeze_params_name_list": ["."]},
        "indexer": {"freeze_indexer": True},
    }
    messages = {}
    for name, flags in wrong.items():
        case = SimpleNamespace(**{**vars(args), "only_train_params_name_list": None, **flags})
        try:
            load_backend(case)
        except UserError as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=True)
    return directory


@pytest.fixture(scope="module")
def ranks(hf_dir, tmp_path_factory):
    cases = {
        f"{layout}/{selection}": make_args(hf_dir, **flags, **sizes, **OPTIMIZER)
        for layout, sizes in LAYOUTS.items()
        for selection, (flags, _) in SELECTIONS.items()
    }
    save = str(tmp_path_factory.mktemp("save") / "run")
    return run_distributed(selection_worker, 2, (cases, str(hf_dir), save), timeout=300)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_list_means_the_same_in_every_layout(ranks, layout, selection):
    is_trained = SELECTIONS[selection][1]
    of_ranks = [rank[f"{layout}/{selection}"] for rank in ranks]
    chosen = {name: trained for result in of_ranks for name, trained in result[0].items()}
    assert chosen == {name: is_trained(name) for name in chosen}
    assert "embedding.word_embeddings.weight" in chosen and len(chosen) > 10
    for result in of_ranks:
        assert {name: is_trained(name) for name in result[0]} == result[0]


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_trained_parameters_change_and_all_are_pushed(hf_dir, ranks, layout, selection):
    _, _, expected_weights, expected_metrics, gradients = ranks[0][f"dp2_plain/{selection}"]
    absolute = bound_of_weights(make_args(hf_dir, **OPTIMIZER), gradients, TRAINED_TOKENS)
    for rank in ranks:
        _, changed, weights, metrics, _ = rank[f"{layout}/{selection}"]
        assert changed == {name for name in weights if TRAINED_HF[selection](name)}
        assert_equal_weights(weights, expected_weights, absolute)
        for step, expected in zip(metrics, expected_metrics, strict=True):
            assert_equal_metrics(step, expected, bounds_of_batch())


def test_a_run_with_frozen_parameters_resumes_bitwise(ranks):
    for rank in ranks:
        equal, message = rank["resumed"]
        assert equal
        lists = r"--only-train-params-name-list layers\.1\. final"
        advice = f"its optimizer state was saved with {lists}, this run has no frozen parameters: give --no-load-optim"
        assert message.endswith(advice), message


def test_recomputed_layers_learn_behind_a_frozen_embedding(ranks):
    for rank in ranks:
        kept, recomputed = rank["recompute"]
        assert kept > 0 and recomputed == pytest.approx(kept, rel=1e-5)


def test_a13_an_expression_that_matches_nothing_is_an_error(ranks):
    for rank in ranks:
        messages = rank["errors"]
        # Layer 1 is on the second stage only: that is a match on both.
        assert messages["one of two"].startswith(
            "--freeze-params-name-list linear_fc3: no parameter has a name that matches; names are such as "
        )
        assert "\n" not in messages["one of two"] and ".weight" in messages["one of two"]
        assert messages["only"].startswith("--only-train-params-name-list layer.0: no parameter")
        assert messages["everything"] == "--freeze-params-name-list: all parameters are frozen; free some of them"
        assert messages["indexer"].startswith("--freeze-indexer: the model has no indexer")
