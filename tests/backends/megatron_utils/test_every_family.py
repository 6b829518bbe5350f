"""Every family that trains, by the table of `tiny_families`: flags, logits, gradients, and its checkpoint given back."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from slime.arguments.hf_config import read_hf_config
from slime.models.families import FAMILIES, TRAINED_MODEL_TYPES, model_args_from_hf
from slime.weights.hf_reader import SafetensorsDirectory
from tests.support.kernels.transformer_engine_on_cpu import call_with_transformer_engine
from tests.support.models.args import parse
from tests.support.models.tiny_families import LAYOUTS, TINY_FAMILIES, ranks_of
from tests.support.models.tiny_model import tiny_args, write_tiny_latent
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
# Of each kind of layers a family. For others it is enough on every change to have the layouts that these layers differ in.
KINDS = (
    "qwen3", "glm4", "qwen2_moe", "qwen3_next", "qwen3_5", "glm4_moe", "minimax_m2", "deepseek_v3", "deepseek_v3 dense",
    "glm_moe_dsa",
)  # fmt: skip
OF_KINDS = ("recomputed", "attention recomputed", "tp2 whole sequence")


def cases_in(layouts):
    """Families, and those of the layouts that each has; None: as it is."""
    return [
        pytest.param(name, layout, marks=pytest.mark.slow if layout in OF_KINDS and name not in KINDS else ())
        for name, row in TINY_FAMILIES.items()
        for layout in layouts
        if layout in (None, *row.layouts)
    ]


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
def one_rank(models, selected):
    cases = selected(test_logits_and_gradients_are_those_of_the_reference)
    whole = {None: {name: str(directory) for name, (directory, _) in models.items()}}
    (found,) = run_distributed(run_families, 1, (whole | _directories(models, cases),))
    return found


@pytest.fixture(scope="module")
def two_ranks(models, selected):
    """What each of two ranks finds in the layouts that every change is tested in."""
    cases = selected(test_tensor_parallel_ranks_give_logits_gradients_and_checkpoint)
    whole = {"pp2": {name: str(directory) for name, (directory, _) in models.items()}}
    return run_distributed(run_families, 2, (whole | _directories(models, cases),))


@pytest.fixture(scope="module")
def with_transformer_engine(models, selected):
    """What one rank finds whose layers are Transformer Engine's."""
    cases = selected(test_layers_of_transformer_engine_are_the_same_model)
    whole = {None: {name: str(directory) for name, (directory, _) in models.items()}}
    layouts = whole | _directories(models, cases)
    (found,) = run_distributed(
        call_with_transformer_engine, 1, (run_families, layouts), start_method="spawn", timeout=300
    )
    return found


def _directories(models, cases):
    """By layout but the plain one, and by name, the directories of the cases' models."""
    layouts: dict[str, dict[str, str]] = {}
    for name, layout in ((case["name"], case["layout"]) for case in cases):
        if layout is not None:
            layouts.setdefault(layout, {})[name] = str(models[name][0])
    return layouts


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


@pytest.mark.parametrize(("name", "layout"), cases_in(ONE_RANK))
def test_logits_and_gradients_are_those_of_the_reference(one_rank, expected, name, layout):
    found = one_rank[layout][name]
    assert not isinstance(found, str), found
    assert_like_reference(found, expected[name])


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if layout is None else pytest.mark.slow)
        for name, row in TINY_FAMILIES.items()
        for layout in ONE_RANK
        if layout in (None, *row.layouts)
    ],
)
def test_layers_of_transformer_engine_are_the_same_model(models, with_transformer_engine, expected, name, layout):
    found = with_transformer_engine[layout][name]
    assert not isinstance(found, str), found
    assert_like_reference(found, expected[name])
    assert_gives_checkpoint_back([found], models[name][0])


@EVERY
def test_a_checkpoint_is_given_back_with_the_same_bits(models, one_rank, name):
    directory, _ = models[name]
    found = one_rank[None][name]
    assert not isinstance(found, str), found
    assert_gives_checkpoint_back([found], directory)
    assert found.exported.keys() == set(of_trained_parts(SafetensorsDirectory(directory).names()))
    assert found.not_contiguous == []


@pytest.mark.parametrize(("name", "layout"), cases_in(TENSOR_PARALLEL))
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


def _has_its_attention(name):
    """Latent attention is the trainer's own beside Transformer Engine's layers, and linear attention is so everywhere."""
    return TINY_FAMILIES[name].write is not write_tiny_latent


