"""Names on disk: the same whatever layers are made of; and checkpoints that have others, or lack something, are read."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from slime.utils.errors import UserError
from tests.support.kernels import transformer_engine_on_cpu
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args
from tests.support.processes.checkpoint_trainer import Trainer, assert_same, make_args, resume, train_and_save
from tests.support.processes.distributed import run_distributed
from tests.support.processes.megatron_worker import start

ONES = {"moe_layer_freq": [1, 1]}
# Of every kind of layer, and of layers for multi-token prediction.
FAMILIES: dict[str, dict] = {
    "qwen3": {"mtp_num_layers": 1}, "qwen3_moe": {}, "glm4": {}, "glm4_moe": {"mtp_num_layers": 1}, "minimax_m2": {},
    "qwen3_next": {}, "deepseek_v3": {"mtp_num_layers": 1}, "deepseek_v3 dense": {"mtp_num_layers": 1}, "moonlight": {},
    "glm_moe_dsa": {},
}  # fmt: skip


def names_worker(directories) -> list[dict[str, set[str]]]:
    """Per implementation of layers, the names on disk of each family's tensors."""
    transformer_engine_on_cpu.install()
    start(tiny_args(next(iter(directories.values()))))
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    from slime.backends.megatron_utils.model_provider import build_model

    def names(layers: str) -> dict[str, set[str]]:
        found = {}
        for name, directory in directories.items():
            args = tiny_args(directory, transformer_impl=layers, **FAMILIES[name])
            model = build_model(args, True, True, None)
            entries = model.sharded_state_dict().values()
            found[name] = {entry.key for entry in entries if not isinstance(entry, ShardedObject)}
        return found

    return [names("local"), names("transformer_engine")]


def test_tensors_have_the_same_names_whatever_layers_are_made_of(tmp_path):
    directories = {name: str(tmp_path / str(number)) for number, name in enumerate(FAMILIES)}
    for name, directory in directories.items():
        TINY_FAMILIES[name].save(Path(directory))
    ((local, engine),) = run_distributed(
        names_worker, 1, (directories,), start_method="transformer engine", timeout=200
    )
    for name in FAMILIES:
        assert local[name] == engine[name], (name, local[name] ^ engine[name])
    # It does fuse norms, but with nothing that is in front of a router.
    assert "decoder.layers.mlp.linear_fc1.layer_norm_weight" in local["qwen3"]
    assert "decoder.layers.pre_mlp_layernorm.weight" in local["qwen3_moe"]
    fused = {"self_attention.linear_q_up_proj", "self_attention.linear_kv_up_proj", "mlp.linear_fc1"}
    assert {f"decoder.layers.0.{layer}.layer_norm_weight" for layer in fused} <= local["deepseek_v3"]


def save_each(cases, has_engine) -> dict[str, dict]:
    """Per case, the state after a step, which is saved."""
    if has_engine:
        transformer_engine_on_cpu.install()
    return {name: train_and_save(args)[0] for name, args in cases.items()}


