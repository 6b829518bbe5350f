"""Hugging Face -> Megatron -> Hugging Face: the same names and bits in every layout, and errors that name the tensor."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.weights.buckets import split_into_buckets
from tests.support.models.tiny_model import tiny_args, write_tiny_mimo, write_tiny_model
from tests.support.processes.distributed import run_distributed

VOCABULARY = 131
MODELS = {
    "qwen3-untied": {"model_type": "qwen3", "tied": False},
    "qwen3-tied": {"model_type": "qwen3", "tied": True},
    "qwen2-untied": {"model_type": "qwen2", "tied": False, "head_dim": 8},
}
BUFFER = 20_000


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for name, how in MODELS.items():
        write_tiny_model(root / name, vocab_size=VOCABULARY, **how)
    write_tiny_mimo(root / "mimo", vocab_size=VOCABULARY, head_dim=8)
    return {name: root / name for name in (*MODELS, "mimo")}


def _round_trip(directories, layouts):
    from tests.support.processes import megatron_worker as megatron

    results = []
    for layout in layouts:
        for name, directory in directories.items():
            args = tiny_args(directory, **layout)
            chunks = megatron.load_model(args)
            from slime.backends.megatron_utils.hf_conversion import iter_stage_named_tensors, names_of_stage

            tensors, contiguous, shared = [], True, set()
            for hf_name, tensor in iter_stage_named_tensors(args, chunks, names_of_stage(args, chunks)):
                tensors.append((hf_name, tensor.clone()))
                contiguous &= tensor.is_contiguous()
                if tensor.untyped_storage().nbytes() > tensor.nbytes:
                    shared.add(hf_name)
            results.append((name, list(split_into_buckets(tensors, BUFFER)), contiguous, shared))
    return results


def _check(results, directories):
    for name, buckets, contiguous, _ in results:
        stored = load_file(directories[name] / "model.safetensors")
        assert contiguous
        assert all(tensor.dtype == stored[hf_name].dtype for bucket in buckets for hf_name, tensor in bucket)
        assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= BUFFER for bucket in buckets)
        assert len(buckets) > 1


def _check_stages(results_of_stages, directories):
    """The stages send the whole model between them, and each tensor once."""
    for of_stages in zip(*results_of_stages, strict=True):
        name = of_stages[0][0]
        stored = load_file(directories[name] / "model.safetensors")
        sent = [pair for _, buckets, *_ in of_stages for bucket in buckets for pair in bucket]
        assert sorted(hf_name for hf_name, _ in sent) == sorted(stored)
        assert all(torch.equal(tensor, stored[hf_name]) for hf_name, tensor in sent)


def test_round_trip_is_bitwise(directories):
    paths = {name: str(directory) for name, directory in directories.items()}
    (single,) = run_distributed(_round_trip, 1, (paths, [{}]))
    _check(single, directories)
    _check_stages([single], directories)
    layouts = [{"tensor_model_parallel_size": 2}, {}, {"pipeline_model_parallel_size": 2}]
    first, second = run_distributed(_round_trip, 2, (paths, layouts))
    for results in (first, second):
        _check(results, directories)
    count = len(directories)
    for results in (first, second):
        # With one stage every rank makes all of it.
        for start in (0, count):
            _check_stages([results[start : start + count]], directories)
    _check_stages([first[-count:], second[-count:]], directories)
    # What was gathered keeps nothing beside itself but the padding of the vocabulary. Norms are not gathered.
    vocabulary = {"model.embed_tokens.weight", "lm_head.weight"}
    for *_, shared in first[:count]:
        assert {hf_name for hf_name in shared if "norm" not in hf_name} <= vocabulary


def _bytes_read(directories):
    """By model and tensor, the bytes that this of two tensor-parallel ranks reads."""
    import collections

    from slime.weights.hf_reader import StoredTensor
    from tests.support.processes import megatron_worker as megatron

    counts, read = collections.defaultdict(collections.Counter), StoredTensor.__getitem__

    def counted(stored, index):
        found = read(stored, index)
        counts[stored._path.parent.name][stored._name] += found.nbytes
        return found

    StoredTensor.__getitem__ = counted
    for directory in directories:
        megatron.load_model(tiny_args(directory, tensor_model_parallel_size=2))
    return dict(counts)


def test_a_rank_reads_its_own_rows_and_columns_alone(directories):
    names = ("qwen3-untied", "qwen2-untied", "mimo")
    first, second = run_distributed(_bytes_read, 2, ([str(directories[name]) for name in names],))
    for name in names:
        stored = load_file(directories[name] / "model.safetensors")
        assert first[name].keys() == second[name].keys() == stored.keys()
        for hf_name, tensor in stored.items():
            read = first[name][hf_name], second[name][hf_name]
            if "norm" in hf_name:
                assert read == (tensor.nbytes, tensor.nbytes)
            elif len(tensor) == VOCABULARY:
                row = tensor[0].nbytes
                assert sum(read) == tensor.nbytes and read[0] % row == 0 and VOCABULARY * row / 2 <= read[0] < 80 * row
            else:
                assert read == (tensor.nbytes / 2, tensor.nbytes / 2), hf_name
        total = sum(tensor.nbytes for tensor in stored.values())
        assert max(first[name].total(), second[name].total()) < 0.56 * total


def _mimo_projection(directory):
    from tests.support.processes import megatron_worker as megatron

    chunks = megatron.load_model(tiny_args(directory))
    critic = tiny_args(directory, role="critic")
    critic_names = [name for name, _ in megatron.load_model(critic)[0].named_parameters()]
    return dict(chunks[0].named_parameters())["module.mtp.layers.0.eh_proj.weight"].detach(), critic_names


def test_a_prediction_layer_takes_embedding_and_state_in_the_order_of_megatron(directories):
    ((weight, critic_names),) = run_distributed(_mimo_projection, 1, (str(directories["mimo"]),))
    stored = load_file(directories["mimo"] / "model.safetensors")["model.mtp_layers.0.input_proj.weight"]
    of_state, of_embedding = stored[:, :32], stored[:, 32:]
    assert torch.equal(weight[:, :32], of_embedding) and torch.equal(weight[:, 32:], of_state)
    assert not any("mtp" in name for name in critic_names)


def _errors(sources, tiny):
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(tiny)
    chunks = megatron.load_model(args)
    from slime.backends.megatron_utils.hf_conversion import (
        convert_to_hf,
        expected_hf_names,
        load_hf_weights,
        remove_padding,
    )

    before = {name: parameter.clone() for name, parameter in chunks[0].named_parameters()}
    messages = {}
    try:
        convert_to_hf(args, "qwen3", "decoder.final_layernorm.weight", torch.ones(1), {"quant_method": "fp8"})
    except ValueError as error:
        messages["quantised"] = str(error)
    for name, source in sources.items():
        try:
            load_hf_weights(args, chunks, source)
        except ValueError as error:
            messages[name] = str(error)
    untouched = all(torch.equal(parameter, before[name]) for name, parameter in chunks[0].named_parameters())

    fc1 = chunks[0].module.decoder.layers[1].mlp.linear_fc1.weight
    converted = convert_to_hf(args, "Qwen3ForCausalLM", "module.module.decoder.layers.1.mlp.linear_fc1.weight", fc1)
    trimmed = remove_padding("module.module.embedding.word_embeddings.weight", torch.ones(136, 2), VOCABULARY).shape
    kept = remove_padding("module.module.decoder.final_layernorm.weight", torch.ones(136), VOCABULARY).shape
    return (
        messages,
        untouched,
        [(hf_name, tensor.shape) for hf_name, tensor in converted],
        trimmed,
        kept,
        (expected_hf_names(sources["tied"])),
    )


def test_checkpoints_that_do_not_fit_are_refused_whole(directories, tmp_path):
    stored = load_file(directories["qwen3-untied"] / "model.safetensors")
    sources = {name: tmp_path / name for name in ("names", "shape", "cut", "empty")}
    for source in sources.values():
        source.mkdir()
        shutil.copy(directories["qwen3-untied"] / "config.json", source)
    renamed = {name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upward"): 2 * stored[name] for name in stored}
    save_file(renamed, sources["names"] / "model.safetensors")
    key = "model.layers.0.self_attn.o_proj.weight"
    save_file({**stored, key: stored[key][:, :-2].contiguous()}, sources["shape"] / "model.safetensors")
    whole = (directories["qwen3-untied"] / "model.safetensors").read_bytes()
    (sources["cut"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    sources["tied"] = directories["qwen3-tied"]

    arguments = ({name: str(source) for name, source in sources.items()}, str(directories["qwen3-untied"]))
    ((messages, untouched, converted, trimmed, kept, tied_names),) = run_distributed(_errors, 1, arguments)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in messages["names"]
    assert "1 not in the model: model.layers.1.mlp.upward.weight" in messages["names"]
    assert key in messages["shape"] and "[32, 62]" in messages["shape"]
    assert "model.safetensors" in messages["cut"]
    assert "*.safetensors" in messages["empty"]
    assert "1 missing: lm_head.weight" in messages["tied"]
    assert "fp8" in messages["quantised"]
    assert untouched
    assert converted == [
        ("model.layers.1.mlp.gate_proj.weight", (96, 32)),
        ("model.layers.1.mlp.up_proj.weight", (96, 32)),
    ]
    assert trimmed == (VOCABULARY, 2) and kept == (136,)
    assert "lm_head.weight" not in tied_names and len(tied_names) == len(stored) - 1
