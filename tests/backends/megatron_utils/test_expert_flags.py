"""What flags of experts do in whole steps: noise and chance in routing, experts filled up to their capacity, shared experts
that overlap with the others, scores on what experts take, and losses of routers, which are logged."""

import contextlib
import math

import numpy as np
import pytest
import torch

from tests.support.models.tiny_model import write_tiny_mixtures
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, assert_equal_runs, layout_args, train_case

EXPERTS, TOPK = 4, 2
EPSILON = 0.25
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SAME_STREAMS = {"use_dynamic_batch_size": False, "micro_batch_size": 5}
JITTER = {"moe_input_jitter_eps": EPSILON, "loss_type": "sft_loss"}
EVEN = {"moe_router_force_load_balancing": True}
CAPACITY = {**SAME_STREAMS, "moe_expert_capacity_factor": 1.5}
FILLED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
OVERLAPPED = {"moe_shared_expert_overlap": True}
LOSSES = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05,
    "moe_per_layer_logging": True, **SAME_STREAMS,
}  # fmt: skip
OF_SAMPLES = {
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3, "moe_per_layer_logging": True,
}  # fmt: skip
OF_STEPS = {**OF_SAMPLES, "moe_router_load_balancing_type": "global_aux_loss"}
ON_INPUTS = {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True}
SPREAD = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2,
          "expert_tensor_parallel_size": 1}  # fmt: skip
CUT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CONTEXT = {"context_parallel_size": 2, "expert_model_parallel_size": 2}
DATA = {"data_parallel_size": 2, "expert_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_tiny_mixtures(tmp_path_factory.mktemp("hf"))


def args_of(root, model="qwen3_moe", **flags):
    return layout_args(root / model, **flags)


@contextlib.contextmanager
def seen_by_routers(model):
    """While it lasts every call of a router adds to the list: what it is given, what it multiplies, its logits and its mask."""
    from megatron.core.transformer.moe.router import TopKRouter

    calls, undone = [], []
    for router in (module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)):

        def gating(multiplied, router=router, gating=router.gating):
            logits = gating(multiplied)
            calls[-1].update(multiplied=multiplied.detach().clone(), logits=logits.detach().clone())
            return logits

        def before(router, given):
            calls.append({
                "layer": router.layer_number,
                "given": given[0].detach().clone(),
                "mask": given[1].flatten().clone(),
                "learns": torch.is_grad_enabled(),
            })  # fmt: skip

        router.gating = gating
        undone += [router.register_forward_pre_hook(before).remove, lambda router=router: delattr(router, "gating")]
    try:
        yield calls
    finally:
        for undo in undone:
            undo()


