"""`--load-main-params-from-ckpt`: the float32 copies of 16-bit weights begin with what the checkpoint has, unrounded.

What a run begins with is read from the checkpoint that it writes before its first step.
"""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.arguments.checkpoints import WeightSource
from slime.weights.quantisers import quantise_fp8_tensor
from tests.support.kernels.transformer_engine_on_cpu import call_with_transformer_engine
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import (
    ResumableRun,
    changed,
    lines_of_slime,
    resumable_args,
    resumed,
    stored_tensors,
)

COPIES = "optimizer.state.fp32_param."
ASKED = {"bf16": True, "load_main_params_from_ckpt": True}
OPTIMIZERS = {
    "distributed": {},
    "whole": {"use_distributed_optimizer": False},
    "on the weights": {"use_precision_aware_optimizer": True},
    "on the host": {"optimizer_cpu_offload": True},
    "without moments": {"use_stateless_adam": True, "no_save_optim": True},
}
LAYOUTS = {
    "data": {"data_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def begun(args: SimpleNamespace, source: WeightSource) -> ResumableRun:
    """The run that starts from `source`, in place of other weights."""
    run = ResumableRun(changed(args, seed=args.seed + 77), loads=False)
    run.args = run.backend.args = args
    run.backend.load(source)
    run.optimizer, run.scheduler = run.backend.optimizer, run.backend.scheduler
    return run


def begin_and_save(cases: dict[str, tuple[SimpleNamespace, WeightSource]]) -> dict[str, list[str]]:
    """What each run says of float32 when it starts."""
    told = {}
    for name, (args, source) in cases.items():
        with lines_of_slime() as lines:
            run = begun(args, source)
        run.save()
        told[name] = [line for line in lines if "float32" in line]
    return told


def save_sources(wide: SimpleNamespace, narrow: SimpleNamespace, bare: SimpleNamespace) -> None:
    """The checkpoints of a run in float32, and of two in bfloat16 after a step, the second of which leaves its copies out."""
    begun(wide, WeightSource("hf", wide.hf_checkpoint)).save()
    for args in (narrow, bare):
        run = ResumableRun(args)
        run.prepare()
        run.step()
        run.save()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Name → (what a run starts from, name → float32 value of each weight there)."""
    root = tmp_path_factory.mktemp("sources")
    write_tiny_model(root / "model", tied=False)
    wide = resumable_args(root / "model", root / "wide", no_save_optim=True)
    narrow = resumable_args(root / "model", root / "narrow", bf16=True)
    bare = resumable_args(root / "model", root / "bare", bf16=True, no_save_optim=True)
    run_distributed(save_sources, 1, (wide, narrow, bare))
    stored = stored_tensors(root / "wide/iter_0000000")
    trained = stored_tensors(root / "narrow/iter_0000000")
    prefix = "optimizer.state.param."
    copies = {name.removeprefix(prefix): value for name, value in trained.items() if name.startswith(prefix)}
    assert copies.keys() == stored.keys() and all(value.dtype == torch.float32 for value in stored.values())
    return root, {
        "hf": (WeightSource("hf", str(root / "model")), stored),
        "float32": (WeightSource("megatron", str(root / "wide")), stored),
        "float32, resumed": (WeightSource("megatron", str(root / "wide"), resume=True), stored),
        "copies": (WeightSource("megatron", str(root / "narrow")), copies),
        "copies, resumed": (WeightSource("megatron", str(root / "narrow"), resume=True), copies),
    }


def copies_in(directory) -> dict[str, torch.Tensor]:
    tensors = stored_tensors(directory)
    return {name.removeprefix(COPIES): value for name, value in tensors.items() if name.startswith(COPIES)}


def differing(found, expected) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not value.equal(found[name])]


STARTS = {"begun": ("hf", "float32", "copies"), "resumed": ("float32, resumed", "copies, resumed")}


@pytest.mark.parametrize(
    "layout, starts",
    [
        # A run that resumes asks more of a checkpoint, and then takes the copies as one that begins: in every layout alike.
        pytest.param(layout, starts, marks=pytest.mark.slow if layout in LAYOUTS and starts == "resumed" else ())
        for layout in ("one rank", *LAYOUTS)
        for starts in STARTS
    ],
)
def test_copies_are_what_the_checkpoint_has(tmp_path, sources, layout, starts):
    root, known = sources
    cases = {
        f"{optimizer} from {name}": resumable_args(
            root / "model", tmp_path / f"{optimizer} from {name}", no_load_optim=True, **ASKED, **LAYOUTS.get(layout, {}),
            **OPTIMIZERS[optimizer],
        )
        for optimizer in (OPTIMIZERS if layout in ("one rank", "data") else ["distributed"])
        for name in STARTS[starts]
    }  # fmt: skip
    run_distributed(
        begin_and_save,
        2 if layout in LAYOUTS else 1,
        ({key: (args, known[key.split(" from ")[1]][0]) for key, args in cases.items()},),
        timeout=300,
    )
    for key in cases:
        expected = known[key.split(" from ")[1]][1]
        assert any(not value.bfloat16().float().equal(value) for value in expected.values())
        assert not differing(copies_in(tmp_path / key / "iter_0000000"), expected), key


# Layers and optimizer are Transformer Engine's here.
OF_ENGINE = {"bf16": True, "use_precision_aware_optimizer": True, "attention_backend": "auto"}


def begin_and_go_on(cases: dict[bool, tuple[tuple[SimpleNamespace, WeightSource], SimpleNamespace]]) -> dict[bool, str]:
    """By case, the module of the optimizer. Saves what a run begins with; and of another one its first step, its second step by
    the run that resumes from there, and by itself."""
    found = {}
    for case, (begun_with, args) in cases.items():
        begun(*begun_with).save()
        run = ResumableRun(args)
        run.prepare()
        run.step()
        run.save()
        for iteration, each in enumerate((resumed(args, args.save), run), start=1):
            each.prepare()
            each.step()
            each.save(iteration)
        found[case] = type(run.parts()[0].optimizer).__mro__[1].__module__
    return found


@pytest.fixture(scope="module")
def of_engine(sources, selected, tmp_path_factory):
    """By whether remainders are stored: the module of the optimizer, and the directory that `begin_and_go_on` saved to. All run
    in one process, which imports for longer than it trains."""
    root, known = sources
    cases, directories = {}, {}
    for case in selected(test_precision_aware_adam_of_transformer_engine_begins_and_goes_on_with_what_was_saved):
        remainders = case["remainders"]
        directory = directories[remainders] = tmp_path_factory.mktemp("engine")
        flags = {**OF_ENGINE, "store_param_remainders": remainders}
        first = resumable_args(root / "model", directory / "begun", no_load_optim=True, **{**ASKED, **flags})
        source, _ = known["float32"]
        cases[remainders] = (first, source), resumable_args(root / "model", directory / "resumed", **flags)
    (modules,) = run_distributed(
        call_with_transformer_engine, 1, (begin_and_go_on, cases), start_method="transformer engine", timeout=200
    )
    return {remainders: (modules[remainders], directory) for remainders, directory in directories.items()}


@pytest.mark.parametrize("remainders", [True, False], ids=["remainders", "whole copies"])
def test_precision_aware_adam_of_transformer_engine_begins_and_goes_on_with_what_was_saved(
    of_engine, sources, remainders
):
    module, directory = of_engine[remainders]
    _, expected = sources[1]["float32"]
    assert module.startswith("transformer_engine.")
    assert not differing(copies_in(directory / "begun/iter_0000000"), expected)
    before, again, whole = (stored_tensors(directory / f"resumed/iter_{number:07d}") for number in range(3))
    assert not differing(again, whole)
    assert {name.split(".decoder")[0] for name in differing(before, whole)} >= {
        "optimizer.state.param", "optimizer.state.exp_avg", "optimizer.state.exp_avg_sq",
    }  # fmt: skip


def test_a_stage_that_learns_alone_has_copies_of_its_own(tmp_path, sources):
    """They are found among weights that are stored with those of the layers that learn nothing."""
    root, known = sources
    flags = {**LAYOUTS["pipeline"], "only_train_params_name_list": [r"layers\.1\.", "final"], **ASKED}
    cases = {
        name: (resumable_args(root / "model", tmp_path / name, **flags), known[name][0]) for name in ("hf", "float32")
    }
    run_distributed(begin_and_save, 2, (cases,))
    for name in cases:
        found, expected = copies_in(tmp_path / name / "iter_0000000"), known[name][1]
        assert len(found) > 5 and "decoder.final_layernorm.weight" in found
        for weight, value in found.items():
            whole = expected[weight.replace(".layers.1.", ".layers.")]
            assert value.equal(whole[1] if ".layers." in weight else whole), (name, weight)


def save_begun(args: SimpleNamespace, source: WeightSource) -> None:
    begun(args, source).save()


def copies_of_embedding(cases: dict[str, tuple[SimpleNamespace, WeightSource]]) -> dict[str, list[torch.Tensor]]:
    """What the optimizer of this stage has of an embedding that the first and the last stage share."""
    from slime.backends.megatron_utils.checkpoint import gathered_state
    from slime.backends.megatron_utils.optimizer import parts_of

    found = {}
    for name, (args, source) in cases.items():
        parts = parts_of(begun(args, source).optimizer)
        own = [(part, weight) for part in parts for weight, _ in gathered_state._own_starts(part)]
        found[name] = [
            gathered_state._state_of(part, weight, "param").view(weight.shape).clone()
            for part, weight in own
            if getattr(weight, "shared_embedding", False)
        ]
    return found


def test_both_stages_of_a_tied_embedding_have_the_same_copy_of_it(tmp_path):
    """That of the last one is stored nowhere, so no checkpoint shows it."""
    write_tiny_model(tmp_path / "model", tied=True)
    source = WeightSource("hf", str(tmp_path / "model"))
    run_distributed(save_begun, 1, (resumable_args(tmp_path / "model", tmp_path / "wide", no_save_optim=True), source))
    expected = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    assert not expected.bfloat16().float().equal(expected)
    cases = {
        f"{optimizer} from {name}": (
            resumable_args(tmp_path / "model", tmp_path / optimizer / name, **ASKED, **LAYOUTS["pipeline"], **flags), origin
        )
        for optimizer, flags in (("distributed", {}), ("on the weights", OPTIMIZERS["on the weights"]))
        for name, origin in (("hf", source), ("float32", WeightSource("megatron", str(tmp_path / "wide"))))
    }  # fmt: skip
    for of_stage in run_distributed(copies_of_embedding, 2, (cases,), timeout=300):
        for name in cases:
            (found,) = of_stage[name]
            assert found[: len(expected)].equal(expected), name


def test_without_the_flag_they_are_rounded(tmp_path, sources):
    root, known = sources
    cases = {
        name: (resumable_args(root / "model", tmp_path / name, bf16=True, no_load_optim=True), source)
        for name, (source, _) in known.items()
    }
    run_distributed(begin_and_save, 1, (cases,), timeout=300)
    for name, (_, expected) in known.items():
        rounded = {weight: value.bfloat16().float() for weight, value in expected.items()}
        assert not differing(copies_in(tmp_path / name / "iter_0000000"), rounded), name


def test_who_finds_nothing_in_float32_is_told(tmp_path, sources):
    root, known = sources
    write_tiny_model(tmp_path / "model", tied=False)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model/model.safetensors").items()}
    save_file(tensors, tmp_path / "model/model.safetensors")
    # What is quantised is read in float32.
    shutil.copytree(tmp_path / "model", tmp_path / "quantised")
    matrix = "model.layers.0.mlp.up_proj.weight"
    tensors[matrix], tensors[f"{matrix}_scale"] = quantise_fp8_tensor(tensors[matrix])
    save_file(tensors, tmp_path / "quantised/model.safetensors")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    (tmp_path / "quantised/config.json").write_text(json.dumps(config))
    bare = WeightSource("megatron", str(root / "bare"))
    cases = {
        "hf": (tmp_path / "model", WeightSource("hf", str(tmp_path / "model"))),
        "quantised": (tmp_path / "quantised", WeightSource("hf", str(tmp_path / "quantised"))),
        "megatron": (root / "model", bare),
        "fine": (root / "model", known["hf"][0]),
    }
    cases = {name: (resumable_args(model, tmp_path / name, **ASKED), source) for name, (model, source) in cases.items()}
    for name in ("copies", "float32"):
        of_float32 = resumable_args(root / "model", tmp_path / f"wide {name}", no_load_optim=True)
        cases[f"wide {name}"] = of_float32, known[f"{name}, resumed"][0]
    (told,) = run_distributed(begin_and_save, 1, (cases,))
    (line,) = told["wide copies"]
    assert "the float32 weights are made of the 16-bit ones" in line and not told["wide float32"]
    (line,) = told["hf"]
    assert "has no weights in float32" in line
    (line,) = told["megatron"]
    assert "are made of the 16-bit weights" in line and "it holds no others" in line
    assert not told["fine"] and not told["quantised"]


def test_a_critic_begins_with_an_actors_weights_and_a_head_of_its_own(tmp_path, sources):
    root, known = sources
    cases = {
        name: (resumable_args(root / "model", tmp_path / name, role="critic", **ASKED), known[name][0])
        for name in ("hf", "float32", "copies")
    }
    (told,) = run_distributed(begin_and_save, 1, (cases,))
    assert "are of a run that trained other weights" in told["copies"][0] and not told["float32"]
    for name in cases:
        found, expected = copies_in(tmp_path / name / "iter_0000000"), dict(known[name][1])
        assert not found.pop("value_head.weight").any() and expected.pop("output_layer.weight") is not None
        if name == "copies":
            # Of the actor's optimizer, which has none of the head, nothing is taken.
            expected = {weight: value.bfloat16().float() for weight, value in expected.items()}
        assert not differing(found, expected), name
