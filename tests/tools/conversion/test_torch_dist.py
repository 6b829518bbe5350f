"""Hugging Face -> torch_dist -> Hugging Face without a model in memory, and what training makes of either."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from slime.utils.errors import UserError
from tests.support.models.tiny_model import tiny_args, write_tiny_mimo, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tools.conversion.inspection import check_checksums, describe, misfits, write_checksums
from tools.conversion.torch_dist import convert_hf_to_torch_dist, convert_torch_dist_to_hf, megatron_names

LARGEST = 40_000
OPTIONS = {"workers": 1, "force": False, "largest": LARGEST}
HF_OPTIONS = {**OPTIONS, "model_name": None, "vocab_size": None, "adds_missing": False}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    write_tiny_model(root / "qwen3", layers=4)
    write_tiny_mimo(root / "mimo", head_dim=8)
    write_tiny_model(root / "tied", tied=True)
    run_distributed(_convert, 1, (str(root),))
    return root


def _convert(root):
    from pathlib import Path

    root = Path(root)
    for name in ("qwen3", "mimo", "tied"):
        convert_hf_to_torch_dist(root / name, root / f"{name}-dist", [], **OPTIONS)


@pytest.mark.parametrize("name", ["qwen3", "mimo", "tied"])
def test_there_and_back_is_bitwise(directories, tmp_path, name):
    convert_torch_dist_to_hf(directories / f"{name}-dist", tmp_path / "back", directories / name, **HF_OPTIONS)
    stored, back = load_file(directories / name / "model.safetensors"), {}
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 1
    for path in shards:
        back |= load_file(path)
    assert back.keys() == stored.keys()
    assert all(back[key].dtype == tensor.dtype and back[key].equal(tensor) for key, tensor in stored.items())
    assert (tmp_path / "back" / "config.json").exists()


def _families(root):
    """Of every family that trains, by name: its tensors that differ from what came back, or from what Megatron loads."""
    from pathlib import Path

    from tests.support.models.tiny_families import TINY_FAMILIES

    paths, found = {}, {}
    for number, (name, family) in enumerate(TINY_FAMILIES.items()):
        model, checkpoint, back = (Path(root) / f"{number}{suffix}" for suffix in ("", "-dist", "-back"))
        family.save(model)
        convert_hf_to_torch_dist(model, checkpoint, [], **OPTIONS)
        convert_torch_dist_to_hf(checkpoint, back, model, **HF_OPTIONS)
        paths[name] = (model, checkpoint, back)
    for name, (model, checkpoint, back) in paths.items():
        stored, returned = load_file(model / "model.safetensors"), {}
        for path in back.glob("*.safetensors"):
            returned |= load_file(path)
        loaded = _load(str(checkpoint), str(model), {})
        found[name] = [
            key
            for key in sorted(stored.keys() | returned.keys() | loaded.keys())
            for given in (returned, loaded)
            if key not in given
            or key not in stored
            or given[key].dtype != stored[key].dtype
            or not given[key].equal(stored[key])
        ]
    return found


@pytest.mark.slow
def test_every_family_goes_there_and_back_bitwise_and_is_loaded(tmp_path):
    (found,) = run_distributed(_families, 1, (str(tmp_path),), timeout=400)
    assert len(found) >= 17 and not any(found.values()), found


def _load(checkpoint, hf_dir, layout):
    """What a rank that loads the checkpoint exports, and what it saves again."""
    from slime.arguments.checkpoints import WeightSource
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(hf_dir, **layout)
    megatron.start(args)
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.hf_conversion import iter_stage_named_tensors, names_of_stage
    from slime.backends.megatron_utils.model_provider import setup_model

    chunks = setup_model(args)
    assert load_checkpoint(args, WeightSource("megatron", checkpoint), chunks) == 0
    return {
        name: tensor.clone() for name, tensor in iter_stage_named_tensors(args, chunks, names_of_stage(args, chunks))
    }


@pytest.mark.slow
def test_every_layout_loads_what_was_converted(directories):
    stored = load_file(directories / "qwen3" / "model.safetensors")
    for layout in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}):
        ranks = run_distributed(_load, 2, (str(directories / "qwen3-dist"), str(directories / "qwen3"), layout))
        found = {name: tensor for of_rank in ranks for name, tensor in of_rank.items()}
        assert found.keys() == stored.keys() and all(found[name].equal(tensor) for name, tensor in stored.items())


def test_one_rank_loads_what_was_converted(directories):
    (found,) = run_distributed(_load, 1, (str(directories / "mimo-dist"), str(directories / "mimo"), {}))
    stored = load_file(directories / "mimo" / "model.safetensors")
    assert found.keys() == stored.keys() and all(found[name].equal(tensor) for name, tensor in stored.items())


def _save(hf_dir, root, layout):
    from tests.support.processes import megatron_worker as megatron

    batch = {"rollout_batch_size": 2, "n_samples_per_prompt": 1, "global_batch_size": 2}
    args = tiny_args(
        hf_dir, save=root, use_distributed_optimizer=True, bf16=True, num_rollout=1, world_size=2, **batch, **layout
    )
    backend = megatron.load_backend(args)
    backend.save(7)
    from slime.backends.megatron_utils.checkpoint import publish_checkpoint

    if torch.distributed.get_rank() == 0:
        publish_checkpoint(args, 7)


@pytest.mark.slow
def test_what_training_has_saved_becomes_a_hugging_face_directory(directories, tmp_path):
    """Saved in parts by two ranks, with the optimizer's float32 copies, which are left out."""
    layout = {"tensor_model_parallel_size": 2}
    run_distributed(_save, 2, (str(directories / "qwen3"), str(tmp_path / "run"), layout))
    convert_torch_dist_to_hf(tmp_path / "run", tmp_path / "back", directories / "qwen3", **{**HF_OPTIONS, "workers": 2})
    stored, back = load_file(directories / "qwen3" / "model.safetensors"), {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        back |= load_file(path)
    assert back.keys() == stored.keys() and all(back[key].equal(tensor.bfloat16()) for key, tensor in stored.items())
    lines = list(describe(tmp_path / "run"))
    assert (
        "iterations 7" in lines[0] and "tensor_model_parallel_size 2" in lines[1] and lines[2] == "optimizer state: no"
    )


def test_names_of_stacked_tensors():
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert list(megatron_names(key, (2, 8, 4))) == [
        ("decoder.layers.0.mlp.linear_fc2.weight", (0,)),
        ("decoder.layers.1.mlp.linear_fc2.weight", (1,)),
    ]
    assert list(megatron_names("decoder.layers.3.mlp.router.weight", (4, 8))) == [
        ("decoder.layers.3.mlp.router.weight", ())
    ]
    experts = list(megatron_names("decoder.layers.mlp.experts.experts.linear_fc1.weight", (2, 3, 8, 4)))
    assert len(experts) == 6
    assert experts[5] == ("decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight", (1, 2))


def test_what_lacks_something_is_refused_or_filled(directories, tmp_path):
    # The model without layers for prediction has less than the directory of the other.
    with pytest.raises(UserError, match=r"lacks \d+ tensors that .*mtp.*--add-missing-from-origin-hf"):
        dense = tmp_path / "dense-dist"
        shutil.copytree(directories / "mimo-dist", dense)
        _forget_prediction(dense)
        convert_torch_dist_to_hf(dense, tmp_path / "a", directories / "mimo", **HF_OPTIONS)
    convert_torch_dist_to_hf(dense, tmp_path / "b", directories / "mimo", **{**HF_OPTIONS, "adds_missing": True})
    stored, back = load_file(directories / "mimo" / "model.safetensors"), {}
    for path in (tmp_path / "b").glob("*.safetensors"):
        back |= load_file(path)
    assert back.keys() == stored.keys() and all(back[key].equal(tensor) for key, tensor in stored.items())
    with pytest.raises(UserError, match="is no torch_dist checkpoint"):
        convert_torch_dist_to_hf(tmp_path, tmp_path.with_name("c"), directories / "mimo", **HF_OPTIONS)


def _forget_prediction(checkpoint):
    import pickle

    path = checkpoint / "iter_0000000" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for key in [key for key in metadata.state_dict_metadata if key.startswith("mtp.")]:
        del metadata.state_dict_metadata[key]
    path.write_bytes(pickle.dumps(metadata))


def test_a_file_that_is_cut_off_or_lost_is_found(directories, tmp_path):
    shutil.copytree(directories / "tied-dist", tmp_path / "run")
    write_checksums(tmp_path / "run")
    assert check_checksums(tmp_path / "run") == []
    part = tmp_path / "run" / "iter_0000000" / "__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[-200] ^= 1
    part.write_bytes(data)
    assert check_checksums(tmp_path / "run") == ["iter_0000000/__0_0.distcp has changed"]
    part.write_bytes(data[:-100])
    with pytest.raises(UserError, match=r"__0_0.distcp is cut off"):
        list(describe(tmp_path / "run"))
    part.unlink()
    with pytest.raises(UserError, match=r"__0_0.distcp is missing"):
        list(describe(tmp_path / "run"))


def _misfits(root):
    from pathlib import Path

    root = Path(root)
    found = [misfits(root / "qwen3-dist", root / name, []) for name in ("qwen3", "tied")]
    return [*found, misfits(root / "qwen3", root / "qwen3", []), misfits(root / "qwen3", root / "tied", [])]


@pytest.mark.slow
def test_a_checkpoint_is_compared_with_a_model(directories):
    ((same, other, hf, hf_other),) = run_distributed(_misfits, 1, (str(directories),))
    assert same == [] and hf == []
    assert "has output_layer.weight, which the model has not" in other
    assert "decoder.layers.mlp.linear_fc2.weight is [4, 32, 96], and [2, 32, 96] in the model" in other
    assert "has model.layers.2.mlp.up_proj.weight, which the model has not" in hf_other


@pytest.mark.slow
def test_config_and_weights_that_disagree_are_told(directories, tmp_path):
    shutil.copytree(directories / "tied", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "layer_types": None}))
    ((message,),) = run_distributed(_refused, 1, (str(tmp_path),))
    assert "lacks 11 tensors: model.layers.2.input_layernorm.weight" in message


def _refused(root):
    from pathlib import Path

    with pytest.raises(UserError) as caught:
        convert_hf_to_torch_dist(Path(root) / "model", Path(root) / "dist", [], **OPTIONS)
    return [str(caught.value)]
