"""Modules that multiply forwards in FP8: the engine's numbers, the parameters' gradients, every layout, and what is refused."""

import functools
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.models.tensor_layouts import GatedLinear, QueryKeyValue, Replicated, Sharded, TensorSizes
from slime.utils.errors import UserError
from slime.weights.quantisers import quantise_fp8_blocks
from tests.support.models.tiny_families import LAYOUTS
from tests.support.models.tiny_model import tiny_args, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed

BLOCK = 128
SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
SEQUENCES = [[5, 9, 2, 77, 31], [4, 8, 1]]
SIZES = TensorSizes(num_attention_heads=4, num_query_groups=2, vocab_size=131, padded_vocab_size=256)
# Attention and MLP of the second of two layers.
DENSE = {
    "megatron_deepgemm_forward_layers": [1],
    "megatron_deepgemm_forward_modules": ["linear_qkv", "self_attention.linear_proj", "mlp"],
}
EXPERTS = {"megatron_deepgemm_moe_forward_layers": [1]}
OF_DENSE = ("tp2", "tp2 whole sequence", "pp2")
OF_EXPERTS = {"ep2": LAYOUTS["ep2"], "etp2": {**LAYOUTS["tp2"], "expert_tensor_parallel_size": 2}}


def by_hand(rows, weight):
    """rows · weightᵀ in FP8: block by block, in float64. The numbers of FP8 themselves are torch's."""

    def rounded(numbers):
        return torch.from_numpy(numbers.astype(np.float32)).to(torch.float8_e4m3fn).double().numpy()

    (tokens, columns), outputs = rows.shape, len(weight)
    result = np.zeros((tokens, outputs))
    for first in range(0, columns, BLOCK):
        of_rows = rows[:, first : first + BLOCK].float().numpy()
        scale = np.maximum(np.abs(of_rows).max(1, keepdims=True), np.float32(1e-10)) / np.float32(448)
        numbers = rounded(of_rows / scale)
        for start in range(0, outputs, BLOCK):
            block = weight[start : start + BLOCK, first : first + BLOCK].float().numpy()
            largest = np.abs(block).max() / np.float32(448)
            result[:, start : start + BLOCK] += scale * (numbers @ rounded(block / largest).T) * largest
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_the_blocks_by_hand(dtype):
    from slime.backends.megatron_utils.low_precision import _multiply_on_host

    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(count, 3 * BLOCK, generator=generator).to(dtype) for count in (5, 2 * BLOCK + 64))
    rows[2, :BLOCK] = 0
    rows[3, BLOCK] = 3000
    numbers, scales = quantise_fp8_blocks(weight, (BLOCK, BLOCK))
    found = _multiply_on_host(rows, numbers, [BLOCK, BLOCK], scales)
    expected = by_hand(rows, weight)
    assert found.dtype == dtype and found.shape == (5, 2 * BLOCK + 64)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]
    assert np.abs(found.double().numpy() - expected).max() < tolerance * np.abs(expected).max()
    # It is no other product.
    exact = (rows.double() @ weight.double().T).numpy()
    assert np.abs(exact - expected).max() > 2 * tolerance * np.abs(expected).max()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_kernels_are_given_whole_rows_and_what_a_gradient_needs_is_kept(is_frozen):
    from slime.backends.megatron_utils.low_precision import _linear_in_fp8, _multiply_on_host

    given, kept = [], []

    def multiply(rows, *weight):
        given.append((tuple(rows.shape), rows.is_contiguous()))
        return _multiply_on_host(rows, *weight)

    def linear(rows):
        of_megatron = {"bias": None, "allreduce_dgrad": False, "sequence_parallel": False, "tp_group": None}
        quantise = functools.partial(quantise_fp8_blocks, block=(BLOCK, BLOCK))
        return _linear_in_fp8(quantise, multiply, input=rows, weight=weight, **of_megatron)

    weight = torch.randn(64, 2 * BLOCK).requires_grad_(not is_frozen)
    # Rows between which others lie.
    rows = torch.randn(3, 1, 3 * BLOCK)[..., : 2 * BLOCK].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda one: one):
        output = linear(rows)
    assert output.shape == (3, 1, 64) and given == [((3, 2 * BLOCK), True)]
    assert kept == [weight.shape] if is_frozen else kept == [rows.shape, weight.shape]
    output.sum().backward()
    torch.testing.assert_close(rows.grad, weight.detach().sum(0).expand_as(rows))
    # An expert may have no tokens.
    none = torch.empty(0, 2 * BLOCK, requires_grad=True)
    output = linear(none)
    assert output.shape == (0, 64) and len(given) == 1
    output.sum().backward()
    assert none.grad.shape == none.shape
    if not is_frozen:
        torch.testing.assert_close(weight.grad, rows.detach().sum((0, 1)).expand_as(weight))