def resume_each(cases, has_engine) -> dict[str, tuple]:
    """Per case, what `resume` finds of its checkpoint."""
    if has_engine:
        transformer_engine_on_cpu.install()
    return {name: resume(args, WeightSource("megatron", args.save, resume=True)) for name, args in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("engine_saves", [True, False])
def test_layers_of_transformer_engine_and_local_ones_load_what_the_others_saved(tmp_path, engine_saves):
    """Bitwise, and training goes on."""
    cases = {}
    for name in ("qwen3", "qwen3_moe", "deepseek_v3", "glm_moe_dsa"):
        TINY_FAMILIES[name].save(tmp_path / name)
        (tmp_path / f"saved {name}").mkdir()
        cases[name] = make_args(tmp_path / name, tmp_path / f"saved {name}", adam_eps=1e-3)
    workers = ((save_each, engine_saves), (resume_each, not engine_saves))
    (saved,), (found,) = (
        run_distributed(
            worker, 1, (cases, engine), start_method="transformer engine" if engine else "forkserver", timeout=200
        )
        for worker, engine in workers
    )
    for name in cases:
        iteration, loaded, stepped = found[name]
        assert iteration == 3
        assert_same(loaded, saved[name])
        assert any((stepped["weights"][key] != weight).any() for key, weight in loaded["weights"].items())


def as_older_versions_did() -> None:
    """Have local layers the names on disk that Megatron gives them, and patterns of ones kept apart."""
    from slime.backends.megatron_utils import layer_spec, transformer_config

    fields = transformer_config._model_fields
    transformer_config._model_fields = lambda args: {**fields(args), "moe_layer_freq": args.moe_layer_freq}
    layer_spec._names_on_disk = lambda layer, config: (
        {}
        if config.multi_latent_attention
        else {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
    )


def older_worker(cases) -> dict[str, tuple]:
    """Per case, given as flags of the run that saves and of the one that resumes: the names that the first has written, and
    what both found. All have saved before anything is read."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import layer_spec, transformer_config
    from slime.backends.megatron_utils.checkpoint.stored import read_stored

    now = transformer_config._model_fields, layer_spec._names_on_disk
    as_older_versions_did()
    saved = {name: train_and_save(saving) for name, (saving, _) in cases.items()}
    transformer_config._model_fields, layer_spec._names_on_disk = now
    found = {}
    for name, (saving, resuming) in cases.items():
        stored = read_stored(Path(saving.save) / "iter_0000003")
        again = resume(resuming, WeightSource("megatron", saving.save, resume=True))
        found[name] = sorted(stored.shapes), saved[name], again
    return found


def test_checkpoints_of_older_versions_are_resumed_bitwise(tmp_path):
    """Weights, and what the optimizer keeps of them."""
    for name in ("qwen3_moe", "deepseek_v3"):
        TINY_FAMILIES[name].save(tmp_path / name)

    def case(family, saving=None, resuming=None) -> tuple:
        save = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        save.mkdir()
        return tuple(make_args(tmp_path / family, save, **(flags or {})) for flags in (saving, resuming))

    cases = {
        "stacked": case("qwen3_moe"),
        "stacked, read by a pattern": case("qwen3_moe", resuming=ONES),
        "apart": case("qwen3_moe", saving=ONES),
        "apart, read by a pattern": case("qwen3_moe", ONES, ONES),
        "apart, distributed": case("qwen3_moe", *[{"use_distributed_optimizer": True, **ONES}] * 2),
        "latent": case("deepseek_v3"),
    }
    (found,) = run_distributed(older_worker, 1, (cases,), timeout=120)
    norm = "mlp.linear_fc1.layer_norm_weight"
    for name, written in (
        ("stacked", f"decoder.layers.{norm}"),
        ("apart", f"decoder.layers.0.{norm}"),
        ("apart", f"optimizer.state.exp_avg.decoder.layers.1.{norm}"),
        ("latent", "decoder.layers.0.pre_mlp_layernorm.weight"),
        ("latent", "decoder.layers.1.self_attention.kv_layernorm.weight"),
    ):
        assert written in found[name][0], (name, written, found[name][0])
    for _, (at_checkpoint, after), (iteration, loaded, stepped) in found.values():
        assert iteration == 3
        assert_same(loaded, at_checkpoint)
        assert_same(stepped, after)


def extra_state_worker(args) -> tuple:
    """Saves; resumes with norms that keep something beside weights, as those of Transformer Engine do. What they were given."""
    saved = train_and_save(args)
    from slime.backends.megatron_utils.layer_spec import RMSNorm

    given: list = []
    RMSNorm.get_extra_state = lambda norm: torch.empty(0, dtype=torch.uint8)
    RMSNorm.set_extra_state = lambda norm, state: given.append(state)
    return saved, resume(args, WeightSource("megatron", args.save, resume=True)), given


def test_what_layers_keep_beside_weights_may_be_missing(hf_dir, tmp_path):
    ((saved, (iteration, loaded, stepped), given),) = run_distributed(
        extra_state_worker, 1, (make_args(hf_dir, tmp_path / "save"),)
    )
    assert iteration == 3 and len(given) == 1 + 4 * 2 and all(state.numel() == 0 for state in given)
    assert_same(loaded, saved[0])
    assert_same(stepped, saved[1])


def sizes_worker(args, cases) -> dict[str, str | None]:
    """Per case what is said of a checkpoint of `args` by a run with other flags, or None where it is loaded."""
    Trainer(args).save(3)
    from slime.backends.megatron_utils.checkpoint import load_checkpoint
    from slime.backends.megatron_utils.model_provider import setup_model

    common, found = Path(args.save) / "iter_0000003/common.pt", {}
    for is_old in (False, True):
        if is_old:
            state = torch.load(common, weights_only=True)
            assert state.pop("vocab_size") == args.vocab_size
            torch.save(state, common)
        for name, flags in cases.items():
            case = SimpleNamespace(**{**vars(args), "seed": 99, **flags})
            start(case)
            try:
                load_checkpoint(case, WeightSource("megatron", args.save), setup_model(case))
                found[f"old, {name}" if is_old else name] = None
            except UserError as error:
                found[f"old, {name}" if is_old else name] = str(error)
    return found


def test_a_checkpoint_of_another_vocabulary_or_other_heads_is_refused(hf_dir, tmp_path):
    """All of it has shapes that are loaded: rows of the vocabulary may be padding, and heads are told by no shape."""
    args = make_args(hf_dir, tmp_path / "save")
    assert (args.vocab_size, args.padded_vocab_size) == (131, 136)
    cases = {
        "same": {},
        "more padding": {"padded_vocab_size": 256},
        "less padding": {"padded_vocab_size": 131},
        "more": {"vocab_size": 150, "padded_vocab_size": 152},
        "fewer": {"vocab_size": 100, "padded_vocab_size": 104},
        "heads": {"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 8, "qk_layernorm": False},
    }
    (found,) = run_distributed(sizes_worker, 1, (args, cases))
    for name in ("same", "more padding", "less padding"):
        assert found[name] is None and found[f"old, {name}"] is None, name
    assert "iter_0000003 is of another model" in found["more"]
    assert "--vocab-size 131 in the checkpoint, and 150 by the flags" in found["more"]
    assert "--vocab-size 131 in the checkpoint, and 100 by the flags" in found["fewer"]
    assert "embedding.word_embeddings.weight has 136 rows in the checkpoint, and --vocab-size 150" in found["old, more"]
    for name in ("heads", "old, heads"):
        assert "--num-attention-heads 4 in the checkpoint, and 8 by the flags" in found[name]
        assert "--num-query-groups 2 in the checkpoint, and 4 by the flags" in found[name]


def settings_worker(args, cases) -> list[str]:
    """The name of each case, then what is said of a checkpoint of `args` by a run with its flags: first all that resume."""
    Trainer(args).save(3)
    from slime.backends.megatron_utils.checkpoint import load_checkpoint, reading
    from slime.backends.megatron_utils.model_provider import setup_model

    said: list[str] = []
    reading._tell = lambda level, line: said.append(line)
    for resumes in (True, False):
        for name, flags in cases.items():
            case = SimpleNamespace(**{**vars(args), **flags})
            start(case)
            said.append(f"{name}, resumed" if resumes else name)
            try:
                load_checkpoint(case, WeightSource("megatron", args.save, resume=resumes), setup_model(case))
            except UserError as error:
                said.append(f"refused: {error}")
    return said


def test_weights_that_would_compute_something_else_are_refused_in_a_resume_and_told_elsewhere(hf_dir, tmp_path):
    args = make_args(hf_dir, tmp_path / "save")
    cases = {
        "same": {},
        "neutral": {"moe_router_topk_scaling_factor": 1.0},
        "other": {"rotary_base": 500, "layernorm_epsilon": 0.1, "moe_router_topk": args.moe_router_topk},
    }
    assert args.moe_router_topk_scaling_factor is None
    (said,) = run_distributed(settings_worker, 1, (args, cases))
    differences = (
        f"--norm-epsilon {args.layernorm_epsilon} in the checkpoint, and 0.1 by the flags; --rotary-base {args.rotary_base} in "
        "the checkpoint, and 500 by the flags"
    )
    refused, told = (said.pop(place) for place in (3, -1))
    assert said == ["same, resumed", "neutral, resumed", "other, resumed", "same", "neutral", "other"]
    assert refused.startswith("refused: ") and f"{differences}; give the flags" in refused and "--finetune" in refused
    assert told.endswith(f"its weights compute something else here: {differences}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("original_max_position_embeddings", 96), ("beta_fast", 16.0), ("beta_slow", 2.0), ("dsa_indexer_topk", 3),
        ("rotary_seq_len_interpolation_factor", 2), ("dsa_indexer_rope_interleave", True), ("mscale", 0.5),
    ],
)  # fmt: skip
def test_what_has_no_weights_is_compared_where_a_checkpoint_notes_it(tmp_path, flag, value):
    from slime.backends.megatron_utils.checkpoint.stored import model_notes, other_settings

    TINY_FAMILIES["glm_moe_dsa"].save(tmp_path)
    args = tiny_args(tmp_path)
    other, notes = SimpleNamespace(**{**vars(args), flag: value}), model_notes(args)
    (line,) = other_settings(other, notes)
    assert line.startswith(f"--{flag.replace('_', '-')} ") and other_settings(args, notes) == []
    del notes["computation"][flag]
    assert other_settings(other, notes) == []


def test_metadata_that_are_damaged_or_missing_are_told_by_file(tmp_path):
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    from slime.backends.megatron_utils.checkpoint.stored import read_stored

    path = tmp_path / ".metadata"
    with pytest.raises(UserError, match=rf"{path} cannot be read: .*; give a checkpoint that is whole"):
        read_stored(tmp_path)
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((2, 3)), [])
    names = {"a.weight": described, "optimizer.state.exp_avg.a.weight": described}
    names |= {"a._extra_state/shard_0_1": BytesStorageMetadata()}
    whole = pickle.dumps(Metadata(names, storage_data={}))
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=rf"{path} cannot be read: "):
            read_stored(tmp_path)
    path.write_bytes(whole)
    found = read_stored(tmp_path)
    assert found.shapes == {"a.weight": (2, 3), "optimizer.state.exp_avg.a.weight": (2, 3)}
    assert (found.weights, found.optimized, found.objects) == ({"a.weight"}, {"a.weight"}, {"a._extra_state/shard_0_1"})


def layout_worker(args, cases) -> list[bool]:
    """Per case whether generators go on where a checkpoint of `args` left them."""
    trainer = Trainer(args)
    trainer.save(3)
    expected, found = torch.rand(4).tolist(), []
    common = Path(args.save) / "iter_0000003/common.pt"
    for changed, older in cases:
        if older:
            state = torch.load(common, weights_only=True)
            for name in ("expert_tensor_parallel_size", "use_tp_pp_dp_mapping"):
                state["layout"].pop(name, None)
            torch.save(state, common)
        trainer.args = SimpleNamespace(**{**vars(args), **changed})
        trainer.load(WeightSource("megatron", args.save, resume=True))
        found.append(torch.rand(4).tolist() == expected)
    return found


def test_generators_go_on_in_the_layout_of_experts_that_saved_them(hf_dir, tmp_path):
    cases = [
        ({}, False),
        ({"expert_tensor_parallel_size": 1}, False),
        ({"expert_tensor_parallel_size": 2}, False),
        ({"use_tp_pp_dp_mapping": True}, False),
        ({}, True),
        ({"expert_tensor_parallel_size": 2}, True),
    ]
    (found,) = run_distributed(layout_worker, 1, (make_args(hf_dir, tmp_path / "save"), cases))
    # Unset, experts are cut as all else is; and older checkpoints do not tell how they are.
    assert found == [True, True, False, False, True, True]
