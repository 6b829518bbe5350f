"""Weights that a run cannot load, or casts, as files, metadata, configs and flags tell them before anything starts."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.arguments import parse_args
from slime.plan import make_plan
from slime.plan.before_start import (
    check_before_start,
    divided_blocks,
    other_dtypes,
    pushes_without_a_taker,
    sizes_against_config,
)
from slime.utils.errors import UserError
from slime.weights.hf_reader import places_of_checkpoint
from tests.support.models.args import command_line, parse, write_config, write_iteration, write_stand_ins
from tests.support.models.tiny_families import TINY_FAMILIES


def told(directory: Path, *words: str, **config: object) -> list[str]:
    """The problems of a run whose `--hf-checkpoint` is whole; `config`: entries of its config that arguments do not show."""
    args = parse(directory, *words)
    write_stand_ins(write_config(directory / "model", **config))
    try:
        check_before_start(args)
    except UserError as error:
        return str(error).splitlines()
    return []


def cut(file: Path, size: int | None) -> None:
    """Leave the first `size` bytes of a file; None: leave nothing of it."""
    content = file.read_bytes()
    file.unlink()
    if size is not None:
        file.write_bytes(content[:size])


@pytest.mark.parametrize(
    ("file", "size", "problem"),
    [
        ("__0_0.distcp", 1000, "__0_0.distcp is cut off: it has 1000 bytes, and should have "),
        ("__0_0.distcp", None, "__0_0.distcp is missing"),
        (".metadata", 100, ".metadata cannot be read: "),
        (".metadata", None, "iter_0000001 is no torch_dist checkpoint: it has no .metadata"),
        ("states/ref/__0_0.distcp", 1000, "states/ref/__0_0.distcp is cut off: it has 1000 bytes, and should have "),
        ("metadata.json", 10, "iter_0000001 is no whole checkpoint, although "),
    ],
)
def test_a_checkpoint_that_is_cut_off_is_told_by_its_file(tmp_path, file, size, problem):
    checkpoint = tmp_path / "checkpoint"
    written = write_iteration(checkpoint)
    shutil.copytree(written, written / "states/ref")
    words = ("--load", str(checkpoint))
    assert told(tmp_path, *words) == []
    cut(written / file, size)
    [line] = told(tmp_path, *words)
    assert problem in line and f"{checkpoint}" in line
    assert line.endswith("start from another one") and line.startswith("--load ") or line.endswith("start elsewhere")


@pytest.mark.parametrize(
    ("words", "missed"),
    [
        ("--load CHECKPOINT", True),
        ("--load CHECKPOINT --no-load-optim", False),
        ("--load CHECKPOINT --finetune", False),
        ("--load MODEL --use-kl-loss --ref-load CHECKPOINT", False),
    ],
)
def test_what_is_not_read_may_be_cut_off(tmp_path, words, missed):
    """The state of the optimizer, behind all weights."""
    checkpoint = tmp_path / "checkpoint"
    written = write_iteration(checkpoint, shapes={"embedding.word_embeddings.weight": (300, 64)})
    [file] = written.glob("*.distcp")
    cut(file, file.stat().st_size - 100)
    words = words.replace("CHECKPOINT", str(checkpoint)).replace("MODEL", str(tmp_path / "model"))
    lines = told(tmp_path, *words.split())
    assert [file.name in line for line in lines] == [True] * missed


SOURCES = {
    "--load": "--load OTHER",
    "--ref-load": "--use-kl-loss --ref-load OTHER",
    "--opd-teacher-load": "--use-opd --opd-type megatron --opd-teacher-load OTHER",
    "roles.yaml:1: role critic:": "--advantage-estimator ppo --megatron-config-path roles.yaml",
}
SIZES = {
    "num_layers": ("num_hidden_layers", "--num-layers 3 there, 2 here"),
    "hidden_size": ("hidden_size", "--hidden-size 32 there, 64 here"),
    "ffn_hidden_size": ("intermediate_size", "--ffn-hidden-size 96 there, 128 here"),
    "vocab_size": ("vocab_size", "--vocab-size 100 there, 300 here"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", SOURCES)
@pytest.mark.parametrize("kind", ["torch_dist", "hf"])
def test_weights_of_another_model_are_told_by_the_flag_that_names_them(tmp_path, kind, place, size):
    entry, differs = SIZES[size]
    value = int(differs.split()[1])
    other, same = tmp_path / "other", tmp_path / "same"
    if kind == "hf":
        write_stand_ins(write_config(other, **{entry: value}))
        write_stand_ins(write_config(same, max_position_embeddings=9999))
    else:
        write_iteration(other, 0, **{size: value})
        # Rows that pad the vocabulary are no difference.
        write_iteration(same, 0, vocab_size=384)
    for directory in (other, same):
        fresh = ", finetune: true" if kind == "torch_dist" else ""
        (tmp_path / "roles.yaml").write_text(f"megatron: [{{role: critic, overrides: {{load: {directory}{fresh}}}}}]\n")
        words = SOURCES[place].replace("OTHER", str(directory)).replace("roles.yaml", f"{tmp_path}/roles.yaml")
        lines = told(tmp_path, *words.split(), "--finetune")
        if directory == same:
            assert lines == []
            continue
        [line] = lines
        assert line.startswith(place.replace("roles.yaml", f"{tmp_path}/roles.yaml")) and differs in line
        assert line.endswith("; give weights of the same model")


def test_a_critic_of_a_size_of_its_own_starts_from_weights_of_that_size(tmp_path):
    smaller = write_iteration(tmp_path / "smaller", 0, num_layers=1).parent
    config = write_config(tmp_path / "config", num_hidden_layers=1)
    overrides = f"load: {smaller}, finetune: true"
    for own, count in (("", 1), (f", hf_checkpoint: {config}, num_layers: 1", 0)):
        (tmp_path / "roles.yaml").write_text(f"megatron: [{{role: critic, overrides: {{{overrides}{own}}}}}]\n")
        words = ("--advantage-estimator", "ppo", "--megatron-config-path", f"{tmp_path}/roles.yaml")
        assert len(told(tmp_path, *words)) == count


def test_layers_that_are_kept_apart_are_counted(tmp_path):
    shapes = {f"decoder.layers.{layer}.mlp.linear_fc2.weight": (64, 128) for layer in range(12)}
    write_iteration(tmp_path / "checkpoint", shapes=shapes)
    [line] = told(tmp_path, "--load", str(tmp_path / "checkpoint"))
    assert "--num-layers 12 there, 2 here" in line


def test_a_checkpoint_of_fsdp_is_looked_at_as_the_directory_that_it_is(tmp_path):
    written = write_stand_ins(write_config(tmp_path / "checkpoint/iter_0000001"))
    (written / "metadata.json").write_text(json.dumps({"sharded_backend": "fsdp2"}))
    (tmp_path / "checkpoint/latest_checkpointed_iteration.txt").write_text("1")
    words = ("--load", str(tmp_path / "checkpoint"), "--train-backend", "fsdp")
    assert told(tmp_path, *words) == []
    cut(written / "model.safetensors", 50)
    [line] = told(tmp_path, *words)
    assert line.startswith(f"--load {tmp_path}/checkpoint: {written}/model.safetensors cannot be read")
    write_stand_ins(write_config(written, num_hidden_layers=3))
    [line] = told(tmp_path, *words)
    assert "--num-layers 3 there, 2 here" in line


def write_headers(file: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> None:
    """A safetensors file of these tensors, whose bytes take no room."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with file.open("ab") as opened:
        opened.truncate(8 + len(text) + end)