@pytest.mark.parametrize(
    ("layout", "rows", "size", "is_whole"),
    [
        (Replicated(), (576,), 1, True),
        (Sharded(0), (512,), 4, True),
        (Sharded(0), (512,), 8, False),
        (GatedLinear(), (256, 256), 2, True),
        (GatedLinear(), (256, 256), 4, False),
        # Rows of gate end within a block, where those of up go on.
        (GatedLinear(), (192, 192), 1, False),
        (QueryKeyValue(), (512, 256, 256), 2, True),
        # Two groups of two heads of 64 rows: a block of keys has both, and here their queries and values are between.
        (QueryKeyValue(), (256, 128, 128), 1, False),
    ],
)
def test_blocks_of_a_rank_are_those_of_the_checkpoint(layout, rows, size, is_whole):
    from slime.backends.megatron_utils.low_precision import has_whole_blocks

    found = {has_whole_blocks(layout, rows, SIZES, rank, size) for rank in range(size)}
    assert found == {is_whole}


def in_blocks(root, written, directory="served", scale_dtype=torch.float32, **settings):
    """The model in `root/plain` in FP8 for engines, in `root/served`; `written`: names of what is quantised."""
    (root / directory).mkdir()
    config = json.loads((root / "plain/config.json").read_text())
    (root / directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": {**SETTINGS, **settings}})
    )
    tensors = {}
    for name, tensor in load_file(root / "plain/model.safetensors").items():
        tensors[name] = tensor
        if written in name:
            tensors[name], tensors[f"{name}_scale_inv"] = quantise_fp8_blocks(
                tensor, (BLOCK, BLOCK), scale_dtype=scale_dtype
            )
    save_file(tensors, root / directory / "model.safetensors")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    root = tmp_path_factory.mktemp("dense")
    sizes = {"model_type": "qwen2", "hidden": 128, "heads": 4, "groups": 2, "head_dim": 128, "intermediate_size": 256}
    model = write_tiny_model(root / "plain", **sizes)
    in_blocks(root, "_proj.weight")
    return root, model


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixture")
    model = write_tiny_mixture(root / "plain", "qwen3_moe", hidden=128, moe_intermediate_size=256)
    in_blocks(root, ".experts.")
    return root, model


