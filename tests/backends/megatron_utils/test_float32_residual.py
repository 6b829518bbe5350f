"""A residual stream in float32 beside weights of 16 bits (`--fp32-residual-connection`)."""

import pytest
import torch

from tests.support.models.tiny_model import tiny_args, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

SEQUENCES = [[1, 5, 9, 3, 2, 77], [4, 4, 100, 119, 2, 8, 90, 11, 3, 60]]
LAYERS = 6
FLOAT32 = {"bf16": True, "fp32_residual_connection": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, layers=LAYERS, vocab_size=128)
    return directory


def streams(cases):
    """By case: logits; of every layer what comes in, what attention and MLP give, and what goes out."""
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        chunk, layers = megatron.load_model(args)[0].eval(), []

        def watch(layer, rows):
            layer.register_forward_pre_hook(
                lambda _, given, options: rows.append(options["hidden_states"]), with_kwargs=True
            )
            for part in (layer.self_attention, layer.mlp):
                part.register_forward_hook(lambda _, given, output: rows.append(output[0]))
            layer.register_forward_hook(lambda _, given, output: rows.append(output[0]))

        for layer in chunk.module.module.decoder.layers if args.bf16 else chunk.module.decoder.layers:
            layers.append([])
            watch(layer, layers[-1])
        with torch.no_grad():
            found[name] = megatron.packed_forward(chunk, SEQUENCES).float(), layers
    return found


def test_outputs_are_added_in_float32(hf_dir):
    flags = {"residual": FLOAT32, "16 bits": {"bf16": True}, "exact": {}}
    cases = {name: tiny_args(hf_dir, **flags) for name, flags in flags.items()}
    (found,) = run_distributed(streams, 1, (cases,))
    logits, layers = found["residual"]
    assert len(layers) == LAYERS
    for before, attention, mlp, after in layers:
        assert (before.dtype, attention.dtype, mlp.dtype, after.dtype) == (
            torch.float32, torch.bfloat16, torch.bfloat16, torch.float32,
        )  # fmt: skip
        assert torch.equal(after, before + attention.float() + mlp.float())
    assert {tensor.dtype for rows in found["16 bits"][1] for tensor in rows} == {torch.bfloat16}
    errors = {name: (found[name][0] - found["exact"][0]).square().mean().sqrt() for name in ("residual", "16 bits")}
    assert errors["residual"] < 0.95 * errors["16 bits"]


def steps(cases):
    """By case: log-probs before the step on the last stage, by sample, and loss and gradient norm of the step."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        log_probs = {}
        if run.is_last_stage:
            rows = zip(run.data["sample_indices"], run.data.whole("log_probs"), strict=True)
            log_probs = {index: row.tolist() for index, row in rows}
        metrics = run.step()
        found[name] = log_probs, metrics["loss"], metrics["grad_norm"]
    return found


def test_every_layout_carries_it(hf_dir, tmp_path):
    """Stages send it as it is; what tensor-parallel ranks add up is rounded to 16 bits, in another order than one rank has."""
    write_tiny_mixture(tmp_path, "qwen3_moe", vocab_size=128)
    experts = {"moe_router_dtype": "fp32", **FLOAT32}
    (one,) = run_distributed(
        steps, 1, ({
            "one": layout_args(hf_dir, **FLOAT32),
            "recomputed": layout_args(hf_dir, **FLOAT32, **RECOMPUTED),
            "experts": layout_args(tmp_path, **experts),
        },),
    )  # fmt: skip
    assert one["recomputed"] == one["one"]
    ranks = run_distributed(
        steps, 2, ({
            "pipeline": layout_args(hf_dir, **FLOAT32, **PIPELINE),
            "tensor": layout_args(hf_dir, **FLOAT32, **TENSOR),
            "experts": layout_args(tmp_path, **experts, **TENSOR),
        },),
    )  # fmt: skip
    for name, usual, tolerance in (("pipeline", "one", 1e-6), ("tensor", "one", 0.03), ("experts", "experts", 0.03)):
        log_probs, loss, norm = one[usual]
        found = {index: row for rank in ranks for index, row in rank[name][0].items()}
        assert found.keys() == log_probs.keys()
        for index, row in log_probs.items():
            assert found[index] == pytest.approx(row, abs=tolerance * 10), (name, index)
        for rank in ranks:
            assert rank[name][1] == pytest.approx(loss, rel=10 * tolerance, abs=tolerance), name
            assert rank[name][2] == pytest.approx(norm, rel=10 * tolerance), name
