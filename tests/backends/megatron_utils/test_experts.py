"""Mixtures of experts: the experts and logits of transformers, and the bits of a Hugging Face checkpoint in every layout."""

import collections
import dataclasses
import functools
import math
import shutil
import types

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.models.grpo_batch import TRAINED_TOKENS
from tests.support.models.tiny_model import TINY_EXPERTS, tiny_args, write_tiny_mixture
from tests.support.oracles.rounding import assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import assert_equal_runs, layout_args, train_steps
from tests.support.processes.resumed_run import ResumableRun, resumable_args, resumed

BIASED = "biased"
# As published checkpoints are: without a row of padding.
VOCABULARY = 128
SEQUENCES = [[1, 5, 9, 3, 2, 77], [4, 4, 100, 119, 2, 8, 90, 11, 3, 60]]
EXPERTS = {"expert_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WHOLE_EXPERTS = {"expert_tensor_parallel_size": 1}
PIPELINE = {"pipeline_model_parallel_size": 2}
TWO_RANKS = {
    "experts": EXPERTS,
    "experts cut": TENSOR,
    "experts whole, spread over the tensor group": {**TENSOR, **EXPERTS, **WHOLE_EXPERTS},
    "experts cut, the rest whole": {"expert_tensor_parallel_size": 2},
}
FOUR_RANKS = {
    "experts x cut": {**TENSOR, **EXPERTS},
    "experts x cut, the rest whole": {**EXPERTS, "expert_tensor_parallel_size": 2},
    "experts x pipeline": {**PIPELINE, **EXPERTS},
    "experts x pipeline x tensor": {**PIPELINE, **TENSOR, **EXPERTS, **WHOLE_EXPERTS},
    "experts x context": {"context_parallel_size": 2, **EXPERTS},
    "four": {"expert_model_parallel_size": 4},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    models = {name: write_tiny_mixture(root / name, name, vocab_size=VOCABULARY) for name in TINY_EXPERTS}
    write_biases(root / "qwen3_moe", root / BIASED)
    return root, models


def test_a_z_loss_without_weight_is_none():
    """To be logged it would be divided by its weight."""
    from slime.backends.megatron_utils.routers import Router

    config = types.SimpleNamespace(moe_z_loss_coeff=0.0, moe_per_layer_logging=True)
    router, logits = types.SimpleNamespace(config=config, training=True), torch.ones(2, 4)
    assert Router.apply_z_loss(router, logits) is logits


def test_the_z_loss_counts_in_32_bits(monkeypatch):
    """1001 tokens, a number that bfloat16 does not have; two equal logits, whose logsumexp is log 2 and softmax 1/2."""
    from slime.backends.megatron_utils.routers import Router

    counted = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tokens, group: counted.append(tokens.item()))
    config = types.SimpleNamespace(moe_z_loss_coeff=0.5, moe_per_layer_logging=False)
    router = types.SimpleNamespace(config=config, training=True, tp_cp_group=None)
    router.attach_and_log_load_balancing_loss = functools.partial(Router.attach_and_log_load_balancing_loss, router)
    logits = torch.zeros(1002, 2, dtype=torch.bfloat16, requires_grad=True)
    padding = torch.arange(1002) == 1001
    Router.apply_z_loss(router, logits, padding).backward(torch.zeros_like(logits))
    assert counted == [1001]
    expected = torch.full((1002, 1), 0.5 * 2 * math.log(2) / 2 / 1001) * ~padding[:, None]
    torch.testing.assert_close(logits.grad.float(), expected.expand(-1, 2), rtol=2**-8, atol=0)


def write_biases(source, directory):
    """A checkpoint whose routers have biases, which bfloat16 would round."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    for number in range(2):
        bias = torch.linspace(-0.01, 0.01001, 4) * (number + 1)
        tensors[f"model.layers.{number}.mlp.gate.e_score_correction_bias"] = bias
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def args_of(root, name, **overrides):
    biased = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"} if name == BIASED else {}
    return tiny_args(root / name, **{**biased, **overrides})


def know_biases():
    """Have this process know a family of Qwen3-MoE with biases."""
    from slime.models.families import FAMILIES
    from slime.models.family import EXPERT_BIAS

    family = FAMILIES["qwen3_moe"]
    FAMILIES["qwen3_moe"] = dataclasses.replace(family, rules=family.rules + EXPERT_BIAS)


def forward(cases):
    """Logits of the packed sequences, and by router which experts each token goes to."""
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        chunks = megatron.load_model(args)
        with torch.no_grad(), megatron.routing_maps(chunks[0]) as maps:
            logits = megatron.packed_forward(chunks[0], SEQUENCES)
        dispatchers = [module.token_dispatcher for module in chunks[0].modules() if hasattr(module, "token_dispatcher")]
        found[name] = logits, maps, [kept_rows(dispatcher, len(logits)) for dispatcher in dispatchers]
    return found


def kept_rows(dispatcher, tokens):
    """Names of what a dispatcher has of each token."""
    kept = {name: value for name, value in vars(dispatcher).items() if isinstance(value, torch.Tensor)}
    return [name for name, tensor in kept.items() if tensor.ndim and len(tensor) >= tokens]


def test_a_token_goes_to_the_experts_of_transformers(models):
    root, of_transformers = models
    (found,) = run_distributed(forward, 1, ({name: args_of(root, name) for name in of_transformers},))
    for name, model in of_transformers.items():
        with torch.no_grad():
            outputs = [model(torch.tensor([tokens]), output_router_logits=True) for tokens in SEQUENCES]
        logits, maps, kept = found[name]
        assert kept == [[]] * len(maps)
        scores = [torch.cat(of_layer) for of_layer in zip(*(output.router_logits for output in outputs), strict=True)]
        assert len(maps) == len(scores) == (1 if name == "qwen2_moe" else 2)
        for map_, of_layer in zip(maps, scores, strict=True):
            chosen = torch.zeros_like(map_).scatter(1, of_layer.topk(2).indices, True)
            assert torch.equal(map_, chosen), name
        expected = torch.cat([output.logits[0] for output in outputs])
        assert (logits - expected).abs().max() <= 1e-5, name


def round_trips(root, names, layouts, dtype):
    """By model and layout: the weights that were loaded, and which of its checkpoint's bytes this rank has read."""
    know_biases()
    from slime.backends.megatron_utils import initialize
    from slime.weights.hf_reader import StoredTensor
    from tests.support.processes import megatron_worker as megatron

    read, counts = StoredTensor.__getitem__, collections.Counter()

    def counted(stored, index):
        found = read(stored, index)
        counts[stored._name] += found.nbytes
        return found

    StoredTensor.__getitem__ = counted
    found = {}
    for name in names:
        for layout, sizes in layouts.items():
            counts.clear()
            args = args_of(root, name, **sizes, **dtype)
            chunks, groups = megatron.load_model(args), initialize.rank_groups(args)
            place = groups.stage, groups.gives_weights
            found[name, layout] = megatron.whole_weights(args, chunks), dict(counts), place
    return found


def assert_round_trips(ranks, root, names, layouts):
    for name in names:
        stored = load_file(root / name / "model.safetensors")
        for layout, sizes in layouts.items():
            of_ranks = [rank[name, layout] for rank in ranks]
            for weights, read, _ in of_ranks:
                assert weights.keys() == stored.keys(), (name, layout)
                assert all(torch.equal(weights[key], stored[key]) for key in stored), (name, layout)
                experts = sum(tensor.nbytes for key, tensor in stored.items() if ".experts." in key)
                cut = sizes.get("expert_tensor_parallel_size", sizes.get("tensor_model_parallel_size", 1))
                parts = cut * sizes.get("expert_model_parallel_size", 1) * sizes.get("pipeline_model_parallel_size", 1)
                if name != "qwen2_moe":  # whose first layer is dense: stages have not the same share
                    assert sum(read[key] for key in read if ".experts." in key) * parts == experts, (name, layout)
            givers = [stage for *_, (stage, gives) in of_ranks if gives]
            assert sorted(givers) == list(range(sizes.get("pipeline_model_parallel_size", 1))), layout


def test_round_trip_is_bitwise_and_a_rank_reads_its_own_experts_alone(models):
    root, names = models[0], ("qwen2_moe", BIASED)
    (one,) = run_distributed(round_trips, 1, (root, names, {"one": {}}, {}))
    assert_round_trips([one], root, names, {"one": {}})
    ranks = run_distributed(round_trips, 2, (root, names, TWO_RANKS, {}))
    assert_round_trips(ranks, root, names, TWO_RANKS)


@pytest.mark.slow
def test_round_trip_is_bitwise_in_products_of_layouts(models):
    root, names = models[0], (*TINY_EXPERTS, BIASED)
    ranks = run_distributed(round_trips, 4, (root, names, FOUR_RANKS, {}), timeout=300)
    assert_round_trips(ranks, root, names, FOUR_RANKS)


def test_biases_stay_in_float32_where_weights_have_16_bits(models):
    root = models[0]
    (one,) = run_distributed(round_trips, 1, (root, (BIASED,), {"one": {}}, {"bf16": True}))
    stored, (weights, *_) = load_file(root / BIASED / "model.safetensors"), one[BIASED, "one"]
    for key, tensor in stored.items():
        expected = tensor if key.endswith("e_score_correction_bias") else tensor.bfloat16()
        assert weights[key].dtype == expected.dtype and torch.equal(weights[key], expected), key


def refusals(root, directories):
    from slime.utils.errors import UserError
    from tests.support.processes import megatron_worker as megatron

    messages = []
    for directory in directories:
        try:
            megatron.load_model(args_of(root, directory, expert_model_parallel_size=2))
        except UserError as error:
            messages.append(str(error))
    return messages


def test_a_tensor_that_does_not_fit_is_told_by_ranks_that_do_not_hold_it(models):
    root = models[0]
    key = "model.layers.1.mlp.experts.3.up_proj.weight"
    for name in ("lacking", "cut"):
        shutil.copytree(root / "qwen3_moe", root / name)
    tensors = load_file(root / "cut" / "model.safetensors")
    save_file({**tensors, key: tensors[key][:40].contiguous()}, root / "cut" / "model.safetensors")
    del tensors[key]
    save_file(tensors, root / "lacking" / "model.safetensors")
    first, second = run_distributed(refusals, 2, (root, ("lacking", "cut")))
    assert first == second
    assert f"1 missing: {key}" in first[0] and key in first[1] and "[40, 32]" in first[1]


# The same in every layout: balancing losses and the capacity of an expert are those of a stream.
SAME_STREAMS = {"use_dynamic_batch_size": False, "micro_batch_size": 5}
LOSSES = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05, **SAME_STREAMS,
}  # fmt: skip
OF_SAMPLES = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
OF_STEPS = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}
OF_BOTH = {
    "moe_router_load_balancing_type": ["global_aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.3, 0.1],
}  # fmt: skip
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
# By name: model, flags, and whether tokens may be divided: how many an expert takes is counted on each rank.
TRAINED = {
    "plain": ("qwen3_moe", {}, True),
    "losses and shared experts": ("qwen2_moe", LOSSES, True),
    "losses and biases": (BIASED, {**LOSSES, **BIAS, "moe_router_bias_update_rate": 0.01}, True),
    "losses of samples": ("qwen3_moe", OF_SAMPLES, True),
    "losses of samples, sigmoid": (BIASED, {**OF_SAMPLES, **BIAS, "moe_router_bias_update_rate": 0.0}, True),
    "losses of steps": ("qwen3_moe", OF_STEPS, True),
    "losses of steps and samples, sigmoid": (BIASED, {**OF_BOTH, **BIAS, "moe_router_bias_update_rate": 0.0}, True),
    "scores on inputs": ("qwen2_moe", {"moe_apply_probs_on_input": True, "moe_router_topk": 1}, True),
    "capacity": ("qwen3_moe", {**SAME_STREAMS, "moe_expert_capacity_factor": 1.0}, False),
}
DATA = {"data_parallel_size": 2}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TRAINED_ON_TWO = {
    "experts": {**DATA, **EXPERTS},
    "experts, averaged": {**DATA, **EXPERTS, "ddp_average_in_collective": True},
    "cut": TENSOR,
    "whole, spread over the tensor group": {**TENSOR, **EXPERTS, **WHOLE_EXPERTS},
    "whole in the tensor group": {**TENSOR, **WHOLE_EXPERTS},
    "pipeline": PIPELINE,
    "recomputed pipeline": {**PIPELINE, **RECOMPUTED},
    "zigzag": {"context_parallel_size": 2, **EXPERTS},
    "gathered": {"context_parallel_size": 2, "allgather_cp": True, **EXPERTS},
    "cut over context ranks, the rest whole": {"context_parallel_size": 2, "expert_tensor_parallel_size": 2},
}
# Those of every change, by layout: every kind of loss where experts are spread over data ranks, and where tensor and context
# ranks, stages that recompute, or the average of gradients have a part in a loss, those of its kinds.
SHARPEST = {
    "experts": ("losses and biases", "losses of samples", "losses of steps", "scores on inputs"),
    "experts, averaged": ("losses of steps",),
    "whole, spread over the tensor group": ("losses and biases", "losses of samples", "losses of steps"),
    "recomputed pipeline": ("losses and biases", "losses of steps"),
    "zigzag": ("losses and biases", "losses of samples", "losses of steps"),
}
TRAINED_ON_FOUR = {
    "experts x cut": {**DATA, **TENSOR, **EXPERTS},
    "cut x pipeline, the rest whole": {**DATA, **PIPELINE, "expert_tensor_parallel_size": 2},
    "experts x pipeline": {**DATA, **PIPELINE, **EXPERTS},
    "experts x context, two optimizers": {
        **DATA,
        **EXPERTS,
        "context_parallel_size": 2,
        "num_distributed_optimizer_instances": 2,
    },
    "experts x pipeline x tensor": {**PIPELINE, **TENSOR, **EXPERTS, **WHOLE_EXPERTS},
    "experts x context": {**DATA, "context_parallel_size": 2, "expert_model_parallel_size": 4},
    "experts x cut x context": {**TENSOR, **EXPERTS, "context_parallel_size": 2},
}


def train(cases):
    know_biases()
    return train_steps(cases)


def grid(layouts):
    """Cases of a row of `TRAINED` and a layout."""
    return [
        pytest.param(name, layout, marks=() if name in SHARPEST.get(layout, ()) else pytest.mark.slow)
        for layout in layouts
        for name, (_, _, tokens_may_be_divided) in TRAINED.items()
        if tokens_may_be_divided or layout in ("experts", "pipeline", "experts x pipeline")
    ]


# Matches no parameter, only the buffer of one router.
FIRST_BIAS = r"layers\.0\.mlp\.router\.expert_bias$"


def training_args(root, name, **changes):
    model, flags, _ = TRAINED[name]
    return layout_args(root / model, **{**flags, **changes})


@pytest.fixture(scope="module")
def one_rank(models, selected):
    """By row of `TRAINED`. Only what is compared with is trained."""
    tests = test_two_ranks_train_as_one, test_four_ranks_train_as_one
    rows = {"losses and biases", *BY_SAMPLES_AND_STEPS, *(case["name"] for test in tests for case in selected(test))}
    cases = {name: training_args(models[0], name) for name in TRAINED if name in rows}
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate"):
        cases[name] = training_args(models[0], "losses and biases", **{name: 0.0})
    for pattern in (r"\.router\.", FIRST_BIAS):
        cases[pattern] = training_args(models[0], "losses and biases", freeze_params_name_list=[pattern])
    return run_distributed(train, 1, (cases,))[0]


def test_balancing_losses_and_biases_act(one_rank):
    trained = one_rank["losses and biases"]
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        without = one_rank[name]["steps"][0]
        assert abs(without["grad_norm"] - trained["steps"][0]["grad_norm"]) > 1e-3, name
        assert without["loss"] == trained["steps"][0]["loss"]
    for number in range(2):
        name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        # By the rate towards the mean in each step, or not at all where a load is the mean.
        moves = (trained["weights"][name] - trained["loaded"][name]) / 0.01
        assert abs(moves - moves.round()).max() < 1e-4 and 1 <= abs(moves).max() <= 3
        frozen = one_rank["moe_router_bias_update_rate"]
        assert (frozen["weights"][name] == frozen["loaded"][name]).all()


@pytest.mark.parametrize(("pattern", "layers"), [(r"\.router\.", (0, 1)), (FIRST_BIAS, (0,))])
def test_steps_do_not_move_frozen_biases(one_rank, pattern, layers):
    run = one_rank[pattern]
    for number in range(2):
        name = f"model.layers.{number}.mlp.gate.e_score_correction_bias"
        assert (run["weights"][name] == run["loaded"][name]).all() == (number in layers)


PACKED = {
    "all together": SAME_STREAMS,
    "each alone": {"use_dynamic_batch_size": False, "micro_batch_size": 1},
    "one stream": {"use_dynamic_batch_size": False, "micro_batch_size": 9},
    "one stream, recomputed": {"use_dynamic_batch_size": False, "micro_batch_size": 9, **RECOMPUTED},
    "recomputed": RECOMPUTED,
    "recomputed experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def kept_after_steps(cases):
    """By case, what the dispatchers of a layer each still have of each token when a step is over."""
    from tests.support.processes.layout_steps import LayoutRun

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        run.step()
        modules = [module for chunk in run.model for module in chunk.modules() if hasattr(module, "token_dispatcher")]
        # No stream is shorter.
        found[name] = [kept_rows(module.token_dispatcher, args.data_pad_size_multiplier) for module in modules]
    return found


def test_dispatchers_keep_nothing_of_a_step_however_experts_are_recomputed(models):
    cases = {name: layout_args(models[0] / "qwen3_moe", **changes) for name, changes in PACKED.items()}
    (found,) = run_distributed(kept_after_steps, 1, (cases,))
    assert found == dict.fromkeys(PACKED, [[], []])


BY_SAMPLES_AND_STEPS = ("losses of samples", "losses of steps")


@pytest.fixture(scope="module")
def packed(models, selected):
    """By losses and packing; and by losses the runs without them, and with those of streams."""
    chosen = selected(test_losses_of_samples_and_steps_do_not_depend_on_packing)
    cases = {
        (case["losses"], case["packing"]): training_args(models[0], case["losses"], **PACKED[case["packing"]])
        for case in chosen
    }
    for losses in BY_SAMPLES_AND_STEPS:
        cases[losses, "without"] = training_args(models[0], losses, moe_aux_loss_coeff=0.0)
        cases[losses, "of streams"] = training_args(models[0], losses, moe_router_load_balancing_type="aux_loss")
    return run_distributed(train, 1, (cases,), timeout=240)[0]


@pytest.mark.parametrize(
    "packing",
    # The first and the fourth of these are between others, or two at once.
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("all together", "one stream, recomputed") else ())
        for name in PACKED
    ],
)
@pytest.mark.parametrize("losses", BY_SAMPLES_AND_STEPS)
def test_losses_of_samples_and_steps_do_not_depend_on_packing(one_rank, packed, losses, packing):
    assert_equal_runs([packed[losses, packing]], one_rank[losses])


