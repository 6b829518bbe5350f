"""Prediction layers of families: loaded, sent and trained as layers of transformers compute them, in every layout."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch, make_samples
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import (
    PREDICTS_BESIDE,
    PREDICTS_LIKE_MIMO,
    tiny_args,
    write_predicting,
    write_tiny_model,
)
from tests.support.oracles.rounding import assert_equal_gradients, assert_equal_metrics
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

FACTOR = 0.3
PIPELINE = {"pipeline_model_parallel_size": 2}
ONE_LAYER = {
    "mtp_num_layers": 1, "enable_mtp_training": True, "mtp_loss_scaling_factor": FACTOR, "use_distributed_optimizer": False,
}  # fmt: skip
# Global name and that of transformers, inside the layer; of the MLPs each family has one.
_COMPARED = (
    ("transformer_layer.self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("transformer_layer.pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
)
_COMPARED_OF_MLP = {
    "mlp.gate_proj.weight": (("transformer_layer.mlp.linear_fc2.weight", "mlp.down_proj.weight"),),
    "mlp.shared_experts.gate_proj.weight": (
        ("transformer_layer.mlp.router.weight", "mlp.gate.weight"),
        ("transformer_layer.mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
    ),
    "mlp.shared_expert.gate_proj.weight": (
        ("transformer_layer.mlp.router.weight", "mlp.gate.weight"),
        ("transformer_layer.mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight"),
    ),
}
_OWN = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "final_layernorm": "shared_head.norm"}
EXPERT_LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": PIPELINE,
    "pp, before the last stage": {**PIPELINE, "pipeline_model_parallel_layout": "Ettm|L"},
    "ep": {"expert_model_parallel_size": 2, "data_parallel_size": 2},
}
WITH_EXPERTS = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "deepseek_v32", "qwen3_next", "qwen3_5_moe_text")
# Its layers are those of Qwen2, with biases and without norms of queries and keys, and its projection takes [state; embedding].
MIMO = "mimo"
# A layer of linear attention before one of softmax attention, as the prediction layer, the third, is.
_MIXED = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
PREDICTING: dict[str, tuple[dict, dict | None]] = {
    "glm4_moe": ({}, None), "glm4_moe_lite": ({}, None), "deepseek_v3": ({}, None), "deepseek_v32": ({}, None),
    "glm_moe_dsa": ({"indexer_types": ["full", "shared", "full"]}, None),
    "qwen3_next": (_MIXED, PREDICTS_BESIDE), "qwen3_5_text": (_MIXED, PREDICTS_BESIDE),
    "qwen3_5_moe_text": (_MIXED, PREDICTS_BESIDE), MIMO: ({}, PREDICTS_LIKE_MIMO),
}  # fmt: skip


def _train_predicting(cases):
    """By case: the tensors that are sent at the start, metrics of two steps, and gradients of the first."""
    from slime.backends.megatron_utils.hf_conversion import expected_hf_names
    from slime.backends.megatron_utils.parameter_names import global_named_parameters

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        sent = run.weights()
        run.prepare()
        metrics = [run.step()]
        named = [pair for chunk in run.model for pair in global_named_parameters(chunk)]
        learning = [pair for pair in named if pair[0].startswith("mtp.") and pair[1].requires_grad]
        gradients = {name: parameter.main_grad.clone() for name, parameter in learning}
        found[name] = sent, expected_hf_names(args.hf_checkpoint, 1), [*metrics, run.step()], gradients
    return found


def write_layers_of_mimo(directory, *, model_type, **options):
    """`write_tiny_model` of a Qwen2, whose config then names MiMo."""
    model = write_tiny_model(directory, model_type="qwen2", **options)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return model


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """Per family (directory, the reference with that layer, and what it lacks of it)."""
    root = tmp_path_factory.mktemp("predicting")
    written = {}
    for name, (entries, own_names) in PREDICTING.items():
        row = TINY_FAMILIES[name]
        write = write_layers_of_mimo if name == MIMO else row.write
        model = write_predicting(root / name, write, own_names, model_type=row.model_type, **row.entries | entries)
        written[name] = (str(root / name), *model)
    return written


@pytest.fixture(scope="module")
def one_rank_predicting(predicting):
    cases = {name: layout_args(directory, **ONE_LAYER) for name, (directory, *_) in predicting.items()}
    return run_distributed(_train_predicting, 1, (cases,), timeout=240)[0]


@pytest.mark.parametrize("family", PREDICTING)
def test_the_layer_of_a_family_is_loaded_sent_and_trained_as_transformers_computes_it(
    predicting, one_rank_predicting, family
):
    directory, model, own = predicting[family]
    sent, expected, (metrics, _), gradients = one_rank_predicting[family]
    stored = load_file(f"{directory}/model.safetensors")
    copies = {f"model.layers.2.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    assert sent.keys() == expected == stored.keys() - copies
    assert all((stored[name].numpy() == tensor).all() for name, tensor in sent.items())
    loss, by_name = _reference(model.double(), own, layout_args(directory, **ONE_LAYER), family == MIMO)
    assert metrics["mtp_loss"] == metrics["mtp_1_loss"] == pytest.approx(loss, rel=1e-5)
    found = {name: gradients[f"mtp.layers.0.{name}"] for name in by_name}
    assert all(gradient.abs().max() > 0 for gradient in by_name.values())
    assert_equal_gradients(found, by_name, TRAINED_TOKENS)


def _reference(model, own, args, state_first):
    """The loss of the layer, and gradients of the term that the objective gets, with a layer of transformers inside.

    Args:
        state_first: whether the projection takes [state; embedding], and not [embedding; state].
    """
    own = {name: tensor.double().requires_grad_() for name, tensor in own.items()}
    # The other kernels of transformers know no float64.
    model.set_experts_implementation("eager")
    inner, total, count = model.model.layers[2], 0.0, 0

    def norm(x, name):
        weight = own[name] + 1 if args.layernorm_zero_centered_gamma else own[name]
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, args.layernorm_epsilon)

    for sample in make_samples(args.vocab_size):
        tokens, length = torch.tensor([sample.tokens]), len(sample.tokens)
        mask = [0] * (length - sample.response_length) + list(sample.loss_mask or [1] * sample.response_length)
        with torch.no_grad():
            states = model.model(tokens, output_hidden_states=True).hidden_states[2]
            hidden, ahead = model.model.norm(states), model.model.embed_tokens(tokens.roll(-1))
        halves = [norm(ahead, "enorm"), norm(hidden, "hnorm")]
        joined = torch.cat(halves[::-1] if state_first else halves, -1) @ own["eh_proj"].T
        positions = torch.arange(length)[None]
        causal = torch.full((length, length), -torch.inf, dtype=joined.dtype).triu(1)[None, None]
        rotary = model.model.rotary_emb(joined, positions)
        inside = inner(joined, attention_mask=causal, position_ids=positions, position_embeddings=rotary)
        # Some layers also return the keys that they chose.
        inside = inside[0] if isinstance(inside, tuple) else inside
        log_probs = (norm(inside, "shared_head.norm") @ model.lm_head.weight.detach().T).log_softmax(-1)[0]
        for position in range(length - 2):
            if mask[position + 2]:
                total, count = total - log_probs[position, sample.tokens[position + 2]], count + 1
    (FACTOR * total / count).backward()
    parts = dict(inner.named_parameters())
    (of_mlp,) = (pairs for name, pairs in _COMPARED_OF_MLP.items() if name in parts)
    gradients = {ours: parts[theirs].grad for ours, theirs in (*_COMPARED, *of_mlp)}
    gradients |= {f"{ours}.weight": own[theirs].grad for ours, theirs in _OWN.items()}
    if state_first:
        gradients["eh_proj.weight"] = gradients["eh_proj.weight"].roll(args.hidden_size, 1)
    if "self_attn.q_proj.bias" in parts:
        heads = [parts[f"self_attn.{name}_proj.bias"].grad.view(args.num_query_groups, -1) for name in "qkv"]
        gradients["transformer_layer.self_attention.linear_qkv.bias"] = torch.cat(heads, 1).flatten()
    return (total / count).item(), gradients


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_a_layer_with_experts_is_the_same_in_every_layout(predicting, one_rank_predicting, family):
    directory = predicting[family][0]
    cases = {name: layout_args(directory, **ONE_LAYER, **layout) for name, layout in EXPERT_LAYOUTS.items()}
    sent, _, metrics, _ = one_rank_predicting[family]
    for rank in run_distributed(_train_predicting, 2, (cases,), timeout=240):
        for found, _, of_layout, _ in rank.values():
            assert all((found[name] == tensor).all() for name, tensor in sent.items()) and found.keys() == sent.keys()
            for step, of_one in zip(of_layout, metrics, strict=True):
                assert_equal_metrics(step, of_one, bounds_of_batch())


def _compare_inner_layers(cases):
    """By case the output of the last decoder layer, and that of the layer inside a prediction layer with its weights."""
    from slime.backends.megatron_utils.parameter_names import unwrap_model
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        (chunk,) = megatron.load_model(args)
        decoder, mtp = (getattr(unwrap_model(chunk), part) for part in ("decoder", "mtp"))
        last, inner, calls = decoder.layers[-1], mtp.layers[0].transformer_layer, []
        inner.load_state_dict(last.state_dict())
        last.register_forward_hook(lambda *call, calls=calls: calls.append(call), with_kwargs=True)
        with torch.no_grad():
            megatron.packed_forward(chunk, [list(range(9)), list(range(4))])
            ((_, inputs, options, (output, _)),) = calls
            found[name] = output, inner(*inputs, **options)[0]
    return found


def test_layers_of_families_whose_checkpoints_have_none_are_like_the_last_of_the_decoder(tmp_path):
    cases = {}
    for name in ("glm4", "minimax_m2"):
        TINY_FAMILIES[name].save(tmp_path / name)
        cases[name] = tiny_args(tmp_path / name, mtp_num_layers=1)
    (found,) = run_distributed(_compare_inner_layers, 1, (cases,))
    assert all(of_decoder.equal(of_prediction) for of_decoder, of_prediction in found.values())
