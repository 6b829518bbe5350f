"""Every family that trains, by the table of `tiny_families`: flags, logits, gradients, and its checkpoint given back."""

import pytest

from slime.arguments.hf_config import read_hf_config
from slime.models.families import FAMILIES, TRAINED_MODEL_TYPES, model_args_from_hf
from slime.weights.hf_reader import SafetensorsDirectory
from tests.support.models.args import parse
from tests.support.models.tiny_families import LAYOUTS, TINY_FAMILIES, ranks_of
from tests.support.models.tiny_model import tiny_args
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import (
    assert_gives_checkpoint_back,
    assert_like_reference,
    of_trained_parts,
    reference,
    run_families,
)
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

EVERY = pytest.mark.parametrize("name", TINY_FAMILIES)


# Of those that every change is tested in.
TENSOR_PARALLEL = ("tp2", "tp2 whole sequence")
ONE_RANK = (None, *(layout for layout, sizes in LAYOUTS.items() if ranks_of(sizes) == 1))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name, the directory of each model, and its reference."""
    root = tmp_path_factory.mktemp("families")
    return {name: (root / name, family.save(root / name)) for name, family in TINY_FAMILIES.items()}


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    root = tmp_path_factory.mktemp("gradients")
    return {name: reference(model, root / name) for name, (_, model) in models.items()}


@pytest.fixture(scope="module")
def one_rank(models):
    directories = {layout: _directories(models, layout) for layout in ONE_RANK}
    (found,) = run_distributed(run_families, 1, (directories,))
    return found


@pytest.fixture(scope="module")
def two_ranks(models):
    """What each of two ranks finds in the layouts that every change is tested in."""
    directories = {layout: _directories(models, layout) for layout in (*TENSOR_PARALLEL, "pp2")}
    return run_distributed(run_families, 2, (directories,))


def _directories(models, layout):
    rows = TINY_FAMILIES.items()
    return {name: str(models[name][0]) for name, row in rows if layout is None or layout in row.layouts}


def test_every_family_that_trains_has_a_row():
    trained = {FAMILIES[model_type].model_types[0] for model_type in TRAINED_MODEL_TYPES}
    assert {family.model_type for family in TINY_FAMILIES.values()} == trained


@EVERY
def test_a_run_gets_the_flags_of_its_config(models, name, tmp_path):
    directory, _ = models[name]
    args = parse(tmp_path, "--hf-checkpoint", str(directory), "--dry-run")
    flags = model_args_from_hf(read_hf_config(directory))
    assert {flag: getattr(args, flag) for flag in flags} == flags
    tiny = vars(tiny_args(directory))
    assert {flag: tiny[flag] for flag in flags} == flags


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, row in TINY_FAMILIES.items() for layout in ONE_RANK if layout in (None, *row.layouts)],
)
def test_logits_and_gradients_are_those_of_the_reference(one_rank, expected, name, layout):
    found = one_rank[layout][name]
    assert not isinstance(found, str), found
    assert_like_reference(found, expected[name])


@EVERY
def test_a_checkpoint_is_given_back_with_the_same_bits(models, one_rank, name):
    directory, _ = models[name]
    found = one_rank[None][name]
    assert not isinstance(found, str), found
    assert_gives_checkpoint_back([found], directory)
    assert found.exported.keys() == set(of_trained_parts(SafetensorsDirectory(directory).names()))
    assert found.not_contiguous == []


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name, row in TINY_FAMILIES.items() for layout in TENSOR_PARALLEL if layout in row.layouts],
)
def test_tensor_parallel_ranks_give_logits_gradients_and_checkpoint(models, two_ranks, expected, name, layout):
    directory, _ = models[name]
    for rank in two_ranks:
        found = rank[layout][name]
        assert_like_reference(found, expected[name])
        assert_gives_checkpoint_back([found], directory)
        # What was gathered keeps nothing beside itself but the padding of the vocabulary. Norms and routers are not gathered.
        kept = {
            tensor for tensor in found.larger_storage if "norm" not in tensor and not tensor.endswith("gate.weight")
        }
        assert kept <= {"model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "lm_head.weight"}
        assert found.not_contiguous == []


@EVERY
def test_pipeline_stages_give_the_checkpoint_between_them(models, two_ranks, name):
    directory, _ = models[name]
    assert_gives_checkpoint_back([rank["pp2"][name] for rank in two_ranks], directory)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count)
        for name, row in TINY_FAMILIES.items()
        for count in sorted({ranks_of(LAYOUTS[layout]) for layout in row.layouts} - {1})
    ],
)
def test_every_layout_trains_as_one_rank_does(models, name, count):
    """Some steps of GRPO: weights as loaded, log-probs, losses, gradient norms and the weights at the end."""
    directory, _ = models[name]
    layouts = [layout for layout in TINY_FAMILIES[name].layouts if ranks_of(LAYOUTS[layout]) == count]
    (one,) = run_distributed(train_steps, 1, ({"one": layout_args(directory)},))
    cases = {layout: layout_args(directory, **LAYOUTS[layout]) for layout in layouts}
    ranks = run_distributed(train_steps, count, (cases,), timeout=300)
    for layout in layouts:
        assert_equal_runs([rank[layout] for rank in ranks], one["one"])