# Of TINY_QWEN3_CONFIG: 4 heads of 16 channels, 2 of them with keys and values.
FITTING = {
    "model.embed_tokens.weight": (300, 64), "lm_head.weight": (300, 64), "model.norm.weight": (64,),
    "model.layers.1.post_attention_layernorm.weight": (64,), "model.layers.1.self_attn.k_proj.weight": (32, 64),
    "model.layers.1.mlp.up_proj.weight": (128, 64), "model.layers.1.mlp.down_proj.weight": (64, 128),
}  # fmt: skip


@pytest.mark.parametrize("name", FITTING)
def test_tensors_of_other_sizes_than_the_config_says_are_told_with_their_file(tmp_path, name):
    args, file = parse(tmp_path), write_stand_ins(tmp_path / "model") / "model.safetensors"
    write_headers(file, FITTING)
    check_before_start(args)
    *other, last = FITTING[name]
    write_headers(file, {**FITTING, name: (*other, last + 16)})
    with pytest.raises(UserError) as error:
        check_before_start(args)
    assert str(error.value) == (
        f"{file}: {name} is {[*other, last + 16]}, and by config.json beside it {[*other, last]}; get weights and config of "
        "the same model"
    )
    # Those of two bytes that four weights share have shapes of their own.
    write_headers(file, {name: (*other, last // 4)}, dtype="U8")
    check_before_start(args)


def test_one_tensor_is_named_and_the_others_are_counted(tmp_path):
    args, file = parse(tmp_path), write_stand_ins(tmp_path / "model") / "model.safetensors"
    write_headers(file, {name: tuple(2 * size for size in shape) for name, shape in FITTING.items()})
    with pytest.raises(
        UserError, match=r"embed_tokens.weight is \[600, 128\].* \[300, 64\], and 6 more tensors differ"
    ):
        check_before_start(args)


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_the_weights_of_every_family_have_the_sizes_of_their_config(tmp_path, family):
    TINY_FAMILIES[family].save(tmp_path)
    places = places_of_checkpoint(tmp_path)
    assert list(sizes_against_config(tmp_path, places)) == []
    whole = json.loads((tmp_path / "config.json").read_text())
    config = whole.get("text_config", whole)
    for entry in ("vocab_size", "hidden_size"):
        changed = {**config, entry: 2 * config[entry]}
        (tmp_path / "config.json").write_text(
            json.dumps({**whole, "text_config": changed} if config is not whole else changed)
        )
        assert list(sizes_against_config(tmp_path, places)), entry


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), None),
        (("--sglang-dtype", "float"), None),
        (("--sglang-dtype", "half"), "half: engines compute in float16, and the trainer in float32"),
        (("--sglang-dtype", "auto"), "auto: engines compute in float16, and the trainer in float32"),
        (("--sglang-dtype", "auto", "--bf16"), "auto: engines compute in float16, and the trainer in bfloat16"),
        (("--sglang-dtype", "half", "--debug-rollout-only"), None),
    ],
)
def test_engines_that_are_told_another_dtype_than_the_trainers_are_warned_of(tmp_path, caplog, words, told):
    args = parse(tmp_path, "--rollout-num-gpus", "1", *words)
    write_stand_ins(tmp_path / "model")
    check_before_start(args)
    for found in ([record.message for record in caplog.records], make_plan(args).warnings):
        about = [message for message in found if "engines compute in" in message]
        assert len(about) == (told is not None) and all(f"--sglang-dtype {told}" in message for message in about)