@pytest.mark.parametrize("losses", BY_SAMPLES_AND_STEPS)
def test_losses_of_samples_and_steps_act(one_rank, packed, losses):
    one = one_rank[losses]
    for name in ("without", "of streams"):
        assert abs(packed[losses, name]["steps"][0]["grad_norm"] - one["steps"][0]["grad_norm"]) > 1e-3, name


@pytest.fixture(scope="module")
def on_two_ranks(models, selected):
    return train_selected(models[0], 2, TRAINED_ON_TWO, selected(test_two_ranks_train_as_one))


@pytest.fixture(scope="module")
def on_four_ranks(models, selected):
    return train_selected(models[0], 4, TRAINED_ON_FOUR, selected(test_four_ranks_train_as_one))


def train_selected(root, ranks, layouts, chosen):
    pairs = [(case["name"], case["layout"]) for case in chosen]
    cases = {(name, layout): training_args(root, name, **layouts[layout]) for name, layout in pairs}
    return run_distributed(train, ranks, (cases,), timeout=300)


@pytest.mark.parametrize(("name", "layout"), grid(TRAINED_ON_TWO))
def test_two_ranks_train_as_one(one_rank, on_two_ranks, name, layout):
    assert_equal_runs([rank[name, layout] for rank in on_two_ranks], one_rank[name])


