"""Routing replay in whole training steps: in any layout tokens go to the recorded experts, and gradients are those of one rank.

The weights of the routers are changed between the log-prob pass and training, so that free routers would choose otherwise.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.rounding import assert_equal_gradients, assert_equal_metrics, bounds_of_step
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

LAYERS, EXPERTS, TOPK = 4, 4, 2
STEPS = 2
MODEL = {
    "num_layers": LAYERS, "num_experts": EXPERTS, "moe_router_topk": TOPK, "moe_ffn_hidden_size": 48,
    "moe_router_dtype": "fp32", "moe_router_load_balancing_type": "none", "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1, "use_distributed_optimizer": False, "moe_layer_freq": 1, "global_batch_size": 4,
    "use_routing_replay": True, "use_rollout_routing_replay": False, "moves_routers": True,
}  # fmt: skip
UNMOVED = {"moves_routers": False}
BALANCED = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.3}
ROLLOUT = {"use_rollout_routing_replay": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ZIGZAG = {"context_parallel_size": 2}
GATHERED = {**ZIGZAG, "allgather_cp": True}
ONE_RANK = {
    "recorded": {},
    "from rollout": ROLLOUT,
    "free": {"use_routing_replay": False},
    "recomputed": RECOMPUTED,
    "recomputed experts": SELECTIVE,
    "balanced over a step": BALANCED,
    "balanced over a step, recomputed": {**BALANCED, **RECOMPUTED},
    "balanced over a step, from rollout": {**BALANCED, **ROLLOUT},
    "unmoved": UNMOVED,
    "unmoved, free": {**UNMOVED, "use_routing_replay": False},
}
TWO_RANKS = {
    "sequence": SEQUENCE,
    "experts": {"expert_model_parallel_size": 2, "data_parallel_size": 2},
    "pipeline": PIPELINE,
    "virtual, recomputed": {**VIRTUAL, **RECOMPUTED},
    "zigzag": ZIGZAG,
    "gathered": GATHERED,
    "sequence, from rollout": {**SEQUENCE, **ROLLOUT},
    "virtual, from rollout": {**VIRTUAL, **ROLLOUT, **RECOMPUTED},
    "zigzag, from rollout": {**ZIGZAG, **ROLLOUT},
    "gathered, from rollout": {**GATHERED, **ROLLOUT},
}
# On every change their layouts run with records of the other origin.
SLOW = ("sequence", "virtual, recomputed", "zigzag", "gathered, from rollout")
FOUR_RANKS = {
    "pipeline x sequence": {**PIPELINE, **SEQUENCE, **RECOMPUTED},
    "virtual x experts": {**VIRTUAL, "expert_model_parallel_size": 2, "data_parallel_size": 2, **SELECTIVE},
    "zigzag x sequence": {**ZIGZAG, **SEQUENCE},
    "gathered x pipeline": {**GATHERED, **PIPELINE, **RECOMPUTED},
    "zigzag x experts": {**ZIGZAG, "data_parallel_size": 2, "expert_model_parallel_size": 2},
    "gathered x sequence, from rollout": {**GATHERED, **SEQUENCE, **ROLLOUT, **RECOMPUTED},
    "zigzag x virtual, from rollout": {**ZIGZAG, **VIRTUAL, **ROLLOUT},
    "pipeline x experts, from rollout": {
        **PIPELINE, **ROLLOUT, "expert_model_parallel_size": 2, "data_parallel_size": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, layers=LAYERS)
    return str(directory)


def cases_of(hf_dir, layouts):
    return {name: layout_args(hf_dir, **{**MODEL, **layout}) for name, layout in layouts.items()}


def engine_experts(sample_index, rows):
    """Made-up choices of an engine, [rows, layers, k]: two different experts for every token and layer."""
    generator = np.random.default_rng(sample_index)
    return np.argsort(generator.random((rows, LAYERS, EXPERTS)), axis=-1)[..., :TOPK].astype(np.int32)


def train_cases(cases):
    return {name: train_case(args) for name, args in cases.items()}


def train_case(args):
    """Both optimizer steps after a change of the routers.

    Returns:
        By step: `steps` (metrics) and `gradients` of what every rank has whole; where one rank has all samples also `bounds`
        of the metrics and `tokens`, the number of those that the gradient is a sum over. `left`: records nobody asked for.
    """
    import torch.distributed as dist

    run = prepared_run(args)
    replay = run.replay
    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from slime.training.train_step import train_one_step

    if args.moves_routers:
        move_routers(run.model)
    steps, gradients = [], []
    with replay.training():
        for step in range(STEPS):
            steps.append(train_one_step(args, run.backend, run.data, 0, step))
            gradients.append({
                name: parameter.main_grad.numpy().copy()
                for chunk in run.model
                for name, parameter in global_named_parameters(chunk)
                if "router" in name or "norm" in name
            })  # fmt: skip
    left = sum(len(layer.records) + len(layer.awaited) for layers in replay.layers for layer in layers)
    result = {"steps": steps, "gradients": gradients, "left": left}
    if dist.get_world_size() == 1:
        result["bounds"] = [bounds_of_step(args, run.data, step) for step in range(STEPS)]
        result["tokens"] = [trained_tokens(run.data, step) for step in range(STEPS)]
    return result


def trained_tokens(data, step):
    from slime.training.train_step import micro_batches_of_step

    return sum(int(data["loss_masks"][i].sum()) for batch in micro_batches_of_step(data, step) for i in batch)


def one_rank_cases(cases, plain):
    """`train_cases`, and what one rank alone is asked beside it."""
    results = train_cases(cases)
    results["plain"] = plain_and_replayed(plain)
    results["refusals"] = refusals(plain)
    return results


def plain_and_replayed(args):
    """Gradients of one step of supervised fine-tuning: by the trainer, and by loops over samples and tokens; and how many
    tokens were trained."""
    import torch

    run = prepared_run(args)
    move_routers(run.model)
    from slime.backends.megatron_utils.parameter_names import global_named_parameters, unwrap_model
    from slime.training.train_step import micro_batches_of_step, train_one_step

    named = dict(global_named_parameters(run.model[0]))
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    positions = [position for batch in micro_batches_of_step(run.data, 0) for position in batch]
    with run.replay.training():
        for step in range(STEPS):
            train_one_step(args, run.backend, run.data, 0, step)
            if step == 0:
                replayed = {name: parameter.main_grad.numpy().copy() for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.data.copy_(before[name])
    model, trained = unwrap_model(run.model[0]), trained_tokens(run.data, 0)
    loss = sum(plain_loss(args, model, run.data, position) for position in positions) / trained
    plain = torch.autograd.grad(loss, list(named.values()))
    return replayed, {name: gradient.numpy() for name, gradient in zip(named, plain, strict=True)}, trained


def plain_loss(args, model, data, position):
    """Summed negative log-likelihood of a sample's trained tokens, every token sent to the experts of the engine."""
    from megatron.core.transformer.moe.router import TopKRouter

    from tests.support.processes.megatron_worker import packed_forward

    tokens, response = data["tokens"][position].tolist(), data["response_lengths"][position]
    experts = engine_experts(data["sample_indices"][position], len(tokens) - 1)
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.routing = plain_routing(experts[:, module.layer_number - 1])
    logits = packed_forward(model, [tokens])
    log_probs, total = logits.log_softmax(-1), 0.0
    for offset, mask in enumerate(data["loss_masks"][position].tolist()):
        row = len(tokens) - response + offset - 1
        total = total - mask * log_probs[row, tokens[row + 1]]
    return total


