"""Experts that are full: which tokens these drop, by either policy, and what a layer gives for them, by hand."""

import math

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.tiny_model import TINY_EXPERTS, tiny_args, write_tiny_mixtures
from tests.support.processes.distributed import run_distributed

EXPERTS, TOPK, TOKENS, PADDING = 4, 2, 61, 7
FACTORS = (0.4, 1.0)
POLICIES = ("probs", "position")
# By layout: its ranks and flags. Each rank has the whole stream, and its experts take its share from every rank.
LAYOUTS = {"one": (1, {}), "spread": (2, {"expert_model_parallel_size": 2})}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_tiny_mixtures(tmp_path_factory.mktemp("hf"))


def layers_worker(cases, tokens):
    """By case, of the last layer: what it takes and gives, each [rows, hidden], which rows its router sends to which
    expert, bool [rows, experts], and how many rows each expert of this rank computes."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        (chunk,) = megatron.load_model(args)
        layer = [module for module in chunk.modules() if isinstance(module, MoELayer)][-1]
        seen = {}
        layer.register_forward_hook(
            lambda layer, taken, given, seen=seen: seen.update(
                taken=taken[0].flatten(0, 1), given=given[0].flatten(0, 1)
            )
        )
        layer.router.register_forward_hook(lambda router, taken, given, seen=seen: seen.update(sent=given[1].bool()))
        layer.experts.register_forward_pre_hook(
            lambda experts, taken, seen=seen: seen.update(computed=taken[1].tolist())
        )
        with torch.no_grad():
            megatron.packed_forward(chunk, [tokens], name[-1])
        found[name] = seen
    return found


def gated(weights, prefix, row):
    gate, up, down = (weights[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return down @ (torch.nn.functional.silu(gate @ row) * (up @ row))


def by_hand(model, weights, rows, factor, policy, padding=0):
    """The same as `layers_worker`, for a layer whose experts see one token after the other: the output and what is kept. The
    last rows may be padding, which goes to no expert."""
    mlp = "model.layers.1.mlp"
    scores = (rows @ weights[f"{mlp}.gate.weight"].T).softmax(-1)
    choices = [sorted(range(EXPERTS), key=lambda expert, row=row: -row[expert])[:TOPK] for row in scores.tolist()]
    capacity = math.ceil(len(rows) * TOPK / EXPERTS * factor)
    kept = torch.zeros(len(rows), EXPERTS, dtype=torch.bool)
    output = torch.zeros_like(rows)
    for expert in range(EXPERTS):
        # The weights of qwen3_moe's experts add up to one for each token.
        weight = {
            token: scores[token, expert] / (scores[token, chosen].sum() if model == "qwen3_moe" else 1)
            for token, chosen in enumerate(choices[: len(rows) - padding])
            if expert in chosen
        }
        first = sorted(weight, key=lambda token, weight=weight: -weight[token]) if policy == "probs" else sorted(weight)
        for token in first[:capacity]:
            kept[token, expert] = True
            output[token] += weight[token] * gated(weights, f"{mlp}.experts.{expert}", rows[token])
    if model == "qwen2_moe":
        for token, row in enumerate(rows):
            shared = gated(weights, f"{mlp}.shared_expert", row)
            output[token] += torch.sigmoid(weights[f"{mlp}.shared_expert_gate.weight"] @ row) * shared
    return output, kept, capacity


@pytest.mark.parametrize("layout", LAYOUTS)
def test_full_experts_by_hand(root, layout):
    tokens = torch.randint(128, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()
    ranks, sizes = LAYOUTS[layout]
    # Experts that are filled up cannot be shared by data ranks.
    fills = (False, True) if layout == "one" else (False,)
    cases = {
        (model, factor, policy, fill, padding): tiny_args(
            root / model, moe_expert_capacity_factor=factor, moe_token_drop_policy=policy,
            moe_pad_expert_input_to_capacity=fill, **sizes,
        )
        for model in TINY_EXPERTS for factor in FACTORS for policy in POLICIES for fill in fills
        for padding in (0, PADDING)
    }  # fmt: skip
    of_ranks = run_distributed(layers_worker, ranks, (cases, tokens))
    for model, factor, policy, fill, padding in cases:
        weights = load_file(root / model / "model.safetensors")
        computed = []
        for rank in of_ranks:
            seen = rank[model, factor, policy, fill, padding]
            output, kept, capacity = by_hand(model, weights, seen["taken"], factor, policy, padding)
            # At either factor some expert is full, and at the small one some token is dropped by all of its experts.
            assert kept.sum() < TOKENS * TOPK and (factor == 1.0 or not kept.any(1).all()) and kept.any()
            case = f"{model}, {factor}, {policy}, {fill}, {padding}"
            torch.testing.assert_close(
                seen["given"], output, rtol=1e-4, atol=1e-5, msg=lambda text, case=case: f"{case}: {text}"
            )
            if fill:
                assert (seen["sent"].sum(0) == capacity).all() and seen["sent"][kept].all()
            else:
                assert torch.equal(seen["sent"], kept) and kept.sum(0).max() == capacity
            computed += seen["computed"]
        of_each = ranks * (torch.full((EXPERTS,), capacity) if fill else kept.sum(0))
        assert computed == of_each.tolist()


def test_the_policies_drop_other_tokens(root):
    weights = load_file(root / "qwen3_moe" / "model.safetensors")
    rows = torch.randn(TOKENS, 32, generator=torch.Generator().manual_seed(1))
    by_weight, by_place = (by_hand("qwen3_moe", weights, rows, 0.4, policy)[1] for policy in POLICIES)
    assert (by_weight != by_place).any() and torch.equal(by_weight.sum(0), by_place.sum(0))
