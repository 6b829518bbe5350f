"""Checkpoints: what is loaded is what was saved, in every layout and with every flag about how that is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from tests.support.oracles.rounding import bound_of_weights
from tests.support.processes.checkpoint_trainer import (
    LAYOUTS,
    PREDICTED_TOKENS,
    ROLLOUTS_PER_STEP,
    Trainer,
    assert_same,
    make_args,
    resume,
    train_and_save,
)
from tests.support.processes.distributed import run_distributed
from tests.support.processes.megatron_worker import start


def layout_args(hf_dir, save, **layout) -> SimpleNamespace:
    """With a large epsilon: near zero Adam's update is else the gradient's sign, which differs between layouts."""
    return make_args(hf_dir, save, adam_eps=1e-4, padded_vocab_size=144, **layout)


def train_and_save_in_layouts(cases) -> dict:
    return {name: train_and_save(args) for name, args in cases.items()}


def resume_in_layouts(cases) -> dict:
    return {name: resume(args, WeightSource("megatron", path, resume=True)) for name, (args, path) in cases.items()}


@pytest.fixture(scope="module")
def saved(hf_dir, tmp_path_factory):
    """Per layout the directory and what `train_and_save` returned on rank 0."""
    cases = {name: layout_args(hf_dir, tmp_path_factory.mktemp(name), **layout) for name, layout in LAYOUTS.items()}
    two = {name: args for name, args in cases.items() if args.world_size == 2}
    results = run_distributed(train_and_save_in_layouts, 2, (two,))[0]
    results |= run_distributed(train_and_save_in_layouts, 1, ({"dp1": cases["dp1"]},))[0]
    return {name: (Path(cases[name].save), *results[name]) for name in cases}


@pytest.fixture(scope="module")
def resumed(hf_dir, saved):
    """What `resume` returned on one rank, per layout that had saved."""
    cases = {name: (layout_args(hf_dir, "unused"), str(directory)) for name, (directory, *_) in saved.items()}
    return run_distributed(resume_in_layouts, 1, (cases,))[0]


def test_the_same_layout_goes_on_bitwise(saved, resumed):
    _, at_checkpoint, after = saved["dp1"]
    iteration, loaded, stepped = resumed["dp1"]
    assert iteration == 3
    assert_same(loaded, at_checkpoint)
    # Equal only when the moments of the optimizer and its schedule came back too.
    assert_same(stepped, after)
    assert stepped["rollouts"] == 2 * ROLLOUTS_PER_STEP
    assert (loaded["random"], stepped["random"]) == (at_checkpoint["random"], after["random"])


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_another_layout_goes_on_with_the_same_numbers(hf_dir, saved, resumed, layout):
    directory, at_checkpoint, after = saved[layout]
    _, loaded, stepped = resumed[layout]
    assert_same(loaded, at_checkpoint)
    absolute = bound_of_weights(layout_args(hf_dir, directory), [stepped["gradient"]], PREDICTED_TOKENS)
    assert_same(stepped, after, absolute)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_common_part_holds_plain_values(saved, layout):
    common = torch.load(saved[layout][0] / "iter_0000003/common.pt", weights_only=True)
    assert common["iteration"] == 3 and common["has_optimizer"] is True
    assert common["layout"]["tensor_model_parallel_size"] == (2 if layout == "tp2" else 1)
    assert common["scheduler"].keys() >= {"init_lr", "wsd_decay_steps", "lr_wsd_decay_style"}
    assert {group["wd_mult"] for group in common["parameter_groups"]} == {0.0, 1.0}


def strictness_worker(args, ways) -> dict:
    """Per `--dist-ckpt-strictness`, a model that lacks some of the checkpoint's weights: what it loaded, or the error."""
    trainer = Trainer(args)
    trainer.save(3)
    saved = dict(trainer.model[0].module.named_parameters())
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.model_provider import setup_model
    from slime.utils.errors import UserError

    results = {}
    for way in ways:
        case = SimpleNamespace(**{**vars(args), "qk_layernorm": False, "dist_ckpt_strictness": way, "seed": 99})
        start(case)
        model = setup_model(case)
        try:
            iteration = load_checkpoint(case, WeightSource("megatron", args.save), model)
            parameters = dict(model[0].module.named_parameters())
            same = all(parameter.equal(saved[name]) for name, parameter in parameters.items())
            results[way] = (iteration, same, saved.keys() - parameters.keys())
        except UserError as error:
            results[way] = str(error)
    return results