def plain_routing(experts):
    """Gates by the definition: the exponentials of the chosen experts' logits, divided by their sum."""
    import torch

    def routing(logits, padding_mask=None):
        rows, chosen = [], torch.zeros(len(logits), EXPERTS, dtype=torch.bool)
        for row, of_row in enumerate(logits.view(-1, EXPERTS)):
            # The last token has no choice of the engine, and no loss depends on it.
            ids = experts[row].tolist() if row < len(experts) else list(range(TOPK))
            total = sum(of_row[expert].exp() for expert in ids)
            gates = [of_row[e].exp() / total if e in ids else torch.zeros(()) for e in range(EXPERTS)]
            rows.append(torch.stack(gates))
            chosen[row, ids] = True
        return torch.stack(rows), chosen

    return routing


def refusals(args):
    """What is said when a replay is asked of a model whose routers cannot do it."""
    from slime.backends.megatron_utils.replaying_router import attach_routing_replay
    from slime.utils.errors import UserError

    messages = []
    for changes in (
        {"num_moe_experts": None},
        {"moe_router_fusion": True},
        {"moe_router_load_balancing_type": "sinkhorn"},
        {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]},
    ):
        config = {"num_moe_experts": 4, "moe_router_fusion": False, "moe_router_load_balancing_type": "none", **changes}
        try:
            attach_routing_replay(args, [SimpleNamespace(config=SimpleNamespace(**config))])
        except UserError as error:
            messages.append(str(error))
    return messages


def prepared_run(args):
    """A run after its log-prob pass."""
    import torch

    run = LayoutRun(args, loads=False)
    run.replay = run.backend.routing_replay
    if args.use_rollout_routing_replay:
        run.data["rollout_routed_experts"] = [
            torch.from_numpy(engine_experts(index, total - 1))
            for index, total in zip(run.data["sample_indices"], run.data["total_lengths"], strict=True)
        ]
    with run.replay.log_prob_pass():
        run.prepare()
    return run


