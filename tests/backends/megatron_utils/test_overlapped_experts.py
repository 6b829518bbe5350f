"""Steps in which one micro-batch is computed while tokens of another travel are, to the last bit, those without."""

import contextlib

import numpy as np
import pytest

from tests.support.kernels.transformer_engine_on_cpu import call_with_transformer_engine
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import write_predicting, write_tiny_mixture
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
RELEASED = "ep_overlap_early_attn_memory_release"
ROLLOUTS = 2
EXPERTS, TOPK = 4, 2
COMMON = {"bf16": True, "expert_model_parallel_size": 2}
DATA = {"data_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1}
ZIGZAG = {"context_parallel_size": 2}
VIRTUAL = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **DATA}
RECOMPUTED = {
    "recompute_granularity": "selective",
    "recompute_modules": ["core_attn", "mlp", "shared_experts"],
}
# Of streams, with padding, which no router may count; of samples, to which routers are told that rows belong; and of steps.
OF_STREAMS = {
    "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05,
    "moe_per_layer_logging": True,
}  # fmt: skip
OF_SAMPLES = {
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_per_layer_logging": True,
}
OF_STEPS = {**OF_SAMPLES, "moe_router_load_balancing_type": "global_aux_loss"}
# Two steps in a rollout.
BEHIND = {"overlap_grad_reduce": True, "ddp_bucket_size": 2000, "overlap_param_gather": True, "global_batch_size": 4}
SHORT = {"max_tokens_per_gpu": 11}
REPLAYED = {"use_routing_replay": True}
FROM_ROLLOUT = {**REPLAYED, "use_rollout_routing_replay": True}
DROPPED = {"hidden_dropout": 0.1, "loss_type": "sft_loss"}
FLOAT16 = {"bf16": False, "fp16": True, "initial_loss_scale": 1024.0}
# Name: the model, and its flags.
TWO_RANKS = {
    "data": ("shared", DATA),
    "context": ("plain", ZIGZAG),
    "tensor, losses of samples": ("plain", {**TENSOR, **OF_SAMPLES}),
    "losses of streams": ("shared", {**DATA, **OF_STREAMS}),
    "from rollout": ("plain", {**DATA, **FROM_ROLLOUT}),
    "last layer dense": ("last dense", {**DATA, **RECOMPUTED}),
}
TWO_RANKS_SLOW = {
    "recomputed": ("shared", {**DATA, **RECOMPUTED}),
    "released early": ("plain", {**DATA, RELEASED: True}),
    "one expert each": ("lone", DATA),
    "tied": ("tied", TENSOR),
    "gathered": ("shared", {**ZIGZAG, "allgather_cp": True}),
    "losses of steps": ("shared", {**DATA, **OF_STEPS}),
    "replayed": ("shared", {**TENSOR, **REPLAYED}),
    "dropped": ("shared", {**TENSOR, **DROPPED}),
    "gradients and weights behind": ("shared", {**DATA, **BEHIND, **SHORT}),
    "embedding frozen": ("shared", {**DATA, "freeze_params_name_list": ["embedding"]}),
    "float16": ("shared", {**DATA, **FLOAT16}),
    "capacity": ("plain", {**DATA, "moe_expert_capacity_factor": 1.0}),
    **{family: (family, DATA) for family in ("qwen3_next", "glm4_moe", "deepseek_v3")},
}
FOUR_RANKS = {
    "virtual stages": ("deep", VIRTUAL),
    "virtual stages, recomputed": ("deep", {**VIRTUAL, **RECOMPUTED, **OF_SAMPLES}),
    "virtual stages, from rollout": ("deep plain", {**VIRTUAL, **FROM_ROLLOUT}),
    "virtual stages, behind": ("deep", {**VIRTUAL, **BEHIND}),
    "virtual stages, not aligned": ("deep", {**VIRTUAL, **BEHIND, "align_grad_reduce": False, "align_param_gather": False}),
    "virtual stages, tensor": ("deep", {**VIRTUAL, **TENSOR, "data_parallel_size": 1}),
    # Layers that are only kept.
    "predicting x tensor": ("predicting", {**TENSOR, **DATA, "mtp_num_layers": 1}),
    "tensor x data": ("shared", {**TENSOR, **DATA, "expert_model_parallel_size": 4}),
}  # fmt: skip
GROUPED = {**DATA, "moe_grouped_gemm": True, "attention_backend": "auto"}
# The gradients of the two uses of an embedding come from two parts, so their sum is not rounded to 16 bits.
ADDED_IN_FLOAT32 = ("tied",)
ENGINE = {
    "shared experts": ("shared", GROUPED),
    "recomputed": ("plain", {
        **GROUPED, "recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act", "shared_experts"],
    }),
    "FP8": ("plain", {
        **GROUPED, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_margin": 0, "fp8_amax_history_len": 1,
        "fp8_amax_compute_algo": "most_recent", "data_pad_size_multiplier": 16,
    }),
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    # The first layer of its type is dense, and it has shared experts.
    write_tiny_mixture(root / "shared", "qwen2_moe", vocab_size=128)
    write_tiny_mixture(root / "last dense", "qwen2_moe", vocab_size=128, mlp_only_layers=[1])
    write_tiny_mixture(root / "deep", "qwen2_moe", vocab_size=128, layers=4)
    write_tiny_mixture(root / "plain", "qwen3_moe", vocab_size=128)
    write_tiny_mixture(root / "deep plain", "qwen3_moe", vocab_size=128, layers=4)
    write_tiny_mixture(root / "tied", "qwen3_moe", vocab_size=128, tied=True)
    write_tiny_mixture(root / "lone", "qwen3_moe", vocab_size=128, num_experts=2)
    for family in ("qwen3_next", "glm4_moe", "deepseek_v3"):
        TINY_FAMILIES[family].save(root / family)
    write_predicting(
        root / "predicting",
        TINY_FAMILIES["glm4_moe"].write,
        model_type="glm4_moe",
        vocab_size=128,
        **TINY_FAMILIES["glm4_moe"].entries,
    )
    return root