def noise_worker(cases):
    """By case: the factors between what routers are given and what they multiply, in a pass and in a step; and the gradient."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        with seen_by_routers(run.model) as of_pass:
            run.prepare()
        with seen_by_routers(run.model) as of_step:
            metrics = run.step()
        factors = [torch.cat([(c["multiplied"] / c["given"]).flatten() for c in calls]) for calls in (of_pass, of_step)]
        found[name] = *factors, metrics["grad_norm"]
    return found


def test_noise_is_of_steps_alone_and_recomputation_repeats_it(root):
    flags = {"advantage_estimator": "grpo", **JITTER}
    cases = {"noise": flags, "recomputed": {**flags, **RECOMPUTED}, "none": {**flags, "moe_input_jitter_eps": None}}
    (found,) = run_distributed(noise_worker, 1, ({name: args_of(root, **flags) for name, flags in cases.items()},))
    of_pass, of_step, norm = found["noise"]
    assert (of_pass == 1).all() and (found["none"][1] == 1).all()
    assert of_step.min() > 1 - EPSILON - 1e-5 and of_step.max() < 1 + EPSILON + 1e-5
    # Of a uniform distribution, by more than 4000 numbers.
    assert len(of_step) > 4000
    assert of_step.mean() == pytest.approx(1, abs=5 * EPSILON / math.sqrt(3 * len(of_step)))
    assert of_step.std() == pytest.approx(EPSILON / math.sqrt(3), rel=0.05)
    assert found["recomputed"][2] == pytest.approx(norm, rel=1e-6)
    assert abs(found["none"][2] - norm) > 1e-4 * norm


def chance_worker(cases, tokens):
    """By case: the first step after a pass; which experts each router chose in a pass over a long sequence."""
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        metrics = run.step()
        chunk = run.model[0].eval()
        with torch.no_grad(), megatron.routing_maps(chunk) as maps:
            for _ in range(2):
                megatron.packed_forward(chunk, [tokens])
        found[name] = metrics, maps
    return found


def test_forced_loads_are_even_and_the_same_in_every_pass(root):
    tokens = torch.randint(128, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    flags = {"even": EVEN, "recomputed": {**EVEN, **RECOMPUTED}, "free": {}}
    (found,) = run_distributed(chance_worker, 1, ({name: args_of(root, **flags[name]) for name in flags}, tokens))
    metrics, maps = found["even"]
    assert len(maps) == 4  # of two layers in each of two passes
    for first, second in zip(maps[:2], maps[2:], strict=True):
        assert torch.equal(first, second) and (first.sum(1) == TOPK).all()
        # A share of 1/2 with the deviation of 500 tosses.
        shares = first.float().mean(0)
        assert (shares - TOPK / EXPERTS).abs().max() < 5 * math.sqrt(0.25 / len(tokens))
    assert not torch.equal(maps[0], maps[1])
    assert max((of_layer.float().mean(0) - 0.5).abs().max() for of_layer in found["free"][1]) > 0.15
    # The policy has not moved: log-probs of the step are those of the pass before.
    assert metrics["ppo_kl"] == found["recomputed"][0]["ppo_kl"] == 0
    assert found["recomputed"][0]["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


def filled_worker(cases):
    """By case what `train_case` gives, and (rows, capacity, tokens of each of the rank's experts) of every call of experts."""
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    calls = []
    forward, preprocess = SequentialMLP.forward, MoEAlltoAllTokenDispatcher.preprocess

    def counted(experts, rows, tokens, probs):
        calls[-1] = *calls[-1], tokens.tolist()
        return forward(experts, rows, tokens, probs)

    def noted(dispatcher, routing_map):
        calls.append((len(routing_map),))
        return preprocess(dispatcher, routing_map)

    SequentialMLP.forward, MoEAlltoAllTokenDispatcher.preprocess = counted, noted
    found = {}
    for name, args in cases.items():
        calls.clear()
        found[name] = train_case(args), list(calls)
    return found


@pytest.mark.parametrize("ranks, layouts", [(1, {"one": {}}), (2, {"spread": SPREAD, "context": CONTEXT, "cut": CUT})])
def test_experts_that_are_filled_up_give_what_they_give_without(root, ranks, layouts):
    cases = {
        (name, filled): args_of(root, **sizes, **(FILLED if filled else CAPACITY))
        for name, sizes in layouts.items()
        for filled in (False, True)
    }
    for rank in run_distributed(filled_worker, ranks, (cases,)):
        for name in layouts:
            (found, calls), (expected, others) = rank[name, True], rank[name, False]
            for step, usual in zip(found["steps"], expected["steps"], strict=True):
                assert step == pytest.approx(usual, rel=1e-5, abs=1e-6)
            for key, weight in expected["weights"].items():
                assert abs(found["weights"][key] - weight).max() < 1e-6, key
            for rows, tokens in calls:
                # Of every rank that shares the experts.
                assert set(tokens) == {ranks * math.ceil(rows * TOPK / EXPERTS * 1.5)}
            assert any(len(set(tokens)) > 1 for _, tokens in others)


def overlap_worker(cases):
    """By case what `train_case` gives, and how often shared experts computed by themselves and in the dispatcher."""
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

    counts = {}

    def counting(name):
        function = getattr(SharedExpertMLP, name)

        def counted(*given):
            counts[name] = counts.get(name, 0) + 1
            return function(*given)

        setattr(SharedExpertMLP, name, counted)

    for name in ("forward", "linear_fc2_forward"):
        counting(name)
    found = {}
    for name, args in cases.items():
        counts.clear()
        found[name] = train_case(args), dict(counts)
    return found


def test_shared_experts_that_overlap_give_what_they_give_alone(root):
    args = {
        name: args_of(root, "qwen2_moe", **flags) for name, flags in {"alone": {}, "overlapped": OVERLAPPED}.items()
    }
    (one,) = run_distributed(overlap_worker, 1, (args,))
    (alone, by_itself), (overlapped, in_dispatcher) = one["alone"], one["overlapped"]
    assert set(by_itself) == {"forward"} and set(in_dispatcher) == {"linear_fc2_forward"}
    assert_equal_runs([overlapped], alone)
    layouts = {"spread": SPREAD, "cut": CUT, "experts": DATA, "recomputed": {**PIPELINE, **RECOMPUTED}}
    cases = {name: args_of(root, "qwen2_moe", **OVERLAPPED, **sizes) for name, sizes in layouts.items()}
    ranks = run_distributed(overlap_worker, 2, (cases,))
    for name in layouts:
        assert_equal_runs([rank[name][0] for rank in ranks], alone)


def losses_worker(cases):
    """By case: the metrics of routers of a step, and what these saw."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        with seen_by_routers(run.model) as calls:
            metrics = run.step()
        found[name] = {key: value for key, value in metrics.items() if key.startswith("moe_")}, calls
    return found


def balance(logits):
    """Switch Transformer (arXiv 2101.03961), equation 4, with several experts for each token; 1 where all is even."""
    scores = logits.double().softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK).indices, 1.0)
    return float(EXPERTS / TOPK * (chosen.mean(0) * scores.mean(0)).sum())


def test_losses_of_routers_are_logged_for_every_layer(root):
    cases = {
        "of streams": args_of(root, "qwen2_moe", **LOSSES),
        "recomputed": args_of(root, "qwen2_moe", **LOSSES, **RECOMPUTED),
        "of samples": args_of(root, **OF_SAMPLES),
        "of steps": args_of(root, "qwen2_moe", **OF_STEPS),
        "of steps, recomputed": args_of(root, "qwen2_moe", **OF_STEPS, **RECOMPUTED),
        "of steps, one stream": args_of(
            root, "qwen2_moe", **OF_STEPS, use_dynamic_batch_size=False, micro_batch_size=9
        ),
        "silent": args_of(root, **{**OF_SAMPLES, "moe_per_layer_logging": False}),
    }
    (one,) = run_distributed(losses_worker, 1, (cases,))
    logged, calls = one["of streams"]
    # The first layer is dense.
    assert set(logged) == {"moe_load_balancing_loss/layer_1", "moe_z_loss/layer_1"}
    streams = [call["logits"].view(-1, EXPERTS)[~call["mask"]].double() for call in calls]
    assert len(streams) == 2
    expected = sum(map(balance, streams)) / 2
    assert logged["moe_load_balancing_loss/layer_1"] == pytest.approx(expected, rel=1e-5)
    expected = sum(float(logits.logsumexp(-1).square().mean()) for logits in streams) / 2
    assert logged["moe_z_loss/layer_1"] == pytest.approx(expected, rel=1e-5)
    assert one["recomputed"][0] == pytest.approx(logged, rel=1e-6)
    assert one["silent"][0] == {} and set(one["of samples"][0]) == {
        f"moe_seq_load_balancing_loss/layer_{number}" for number in range(2)
    }
    # A pass before the step counts; what is logged is what the step has.
    logged, calls = one["of steps"]
    learning = [call for call in calls if call["learns"]]
    assert len(calls) == 2 * len(learning) and len(learning) > 2
    expected = balance(torch.cat([call["logits"].view(-1, EXPERTS)[~call["mask"]] for call in learning]))
    assert logged == {"moe_global_load_balancing_loss/layer_1": pytest.approx(expected, rel=1e-5)}
    for name in ("of steps, recomputed", "of steps, one stream"):
        assert one[name][0] == pytest.approx(logged, rel=1e-5), name
    # One stream counts itself.
    assert len(one["of steps, one stream"][1]) == 1
    of_streams = {"spread": SPREAD, "pipeline": PIPELINE, "context": CONTEXT, "data": DATA}
    kinds = {
        "of streams": ("qwen2_moe", LOSSES),
        "of samples": ("qwen3_moe", OF_SAMPLES),
        "of steps": ("qwen2_moe", OF_STEPS),
    }
    cases = {
        (kind, name): args_of(root, model, **flags, **sizes)
        for kind, (model, flags) in kinds.items()
        for name, sizes in of_streams.items()
    }
    for rank in run_distributed(losses_worker, 2, (cases,)):
        for kind, name in cases:
            assert rank[kind, name][0] == pytest.approx(one[kind][0], rel=1e-5), (kind, name)


def gradients_worker(cases):
    """By case the gradients of all routers of a step."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        run.step()
        routers = [(key, p) for key, p in run.model[0].named_parameters() if "router" in key]
        found[name] = {key: parameter.main_grad.double().clone() for key, parameter in routers}
    return found


def test_two_balancing_losses_add_up(root):
    """What each of them adds to the gradient, both add together."""
    kinds = {"streams": ("aux_loss", 0.3), "samples": ("seq_aux_loss", 0.2), "none": ("none", 0.0)}
    kinds["both"] = (["aux_loss", "seq_aux_loss"], [0.3, 0.2])
    flags = {"use_distributed_optimizer": False, "clip_grad": 0.0, **SAME_STREAMS}
    cases = {
        name: args_of(root, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=coefficient, **flags)
        for name, (kind, coefficient) in kinds.items()
    }
    (found,) = run_distributed(gradients_worker, 1, (cases,))
    assert len(found["none"]) == 2
    for key, without in found["none"].items():
        streams, samples, both = (found[name][key] - without for name in ("streams", "samples", "both"))
        assert min(streams.abs().max(), samples.abs().max()) > 1e-4
        torch.testing.assert_close(both, streams + samples, rtol=1e-4, atol=1e-6)


def last_router_worker(cases):
    """By case, of the router of the last layer: its weight before a step, its gradient, and what it saw in the step."""
    from megatron.core.transformer.moe.router import TopKRouter

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        routers = [module for module in run.model[0].modules() if isinstance(module, TopKRouter)]
        router = max(routers, key=lambda router: router.layer_number)
        weight = router.weight.detach().double().clone()
        with seen_by_routers(run.model) as calls:
            run.step()
        seen = [call for call in calls if call["learns"] and call["layer"] == router.layer_number]
        found[name] = weight, router.weight.main_grad.double().clone(), seen
    return found


def test_the_gradient_of_the_loss_of_a_step_by_hand_in_every_layout(root):
    """The last router's, whose loss no other weight behind it sees: what the loss adds to the gradient of the policy's."""
    flags = {"use_distributed_optimizer": False, "clip_grad": 0.0}

    def cases(layouts):
        return {
            (name, balanced): args_of(root, **flags, **(OF_STEPS if balanced else {}), **sizes)
            for name, sizes in layouts.items()
            for balanced in (False, True)
        }

    (one,) = run_distributed(last_router_worker, 1, (cases({"one": {}, "recomputed": RECOMPUTED}),))
    weight, _, calls = one["one", True]
    rows = torch.cat([call["multiplied"].flatten(0, 1)[~call["mask"]] for call in calls]).double()
    assert len(calls) > 2
    weight.requires_grad_()
    scores = (rows @ weight.T).softmax(-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK).indices, 1.0)

    def gradient(loads):
        loss = OF_STEPS["moe_aux_loss_coeff"] * EXPERTS / TOPK * (loads * scores).sum() / len(scores)
        return torch.autograd.grad(loss, weight, retain_graph=True)[0]

    expected = gradient(chosen.mean(0))
    # Not the gradient with the loads of each stream, nor of the streams so far.
    lengths = [int((~call["mask"]).sum()) for call in calls]
    of_streams = torch.cat([part.mean(0).expand(len(part), -1) for part in chosen.split(lengths)])
    so_far = torch.cat([chosen[:end].mean(0).expand(n, -1) for n, end in zip(lengths, np.cumsum(lengths), strict=True)])
    for other in (of_streams, so_far):
        assert (gradient(other) - expected).abs().max() > 1e-3 * expected.abs().max() > 1e-6
    layouts = {"data": DATA, "spread": SPREAD, "cut": CUT, "context": CONTEXT}
    for found in (one, *run_distributed(last_router_worker, 2, (cases(layouts),))):
        for name in {name for name, _ in found}:
            added = found[name, True][1] - found[name, False][1]
            torch.testing.assert_close(
                added, expected, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def inputs_worker(args, sequences):
    """What the experts of the last layer take, and what they give."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from tests.support.processes import megatron_worker as megatron

    (chunk,) = megatron.load_model(args)
    layer, seen = [module for module in chunk.modules() if isinstance(module, MoELayer)][-1], []
    layer.register_forward_hook(lambda layer, taken, given: seen.append((taken[0], given[0])))
    with torch.no_grad():
        megatron.packed_forward(chunk, sequences)
    return seen


def test_scores_weigh_what_experts_take(root):
    from safetensors.torch import load_file

    ((taken, given),) = run_distributed(
        inputs_worker, 1, (args_of(root, **ON_INPUTS), [[1, 5, 9, 3, 2, 77], [4, 100, 8, 90]])
    )[0]
    weights = load_file(root / "qwen3_moe" / "model.safetensors")

    def expert(number, row):
        gate, up, down = (
            weights[f"model.layers.1.mlp.experts.{number}.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))

    rows = taken.flatten(0, 1)
    scores, numbers = (rows @ weights["model.layers.1.mlp.gate.weight"].T).softmax(-1).max(-1)
    assert len(set(numbers.tolist())) > 1 and scores.max() < 0.999
    of_inputs = torch.stack([expert(i, s * row) for i, s, row in zip(numbers.tolist(), scores, rows, strict=True)])
    of_outputs = torch.stack([s * expert(i, row) for i, s, row in zip(numbers.tolist(), scores, rows, strict=True)])
    torch.testing.assert_close(given.flatten(0, 1), of_inputs, rtol=1e-4, atol=1e-5)
    assert (of_inputs - of_outputs).abs().max() > 1e-2 * of_inputs.abs().max()