@pytest.mark.parametrize(
    "on_gpus, words, warned", [(True, (), 1), (False, (), 0), (True, ("--sglang-dtype", "float32"), 0)]
)
def test_engines_on_gpus_that_follow_the_config_beside_a_trainer_in_float32_are_warned_of(
    tmp_path, on_gpus, words, warned
):
    """Without GPUs they are told to compute in float32."""
    args = parse(tmp_path, "--rollout-num-gpus", "1", *words)
    assert args.params_dtype_name == "float32"
    args.on_gpus = on_gpus
    told = list(other_dtypes(args, {"torch_dtype": "bfloat16"}))
    assert len(told) == warned
    assert all(
        "engines compute in bfloat16, as the config" in line and "--sglang-dtype float32" in line for line in told
    )


@pytest.mark.parametrize(
    "on_gpus, has_trainer, warned", [(True, True, 1), (None, True, 1), (False, True, 0), (True, False, 0)]
)
def test_a_checkpoint_that_engines_with_gpus_load_but_once_is_warned_of(tmp_path, on_gpus, has_trainer, warned):
    write_config(tmp_path, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})
    save_file({"lm_head.weight_packed": torch.zeros(1)}, tmp_path / "model.safetensors")
    args = SimpleNamespace(on_gpus=on_gpus, has_trainer=has_trainer, has_engines=True, hf_checkpoint=str(tmp_path))
    found = list(pushes_without_a_taker(args))
    assert len(found) == warned and all("lm_head.weight_packed: on GPUs" in message for message in found)


def test_a_run_that_only_trains_starts_without_a_hugging_face_directory(tmp_path):
    torch.save({"samples": []}, tmp_path / "0.pt")
    shape = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 300 --swiglu"
    shape += " --disable-bias-linear --normalization RMSNorm --model-name qwen3"
    start = f"--random-init --load-debug-rollout-data {tmp_path}/{{rollout_id}}.pt"
    words = command_line(tmp_path)
    check_before_start(parse_args(argv=[*words[words.index("--prompt-data") :], *shape.split(), *start.split()]))


