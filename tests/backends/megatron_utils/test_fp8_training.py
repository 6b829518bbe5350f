"""Layers in FP8: what they compute, what they keep of their weights, from micro-batch to micro-batch and from pass to pass;
recipes and shapes that are refused.

Transformer Engine's own layers run here over kernels in plain PyTorch. In layouts of several ranks its linear layers are stood
in for by what Megatron and the passes know of them: `is_first_microbatch`, which has them make a copy of their weight anew, and
`_fp8_workspaces`, where the copy is.
"""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime.utils.errors import UserError
from tests.support.kernels.transformer_engine_on_cpu import call_with_transformer_engine
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

STREAMS = {"max_tokens_per_gpu": 40}
PIPELINE = {"pipeline_model_parallel_size": 2, **STREAMS}
INTERLEAVED = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}


class KeptCopies:
    """Copies of weights as layers in FP8 keep them; counts how often they are made, and how often used.

    Attributes:
        made, used: by number of uses.
        stale: uses of a copy of other weights than the layer has.
    """

    def __init__(self, model):
        self.made = self.used = self.stale = 0
        self.modules = [module for chunk in model for module in chunk.modules() if hasattr(module, "linear_fc2")]
        for module in self.modules:
            layer = module.linear_fc2
            layer.is_first_microbatch, layer._fp8_workspaces = True, {}
            layer.register_forward_pre_hook(self._multiply)

    def _multiply(self, layer, _):
        if layer.is_first_microbatch or "weight" not in layer._fp8_workspaces:
            layer._fp8_workspaces["weight"] = layer.weight.detach().clone()
            self.made += 1
        self.used += 1
        self.stale += not torch.equal(layer._fp8_workspaces["weight"], layer.weight)
        layer.is_first_microbatch = False

    def of_pass(self):
        """(made, used, stale) of the pass that is over, per layer, and how many copies are still there."""
        found = tuple(count / len(self.modules) for count in (self.made, self.used, self.stale))
        self.made = self.used = self.stale = 0
        return *found, sum(len(module.linear_fc2._fp8_workspaces) for module in self.modules)


def passes(cases):
    return {name: passes_of_run(args) for name, args in cases.items()}


def passes_of_run(args):
    """What became of the copies in a pass for log-probs, in one with other weights, and in an optimizer step."""
    run = LayoutRun(args)
    for chunk in run.model:
        for module in chunk.modules():
            if hasattr(module, "config"):
                module.config.fp8 = "hybrid"
    args.fp8 = "hybrid"
    copies, found = KeptCopies(run.model), []
    run.prepare()
    found.append(copies.of_pass())
    with torch.no_grad():
        for module in copies.modules:
            module.linear_fc2.weight.mul_(2)
    run.prepare()
    found.append(copies.of_pass())
    run.step()
    found.append(copies.of_pass())
    return found


@pytest.mark.parametrize(("ranks", "layout"), [(1, STREAMS), (2, PIPELINE), (2, INTERLEAVED)])
def test_weights_are_made_anew_in_every_pass_once(tmp_path, ranks, layout):
    """A copy from before would multiply with the weights of another state, or of the step before."""
    write_tiny_model(tmp_path, layers=4)
    for rank in run_distributed(passes, ranks, ({"run": layout_args(str(tmp_path), **layout)},)):
        for made, used, stale, left in rank["run"]:
            assert (made, stale, left) == (1, 0, 0)
            assert used > 1, "one micro-batch alone would show nothing"


RECIPES = ("delayed", "tensorwise", "blockwise")
WIDE = {"bf16": True, "attention_backend": "auto", "moe_grouped_gemm": True, **STREAMS}


def log_probs_of(run):
    run.prepare()
    return torch.cat([row.float() for row in run.data.whole("log_probs")])


def far(one, other):
    return float((one - other).abs().mean())


