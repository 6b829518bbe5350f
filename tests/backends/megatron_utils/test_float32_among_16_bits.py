"""Decays of gated delta nets in float32, as engines have them, among weights of 16 bits: loaded, trained, saved, exported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_model import tiny_args, write_tiny_delta_net
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import ResumableRun, resumable_args, resumed, stored_tensors

DECAY = "A_log"
ENTRIES = {
    "model_type": "qwen3_5_text", "layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
DATA = {"data_parallel_size": 2}
LAYOUTS = {
    "data": DATA,
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "gradients in 16 bits": {**DATA, "accumulate_allreduce_grads_in_fp32": False},
    "on weights": {**DATA, "use_precision_aware_optimizer": True},
    "on the host": {**DATA, "optimizer_cpu_offload": True},
    "stateless": {**DATA, "use_stateless_adam": True},
}
WITH_MOMENTS = [name for name in LAYOUTS if name != "stateless"]


def write_model(directory: Path, wide: str = DECAY) -> Path:
    """A tiny model as published ones are stored: in bfloat16, and `wide` in float32, whose numbers bfloat16 has not."""
    write_tiny_delta_net(directory, **ENTRIES)
    stored = load_file(directory / "model.safetensors")
    named = {name: tensor if name.endswith(wide) else tensor.bfloat16() for name, tensor in stored.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def weights_of(run) -> dict[str, torch.Tensor]:
    from tests.support.processes.megatron_worker import whole_weights

    return whole_weights(run.args, run.model)


def misplaced(run) -> list[str]:
    """Weights whose value the optimizer's state for them does not hold."""
    from slime.backends.megatron_utils.checkpoint.gathered_state import _own_starts, _state_of

    names = {parameter: name for chunk in run.model for name, parameter in chunk.named_parameters()}
    found = []
    for part in run.parts():
        for weight, start in _own_starts(part):
            main = _state_of(part, weight, "param").detach().view(-1)
            if not weight.detach().view(-1)[start : start + len(main)].equal(main.to(weight.dtype)):
                found.append(names[weight])
    return found


def train_and_resume(args: SimpleNamespace, others: dict[str, SimpleNamespace]) -> dict:
    """Weights as loaded and after two steps; what a resumed run has; and a checkpoint of each of `others` that resumes."""
    run = ResumableRun(args)
    run.prepare()
    found = {"loaded": weights_of(run)}
    for _ in range(2):
        run.step()
    found |= {"trained": weights_of(run), "saved": run.fingerprints(), "misplaced": misplaced(run)}
    run.save()
    run = resumed(args, args.save, run.data)
    found |= {"resumed": run.fingerprints(), "misplaced after": misplaced(run)}
    for other in others.values():
        resumed(other, args.save).save()
    return found


