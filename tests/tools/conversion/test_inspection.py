"""What an inspection says of a checkpoint: whether it is whole, and whether it fits a model."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.arguments.checkpoints import WeightSource
from slime.utils.errors import UserError
from tests.support.models.tiny_model import write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args
from tests.support.tables.shell_arrays import ROOT
from tools.conversion.inspection import describe, misfits
from tools.conversion.torch_dist import convert_hf_to_torch_dist, parse_model_flags

CONVERTED = ("plain", "experts")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Models, and checkpoints of two of them."""
    root = tmp_path_factory.mktemp("inspected")
    write_tiny_model(root / "plain", layers=4)
    write_tiny_model(root / "tied", tied=True)
    write_tiny_model(root / "larger", layers=4, vocab_size=300)
    write_tiny_mixture(root / "experts", "qwen3_moe")
    run_distributed(_convert, 1, (str(root),))
    return root


def _convert(root):
    for name in CONVERTED:
        source, target = Path(root) / name, Path(root) / f"{name}-dist"
        convert_hf_to_torch_dist(source, target, [], workers=1, force=False, largest=2**20)


def test_further_sets_of_weights_and_the_format_are_looked_at_too(root, tmp_path):
    run = tmp_path / "run" / "iter_0000000"
    state = run / "states" / "ref"
    shutil.copytree(root / "plain-dist", tmp_path / "run")
    shutil.copytree(root / "plain-dist" / "iter_0000000", state)
    save_file({"torch": torch.zeros(64, dtype=torch.uint8)}, run / "rng_00000.safetensors")
    assert "further sets of weights: ref" in list(describe(tmp_path / "run"))
    for path, cut_off, lost in (
        (state / "__0_0.distcp", "is cut off", "is missing"),
        (state / ".metadata", "cannot be read", "it has no .metadata"),
        (state / "common.pt", "cannot be read", "cannot be read"),
        (state / "metadata.json", "cannot be read", "is missing"),
        (run / "metadata.json", "cannot be read", "is missing"),
        (run / "rng_00000.safetensors", "cannot be read", None),
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        with pytest.raises(UserError, match=f"{path} {cut_off}"):
            list(describe(tmp_path / "run"))
        path.unlink()
        if lost is not None:
            with pytest.raises(UserError, match=lost) as error:
                list(describe(tmp_path / "run"))
            assert str(path.parent) in str(error.value)
        path.write_bytes(whole)
    (run / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    with pytest.raises(UserError, match=r"metadata.json says of another format than torch_dist: .*zarr"):
        list(describe(tmp_path / "run"))


@pytest.fixture(scope="module")
def of_fsdp(root):
    """A checkpoint that FSDP has saved of `plain`, with the optimizer's state, a further set of weights and generators."""
    run_distributed(_save_fsdp, 1, (str(root / "plain"), str(root / "fsdp")))
    return root / "fsdp"


def _save_fsdp(model, directory):
    from slime.training.backend import make_backend
    from slime.training.checkpoint_publication import publish_checkpoint
    from slime.training.model_states import REFERENCE, ModelStates

    args = layout_args(
        model, train_backend="fsdp", save=directory, lr=1e-3, keep_last=None, save_hf=None, data_parallel_size=1
    )
    backend = make_backend(args)
    backend.place()
    backend.load(WeightSource("hf", model))
    for parameter in backend.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    backend.optimizer.step()
    states = ModelStates(backend.live_tensors)
    states.capture(REFERENCE)
    backend.save(4, states, (REFERENCE,)).finish()
    publish_checkpoint(args, 4)


def test_a_checkpoint_of_fsdp_is_looked_at_whole(of_fsdp, tmp_path):
    shutil.copytree(of_fsdp, tmp_path / "run")
    run = tmp_path / "run" / "iter_0000004"
    lines = list(describe(tmp_path / "run"))
    assert lines[0].startswith("FSDP checkpoint, iterations 4; the newest is 4") and lines[1:] == list(describe(run))
    assert "saved by 1 ranks with --train-backend fsdp" in lines[1] and lines[2] == "optimizer state: yes"
    assert lines[3] == "further sets of weights: ref" and lines[4].startswith("Hugging Face checkpoint of qwen3, ")
    (generators,), (weights, *_) = run.glob("rng_*.safetensors"), sorted(run.glob("model*.safetensors"))
    for path in (
        run / "optimizer/__0_0.distcp",
        run / "states/ref/__0_0.distcp",
        generators,
        weights,
        run / "metadata.json",
    ):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=str(path)):
            list(describe(tmp_path / "run"))
        path.write_bytes(whole)
    (run / "optimizer/.metadata").unlink()
    with pytest.raises(UserError, match="optimizer is no torch_dist checkpoint: it has no .metadata"):
        list(describe(tmp_path / "run"))


def _misfits(root):
    root = Path(root)
    found = {name: misfits(root / "plain-dist", root / name, []) for name in ("plain", "tied", "larger")}
    found |= {f"hf, {name}": misfits(root / "plain", root / name, []) for name in ("plain", "tied")}
    found |= {f"fsdp, {name}": misfits(root / "fsdp", root / name, []) for name in ("plain", "tied")}
    for frequency in ("1", "[1]*2"):
        found[frequency] = misfits(root / "experts-dist", root / "experts", ["--moe-layer-freq", frequency])
    _rename(root / "experts-dist", ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")
    found["older"] = misfits(root / "experts-dist", root / "experts", [])
    common = root / "plain-dist" / "iter_0000000" / "common.pt"
    torch.save({"format_version": 1, "iteration": 0, "has_optimizer": False}, common)
    return found | {f"older, {name}": misfits(root / "plain-dist", root / name, []) for name in ("plain", "larger")}


def _rename(checkpoint, old, new):
    """Give tensors in a checkpoint's metadata the names that older versions gave them."""
    path = checkpoint / "iter_0000000" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    entries = metadata.state_dict_metadata
    assert any(old in key for key in entries)
    metadata.state_dict_metadata = {key.replace(old, new): entry for key, entry in entries.items()}
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.slow
def test_a_checkpoint_is_compared_with_a_model(root, of_fsdp, tmp_path):
    for name in ("plain", "tied", "larger", "experts", "fsdp", *(f"{name}-dist" for name in CONVERTED)):
        shutil.copytree(root / name, tmp_path / name)
    (found,) = run_distributed(_misfits, 1, (str(tmp_path),))
    for name in ("plain", "hf, plain", "fsdp, plain", "1", "[1]*2", "older", "older, plain"):
        assert found[name] == [], name
    assert "has output_layer.weight, which the model has not" in found["tied"]
    assert "decoder.layers.mlp.linear_fc2.weight is [4, 32, 96], and [2, 32, 96] in the model" in found["tied"]
    for name in ("hf, tied", "fsdp, tied"):
        assert "has model.layers.2.mlp.up_proj.weight, which the model has not" in found[name]
    assert found["larger"] == ["--vocab-size 131 in the checkpoint, and 300 by the flags"]
    rows = [line.partition(" in the checkpoint")[0] for line in found["older, larger"]]
    assert all(name in row for name, row in zip(("embedding", "output_layer"), rows, strict=True))


@pytest.mark.slow
def test_the_command_compares_in_a_process_of_its_own(root):
    """Which has imported nothing of Megatron before."""
    words = [str(root / "plain-dist"), "--hf-checkpoint", str(root / "plain")]
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/inspect_checkpoint.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"it fits the model of {root / 'plain'}"), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline-model-parallel-size 2",
        "--tensor-model-parallel-size=4 --sequence-parallel --context-parallel-size 2",
        "--pipeline-model-parallel-size 8 --decoder-last-pipeline-num-layers 1 --account-for-loss-in-pipeline-split",
    ],
)
def test_how_ranks_of_a_run_divide_a_model_is_nothing_to_the_tools(tmp_path, capsys, words):
    """Scripts of other programs start a converter with as many processes as a run has stages, and with all of its flags."""
    write_tiny_model(tmp_path, layers=4)
    args = parse_model_flags(tmp_path, ["--vocab-size", "131", *words.split(), "--padded-vocab-size", "160"])
    assert (args.num_layers, args.vocab_size, args.padded_vocab_size, args.world_size) == (4, 131, 160, 1)
    flags = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
    assert f"in one piece: {', '.join(flags)}\n" in capsys.readouterr().err
    parse_model_flags(tmp_path, ["--padded-vocab-size", "160"])
    assert "in one piece" not in capsys.readouterr().err
