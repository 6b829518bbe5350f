"""Hugging Face -> torch_dist -> Hugging Face without a model in memory, and what training makes of either."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.errors import UserError
from slime.weights.quantised_checkpoint import open_checkpoint
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_tiny_mimo, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import of_trained_parts, stored_tensors
from tests.support.tables.shell_arrays import ROOT
from tools import convert_hf_to_fp8, convert_torch_dist_to_hf_parallel, inspect_checkpoint
from tools import convert_hf_to_torch_dist as converter
from tools.command_line import run_tool
from tools.conversion import torch_dist
from tools.conversion.hugging_face import differences
from tools.conversion.inspection import check_checksums, describe, write_checksums
from tools.conversion.torch_dist import (
    Parameter,
    convert_hf_to_torch_dist,
    convert_torch_dist_to_hf,
    is_left_out,
    megatron_names,
    missing_and_surplus,
)

LARGEST = 40_000
OPTIONS = {"workers": 1, "force": False, "largest": LARGEST}
HF_OPTIONS = {**OPTIONS, "model_name": None, "vocab_size": None, "adds_missing": False}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")
    write_tiny_model(root / "qwen3", layers=4)
    write_tiny_mimo(root / "mimo", head_dim=8)
    write_tiny_model(root / "tied", tied=True)
    write_tiny_mixture(root / "experts", "qwen3_moe")
    for name, family in {"seeing": "qwen3_vl", "stacked": "qwen3_vl_moe"}.items():
        TINY_FAMILIES[family].save(root / name)
    run_distributed(_convert, 1, (root,))
    return root


def _convert(root):
    for name in ("qwen3", "mimo", "tied", "experts", "seeing", "stacked"):
        convert_hf_to_torch_dist(root / name, root / f"{name}-dist", [], **OPTIONS)


@pytest.mark.parametrize("name", ["qwen3", "mimo", "tied", "seeing", "stacked"])
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


def _quantised(root):
    for dtype in ("float16", "bfloat16"):
        config_file = root / "fp8" / "config.json"
        config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "dtype": dtype}))
        convert_hf_to_torch_dist(root / "fp8", root / f"{dtype}-dist", [], **OPTIONS)


def test_quantised_weights_become_the_16_bits_of_the_config(directories, tmp_path):
    convert_hf_to_fp8.main(["--model-dir", str(directories / "qwen3"), "--save-dir", str(tmp_path / "fp8")])
    run_distributed(_quantised, 1, (tmp_path,))
    name = "model.layers.0.mlp.down_proj.weight"
    exact = open_checkpoint(tmp_path / "fp8").tensor(name)[:]
    for dtype in (torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        convert_torch_dist_to_hf(tmp_path / f"{short}-dist", tmp_path / short, directories / "qwen3", **HF_OPTIONS)
        back = {}
        for path in (tmp_path / short).glob("*.safetensors"):
            back |= load_file(path)
        assert back[name].equal(exact.to(dtype)) and not back[name].float().equal(exact)


def _families(root):
    """Of every family that trains, by name: its tensors that differ from what came back, or from what Megatron loads."""
    from pathlib import Path

    paths, found = {}, {}
    for number, (name, family) in enumerate(TINY_FAMILIES.items()):
        model, checkpoint, back = (Path(root) / f"{number}{suffix}" for suffix in ("", "-dist", "-back"))
        family.save(model)
        convert_hf_to_torch_dist(model, checkpoint, [], **OPTIONS)
        convert_torch_dist_to_hf(checkpoint, back, model, **HF_OPTIONS)
        paths[name] = (model, checkpoint, back)
    for name, (model, checkpoint, back) in paths.items():
        stored, returned = stored_tensors(model), stored_tensors(back)
        loaded = _load(str(checkpoint), str(model), {})
        found[name] = [
            key
            for key in sorted(stored.keys() | returned.keys() | loaded.keys())
            for given in ((returned, loaded) if of_trained_parts([key]) else (returned,))
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


def test_it_is_loaded_whichever_way_flags_say_that_all_layers_have_experts(directories):
    """Scripts of models say it by a pattern, and the converter, by config.json, by a number."""
    arguments = (str(directories / "experts-dist"), str(directories / "experts"), {"moe_layer_freq": [1, 1]})
    (found,) = run_distributed(_load, 1, arguments)
    stored = load_file(directories / "experts" / "model.safetensors")
    assert found.keys() == stored.keys() and all(found[name].equal(tensor) for name, tensor in stored.items())


def _save(hf_dir, root, layout):
    from tests.support.processes import megatron_worker as megatron

    batch = {"rollout_batch_size": 2, "n_samples_per_prompt": 1, "global_batch_size": 2}
    args = tiny_args(
        hf_dir, save=root, use_distributed_optimizer=True, bf16=True, num_rollout=1, world_size=2, **batch, **layout
    )
    backend = megatron.load_backend(args)
    backend.save(7).finish()
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


@pytest.mark.parametrize("predictions", [0, 1])
def test_a_layer_for_prediction_and_what_it_has_a_copy_of_are_no_misfits(tmp_path, predictions):
    """As of DeepSeek V3 and GLM-4.5, whose layer behind the last has embedding and head of the model again."""
    norm, last = "model.layers.1.input_layernorm.weight", "model.layers.2"
    behind = [f"{last}.{name}.weight" for name in ("enorm", "embed_tokens", "shared_head.head")]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "glm4_moe", "num_hidden_layers": 2}))
    of_another = "model.layers.1.self_attn.other.weight"
    save_file({name: torch.ones(1) for name in (norm, *behind, of_another)}, tmp_path / "model.safetensors")
    names = ["decoder.layers.1.input_layernorm.weight", "decoder.final_layernorm.weight"]
    names += ["mtp.layers.0.enorm.weight", "mtp.layers.0.hnorm.weight"][: 2 * predictions]
    lacking = ["model.norm.weight", f"{last}.hnorm.weight"] if predictions else ["model.norm.weight"]
    missing, surplus = missing_and_surplus(tmp_path, [Parameter(name, (), 1) for name in names], None)
    assert (sorted(missing), surplus) == (sorted(lacking), [of_another])
    assert [name for name in (norm, *behind, of_another) if is_left_out(tmp_path, name)] == behind[1:]


def test_parts_that_exports_carry_are_no_misfits_and_not_left_out(tmp_path):
    tower, buffer = "model.visual.blocks.0.norm1.weight", "model.language_model.layers.0.rotary_emb.inv_freq"
    config = {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 1}, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = (tower, buffer, "lm_head.weight", "mtp.norm.weight")
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    assert missing_and_surplus(tmp_path, [], None) == ([], [])
    # Of a tied head there is nothing to export.
    assert [name for name in names if is_left_out(tmp_path, name)] == [buffer, "lm_head.weight"]


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


def test_layers_for_prediction_that_the_family_has_no_tensors_for_are_left_out(directories, tmp_path):
    """Such as a run of Qwen2 has by --mtp-num-layers. The layers of MiMo are those of Qwen2."""
    config = json.loads((directories / "mimo" / "config.json").read_text())
    stored = {name: t for name, t in load_file(directories / "mimo" / "model.safetensors").items() if "mtp" not in name}
    (tmp_path / "qwen2").mkdir()
    (tmp_path / "qwen2" / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    save_file(stored, tmp_path / "qwen2" / "model.safetensors")
    convert_torch_dist_to_hf(directories / "mimo-dist", tmp_path / "back", tmp_path / "qwen2", **HF_OPTIONS)
    assert list(differences(tmp_path / "back", tmp_path / "qwen2")) == []


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
    for broken in ("[1", "[1]", "1"):
        (tmp_path / "run" / "checksums.json").write_text(broken)
        with pytest.raises(UserError, match="checksums.json cannot be read"):
            check_checksums(tmp_path / "run")
    part.write_bytes(data[:-100])
    with pytest.raises(UserError, match=r"__0_0.distcp is cut off"):
        list(describe(tmp_path / "run"))
    part.unlink()
    with pytest.raises(UserError, match=r"__0_0.distcp is missing"):
        list(describe(tmp_path / "run"))


def origin_with(directories, path, **entries):
    """A directory of the model `qwen3` without weights, with other entries in its config."""
    path.mkdir()
    config = json.loads((directories / "qwen3" / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **entries}))
    return path


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}, "num_attention_heads of .* 4 .* 8 by"),
        ({"num_hidden_layers": 2, "layer_types": None}, "number of layers 4 in the checkpoint, 2 by config.json"),
        ({"num_hidden_layers": 6, "layer_types": None}, "number of layers 4 in the checkpoint, 6 by config.json"),
        ({"hidden_size": 64}, "hidden size 32 in the checkpoint, 64 by config.json"),
        ({"head_dim": 8}, r"rows of decoder.layers.0.self_attention.linear_qkv.weight 128 in the checkpoint, 64 by"),
        ({"vocab_size": 120}, "vocab_size 131 in the checkpoint, 120 by config.json"),
        ({"vocab_size": 1000}, r"has \d+ rows of vocabulary.* asks for 1000"),
    ],
)
def test_the_config_of_another_model_is_refused(directories, tmp_path, entries, message):
    origin = origin_with(directories, tmp_path / "origin", **entries)
    with pytest.raises(UserError, match=message):
        convert_torch_dist_to_hf(directories / "qwen3-dist", tmp_path / "back", origin, **HF_OPTIONS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["origin"]


@pytest.mark.parametrize("notes_heads", [True, False])
def test_heads_are_told_apart_where_all_rows_are_as_many(directories, tmp_path, notes_heads):
    """By what the checkpoint notes of them, or by the norm that each has a channel of."""
    shutil.copytree(directories / "qwen3-dist", tmp_path / "dist")
    if not notes_heads:
        common = torch.load(tmp_path / "dist" / "iter_0000000" / "common.pt")
        assert common.pop("attention_heads") == {"num_attention_heads": 4, "num_query_groups": 2}
        torch.save(common, tmp_path / "dist" / "iter_0000000" / "common.pt")
    origin = origin_with(directories, tmp_path / "origin", num_attention_heads=8, num_key_value_heads=4, head_dim=8)
    what = "num_attention_heads of" if notes_heads else "channels of .*q_layernorm.weight 16 .* 8 by"
    with pytest.raises(UserError, match=rf"of different models: {what}"):
        convert_torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", origin, **HF_OPTIONS)


def test_weights_of_another_model_are_refused(directories, tmp_path):
    for what, message in (
        ("less", r"has 1 tensors that .* has not: lm_head.weight"),
        ("wider", r"q_norm.*\[16\].*\[8\]"),
    ):
        shutil.copytree(directories / "qwen3", tmp_path / what)
        tensors = load_file(tmp_path / what / "model.safetensors")
        if what == "less":
            del tensors["lm_head.weight"]
        else:
            name = "model.layers.1.self_attn.q_norm.weight"
            tensors[name] = tensors[name][:8].clone()
        save_file(tensors, tmp_path / what / "model.safetensors")
        with pytest.raises(UserError, match=message):
            convert_torch_dist_to_hf(directories / "qwen3-dist", tmp_path / "back", tmp_path / what, **HF_OPTIONS)


def test_the_origin_is_not_replaced(directories, tmp_path):
    origin = origin_with(directories, tmp_path / "models")
    for target in (origin, tmp_path):
        with pytest.raises(UserError, match="is the source .*models, or one lies in the other"):
            convert_torch_dist_to_hf(directories / "qwen3-dist", target, origin, **{**HF_OPTIONS, "force": True})
    assert (origin / "config.json").exists()


def test_rows_of_the_vocabulary(directories, tmp_path):
    options = {**HF_OPTIONS, "vocab_size": 100}
    convert_torch_dist_to_hf(directories / "tied-dist", tmp_path / "back", directories / "tied", **options)
    (path, *_) = [
        path for path in (tmp_path / "back").glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path)
    ]
    stored = load_file(directories / "tied" / "model.safetensors")["model.embed_tokens.weight"]
    assert load_file(path)["model.embed_tokens.weight"].equal(stored[:100])
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 100
    with pytest.raises(UserError, match=r"has \d+ rows of vocabulary, and --vocab-size .* 1000"):
        convert_torch_dist_to_hf(
            directories / "tied-dist", tmp_path / "b", directories / "tied", **{**HF_OPTIONS, "vocab_size": 1000}
        )


def test_the_size_of_the_vocabulary_stands_where_the_config_has_it(directories, tmp_path):
    config = json.loads((directories / "qwen3" / "config.json").read_text())
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_text(json.dumps({"model_type": config["model_type"], "text_config": config}))
    options = {**HF_OPTIONS, "vocab_size": 100}
    convert_torch_dist_to_hf(directories / "qwen3-dist", tmp_path / "back", origin, **options)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "vocab_size" not in written and written["text_config"]["vocab_size"] == 100


def test_what_a_quantised_origin_adds_is_copied_as_it_is_stored(directories, tmp_path):
    dense, origin = tmp_path / "dense-dist", tmp_path / "origin"
    shutil.copytree(directories / "mimo-dist", dense)
    _forget_prediction(dense)
    recipe = ["--model-dir", str(directories / "mimo"), "--save-dir", str(origin), "--block-size", "8", "16"]
    convert_hf_to_fp8.main(recipe)
    convert_torch_dist_to_hf(dense, tmp_path / "back", origin, **{**HF_OPTIONS, "adds_missing": True})
    stored, back = ({}, {})
    for directory, found in ((origin, stored), (tmp_path / "back", back)):
        for path in directory.glob("*.safetensors"):
            found |= load_file(path)
    assert back.keys() == stored.keys() and "weight_scale_inv" in "".join(name for name in back if ".mtp" in name)
    assert all(
        back[name].dtype == tensor.dtype and back[name].float().equal(tensor.float()) for name, tensor in stored.items()
    )


def test_broken_parts_of_a_checkpoint_are_told_by_file(directories, tmp_path):
    shutil.copytree(directories / "tied-dist", tmp_path / "run")
    parts = tmp_path / "run" / "iter_0000000"
    (parts / "common.pt").unlink()
    with pytest.raises(UserError, match="common.pt cannot be read"):
        list(describe(tmp_path / "run"))
    metadata = (parts / ".metadata").read_bytes()
    for length in (0, 3, len(metadata) // 2, len(metadata) - 1):
        (parts / ".metadata").write_bytes(metadata[:length])
        with pytest.raises(UserError, match=".metadata cannot be read"):
            list(describe(tmp_path / "run"))
        with pytest.raises(UserError, match=".metadata cannot be read"):
            convert_torch_dist_to_hf(tmp_path / "run", tmp_path / "back", directories / "tied", **HF_OPTIONS)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": ')
    for action in (
        lambda: list(describe(tmp_path / "hf")),
        lambda: convert_torch_dist_to_hf(directories / "tied-dist", tmp_path / "back", tmp_path / "hf", **HF_OPTIONS),
    ):
        with pytest.raises(UserError, match="config.json cannot be read"):
            action()


def test_the_parallel_name_is_the_same_tool(directories, tmp_path, monkeypatch):
    words = ["--input-dir", directories / "tied-dist", "--output-dir", tmp_path / "back"]
    words += ["--origin-hf-dir", directories / "tied", "--load-max-workers", "1", "--save-max-workers", "1"]
    convert_torch_dist_to_hf_parallel.main([str(word) for word in words])
    assert list(differences(tmp_path / "back", directories / "tied")) == []


@pytest.mark.slow
def test_the_export_of_training_has_the_tensors_it_came_from(directories, tmp_path):
    command = [sys.executable, "-W", "ignore", "tools/convert_to_hf.py", "--check-same"]
    in_16_bits = write_tiny_model(directories / "bf16").bfloat16()
    in_16_bits.save_pretrained(directories / "bf16")
    for name, source, same in (("tied", "tied", True), ("tied", "other", False), ("bf16", "bf16", True)):
        flags = ["--hf-checkpoint", directories / name, "--output-dir", tmp_path / source]
        if not same:
            write_tiny_model(tmp_path / "model", tied=True, seed=1)
            flags += ["--load", tmp_path / "model"]
        result = subprocess.run(
            [*command, *map(str, flags)], capture_output=True, text=True, timeout=300, cwd=ROOT,
            env={**os.environ, "SLIME_ACCELERATOR": "cpu"},
        )  # fmt: skip
        assert result.returncode == (not same), result.stdout + result.stderr
        assert ("has other numbers" in result.stdout) == (not same)
        assert list(differences(tmp_path / source, directories / name)) == [] or not same


@pytest.mark.slow
def test_the_exit_status_of_an_inspection_says_whether_all_fits(directories, tmp_path):
    shutil.copytree(directories / "tied-dist", tmp_path / "run")
    for words, status in (
        ((), 0),
        (("--check-checksums",), 2),
        (("--write-checksums",), 0),
        (("--check-checksums",), 0),
    ):
        assert _status(tmp_path / "run", *words) == status, words
    (tmp_path / "run" / "more").touch()
    assert _status(tmp_path / "run", "--check-checksums") == 1
    next((tmp_path / "run").rglob("*.distcp")).unlink()
    assert _status(tmp_path / "run") == 2


@pytest.mark.parametrize("rank, run, expected", [(0, "torchrun", [3]), (1, "torchrun", []), (1, None, [2])])
def test_of_processes_that_torchrun_starts_the_first_converts(tmp_path, monkeypatch, rank, run, expected):
    """The last row: what a cluster says of its nodes is no launcher's word."""
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 6, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if run is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run)
    converted = []
    monkeypatch.setattr(converter, "start_server", lambda *_: None)
    monkeypatch.setattr(torch_dist, "convert_hf_to_torch_dist", lambda *_, workers, **__: converted.append(workers))
    (tmp_path / "config.json").write_text("{}")
    converter.main(["--hf-checkpoint", str(tmp_path), "--save", "never-made"])
    assert converted == expected


@pytest.mark.slow
def test_torchrun_and_one_process_make_the_same(directories, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["--hf-checkpoint", str(directories / "qwen3"), "--save", str(tmp_path / "dist")]
    command = [*launcher, str(ROOT / "tools/convert_hf_to_torch_dist.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    convert_torch_dist_to_hf(tmp_path / "dist", tmp_path / "back", directories / "qwen3", **HF_OPTIONS)
    assert list(differences(tmp_path / "back", directories / "qwen3")) == []


def _status(directory, *words):
    with pytest.raises(SystemExit) as end:
        run_tool(inspect_checkpoint.main, words=[str(directory), *words])
    return end.value.code


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
