"""What a rank reads of a checkpoint, and checkpoints that do not fit. Bits and layouts: `test_every_family.py`."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.tiny_model import tiny_args, write_tiny_mimo, write_tiny_model
from tests.support.processes.distributed import run_distributed

VOCABULARY = 131
MODELS = {
    "qwen3-untied": {"model_type": "qwen3", "tied": False},
    "qwen3-tied": {"model_type": "qwen3", "tied": True},
    "qwen2-untied": {"model_type": "qwen2", "tied": False, "head_dim": 8},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    for name, how in MODELS.items():
        write_tiny_model(root / name, vocab_size=VOCABULARY, **how)
    write_tiny_mimo(root / "mimo", vocab_size=VOCABULARY, head_dim=8)
    return {name: root / name for name in (*MODELS, "mimo")}


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
        convert_to_hf(args, "qwen3", "decoder.final_layernorm.weight", torch.ones(1), {"quant_method": "awq"})
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
    assert "convert_to_hf: " in messages["quantised"] and "quant_method awq" in messages["quantised"]
    assert untouched
    assert converted == [
        ("model.layers.1.mlp.gate_proj.weight", (96, 32)),
        ("model.layers.1.mlp.up_proj.weight", (96, 32)),
    ]
    assert trimmed == (VOCABULARY, 2) and kept == (136,)
    assert "lm_head.weight" not in tied_names and len(tied_names) == len(stored) - 1