@pytest.mark.parametrize(("name", "layout"), grid(TRAINED_ON_FOUR))
def test_four_ranks_train_as_one(one_rank, on_four_ranks, name, layout):
    assert_equal_runs([rank[name, layout] for rank in on_four_ranks], one_rank[name])


def refuse_steps(args):
    """The biases of routers after a step that the guard has refused, and those before."""
    know_biases()
    from slime.backends.megatron_utils.parameter_names import global_named_biases
    from tests.support.processes.layout_steps import LayoutRun

    run = LayoutRun(args)
    biases = [bias for _, bias in global_named_biases(run.model[0])]
    before = [bias.clone() for bias in biases]
    run.prepare()
    with torch.no_grad():
        run.model[0].module.output_layer.weight[0, 0] = float("nan")
    metrics = run.step()
    return metrics["skipped_steps"], all(torch.equal(bias, was) for bias, was in zip(biases, before, strict=True))


def test_a_step_that_is_not_taken_moves_no_bias(models):
    model, flags, _ = TRAINED["losses and biases"]
    args = layout_args(models[0] / model, **flags, check_for_nan_in_loss_and_grad=False)
    ((skipped, unmoved),) = run_distributed(refuse_steps, 1, (args,))
    assert skipped == 1 and unmoved


def count_tokens(args):
    """How many times each router has sent a token to an expert, after two streams of 701 tokens."""
    know_biases()
    from slime.backends.megatron_utils.routers import Router
    from tests.support.processes import megatron_worker as megatron

    (chunk,) = megatron.load_model(args)
    for _ in range(2):
        megatron.packed_forward(chunk, [[7] * 701])
    return [module.local_tokens_per_expert.tolist() for module in chunk.modules() if isinstance(module, Router)]