class _Exact(torch.autograd.Function):
    """A value, with the gradient of another one."""

    @staticmethod
    def forward(context, exact, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def _of_megatron(module):
    """Have a linear layer give the numbers of FP8, and the gradients that Megatron's own gives."""
    from megatron.core import tensor_parallel

    from slime.backends.megatron_utils.low_precision import _multiply_on_host

    del module._forward_impl
    own = module._forward_impl

    def forward(*, input, weight, bias, sequence_parallel, tp_group, **more):
        exact = own(
            input=input, weight=weight, bias=bias, sequence_parallel=sequence_parallel, tp_group=tp_group, **more
        )
        with torch.no_grad():
            rows = input
            if sequence_parallel:
                rows = torch.cat(_parts(input, tp_group))
            numbers, scales = quantise_fp8_blocks(weight, (BLOCK, BLOCK))
            value = _multiply_on_host(rows.flatten(0, -2), numbers, [BLOCK, BLOCK], scales).view(exact.shape)
            value = value if bias is None else value + bias
        return _Exact.apply(exact, value)

    assert isinstance(module, tensor_parallel.ColumnParallelLinear | tensor_parallel.RowParallelLinear)
    module._forward_impl = forward


def _parts(tensor, group):
    import torch.distributed as dist

    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def _steps(cases):
    """By case (checkpoint, changed arguments): what three steps of GRPO are with layers of ours and with Megatron's backward
    passes: metrics, and the last gradients. And the names of the modules that multiply in FP8."""
    from slime.backends.megatron_utils.parameter_names import global_named_parameters, unwrap_model
    from tests.support.processes.layout_steps import LayoutRun, layout_args

    results = {}
    for name, (served, changes) in cases.items():
        found = []
        for is_ours in (True, False):
            run = LayoutRun(layout_args(served, vocab_size=131, **changes))
            modules = {
                path: module
                for chunk in run.model
                for path, module in unwrap_model(chunk).named_modules()
                if "_forward_impl" in vars(module)
            }
            if not is_ours:
                for module in modules.values():
                    _of_megatron(module)
            run.prepare()
            steps = [run.step() for _ in range(3)]
            metrics = [(step["loss"], step["grad_norm"]) for step in steps if run.is_last_stage]
            named = [pair for chunk in run.model for pair in global_named_parameters(chunk)]
            found.append((metrics, {key: parameter.main_grad.clone() for key, parameter in named}))
        results[name] = *found, sorted(modules)
    return results


def assert_gradients_are_megatrons(ranks, expected):
    """expected: how many modules of a rank multiply in FP8, by case."""
    for case, count in expected.items():
        assert sum(len(rank[case][2]) for rank in ranks) == count, (case, [rank[case][2] for rank in ranks])
        for (steps, gradients), (of_megatron, expected_gradients), _ in (rank[case] for rank in ranks):
            for (loss, norm), (expected_loss, expected_norm) in zip(steps, of_megatron, strict=True):
                assert loss == pytest.approx(expected_loss, abs=1e-6) and norm == pytest.approx(expected_norm, rel=1e-5)
            for name, gradient in expected_gradients.items():
                scale = gradient.abs().max()
                assert (gradients[name] - gradient).abs().max() <= 2e-5 * scale.clamp(min=1e-3), (case, name)


def test_one_rank_trains_with_the_parameters_gradients(dense, mixture):
    one = {"plain": {}, "recomputed": LAYOUTS["recomputed"]}
    cases = {name: (str(dense[0] / "served"), DENSE | changes) for name, changes in one.items()}
    cases["experts"] = str(mixture[0] / "served"), EXPERTS
    ranks = run_distributed(_steps, 1, (cases,))
    assert_gradients_are_megatrons(ranks, {**dict.fromkeys(one, 4), "experts": 8})
    assert ranks[0]["plain"][2] == [
        f"decoder.layers.1.{name}"
        for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv")
    ]
    # Two experts' names have the ending of neither list.
    assert all(".mlp.experts." in name for name in ranks[0]["experts"][2])


@pytest.mark.slow
def test_every_layout_trains_with_the_parameters_gradients(dense, mixture):
    cases = {name: (str(dense[0] / "served"), DENSE | LAYOUTS[name]) for name in OF_DENSE}
    cases |= {name: (str(mixture[0] / "served"), EXPERTS | changes) for name, changes in OF_EXPERTS.items()}
    ranks = run_distributed(_steps, 2, (cases,))
    # A stage has the only layer of them; ranks of experts have half of them each, or half of each.
    expected = {"tp2": 8, "tp2 whole sequence": 8, "pp2": 4, "ep2": 8, "etp2": 16}
    assert_gradients_are_megatrons(ranks, expected)


class OfEngine(torch.nn.Module):
    """A linear layer as an engine computes it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, rows):
        value = torch.from_numpy(by_hand(rows.flatten(0, -2), self.linear.weight)).float()
        value = value.view(*rows.shape[:-1], -1)
        return value if self.linear.bias is None else value + self.linear.bias


def _logits(cases):
    from tests.support.processes import megatron_worker as megatron

    results = {}
    for name, (served, changes) in cases.items():
        chunks = megatron.load_model(tiny_args(served, **changes))
        with torch.no_grad():
            results[name] = megatron.packed_forward(chunks[0], SEQUENCES)
    return results


def test_log_probs_come_near_those_of_an_engine(dense):
    root, model = dense
    served = str(root / "served")
    (found,) = run_distributed(_logits, 1, ({"fp8": (served, DENSE), "exact": (served, {})},))
    stored = load_file(root / "served/model.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"{name}_scale_inv" in stored:
                scales = stored[f"{name}_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                parameter.copy_(stored[name].float() * scales)
        layer = model.model.layers[1]
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, torch.nn.Linear):
                    setattr(parent, name, OfEngine(module))
        engine = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]).log_softmax(-1)
    gaps = {name: (logits[:, :131].log_softmax(-1) - engine).abs().mean().item() for name, logits in found.items()}
    # A number that lies between two of FP8 may fall to either.
    assert gaps["exact"] > 5e-3 and gaps["fp8"] < gaps["exact"] / 20, gaps


@pytest.mark.parametrize("how", [("ue8m0", torch.float32), ("float", torch.bfloat16)], ids=["powers", "bfloat16"])
def test_a_layer_rounds_the_weights_that_it_has_at_the_time_as_the_checkpoint_is_rounded(tmp_path, how):
    """A reference, a teacher and older copies take turns in one model."""
    write_tiny_model(tmp_path / "plain", hidden=128, intermediate_size=256)
    in_blocks(tmp_path, ".mlp.", scale_fmt=how[0], scale_dtype=how[1])
    run_distributed(_products, 1, (str(tmp_path), how))


def _products(root, how):
    from slime.backends.megatron_utils.hf_conversion import load_hf_weights
    from slime.backends.megatron_utils.low_precision import _multiply_on_host
    from slime.backends.megatron_utils.parameter_names import unwrap_model
    from tests.support.processes import megatron_worker as megatron

    modules = {"megatron_deepgemm_forward_layers": [1], "megatron_deepgemm_forward_modules": ["mlp.linear_fc1"]}
    args = tiny_args(f"{root}/served", **modules)
    chunks = megatron.load_model(args)
    module = unwrap_model(chunks[0]).decoder.layers[1].mlp.linear_fc1
    rows, seen = torch.randn(3, 1, BLOCK), []
    for directory in ("served", "plain"):
        load_hf_weights(args, chunks, f"{root}/{directory}")
        with torch.no_grad():
            found, expected = module(rows)[0], {}
            for one in (how, ("float", torch.float32)):
                numbers, scales = quantise_fp8_blocks(module.weight, (BLOCK, BLOCK), *one)
                expected[one] = _multiply_on_host(rows.flatten(0, 1), numbers, [BLOCK, BLOCK], scales.float())
        assert torch.equal(found.flatten(0, 1), expected[how])
        # What has been read with scales of bfloat16 gets the same ones in float32.
        kept = directory == "served" and how[1] == torch.bfloat16
        assert torch.equal(expected[how], expected["float", torch.float32]) is kept
        seen.append(found)
    # Of the same form as those of the checkpoint, scales are what they were.
    assert torch.equal(*seen) is (how[1] == torch.bfloat16)


def test_what_does_not_fit_is_refused_by_name(dense, tmp_path):
    # The last rows of gate are half a block, and so are the last columns of down.
    (tmp_path / "narrow").mkdir()
    write_tiny_model(tmp_path / "narrow/plain", hidden=128, intermediate_size=192)
    in_blocks(tmp_path / "narrow", "_proj.weight")
    (messages,) = run_distributed(_refusals, 1, (str(dense[0]), str(tmp_path)))
    assert "of decoder.layers.1.mlp.linear_fc1.weight, [384, 128] on this rank, the blocks" in messages["rows"]
    assert "of decoder.layers.1.mlp.linear_fc2.weight, [128, 192] on this rank, the blocks" in messages["columns"]
    assert "linear_fcx: decoder layer 1 has no such module; it has self_attention.linear_proj" in messages["module"]
    assert "quant_method None, weight_block_size None" in messages["plain"]
    assert "has no FP8 blocks of model.layers.1.self_attn.q_proj.weight" in messages["not quantised"]
    assert "--transformer-impl local" in messages["engine"]
    assert "sglang, which does not import here" in messages["no package"]
    assert "engines multiply by other_linear" in messages["other kernel"]
    assert "engines multiply by deepgemm_linear, or with scales of another format" in messages["other scales"]
    assert messages["kernel"] == "deepgemm_linear" and messages["critic"] is None
    assert messages["compiles ahead"] == "false" and messages["compiles ahead as it is told"] == "true"


def _refusals(root, scratch):
    """By case, the message of the refusal."""
    import shutil
    from pathlib import Path

    from slime.backends.megatron_utils import low_precision
    from slime.backends.megatron_utils.model_provider import setup_model
    from tests.support.processes import megatron_worker as megatron

    def refusal(function, *arguments):
        try:
            function(*arguments)
        except UserError as error:
            return str(error)
        return None

    served, partly = Path(root, "served"), Path(scratch, "partly")
    shutil.copytree(served, partly)
    tensors = load_file(partly / "model.safetensors")
    save_file(
        {name: t for name, t in tensors.items() if "q_proj.weight_scale" not in name}, partly / "model.safetensors"
    )
    megatron.start(tiny_args(served))
    messages = {}
    narrow = Path(scratch, "narrow/served")
    for case, directory, changes in (
        ("module", served, {"megatron_deepgemm_forward_modules": ["linear_fcx"]}),
        ("plain", Path(root, "plain"), {}),
        ("not quantised", partly, {}),
        ("rows", narrow, {"megatron_deepgemm_forward_modules": ["linear_fc1"]}),
        ("columns", narrow, {"megatron_deepgemm_forward_modules": ["linear_fc2"]}),
    ):
        messages[case] = refusal(setup_model, tiny_args(directory, **{**DENSE, **changes}))
    args = tiny_args(served, **DENSE)
    chunks = setup_model(args)
    args.role = "critic"
    messages["critic"] = refusal(low_precision.multiply_in_fp8, args, [])
    args.role = "actor"
    low_precision.unwrap_model(chunks[0]).config.transformer_impl = "transformer_engine"
    messages["engine"] = refusal(low_precision.multiply_in_fp8, args, chunks)
    messages["no package"] = refusal(low_precision.engine_linear)
    messages["compiles ahead"] = os.environ.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE")
    os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"] = "true"
    packages = _packages_of_an_engine()
    sys.modules.update(packages)
    utils = packages["sglang.srt.layers.quantization"].fp8_utils
    messages["kernel"] = low_precision.engine_linear().__name__
    messages["compiles ahead as it is told"] = os.environ["SGLANG_JIT_DEEPGEMM_PRECOMPILE"]
    packages["sglang.srt.layers"].deep_gemm_wrapper.DEEPGEMM_SCALE_UE8M0 = True
    messages["other scales"] = refusal(low_precision.engine_linear)
    utils._dispatch_auto_backend = lambda: other_linear
    messages["other kernel"] = refusal(low_precision.engine_linear)
    return messages


def deepgemm_linear():
    pass


def other_linear():
    pass


def _packages_of_an_engine():
    """Modules with the names that are asked for, as a machine with GPUs has them."""
    names = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.quantization")
    modules = {name: ModuleType(name) for name in names}
    modules["sglang.srt.layers"].deep_gemm_wrapper = SimpleNamespace(DEEPGEMM_SCALE_UE8M0=False)
    modules["sglang.srt.layers.quantization"].fp8_utils = SimpleNamespace(
        deepgemm_w8a8_block_fp8_linear_with_fallback=deepgemm_linear,
        triton_w8a8_block_fp8_linear=lambda: None,
        _dispatch_auto_backend=lambda: deepgemm_linear,
    )
    return modules
