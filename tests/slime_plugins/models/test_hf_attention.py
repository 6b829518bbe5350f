"""Attention of transformers inside Megatron's layers: models are those of transformers, and train as with our own."""

import json
import re
from pathlib import Path

import pytest
import torch

from slime.utils.errors import UserError
from tests.support.models.tiny_families import LAYOUTS, TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.family_checks import assert_gives_checkpoint_back, assert_like_reference, reference
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps

PAGE = Path(__file__).resolve().parents[3] / "docs/en/advanced/models.md"
SPEC = ["slime_plugins.models.hf_attention", "get_hf_attention_spec"]
# Of each kind of layer: with and without a spec of the family's own, linear attention, latent attention.
FAMILIES = ("qwen3", "llama3", "glm4", "qwen3_next", "qwen3_5", "minimax_m2", "deepseek_v3")
# One of each kind.
KINDS = ("qwen3", "glm4", "qwen3_next", "deepseek_v3")
SOME = ("qwen3", "qwen3_next")
OTHERS = tuple(name for name in FAMILIES if name not in SOME)
WITHOUT_CLASS = "without_class"
TENSOR_PARALLEL = ("tp2", "tp2 whole sequence")
TRAINED = ("tp2", "tp2 whole sequence", "cp2", "cp2 gathered", "pp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """By name, the directory of each model and what its reference gives. A model is made when it is first asked for."""
    root = tmp_path_factory.mktemp("models")

    class Models(dict):
        def __missing__(self, name):
            model = TINY_FAMILIES[name].save(root / name)
            self[name] = root / name, reference(model, root / f"gradients of {name}")
            return self[name]

    return Models()


def _runs(directories, layouts, spec):
    """By name and layout, of those that the family has, what `run_family` finds."""
    from tests.support.processes import megatron_worker as megatron
    from tests.support.processes.family_checks import run_family

    found = {}
    for layout in layouts:
        for name, directory in directories.items():
            if layout in LAYOUTS and layout not in TINY_FAMILIES[name].layouts:
                continue
            args = tiny_args(directory, spec=spec, **LAYOUTS.get(layout, {}))
            megatron.start(args)
            found[name, layout] = run_family(args)
    return found


def _one_rank(directories, wanted, spec_of_page, refused):
    """What is asked of one rank, by one start of its process. `wanted`: names and layouts of runs."""
    runs = {}
    for layout in ("one rank", "recomputed"):
        of_layout = {name: directory for name, directory in directories.items() if (name, layout) in wanted}
        runs |= _runs(of_layout, (layout,), SPEC)
    return {
        "runs": runs,
        "of page": _runs({"qwen3": directories["qwen3"]}, ("one rank",), spec_of_page),
        "own attention": train_steps({"one": layout_args(directories["qwen3"])})["one"],
        "refusals": _refusals(refused),
    }


@pytest.fixture(scope="module")
def one_rank(models, selected, tmp_path_factory):
    root = tmp_path_factory.mktemp("specs")
    (of_page,) = re.findall(r"^```python\n# my_layers.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (root / "my_layers.py").write_text(of_page)
    TINY_FAMILIES["mimo"].save(root / WITHOUT_CLASS)
    config = json.loads((root / WITHOUT_CLASS / "config.json").read_text())
    (root / WITHOUT_CLASS / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    refused = [
        tiny_args(models["qwen3"][0], spec=[__name__, "with_bias_of_its_own"]),
        tiny_args(models["qwen3_next"][0], spec=SPEC, mtp_num_layers=1),
        tiny_args(root / WITHOUT_CLASS, spec=SPEC),
    ]
    wanted = {(case["name"], case["layout"]) for case in selected(test_a_model_is_that_of_transformers)}
    directories = {
        name: str(models[name][0])
        for name in FAMILIES
        if name in SOME or {(name, "one rank"), (name, "recomputed")} & wanted
    }
    of_page = [f"{root}/my_layers.py:first_of_transformers"]
    return run_distributed(_one_rank, 1, (directories, wanted, of_page, refused), timeout=300)[0]


def _two_ranks(directories, saved):
    """What is asked of two ranks, by one start of their processes."""
    plain, mixed = directories["qwen3"], directories["qwen3_next"]
    layouts = [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]
    return {
        "runs": _runs({name: directories[name] for name in SOME}, TENSOR_PARALLEL, SPEC),
        "trained": train_steps({"cp2": layout_args(plain, spec=SPEC, **LAYOUTS["cp2"])})["cp2"],
        "bfloat16": _in_bfloat16(mixed),
        "random": _random_start(plain, layouts),
        "checkpoint": _checkpoint(mixed, saved),
    }


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory):
    directories = {name: str(models[name][0]) for name in SOME}
    return run_distributed(_two_ranks, 2, (directories, str(tmp_path_factory.mktemp("saved"))), timeout=300)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "one rank") for name in KINDS),
        ("qwen3_next", "recomputed"),
        *(pytest.param(name, "one rank", marks=pytest.mark.slow) for name in FAMILIES if name not in KINDS),
        *(pytest.param(name, "recomputed", marks=pytest.mark.slow) for name in FAMILIES if name != "qwen3_next"),
    ],
)
def test_a_model_is_that_of_transformers(models, one_rank, name, layout):
    directory, expected = models[name]
    assert_like_reference(one_rank["runs"][name, layout], expected)
    assert_gives_checkpoint_back([one_rank["runs"][name, layout]], directory)


@pytest.fixture(scope="module")
def others_on_two_ranks(models):
    directories = {name: str(models[name][0]) for name in OTHERS}
    return run_distributed(_runs, 2, (directories, TENSOR_PARALLEL, SPEC), timeout=300)


@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_tensor_parallel_ranks_have_the_whole_gradients(request, models, names):
    if names is SOME:
        ranks = [rank["runs"] for rank in request.getfixturevalue("two_ranks")]
    else:
        ranks = request.getfixturevalue("others_on_two_ranks")
    for rank in ranks:
        assert {(name, "tp2") for name in names} < rank.keys()
        for (name, _), found in rank.items():
            directory, expected = models[name]
            assert_like_reference(found, expected)
            assert_gives_checkpoint_back([found], directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_layouts_train_as_our_own_attention_does_on_one_rank(models, name):
    directory, _ = models[name]
    (one,) = run_distributed(train_steps, 1, ({"one": layout_args(directory)},))
    layouts = [layout for layout in TRAINED if layout in TINY_FAMILIES[name].layouts or "whole" not in layout]
    cases = {layout: layout_args(directory, spec=SPEC, **LAYOUTS[layout]) for layout in layouts}
    ranks = run_distributed(train_steps, 2, (cases,), timeout=400)
    for layout in layouts:
        assert_equal_runs([rank[layout] for rank in ranks], one["one"])


def test_context_parallel_ranks_train_as_one_rank_does(one_rank, two_ranks):
    assert_equal_runs([rank["trained"] for rank in two_ranks], one_rank["own attention"])


def _in_bfloat16(directory):
    """What the module has in a model of bfloat16, and its mean gradient after ranks of a tensor-parallel group made others."""
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(directory, spec=SPEC, bf16=True, tensor_model_parallel_size=2)
    megatron.start(args)
    import torch.distributed as dist
    from megatron.core.distributed import finalize_model_grads

    from slime.backends.megatron_utils.model_provider import setup_model
    from slime.backends.megatron_utils.parameter_names import unwrap_model

    chunks = setup_model(args)
    delta_net, softmax = (unwrap_model(chunks[0]).decoder.layers[layer].self_attention for layer in (0, 3))
    dtypes = {name: parameter.dtype for name, parameter in delta_net.named_parameters()}
    (rotary,) = softmax._rotary
    weight = softmax.self_attn.o_proj.weight
    weight.main_grad.fill_(1 + dist.get_rank())
    finalize_model_grads(chunks)
    return dtypes, rotary.inv_freq, float(weight.main_grad.mean())


def test_frequencies_and_decays_are_not_rounded_and_ranks_agree(two_ranks):
    for dtypes, frequencies, gradient in (rank["bfloat16"] for rank in two_ranks):
        # A quarter of 16 channels is rotated.
        torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 4, 2) / 4), rtol=1e-6, atol=0)
        others = {name: dtype for name, dtype in dtypes.items() if name != "linear_attn.A_log"}
        assert dtypes["linear_attn.A_log"] == torch.float32 and set(others.values()) == {torch.bfloat16}
        # Work that both do is not counted twice.
        assert gradient == 1.5


def _random_start(directory, layouts):
    from tests.support.processes import megatron_worker as megatron

    weights = []
    for sizes in layouts:
        args = tiny_args(directory, spec=SPEC, padded_vocab_size=144, **sizes)
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import setup_model

        weights.append(megatron.whole_weights(args, setup_model(args)))
    return weights


def test_random_weights_are_those_of_any_layout(two_ranks):
    for one, *others in (rank["random"] for rank in two_ranks):
        assert (one["model.layers.0.self_attn.q_norm.weight"] == 1).all()
        assert all(torch.equal(one[name], other[name]) for other in others for name in one)


def _checkpoint(directory, saved):
    """Weights after saving with two tensor-parallel ranks, and after loading that into a model without."""
    from tests.support.processes import megatron_worker as megatron

    whole = {"padded_vocab_size": 144, "spec": SPEC}
    args = tiny_args(directory, tensor_model_parallel_size=2, **whole)
    chunks = megatron.load_model(args)
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.model_provider import setup_model
    from slime.backends.megatron_utils.parameter_names import unwrap_model

    before = megatron.whole_weights(args, chunks)
    dist_checkpointing.save(unwrap_model(chunks[0]).sharded_state_dict(), saved)
    args = tiny_args(directory, **whole)
    megatron.start(args)
    chunks = setup_model(args)
    bare = unwrap_model(chunks[0])
    bare.load_state_dict(dist_checkpointing.load(bare.sharded_state_dict(), saved), strict=False)
    return before, megatron.whole_weights(args, chunks)


def test_a_checkpoint_of_our_own_fits_any_layout(two_ranks):
    for before, after in (rank["checkpoint"] for rank in two_ranks):
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_the_page_puts_it_into_one_layer(models, one_rank):
    directory, expected = models["qwen3"]
    (found,) = one_rank["of page"].values()
    assert_like_reference(found, expected)
    assert_gives_checkpoint_back([found], directory)


def with_bias_of_its_own(args, config, vp_stage=None):
    from slime_plugins.models.hf_attention import HfAttention, get_hf_attention_spec

    class Biased(HfAttention):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.scale = torch.nn.Parameter(torch.ones(1))

    block = get_hf_attention_spec(args, config, vp_stage)
    for layer in block.layer_specs:
        layer.submodules.self_attention.module = Biased
    return block


def _refusals(cases):
    from tests.support.processes import megatron_worker as megatron

    found = []
    for args in cases:
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import build_model

        with pytest.raises(UserError) as caught:
            build_model(args, True, True, None)
        found.append(str(caught.value))
    return found


def test_what_would_be_lost_is_refused(one_rank):
    unknown, predicting, without_class = one_rank["refusals"]
    assert unknown.startswith(f"--spec {__name__} with_bias_of_its_own returned layers with ")
    assert "decoder.layers.0.self_attention.scale, which has no tensor in checkpoints of qwen3" in unknown
    assert predicting.startswith("--mtp-num-layers 1: prediction layers of qwen3_next are built with --spec ")
    assert "slime_plugins.models.qwen3_next get_qwen3_next_spec alone" in predicting
    assert re.search(rf"has no class for the model of --hf-checkpoint \S*/{WITHOUT_CLASS}", without_class)


def test_a_family_passes_on_the_names_of_transformers():
    from slime.models.families import FAMILIES as KNOWN

    name = "decoder.layers.7.self_attention.{}"
    for model_type, begin in (("qwen3_next", "model"), ("qwen3_5", "model.language_model")):
        find = KNOWN[model_type].find
        assert find(name.format("linear_attn.A_log"))[1] == (f"{begin}.layers.7.linear_attn.A_log",)
        assert find(name.format("linear_attn.A_log"))[0].keeps_float32
        rule, names = find("module.module." + name.format("self_attn.new.weight"))
        assert names == (f"{begin}.layers.7.self_attn.new.weight",) and not rule.keeps_float32
        for unknown in ("new.weight", "mlp.self_attn.new"):
            with pytest.raises(KeyError):
                find(name.format(unknown))


def test_what_a_layer_hides_is_what_transformers_hides(tmp_path):
    """Layers of another kind than plain causal attention get their own masks."""
    from transformers import AutoConfig

    from slime_plugins.models.hf_attention import _mask_function

    write_tiny_model(tmp_path, model_type="qwen2", head_dim=8)
    config = AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation, config.sliding_window = "eager", 2
    config.layer_types = ["full_attention", "sliding_attention", "linear_attention"]
    hidden = torch.zeros(1, 4, 8)
    seen = [
        (_mask_function(config, layer)(config, hidden, None, past_key_values=None)[0, 0] == 0).sum(-1).tolist()
        for layer in range(2)
    ]
    assert seen == [[1, 2, 3, 4], [1, 2, 2, 2]] and _mask_function(config, 2) is None