def run_cases(cases: dict[str, tuple[SimpleNamespace, dict[str, SimpleNamespace]]]) -> dict[str, dict]:
    return {name: train_and_resume(args, others) for name, (args, others) in cases.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(directory of the model, that of the checkpoints, what each of two ranks found)"""
    root = tmp_path_factory.mktemp("runs")
    model, narrow = write_model(root / "model"), write_model(root / "narrow model", wide="nothing")

    def args_in(layout, name, of=model):
        return resumable_args(of, root / name, **{"bf16": True, "lr": 1e-5, **layout})

    others = {name: args_in(LAYOUTS[name], f"data, then {name}") for name in WITH_MOMENTS}
    others["narrow"] = args_in(DATA, "data, then narrow", narrow)
    cases = {name: (args_in(layout, name), others if name == "data" else {}) for name, layout in LAYOUTS.items()}
    cases["narrow"] = (args_in(DATA, "narrow", narrow), {"data": args_in(DATA, "narrow, then data")})
    return model, root, run_distributed(run_cases, 2, (cases,), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_loaded_and_exported_in_the_dtype_of_the_checkpoint(runs, name):
    model, _, ranks = runs
    stored = load_file(model / "model.safetensors")
    for rank in ranks:
        loaded, trained = rank[name]["loaded"], rank[name]["trained"]
        assert loaded.keys() == stored.keys()
        assert [key for key, tensor in stored.items() if not _is_same(loaded[key], tensor)] == []
        assert {key: tensor.dtype for key, tensor in trained.items()} == {
            key: tensor.dtype for key, tensor in stored.items()
        }
        (decay,) = (key for key in stored if key.endswith(DECAY))
        assert stored[decay].dtype == torch.float32 and not stored[decay].bfloat16().float().equal(stored[decay])
        # Two steps of a small learning rate, of which bfloat16 would show nothing.
        moved = (trained[decay] - stored[decay]).abs()
        assert moved.max() > 0 and trained[decay].bfloat16().equal(stored[decay].bfloat16())


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.dtype == other.dtype and tensor.equal(other)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resumed_run_has_the_state_of_each_weight(runs, name):
    for rank in runs[-1]:
        found = rank[name]
        assert found["resumed"] == found["saved"]
        assert found["misplaced"] == found["misplaced after"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_MOMENTS)
def test_another_layout_saves_what_it_loaded(runs, name):
    _, root, _ = runs
    expected, found = (
        stored_tensors(root / directory / "iter_0000000") for directory in ("data", f"data, then {name}")
    )
    (decay,) = (key for key in expected if key.startswith("decoder") and key.endswith(DECAY))
    assert expected[decay].equal(expected[f"optimizer.state.param.{decay}"]) and expected[decay].dtype == torch.float32
    assert expected[f"optimizer.state.exp_avg_sq.{decay}"].any()
    assert found.keys() == expected.keys()
    # On the weights the optimizer has another bfloat16 where its value is halfway between two.
    compared = [key for key in expected if key == decay or key.startswith("optimizer.state.")]
    assert [key for key in compared if not _is_same(found[key], expected[key])] == []


@pytest.mark.slow
def test_checkpoints_of_either_dtype_go_on_in_the_other_with_the_value_that_the_optimizer_has(runs):
    _, root, _ = runs
    for before, after, dtype in (("data", "narrow", torch.bfloat16), ("narrow", "data", torch.float32)):
        saved, again = (stored_tensors(root / name / "iter_0000000") for name in (before, f"{before}, then {after}"))
        (decay,) = (key for key in saved if key.startswith("decoder") and key.endswith(DECAY))
        value = saved[f"optimizer.state.param.{decay}"]
        assert not value.equal(value.bfloat16().float())
        assert again[f"optimizer.state.param.{decay}"].equal(value)
        assert _is_same(again[decay], value.to(dtype))


def _dtypes(cases: dict[str, SimpleNamespace]) -> dict[str, torch.dtype]:
    from tests.support.processes.megatron_worker import load_model, whole_weights

    found = {}
    for name, args in cases.items():
        weights = whole_weights(args, load_model(args))
        (found[name],) = {weights[key].dtype for key in weights if key.endswith(DECAY)}
    return found


def test_it_is_as_narrow_as_the_others_where_the_checkpoint_or_the_optimizer_has_no_other(tmp_path):
    wide, narrow = write_model(tmp_path / "wide"), write_model(tmp_path / "narrow", wide="nothing")
    whole = {"use_distributed_optimizer": False}
    kernels = {"use_precision_aware_optimizer": True, "accumulate_allreduce_grads_in_fp32": False}
    cases = {
        "wide": tiny_args(wide, bf16=True),
        "float16": tiny_args(wide, fp16=True),
        "stored in 16 bits": tiny_args(narrow, bf16=True),
        "whole optimizer": tiny_args(wide, bf16=True, **whole),
        "kernels of one dtype": tiny_args(wide, bf16=True, **kernels),
        "critic": tiny_args(wide, bf16=True, role="critic"),
    }
    (found,) = run_distributed(_dtypes, 1, (cases,))
    assert found == {
        "wide": torch.float32,
        "float16": torch.float32,
        "stored in 16 bits": torch.bfloat16,
        "whole optimizer": torch.bfloat16,
        "kernels of one dtype": torch.bfloat16,
        "critic": torch.float32,
    }


def _dtype_without_weights(directory):
    from tests.support.processes.megatron_worker import start

    args = tiny_args(directory, bf16=True)
    start(args)
    from slime.backends.megatron_utils.model_provider import setup_model

    return {str(p.dtype) for chunk in setup_model(args) for name, p in chunk.named_parameters() if name.endswith(DECAY)}


def test_a_model_is_built_beside_a_directory_without_weights(tmp_path):
    """As a rehearsal builds it, and a run that goes on from a checkpoint of its own."""
    directory = write_model(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    assert run_distributed(_dtype_without_weights, 1, (str(directory),)) == [{"torch.bfloat16"}]