def test_routers_count_tokens_in_32_bits_beside_weights_of_16(models):
    """bfloat16 has neither 701 nor 1402, so that loads which are nearly even would seem to be so."""
    (counts,) = run_distributed(count_tokens, 1, (tiny_args(models[0] / BIASED, **BIAS, bf16=True),))
    assert len(counts) == 2
    # Two experts for each token. Since these are all alike, an expert has many of them.
    assert all(sum(of_router) == 2 * 1402 and max(of_router) > 701 for of_router in counts)


def save_and_go_on(runs):
    """By name: the weights at a checkpoint after two steps, and those that a third step ends at."""
    know_biases()
    return {name: go_on(ResumableRun(args), steps=2, saves=True) for name, args in runs.items()}


def resume_and_go_on(runs):
    know_biases()
    return {name: go_on(resumed(args, directory)) for name, (args, directory) in runs.items()}


def go_on(run, steps=0, saves=False):
    for _ in range(steps):
        run.prepare()
        run.step()
    if saves:
        run.save()
    loaded = run.weights()
    run.prepare()
    run.step()
    return loaded, run.weights(), run.mean_gradient()


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_expert_parallel_sizes_and_with_its_optimizer(models, tmp_path):
    root, (model, flags, _) = models[0], TRAINED["losses and biases"]

    def args_in(layout, name):
        further = {"lr": 1e-3, "clip_grad": 0.0, **flags, **layout}
        return resumable_args(root / model, tmp_path / name, **further)

    (one,) = run_distributed(save_and_go_on, 1, ({"one": args_in({}, "one")},))
    spread = run_distributed(save_and_go_on, 2, ({"spread": args_in(TRAINED_ON_TWO["experts"], "spread")},))
    saved = {"one": one["one"], "spread": spread[0]["spread"]}
    ways = {(source, layout): sizes for source in saved for layout, sizes in TRAINED_ON_TWO.items()}
    runs = {way: (args_in(sizes, "resumed"), tmp_path / way[0]) for way, sizes in ways.items()}
    found = dict(run_distributed(resume_and_go_on, 2, (runs,), timeout=300)[0])
    of_one = {("spread", "one"): (args_in({}, "resumed"), tmp_path / "spread")}
    fresh = {"fresh": (args_in({"no_load_optim": True}, "resumed"), tmp_path / "spread")}
    (alone,) = run_distributed(resume_and_go_on, 1, ({**of_one, **fresh},))
    without_moments = alone.pop("fresh")
    for way, (loaded, weights, _) in {**found, **alone}.items():
        at_checkpoint, after, gradient = saved[way[0]]
        assert all((loaded[name] == at_checkpoint[name]).all() for name in at_checkpoint), way
        assert_equal_weights(weights, after, bound_of_weights(args_in({}, "one"), [gradient], TRAINED_TOKENS))
    # Not for want of moments.
    _, weights, _ = without_moments
    assert max(abs(weights[name] - weight).max() for name, weight in saved["spread"][1].items()) > 1e-4