@pytest.fixture(scope="module")
def steps_with_transformer_engine(models, selected):
    """By name and layout (None: one rank), what every rank finds in some steps of GRPO with layers and optimizer of Transformer
    Engine."""
    chosen = selected(test_layers_of_transformer_engine_train_in_every_layout_as_on_one_rank)
    cases: dict[int, dict] = {}
    for name, layout in sorted({(case["name"], each) for case in chosen for each in ("", case["layout"])}):
        sizes = LAYOUTS[layout] if layout else {}
        cases.setdefault(ranks_of(sizes), {})[name, layout or None] = layout_args(models[name][0], **sizes)
    found: dict[tuple, list] = {}
    for count, of_count in cases.items():
        ranks = run_distributed(
            call_with_transformer_engine, count, (train_steps, of_count), start_method="spawn", timeout=560
        )
        found |= {case: [rank[case] for rank in ranks] for case in of_count}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in KINDS
        for layout in TINY_FAMILIES[name].layouts
        # Without a kernel of flash attention its attention takes no part of a sample.
        if layout in ("tp2", "pp2", "ep2", "tp2 pp2") or ("cp2" in layout and not _has_its_attention(name))
    ],
)
def test_layers_of_transformer_engine_train_in_every_layout_as_on_one_rank(steps_with_transformer_engine, name, layout):
    (one,) = steps_with_transformer_engine[name, None]
    assert_equal_runs(steps_with_transformer_engine[name, layout], one)


BFLOAT16 = {"bf16": True, "accumulate_allreduce_grads_in_fp32": True}
# Of families with attention or experts of their own, the layouts of two ranks that cut these.
CUT = [
    (name, layout)
    for name in ("qwen3_next", "qwen3_5_moe", "minimax_m2", "glm_moe_dsa")
    for layout in ("tp2", "pp2", "cp2", "cp2 gathered", "ep2")
    if layout in TINY_FAMILIES[name].layouts
]


def some_steps(cases) -> dict:
    """Per case, log-probs as loaded by this rank's samples (on the last stage), and loss and gradient norm of three steps."""
    from tests.support.processes.layout_steps import LayoutRun

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        rows = run.data.whole("log_probs") if run.is_last_stage else []
        steps = [run.step() for _ in range(3)]
        log_probs = [value for row in rows for value in row.tolist()]
        found[name] = log_probs, [(step["loss"], step["grad_norm"]) for step in steps if run.is_last_stage]
    return found


@pytest.fixture(scope="module")
def in_bfloat16(models, tmp_path_factory):
    """`some_steps` of every family on one rank, in float32 and in bfloat16, both from weights that bfloat16 has: so they differ
    in what is computed alone."""
    root = tmp_path_factory.mktemp("rounded")
    cases = {}
    for name, (directory, _) in models.items():
        shutil.copytree(directory, root / name)
        for file in (root / name).glob("*.safetensors"):
            save_file(
                {key: tensor.bfloat16().float() for key, tensor in load_file(file).items()}, file, {"format": "pt"}
            )
        for precision, flags in {"float32": {}, "bfloat16": BFLOAT16}.items():
            cases[name, precision] = layout_args(root / name, **flags)
    (found,) = run_distributed(some_steps, 1, (cases,), timeout=400)
    return found


@pytest.mark.slow
@EVERY
def test_steps_in_bfloat16_stay_near_those_in_float32(in_bfloat16, name):
    """A value of bfloat16 has 8 bits: log-probs of these models change by some thousandths, more where another expert or key is
    chosen; then later steps part too."""
    (exact, exact_steps), (rounded, steps) = (in_bfloat16[name, precision] for precision in ("float32", "bfloat16"))
    differences = [abs(a - b) for a, b in zip(exact, rounded, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.02
    (loss, norm), (exact_loss, exact_norm) = steps[0], exact_steps[0]
    assert loss == pytest.approx(exact_loss, abs=1e-3) and norm == pytest.approx(exact_norm, rel=0.02)
    for (loss, norm), (exact_loss, _) in zip(steps, exact_steps, strict=True):
        assert loss == pytest.approx(exact_loss, abs=0.03) and 0 < norm < 10


@pytest.mark.slow
def test_layouts_in_bfloat16_train_near_one_rank(models, in_bfloat16):
    cases = {(name, layout): layout_args(models[name][0], **LAYOUTS[layout], **BFLOAT16) for name, layout in CUT}
    ranks = run_distributed(some_steps, 2, (cases,), timeout=400)
    for name, layout in CUT:
        one = in_bfloat16[name, "bfloat16"][1]
        runs = [rank[name, layout][1] for rank in ranks if rank[name, layout][1]]
        assert runs
        for steps in runs:
            assert steps[0] == (pytest.approx(one[0][0], abs=5e-3), pytest.approx(one[0][1], rel=0.05)), (name, layout)
            for (loss, norm), (loss_of_one, _) in zip(steps, one, strict=True):
                assert loss == pytest.approx(loss_of_one, abs=0.03) and 0 < norm < 10, (name, layout)