def test_strictness_decides_whether_a_model_may_lack_weights_of_the_checkpoint(hf_dir, tmp_path):
    ways = ("assume_ok_unexpected", "raise_all", "return_all", "return_unexpected")
    (results,) = run_distributed(strictness_worker, 1, (make_args(hf_dir, tmp_path / "save"), ways))
    iteration, same, lacking = results["assume_ok_unexpected"]
    assert iteration == 3 and same
    assert results["return_all"] == results["return_unexpected"] == results["assume_ok_unexpected"]
    assert lacking == {f"decoder.layers.{i}.self_attention.{n}_layernorm.weight" for i in range(2) for n in "qk"}
    assert "cannot be loaded into the model that the flags describe" in results["raise_all"]
    assert "q_layernorm" in results["raise_all"]


def flags_worker(args) -> dict:
    """Saves and loads on two ranks that hold the same weights, with the flags about how that is done; and a load of damaged
    generators by a run that does not want them."""
    results = {}
    ways = {
        "default": {},
        "alone": {"ckpt_fully_parallel_save": False, "ckpt_fully_parallel_load": False},
        "other": {
            "no_save_rng": True, "dist_ckpt_workers": 3, "ckpt_fully_parallel_load_exchange_algo": "gather_object",
            "dist_ckpt_strictness": "raise_all",
        },
    }  # fmt: skip
    for name, flags in ways.items():
        case = SimpleNamespace(**{**vars(args), "save": f"{args.save}_{name}", **flags})
        results[name] = (*train_and_save(case), resume(case, WeightSource("megatron", case.save, resume=True)))
    case = SimpleNamespace(**{**vars(args), "save": f"{args.save}_alone", "no_load_rng": True})
    generators = Path(case.save, f"iter_0000003/rng_{torch.distributed.get_rank():05d}.safetensors")
    generators.write_bytes(generators.read_bytes()[:10])
    results["damaged"] = *results["alone"][:2], resume(case, WeightSource("megatron", case.save, resume=True))
    return results


def test_flags_of_writing_and_reading(hf_dir, tmp_path):
    ranks = run_distributed(flags_worker, 2, (make_args(hf_dir, tmp_path / "save", **LAYOUTS["dp2"]),), timeout=300)
    for results in ranks:
        for name, (at_checkpoint, after, (iteration, loaded, stepped)) in results.items():
            assert iteration == 3
            assert_same(loaded, at_checkpoint)
            assert_same(stepped, after)
            assert (loaded["random"] == at_checkpoint["random"]) == (name not in ("other", "damaged")), name
        # Generators that a run does not load begin where --seed has them, as where none were saved.
        assert results["damaged"][2][1]["random"] == results["other"][2][1]["random"]
    written = {
        name: [path.stat().st_size for path in sorted((tmp_path / f"save_{name}/iter_0000003").glob("*.distcp"))]
        for name in ("default", "alone")
    }
    # Both ranks write a share of what they hold alike; left alone, the first one writes all of it.
    assert max(written["default"]) < 0.7 * sum(written["default"])
    assert max(written["alone"]) > max(written["default"])
    assert not list((tmp_path / "save_other/iter_0000003").glob("rng_*"))
    for name, workers in (("default", 2), ("other", 3)):
        files = sorted(path.name for path in (tmp_path / f"save_{name}/iter_0000003").glob("*.distcp"))
        assert files == [f"__{rank}_{writer}.distcp" for rank in range(2) for writer in range(workers)]