def move_routers(model):
    """A change of the routers' weights that is large and the same in every layout."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                wave = torch.sin(torch.arange(module.weight.numel()) * (1.0 + module.layer_number))
                with torch.no_grad():
                    module.weight.add_(0.05 * wave.view_as(module.weight))


@pytest.fixture(scope="module")
def one_rank(hf_dir):
    objective = {"loss_type": "sft_loss", "calculate_per_token_loss": True}
    plain = layout_args(hf_dir, **{**MODEL, **ROLLOUT, **objective})
    return run_distributed(one_rank_cases, 1, (cases_of(hf_dir, ONE_RANK), plain), timeout=240)[0]


@pytest.fixture(scope="module")
def two_ranks(hf_dir, selected):
    layouts = {case["case"]: TWO_RANKS[case["case"]] for case in selected(test_two_ranks_replay_like_one)}
    return run_distributed(train_cases, 2, (cases_of(hf_dir, layouts),), timeout=300)


def assert_same(found, expected):
    assert found["left"] == 0
    for step in range(STEPS):
        assert_equal_metrics(found["steps"][step], expected["steps"][step], expected["bounds"][step])
        # A pipeline stage has some of the parameters.
        of_rank, of_all = found["gradients"][step], expected["gradients"][step]
        assert_equal_gradients(of_rank, {name: of_all[name] for name in of_rank}, expected["tokens"][step])


def assert_no_parameter_is_missing(ranks, expected):
    """Together the ranks have compared the gradients of all parameters, in every step."""
    for step in range(STEPS):
        found = set().union(*(rank["gradients"][step] for rank in ranks))
        assert found == set(expected["gradients"][step]), f"step {step}"


def test_free_routers_would_choose_otherwise(one_rank):
    norms = {name: one_rank[name]["steps"][0]["grad_norm"] for name in ONE_RANK}
    assert not math.isclose(norms["free"], norms["recorded"], rel_tol=1e-3)
    assert not math.isclose(norms["from rollout"], norms["recorded"], rel_tol=1e-3)


def test_unchanged_weights_give_the_same_bits(one_rank):
    replayed, free = one_rank["unmoved"], one_rank["unmoved, free"]
    assert replayed["steps"][0] == free["steps"][0] and replayed["steps"][0]["ppo_kl"] == 0
    for name, gradient in free["gradients"][0].items():
        np.testing.assert_array_equal(replayed["gradients"][0][name], gradient, err_msg=name)


def test_gradients_are_those_of_a_plain_computation(one_rank):
    """Of all parameters: the experts that were chosen, and the routers, whose gates are those of the changed weights."""
    replayed, plain, tokens = one_rank["plain"]
    assert sum("router" in name for name in plain) == LAYERS and replayed.keys() == plain.keys()
    for name, gradient in plain.items():
        assert np.abs(gradient).max() > 1e-6, name
    assert_equal_gradients(replayed, plain, tokens)


def test_models_whose_routers_do_not_ask_are_refused(one_rank):
    reasons = ("the model has no experts", "--moe-router-fusion", "sinkhorn", "sinkhorn")
    messages = one_rank["refusals"]
    assert len(messages) == len(reasons)
    for message, reason in zip(messages, reasons, strict=True):
        assert message.startswith("--use-routing-replay") and reason in message


@pytest.mark.parametrize("case", ["recomputed", "recomputed experts"])
def test_recomputed_layers_have_the_gradients_of_those_that_are_not(one_rank, case):
    assert_same(one_rank[case], one_rank["recorded"])


def test_loads_of_a_step_are_counted_with_the_records_that_the_step_replays(one_rank):
    """Records are there for the step still, and for its repetition."""
    balanced = one_rank["balanced over a step"]
    assert_same(one_rank["balanced over a step, recomputed"], balanced)
    for kind, plain in (("", "recorded"), (", from rollout", "from rollout")):
        found, without = one_rank[f"balanced over a step{kind}"], one_rank[plain]
        assert found["left"] == 0 and found["steps"][0]["loss"] == without["steps"][0]["loss"]
        assert not math.isclose(found["steps"][0]["grad_norm"], without["steps"][0]["grad_norm"], rel_tol=1e-3)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in TWO_RANKS]
)
def test_two_ranks_replay_like_one(one_rank, two_ranks, case):
    expected = one_rank["from rollout" if "rollout" in case else "recorded"]
    for rank in two_ranks:
        assert_same(rank[case], expected)
    assert_no_parameter_is_missing([rank[case] for rank in two_ranks], expected)


@pytest.mark.slow
def test_four_ranks_replay_like_one(hf_dir, one_rank):
    ranks = run_distributed(train_cases, 4, (cases_of(hf_dir, FOUR_RANKS),), timeout=600)
    for case in FOUR_RANKS:
        expected = one_rank["from rollout" if "rollout" in case else "recorded"]
        for rank in ranks:
            try:
                assert_same(rank[case], expected)
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from error
        assert_no_parameter_is_missing([rank[case] for rank in ranks], expected)