def tokenizer_file(directory: Path, vocabulary: object, **added: int) -> None:
    rows = [{"content": token, "id": number} for token, number in added.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": rows}))


@pytest.mark.parametrize(
    ("vocabulary", "added", "differs"),
    [
        ({"a": 0, "b": 1}, {"end": 2}, False),
        ([["a", -1.0], ["b", -2.0]], {"end": 2, "pad": 3}, False),
        ({"a": 1, "b": 0}, {"end": 2}, True),
        ({"a": 0, "b": 1}, {}, True),
        (None, {}, False),
    ],
)
def test_a_critic_of_another_tokenizer_is_warned_of(tmp_path, caplog, vocabulary, added, differs):
    """Another size of its vocabulary alone, which rows that pad it make, is no sign of one."""
    critic = write_stand_ins(write_config(tmp_path / "critic", vocab_size=320))
    (tmp_path / "roles.yaml").write_text(f"critic: {{hf_checkpoint: {critic}}}")
    words = ("--advantage-estimator", "ppo", "--megatron-config-path", f"{tmp_path}/roles.yaml")
    args = parse(tmp_path, *words)
    tokenizer_file(write_stand_ins(tmp_path / "model"), {"a": 0, "b": 1}, end=2)
    tokenizer_file(critic, vocabulary, **added)
    check_before_start(args)
    for found in ([record.message for record in caplog.records], make_plan(args).warnings):
        about = [message for message in found if "another tokenizer" in message]
        assert len(about) == differs and all(f"{tmp_path}/roles.yaml:1: role critic" in message for message in about)


@pytest.mark.parametrize(
    ("given", "words", "problem"),
    [
        ("32", "", None),
        (
            "128",
            "",
            "OPEN_TRAINING_INT4_GROUP_SIZE=128: --hf-checkpoint {model} has 4 bits and groups of 32, and is not ",
        ),
        ("128", "--debug-rollout-only", None),
        ("", "", "OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 needs OPEN_TRAINING_INT4_GROUP_SIZE, "),
    ],
)
def test_training_for_int4_in_groups_of_another_size_is_told(tmp_path, monkeypatch, given, words, problem):
    monkeypatch.setenv("OPEN_TRAINING_INT4_FAKE_QAT_FLAG", "1")
    monkeypatch.setenv("OPEN_TRAINING_INT4_GROUP_SIZE", given)
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    lines = told(tmp_path, *words.split(), quantization_config=settings)
    start = () if problem is None else (problem.format(model=tmp_path / "model"),)
    assert len(lines) == len(start) and all(map(str.startswith, lines, start)), lines


DENSE, SHARED = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.shared_experts.down_proj.weight"
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


@pytest.mark.parametrize(
    ("names", "changed", "found"),
    [
        ((DENSE, SHARED, EXPERT), {}, {DENSE: (128, 2), SHARED: (64, 1)}),
        ((DENSE, SHARED, EXPERT), {"sglang_moe_dense_tp_size": 1, "sglang_moe_a2a_backend": "deepep"}, {}),
        ((DENSE, SHARED, EXPERT), {"sglang_moe_dense_tp_size": 1, "sglang_moe_a2a_backend": "none"}, {SHARED: (64, 1)}),
        # Without experts all layers are divided, whatever that flag says.
        ((DENSE,), {"sglang_moe_dense_tp_size": 1}, {DENSE: (128, 2)}),
        ((EXPERT,), {}, {}),
        ((DENSE, SHARED), {"sglang_pp_size": 4}, {}),
        ((DENSE, SHARED, EXPERT), {"rollout_external": True}, {}),
    ],
)
def test_blocks_of_fp8_that_the_ranks_of_an_engine_would_divide_are_told(tmp_path, monkeypatch, names, changed, found):
    """Engines of four GPUs, blocks of 64 columns."""
    args = parse(tmp_path, "--debug-rollout-only", "--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "4")
    vars(args).update(changed)
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    directory = write_config(tmp_path / "model", quantization_config=settings)
    widths = {DENSE: 128, SHARED: 64, EXPERT: 64}
    shapes = {name: (64, widths[name]) for name in names}
    scales = {f"{name}_scale_inv": (1, widths[name] // 64) for name in names}
    write_headers(directory / "model.safetensors", {**shapes, **scales})
    lines = list(divided_blocks(args, str(directory), places_of_checkpoint(directory)))
    assert len(lines) == len(found)
    for line, (name, (width, fitting)) in zip(lines, found.items(), strict=True):
        assert f"{name} has {width} columns" in line and f"--rollout-num-gpus-per-engine {fitting}" in line
        assert ("--sglang-moe-dense-tp-size 1" in line) is (name == DENSE and EXPERT in names)
        assert ("--sglang-moe-a2a-backend deepep" in line) is (name == SHARED)
    monkeypatch.setenv("SGLANG_SHARED_EXPERT_TP1", "true")
    left = list(divided_blocks(args, str(directory), places_of_checkpoint(directory)))
    assert left == [line for line in lines if "shared_experts" not in line]
    # A layer without scales is kept in 16 bits, and may be divided anywhere.
    write_headers(directory / "model.safetensors", shapes)
    assert list(divided_blocks(args, str(directory), places_of_checkpoint(directory))) == []