@contextlib.contextmanager
def noted_parts():
    """While it lasts, every part that is computed adds to the list: its name, its direction, and the number of its plan."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    parts, events, own = [], [], {name: getattr(ScheduleNode, name) for name in ("forward", "backward")}

    def noting(direction):
        def call(node, *given):
            if not any(event is node.event for event in events):
                events.append(node.event)
            number = next(i for i, event in enumerate(events) if event is node.event)
            parts.append((node.name, direction, number))
            return own[direction](node, *given)

        return call

    for name in own:
        setattr(ScheduleNode, name, noting(name))
    try:
        yield parts
    finally:
        for name, function in own.items():
            setattr(ScheduleNode, name, function)


def chosen_by_engine(args, data):
    """Made-up choices of an engine for every token and layer."""
    import torch

    for index, tokens in zip(data["sample_indices"], data["tokens"], strict=True):
        scores = np.random.default_rng(index).random((len(tokens) - 1, args.num_layers, EXPERTS))
        yield torch.from_numpy(np.argsort(scores, axis=-1)[..., :TOPK].astype(np.int32))


def train(cases):
    """By case: metrics of all steps, gradients of the last one and weights behind it, all without their last bit lost; and the
    parts of the steps."""
    from slime.training.routing_replay import ROUTED_EXPERTS
    from slime.training.train_step import train_one_step
    from tests.support.processes.megatron_worker import whole_weights

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        replay, metrics = run.backend.routing_replay, []
        if args.use_rollout_routing_replay:
            run.data[ROUTED_EXPERTS] = [*chosen_by_engine(args, run.data)]
        with noted_parts() as parts:
            for rollout in range(ROLLOUTS):
                with replay.log_prob_pass():
                    run.prepare()
                with replay.training():
                    for step in range(len(run.data["num_microbatches"])):
                        metrics.append(train_one_step(args, run.backend, run.data, rollout, step))
        gradients = [p.main_grad.numpy().copy() for chunk in run.model for p in chunk.parameters() if p.requires_grad]
        weights = {key: tensor.float().numpy() for key, tensor in whole_weights(args, run.model).items()}
        found[name] = metrics, gradients, weights, parts
    return found


def cases_of(root, rows):
    cases = {}
    for name, (model, flags) in rows.items():
        without = {flag: value for flag, value in flags.items() if flag != RELEASED}
        cases[name, False] = layout_args(root / model, **{**COMMON, **without})
        cases[name, True] = layout_args(root / model, **{**COMMON, **flags}, **OVERLAP)
    return cases


def differences(rank, name):
    """What is not the same to the last bit in a case with overlap and without, in words."""
    (metrics, gradients, weights, parts), (found, own, own_weights, own_parts) = rank[name, False], rank[name, True]
    assert own_weights.keys() == weights.keys() and len(own) == len(gradients)
    assert any(np.abs(gradient).max() > 0 for gradient in gradients)
    # Several micro-batches in each step.
    assert parts == [] and len({number for *_, number in own_parts}) > len(found), name
    if name in ADDED_IN_FLOAT32:
        # The first step begins with the same weights.
        first, *_ = ({key: value for key, value in step.items() if key != "grad_norm"} for step in metrics)
        close = zip((*own, *own_weights.values()), (*gradients, *(weights[key] for key in own_weights)), strict=True)
        return [
            *(f"step 0, {key}" for key in first if found[0][key] != first[key]),
            *(f"tensor {n}" for n, (a, b) in enumerate(close) if np.abs(a - b).max() > 2**-6 * np.abs(b).max()),
        ]
    steps = enumerate(zip(found, metrics, strict=True))
    return [
        *(f"step {n}, {key}" for n, (step, usual) in steps for key in usual if step[key] != usual[key]),
        *(f"gradient {n}" for n, (a, b) in enumerate(zip(own, gradients, strict=True)) if not np.array_equal(a, b)),
        *(f"weight {key}" for key in weights if not np.array_equal(own_weights[key], weights[key])),
    ]


def assert_alike(ranks, names):
    found = {(name, number): differences(rank, name) for name in names for number, rank in enumerate(ranks)}
    assert {case: words for case, words in found.items() if words} == {}
    for name in names:
        assert any(map(travels_meanwhile, (rank[name, True][-1] for rank in ranks))), name


def travels_meanwhile(parts):
    """Whether tokens of a micro-batch set out between the backward passes of parts of another one."""
    for index in range(1, len(parts)):
        (*before, behind), (*now, own) = parts[index - 1], parts[index]
        sets_out = (before, now) == (["mlp", "backward"], ["moe_dispatch", "forward"])
        if sets_out and own != behind and any(part[1:] == ("backward", behind) for part in parts[index:]):
            return True
    return False


def test_steps_are_those_without(root):
    ranks = run_distributed(train, 2, (cases_of(root, TWO_RANKS),), timeout=900)
    assert_alike(ranks, TWO_RANKS)
    # Of a model in which both layers have experts: the last layer of one micro-batch and the first one of the next.
    *_, parts = ranks[0]["context", True]
    in_turn = [
        ("moe_combine", "backward", 0), ("attn", "forward", 1), ("mlp", "backward", 0), ("moe_dispatch", "forward", 1),
        ("moe_dispatch", "backward", 0), ("mlp", "forward", 1), ("moe_combine", "forward", 1), ("attn", "backward", 0),
    ]  # fmt: skip
    start = parts.index(in_turn[0])
    assert parts[start : start + len(in_turn)] == in_turn


@pytest.mark.slow
def test_steps_are_those_without_whatever_else_they_do(root):
    ranks = run_distributed(train, 2, (cases_of(root, TWO_RANKS_SLOW),), timeout=1500)
    assert_alike(ranks, TWO_RANKS_SLOW)


@pytest.mark.slow
def test_steps_are_those_without_in_virtual_stages(root):
    ranks = run_distributed(train, 4, (cases_of(root, FOUR_RANKS),), timeout=1500)
    assert_alike(ranks, FOUR_RANKS)


@pytest.mark.slow
def test_steps_are_those_without_with_layers_of_transformer_engine(root):
    cases = cases_of(root, ENGINE)
    ranks = run_distributed(call_with_transformer_engine, 2, (train, cases), start_method="spawn", timeout=900)
    assert_alike(ranks, ENGINE)


def hooked(pre_process, post_process, args):
    """A provider of a model that does more in its first layer than that layer contains."""
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)(pre_process, post_process)
    model.decoder.layers[0].register_forward_hook(lambda layer, given, output: output)
    return model


def refusals(args):
    from slime.utils.errors import UserError

    try:
        LayoutRun(args)
    except UserError as error:
        return str(error)


def test_a_layer_that_does_more_is_refused(root):
    args = layout_args(root / "plain", **COMMON, **DATA, **OVERLAP, custom_model_provider_path=f"{__name__}.hooked")
    for message in run_distributed(refusals, 2, (args,)):
        assert "--overlap-moe-expert-parallel-comm" in message and "layer 1 (TransformerLayer, 1 hooks)" in message