def beside_16_bits(directories):
    """Per model and recipe, mean differences of log-probs to those of layers in 16 bits: at first, with other weights, and
    after a step; how far those other weights moved them; the gradient norms of both; and how many copies of weights are
    left."""
    found = {}
    for name, recipe in itertools.product(directories, RECIPES):
        options = {
            "fp8": "hybrid", "fp8_recipe": recipe, "fp8_margin": 0, "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max",
        }  # fmt: skip
        runs = [LayoutRun(layout_args(directories[name], **WIDE, **more)) for more in ({}, options)]
        plain, narrow = map(log_probs_of, runs)
        differences = [far(plain, narrow)]
        with torch.no_grad():
            for run in runs:
                for key, parameter in run.model[0].named_parameters():
                    if "linear" in key and parameter.ndim == 2:
                        parameter.mul_(1.5)
        others, narrow = map(log_probs_of, runs)
        differences.append(far(others, narrow))
        norms = [run.step()["grad_norm"] for run in runs]
        differences.append(far(*map(log_probs_of, runs)))
        left = sum(len(vars(module).get("_fp8_workspaces", ())) for module in runs[1].model[0].modules())
        found[name, recipe] = differences, far(plain, others), norms, left
    return found


@pytest.fixture(scope="module")
def in_fp8(selected, tmp_path_factory):
    """What `beside_16_bits` finds, in one process: it imports for longer than it trains."""
    cases = selected(test_layers_of_transformer_engine_multiply_in_fp8_with_the_weights_of_the_time)
    directories = {case["name"]: str(tmp_path_factory.mktemp(case["name"])) for case in cases}
    for name, directory in directories.items():
        TINY_FAMILIES[name].save(Path(directory))
    (found,) = run_distributed(
        call_with_transformer_engine, 1, (beside_16_bits, directories), start_method="spawn", timeout=500
    )
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_layers_of_transformer_engine_multiply_in_fp8_with_the_weights_of_the_time(in_fp8, name):
    """With experts the products are grouped. A copy of earlier weights would be as far off as these have moved."""
    for recipe in RECIPES:
        differences, moved, (norm, norm_in_fp8), left = in_fp8[name, recipe]
        assert all(0.002 < difference < moved / 2 for difference in differences), (recipe, differences, moved)
        assert norm_in_fp8 == pytest.approx(norm, rel=0.15) and norm_in_fp8 != norm, recipe
        assert left == 0, recipe


def refusal_of_recipe(directory):
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import transformer_config

    args = tiny_args(directory, bf16=True, fp8="e4m3", fp8_recipe="blockwise", transformer_impl="transformer_engine")
    args.apply_rope_fusion = False
    args.typed_flags = set()
    transformer_config.transformer_engine_available = lambda: True
    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    known = transformer_config.build_transformer_config(args)

    def unknown(config):
        raise ValueError("it needs version 2.3")

    transformer_config.get_fp8_recipe = unknown
    try:
        transformer_config.build_transformer_config(args)
    except UserError as error:
        return (known.fp8, known.fp8_recipe), str(error)
    return (known.fp8, known.fp8_recipe), None


def test_a_recipe_that_the_engine_does_not_know_is_named_at_the_start(tmp_path):
    write_tiny_model(tmp_path)
    ((known, message),) = run_distributed(refusal_of_recipe, 1, (str(tmp_path),))
    assert known == ("e4m3", "blockwise")
    assert "--fp8-recipe blockwise" in message and "it needs version 2.3" in message


def refusals_of_shapes(directory, recipes):
    from slime.backends.megatron_utils.low_precision import require_fp8_shapes

    run, refused = LayoutRun(layout_args(directory, **STREAMS)), {}
    for recipe in recipes:
        for chunk in run.model:
            chunk.config.fp8, chunk.config.fp8_recipe = recipe and "e4m3", recipe
            for module in chunk.modules():
                if hasattr(module, "linear_fc2"):
                    module.linear_fc2.is_first_microbatch = True
        try:
            require_fp8_shapes(run.model)
        except UserError as error:
            refused[recipe] = str(error)
    return refused


@pytest.mark.parametrize(("hidden", "refusing"), [(32, []), (48, ["mxfp8"]), (40, ["delayed", "blockwise", "mxfp8"])])
def test_weights_that_no_kernel_multiplies_in_fp8_are_named_at_the_start(tmp_path, hidden, refusing):
    """Those of latent attention, for example, over eight tensor-parallel ranks."""
    write_tiny_model(tmp_path, hidden=hidden)
    recipes = (None, "delayed", "blockwise", "mxfp8")
    (refused,) = run_distributed(refusals_of_shapes, 1, (str(tmp_path), recipes))
    assert [*refused] == refusing
    for message in refused.values():
        assert f"decoder.layers.0.mlp.linear_fc2.weight is [{hidden}, " in message
