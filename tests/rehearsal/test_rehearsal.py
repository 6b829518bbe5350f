"""Ranks of a tiny model go through the branches for CUDA, each in a process of its own, on fake tensors.

Where no library can be built the tests run on fake CPU tensors, and what only CUDA shows is not asserted there.
"""

import argparse
import contextlib
import dataclasses
import functools
import os

import pytest
import torch
from safetensors import safe_open

from slime.arguments import parse_args
from slime.arguments.config_files.role_config import critic_args
from slime.backends.megatron_utils import parameter_selection
from slime.backends.megatron_utils.hf_conversion import expected_hf_names
from slime.estimates.layout import ParallelLayout
from slime.plan.setup import parallel_layout
from slime.ray.session import main
from slime.rehearsal import fake_device, run
from slime.rehearsal.report import Pushed, Rehearsed
from slime.rehearsal.run import micro_batches, planned, rehearse_rank, show_rehearsal
from slime.rehearsal.stand_in import StandIn, find_or_build
from slime.utils.errors import RunError, UserError
from tests.support.models.args import command_line, write_config
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import write_predicting, write_tiny_mimo, write_tiny_model
from tests.support.processes.forked_rehearsal import prepared
from tests.support.processes.waiting import wait_until

HIDDEN, LAYERS = 192, 2
LAYOUTS = {
    "tensor and sequence": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "context": ["--context-parallel-size", "2"],
    "data, recomputed": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "tensor, attention recomputed, whole optimizer": [
        "--tensor-model-parallel-size", "2", "--recompute-granularity", "selective", "--no-use-distributed-optimizer",
    ],
}  # fmt: skip
STAGES = {
    "pipeline and tensor": [
        "--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "4", "--tensor-model-parallel-size", "2",
        "--sequence-parallel",
    ],
    "virtual, tied": ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"],
    # The first chunk has no layer.
    "layout, tied": ["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "E|tt|t|tL"],
}  # fmt: skip


@pytest.fixture(scope="module")
def stand_in():
    return find_or_build()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("rehearsal")
    write_tiny_model(directory / "model", hidden=HIDDEN, layers=LAYERS)
    write_tiny_model(directory / "deep and tied", hidden=HIDDEN, layers=2 * LAYERS, tied=True)
    return directory


@pytest.fixture
def arguments(directory, monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")

    def parse(*words, model="model"):
        base = command_line(directory.parent / "unused")
        base[base.index("--hf-checkpoint") + 1] = str(directory / model)
        return parse_args(
            argv=[*base, "--actor-num-gpus-per-node", "2", "--rollout-max-context-len", "64", "--rehearse", *words]
        )

    return parse


@pytest.fixture(scope="module")
def rehearse(stand_in):
    """`rehearse_rank` in copies of one process. Ranks have processes of their own in
    `test_without_a_library_the_tensors_are_of_the_cpu` and `tests/scripts/test_rehearsals.py`."""
    with prepared(stand_in.library) as module:
        yield functools.partial(rehearse_rank, stand_in=stand_in, module=module)


@pytest.fixture
def show(rehearse, monkeypatch):
    """`show_rehearsal`, whose ranks are such copies."""
    monkeypatch.setattr(run, "rehearse_rank", lambda args, rank, batches, stand_in: rehearse(args, rank, batches))
    return show_rehearsal


def rehearsed(rehearse, args, batches=None, rank=0):
    result = rehearse(args, rank, batches or micro_batches(args, parallel_layout(args)))
    assert result.failure is None, result.failure.trace
    return result


def reducer_on_the_host(args, total_lengths, response_lengths, loss_masks, *unused, **more):
    """A reduction with weights that its author left on the host, which no machine without a GPU refuses."""
    return lambda values: (values * torch.ones(len(values))).sum()


def waits_of(result, phase="step"):
    return sum(result.waits.get(phase, {}).values())


LONG_STREAMS = ("--rollout-max-context-len", "512", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_every_layout_goes_through(arguments, rehearse, stand_in, tmp_path, layout):
    saves = ["--save", str(tmp_path), "--save-interval", "1"]
    args = arguments(*LAYOUTS[layout], *LONG_STREAMS, *saves, "--transformer-impl", "local")
    result = rehearsed(rehearse, args)
    kinds = result.peaks["step"]
    # Float32 gradients of bfloat16 weights; three float32 numbers of each weight in the optimizer, divided over replicas.
    replicas = 2 // args.tensor_model_parallel_size
    assert kinds["gradients"] == 2 * kinds["weights"]
    assert kinds["optimizer"] == pytest.approx(6 * kinds["weights"] / replicas, rel=0.02)
    if stand_in.library:
        # What is planned beside them, whichever moment of the step that is.
        (plan,) = planned(args, parallel_layout(args), 1)
        assert kinds["activations"] == pytest.approx(plan.step["activations"], rel=0.1), plan
        assert sum(kinds.values()) == pytest.approx(sum(plan.step.values()), rel=0.1), plan
        # A whole optimizer is not gathered.
        assert ("save" in result.peaks) == args.use_distributed_optimizer
    assert result.data_dependent == {}
    # The head is a matrix of its own, and all fits into one bucket.
    assert (len(result.pushed.names), result.pushed.buckets) == (25, 1)
    # Replicas write a share each of the weights, whose buffers are padded on the device; of the optimizer a rank writes whole
    # tensors of its own.
    saved = result.saved
    assert saved.sizes["weights"] == pytest.approx(kinds["weights"], rel=0.03)
    assert saved.written["weights"] == round(saved.sizes["weights"] / replicas)
    assert saved.written["optimizer"] == saved.sizes["optimizer"]
    assert list(tmp_path.iterdir()) == []
    assert result.not_rehearsed == []


@pytest.mark.parametrize("beside, firsts", [(False, [0, 4]), (True, [0, 1])])
def test_the_first_rank_of_every_stage_is_rehearsed_however_ranks_count(beside, firsts):
    layout = ParallelLayout(8, pipeline=2, stages_beside=beside)
    assert run._ranks(argparse.Namespace(rehearse_ranks=None), layout) == firsts


@pytest.mark.parametrize(
    "layout",
    # The last one has virtual stages, which know those of the others, and a copy of the embedding.
    [pytest.param(name, marks=[pytest.mark.slow] if name != "layout, tied" else []) for name in STAGES],
)
def test_stages_of_a_pipeline_together_are_the_model(arguments, rehearse, stand_in, directory, tmp_path, layout):
    model = "deep and tied" if "tied" in layout else "model"
    args = arguments(*STAGES[layout], "--save", str(tmp_path), "--save-interval", "1", model=model)
    cut = parallel_layout(args)
    # Samples enough that a wait for each of them would show.
    batches = [[(16, 8)] * 4] * len(micro_batches(args, cut))
    results = [rehearsed(rehearse, args, batches, rank) for rank in run._ranks(args, cut)]
    with safe_open(directory / model / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    pushed = [name for result in results for name in result.pushed.names]
    assert sorted(pushed) == sorted(names)
    held = [result.peaks["step"]["weights"] for result in results]
    planned = [of_stage.step["weights"] for of_stage in run.planned(args, cut, len(batches))]
    # Buckets are padded.
    assert held == pytest.approx(planned, rel=0.03)
    assert all(result.peaks["step"]["gradients"] == 2 * weights for result, weights in zip(results, held, strict=True))
    assert [result.data_dependent for result in results] == [{}, {}]
    # A copy of the embedding on the last stage is not written. Of a weight there are 2 bytes, and 12 of its optimizer.
    copy = [0, 256 * HIDDEN * 2 if "tied" in layout else 0]
    saved = [result.saved.sizes for result in results]
    assert [of_stage["weights"] for of_stage in saved] == [of - tied for of, tied in zip(planned, copy, strict=True)]
    assert [of_stage["optimizer"] for of_stage in saved] == [6 * of_stage["weights"] for of_stage in saved]
    if stand_in.library is None:
        return
    # All that is written is on the host first, and beside it a tensor that is put together.
    for result, of_stage in zip(results, run.planned(args, cut, len(batches)), strict=True):
        assert result.saved.host == pytest.approx(sum(result.saved.written.values()), rel=0.1)
        assert of_stage.save == pytest.approx(result.saved.host, rel=0.1)
    # Shapes are known, and not sent. What is sent and received together is waited for, but where stages are interleaved.
    # Nothing else depends on the pipeline: the first stage has no loss that could wait.
    waits = [sum_by_what(result.waits["step"]) for result in results]
    assert [sum(count for what, count in stage.items() if "slime/" in what) for stage in waits] == [2, 4]
    messages = len(batches) + 1 if cut.virtual_pipeline == 1 else 0
    assert [stage.pop("the device at megatron/core", 0) for stage in waits] == [messages, messages]
    # The norm of the gradient.
    assert [{what: n for what, n in stage.items() if "megatron/core" in what} for stage in waits] == [
        {"a value at megatron/core": 1}
    ] * 2


def sum_by_what(waits):
    found = {}
    for place, count in waits.items():
        what = "/".join(place.split("/")[:2])
        found[what] = found.get(what, 0) + count
    return found


PPO = ("--advantage-estimator", "ppo", "--tensor-model-parallel-size", "2", "--sequence-parallel")


def test_a_critic_goes_through(arguments, rehearse, stand_in):
    args = critic_args(arguments(*PPO))
    result = rehearsed(rehearse, args)
    kinds = result.peaks["step"]
    # Of each layer the halves of attention (3 * 64 * 192) and gated MLP (3 * 576 * 192), and four norms; half of the
    # embedding's 256 rows, the last norm, and a head with one row, both whole. Buffers are padded.
    parameters = 2 * (3 * 64 * 192 // 2 + 3 * 576 * 192 // 2 + 2 * 16 + 2 * 192) + 256 // 2 * 192 + 192 + 192
    assert kinds["weights"] == pytest.approx(2 * parameters, abs=1024)
    assert kinds["gradients"] == 2 * kinds["weights"] and "logits" not in kinds
    assert waits_of(result, "values") == 0 and waits_of(result) == (5 if stand_in.library else 0)
    assert result.pushed is None and result.not_rehearsed == []


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "tie_word_embeddings": False,
}  # fmt: skip


def test_experts_get_equally_many_tokens(arguments, rehearse, stand_in, tmp_path):
    directory = write_config(tmp_path / "experts", **MIXTURE)
    cut = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2"]
    words = ["--hf-checkpoint", str(directory), *cut, "--actor-num-gpus-per-node", "4", "--use-routing-replay"]
    args = arguments(*words, "--random-init")
    result = rehearsed(rehearse, argparse.Namespace(**{**vars(args), **run.WITHOUT_KERNELS}))
    layers, hidden, batches = 2, 64, 2
    # Half of a stream that is padded to 256 tokens, each at two of six experts: 43 tokens at four of them, 42 at two. The rank
    # has three experts, sends 129 and 127, and gets 43 for each of the three from either rank.
    rows = max(129 + 127, 2 * 3 * 43)
    ((_, _, count, size),) = [entry for entry in result.collectives["step"] if entry[1] == "alltoall_base"]
    # There and back in both directions, and the weights of the experts once in each.
    assert count == batches * layers * 6
    assert size == batches * layers * rows * (4 * hidden * 2 + 2 * 4)
    # Of each layer half of its experts, in halves.
    experts = layers * 3 * 3 * 48 * hidden // 2
    (gathered,) = [
        entry[3]
        for entry in result.collectives["step"]
        if entry[:2] == ["EXPERT_DATA_PARALLEL_GROUP", "reduce_scatter_tensor_coalesced"]
    ]
    assert gathered == pytest.approx(4 * experts, abs=1024)
    # Of each pass over a layer: which tokens, which weights, and how many of each go where.
    assert waits_of(result) == (5 + 3 * batches * layers if stand_in.library else 0)
    assert {at.partition(":")[0] for at in result.data_dependent} == {"megatron/core/transformer/moe/moe_utils.py"}
    assert [line.partition(":")[0] for line in result.not_rehearsed] == [
        "loading",
        "routing replay",
        "the names of the push",
    ]
    # Of each layer two norms, attention with norms of its own, the router, and all six experts of both ranks.
    assert len(result.pushed.names) == len(set(result.pushed.names)) == 3 + layers * (2 + 6 + 1 + 3 * 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        [],
        ["--expert-model-parallel-size", "8"],
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "4"],
        ["--context-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--expert-model-parallel-size", "4"],
    ],
)
def test_experts_go_through_however_they_are_cut(arguments, rehearse, tmp_path, cut):
    """Whole, one for each rank, in halves, and in a pipeline."""
    directory = write_config(tmp_path / "experts", **{**MIXTURE, "num_experts": 8})
    args = arguments("--hf-checkpoint", str(directory), "--random-init", "--actor-num-gpus-per-node", "8", *cut)
    args = argparse.Namespace(**{**vars(args), **run.WITHOUT_KERNELS})
    result = rehearse(args, 7, [[(64, 40)]] * 2)
    assert result.failure is None, result.failure.trace
    planned = run.planned(args, parallel_layout(args), 2)[-1].step
    assert result.peaks["step"]["weights"] == pytest.approx(planned["weights"], rel=0.02)
    assert result.peaks["step"]["gradients"] == 2 * result.peaks["step"]["weights"]


LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256, "intermediate_size": 288,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "q_lora_rank": 192,
    "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 4,
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", [["--context-parallel-size", "2"], ["--tensor-model-parallel-size", "2", "--sequence-parallel"]]
)
def test_latent_attention_keeps_what_is_planned(arguments, rehearse, stand_in, tmp_path, cut):
    directory = write_config(tmp_path / "latent", **LATENT)
    args = arguments("--hf-checkpoint", str(directory), "--random-init", *LONG_STREAMS, *cut)
    args = argparse.Namespace(**{**vars(args), **run.WITHOUT_KERNELS})
    result = rehearsed(rehearse, args)
    (plan,) = planned(args, parallel_layout(args), 1)
    assert result.peaks["step"]["weights"] == plan.step["weights"]
    if stand_in.library:
        assert result.peaks["step"]["activations"] == pytest.approx(plan.step["activations"], rel=0.01)


def test_what_matches_nothing_of_a_rank_is_taken_to_match_elsewhere(monkeypatch):
    # It is put back after the test.
    monkeypatch.setattr(parameter_selection, "of_all_ranks", parameter_selection.of_all_ranks)
    fake_device.lift_selection()
    assert parameter_selection.of_all_ranks([0, 3]) == [1, 3]


def rehearsed_as_planned(rehearse, args):
    """Of every stage, what it did and the plan of its step, which it takes in what is always there."""
    args = argparse.Namespace(**{**vars(args), **run.WITHOUT_KERNELS})
    layout = parallel_layout(args)
    batches = micro_batches(args, layout)
    results = [rehearsed(rehearse, args, batches, rank) for rank in run._ranks(args, layout)]
    steps = [plan.step for plan in planned(args, layout, len(batches))]
    for result, step in zip(results, steps, strict=True):
        for kind in ("weights", "gradients", "optimizer"):
            assert result.peaks["step"][kind] == pytest.approx(step[kind], rel=0.02), (result.rank, kind)
    return list(zip(results, steps, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--enable-mtp-training"]])
def test_a_stage_with_prediction_layers_takes_what_is_planned(arguments, rehearse, stand_in, tmp_path, words):
    """It has no embedding, and gets a copy where it trains them."""
    write_tiny_mimo(tmp_path, vocab_size=65536, hidden=HIDDEN)
    words = [*words, "--pipeline-model-parallel-size", "2", *LONG_STREAMS]
    args = arguments("--hf-checkpoint", str(tmp_path), *words)
    (first, _), (last, step) = rehearsed_as_planned(rehearse, args)
    kinds = last.peaks["step"]
    # Frozen ones have neither gradients nor a state, and are pushed.
    assert (kinds["gradients"] < 1.99 * kinds["weights"]) == (not args.enable_mtp_training)
    assert len(first.pushed.names) + len(last.pushed.names) == 43
    if stand_in.library:
        assert kinds["activations"] == pytest.approx(step["activations"], rel=0.1)


@pytest.mark.slow
def test_prediction_layers_before_the_last_stage_take_what_is_planned(arguments, rehearse, stand_in, tmp_path):
    """Their stage gets a copy of the embedding, and the last one, which has no layers, their states."""
    write_tiny_mimo(tmp_path, vocab_size=65536, hidden=HIDDEN)
    stages = ["--actor-num-gpus-per-node", "3", "--pipeline-model-parallel-size", "3"]
    words = ["--enable-mtp-training", *stages, "--pipeline-model-parallel-layout", "Et|tm|L", *LONG_STREAMS]
    found = rehearsed_as_planned(rehearse, arguments("--hf-checkpoint", str(tmp_path), *words))
    assert sum(len(result.pushed.names) for result, _ in found) == 43
    assert ["logits" in result.peaks["step"] for result, _ in found] == [step["logits"] > 0 for _, step in found]
    # Those of the last stage are nothing beside its logits.
    for result, step in found[:2] if stand_in.library else ():
        assert result.peaks["step"]["activations"] == pytest.approx(step["activations"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--dsa-indexer-loss-coeff", "0.1"]], ids=["frozen", "trained"])
@pytest.mark.parametrize("further", [[], ["--mtp-num-layers", "1", "--enable-mtp-training"]], ids=["", "predicting"])
def test_an_indexer_takes_what_is_planned(arguments, rehearse, tmp_path, words, further):
    """Where a layer predicts, the last one of the decoder has none."""
    row = TINY_FAMILIES["glm_moe_dsa"]
    entries = {**row.entries, "index_n_heads": 32, "index_head_dim": 64}
    if further:
        entries |= {"write": row.write, "indexer_types": ["full", "shared", "full"]}
    (write_predicting if further else row.write)(tmp_path, model_type=row.model_type, vocab_size=256, **entries)
    ((result, _),) = rehearsed_as_planned(rehearse, arguments("--hf-checkpoint", str(tmp_path), *words, *further))
    assert (result.peaks["step"]["gradients"] < 1.9 * result.peaks["step"]["weights"]) == (not words)


@pytest.mark.slow
def test_stages_of_a_critic_take_what_is_planned(arguments, rehearse, stand_in):
    words = ["--advantage-estimator", "ppo", "--pipeline-model-parallel-size", "2", *LONG_STREAMS]
    for result, step in rehearsed_as_planned(rehearse, critic_args(arguments(*words))):
        kinds = result.peaks["step"]
        assert "logits" not in kinds and step["logits"] == 0
        if stand_in.library:
            assert kinds["activations"] == pytest.approx(step["activations"], rel=0.1)


@pytest.mark.slow
def test_prediction_layers_go_through(arguments, rehearse, stand_in, tmp_path):
    write_tiny_mimo(tmp_path, vocab_size=131072)
    words = ["--enable-mtp-training", "--context-parallel-size", "2", *LONG_STREAMS]
    args = arguments("--hf-checkpoint", str(tmp_path), *words)
    result = rehearsed(rehearse, args)
    # The step waits once more, for the number of predictions. The layers are pushed too.
    assert waits_of(result) == (6 if stand_in.library else 0) and len(result.pushed.names) == 43
    if stand_in.library:
        # Its own, of the prediction layer, and the gradient of one.
        (plan,) = planned(args, parallel_layout(args), 1)
        assert result.peaks["step"]["logits"] == pytest.approx(plan.step["logits"], rel=0.05), plan
    assert result.data_dependent == {} and result.not_rehearsed == []


@pytest.mark.slow
def test_prediction_layers_with_experts_go_through(arguments, rehearse, tmp_path):
    row = TINY_FAMILIES["glm4_moe"]
    write_predicting(tmp_path, row.write, model_type=row.model_type, vocab_size=1024, hidden=HIDDEN, **row.entries)
    words = ["--mtp-num-layers", "1", "--enable-mtp-training", "--expert-model-parallel-size", "2"]
    args = arguments("--hf-checkpoint", str(tmp_path), *words)
    result = rehearsed(rehearse, args)
    assert result.not_rehearsed == [] and set(result.pushed.names) == expected_hf_names(tmp_path, 1)
    assert any(name.startswith("model.layers.2.mlp.experts.7.") for name in result.pushed.names)
    (plan,) = planned(args, parallel_layout(args), 1)
    for kind in ("weights", "gradients", "optimizer"):
        assert result.peaks["step"][kind] == pytest.approx(plan.step[kind], rel=0.02)
    # The same is pushed where the trainer has no such layer, and engines draft with the stored one.
    args = arguments("--hf-checkpoint", str(tmp_path), "--sglang-speculative-algorithm", "EAGLE", *words[3:])
    assert set(rehearsed(rehearse, args).pushed.names) == set(result.pushed.names)


def test_the_same_ranks_of_actor_and_critic_are_rehearsed(arguments, monkeypatch, tmp_path, capsys):
    """Each in its own layout."""
    asked = []

    def answer(args, rank, batches, stand_in):
        asked.append((args.role, rank, args.tensor_model_parallel_size, args.transformer_impl))
        return Rehearsed(rank, {}, {"step": {}}, {}, {}, {}, {}, None, [], None)

    monkeypatch.setattr(run, "rehearse_rank", answer)
    monkeypatch.setattr(run, "find_or_build", lambda: StandIn(None, "nothing is built"))
    file = tmp_path / "roles.yaml"
    file.write_text("megatron: [{role: critic, overrides: {tensor_model_parallel_size: 1}}]")
    words = [*PPO, "--megatron-config-path", str(file)]
    show_rehearsal(arguments(*words))
    show_rehearsal(arguments(*words, "--rehearse-ranks", "1"))
    assert asked == [(role, rank, size, "local") for rank in (0, 1) for role, size in (("actor", 2), ("critic", 1))]
    text = capsys.readouterr().out
    assert "CRITIC RANK 1: tensor 0, context 0, data 1" in text and "actor and critic beside each other" in text


def test_what_was_found_is_printed_where_the_process_of_another_rank_ends(arguments, monkeypatch, tmp_path, capsys):
    (tmp_path / "leaving.py").write_text("import sys\nsys.exit('no memory left')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def answer(args, rank, batches, stand_in):
        if rank:
            return rehearse_rank(args, rank, batches, stand_in, "leaving")
        return Rehearsed(rank, {}, {"step": {}}, {}, {}, {}, {}, None, [], None)

    monkeypatch.setattr(run, "rehearse_rank", answer)
    monkeypatch.setattr(run, "find_or_build", lambda: StandIn(None, "nothing is built"))
    with pytest.raises(RunError, match="^the rehearsal of rank 1 failed: no memory left$"):
        show_rehearsal(arguments("--rehearse-ranks", "0,1"))
    text = capsys.readouterr().out
    assert "\nRANK 0: tensor 0" in text and "RANK 1" not in text and "values: no loss, no overflow" in text


def test_without_a_library_the_tensors_are_of_the_cpu(arguments, tmp_path, monkeypatch):
    """The process of a rank finds this package from anywhere, and no kernels where they are installed, nor NIXL."""
    words = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--apply-rope-fusion", "--num-epoch", "1"]
    words += ["--rollout-data-transport", "nixl"]
    args = arguments(*words)
    # Where only the data set tells it.
    args.num_rollout = None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name in ("transformer_engine", "apex", "amp_C", "nixl"):
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} is imported')")
    result = rehearsed(functools.partial(rehearse_rank, stand_in=StandIn(None, "nothing can be built")), args)
    assert result.waits == {}
    # The run saves nothing.
    assert result.saved is None
    assert [line.partition(":")[0] for line in result.not_rehearsed] == [
        "the length of the learning rate's schedule, which the data set tells", "--apply-rope-fusion",
    ]  # fmt: skip
    assert result.peaks["step"]["gradients"] == 2 * result.peaks["step"]["weights"]


def is_alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_the_process_of_a_rank_has_a_deadline_and_sees_no_gpu(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = tmp_path / "found"
    program = f"open({str(found)!r}, 'w').write(f'{{os.getpid()}} ' + os.environ['CUDA_VISIBLE_DEVICES'])"
    (tmp_path / "hanging.py").write_text(f"import os, time\n{program}\ntime.sleep(600)")
    wait, begun = run.ChildProcess.wait, found.exists
    # It has begun when its time is over.
    monkeypatch.setattr(run.ChildProcess, "wait", lambda me, s: wait(me, s) if s < 1800 else wait_until(begun) and None)
    with pytest.raises(RunError, match="rank 1 did not end within 1800 s"):
        rehearse_rank(arguments(), 1, [[(16, 8)]], StandIn(None, "nothing is built"), "hanging")
    pid, visible = found.read_text().split(" ")
    assert visible == "" and not is_alive(int(pid))


@pytest.mark.slow
def test_an_optimizer_on_the_weights_or_on_the_host_takes_what_is_planned(arguments, rehearse):
    aware = ["--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"]
    # Of one parameter: 2 bytes of the remainder, and moments of 2 and of 1 byte.
    narrow = arguments(*aware, "--main-grads-dtype", "bf16", "--exp-avg-sq-dtype", "fp8")
    on_host = arguments(*aware, "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d")
    for args, expected, gradients in ((narrow, 5, 1), (on_host, 0, 2)):
        result = rehearsed(rehearse, args)
        kinds = result.peaks["step"]
        assert kinds.get("optimizer", 0) == pytest.approx(expected * kinds["weights"] / 2 / 2, rel=0.02)
        assert kinds["gradients"] == gradients * kinds["weights"]
        (plan,) = planned(args, parallel_layout(args), 1)
        assert plan.step["optimizer"] == pytest.approx(kinds.get("optimizer", 0), rel=0.02)
        assert not any("adam.py" in place for place in result.waits["step"])


def test_it_goes_without_what_needs_transformer_engine_and_says_so(arguments, show, capsys):
    fp8 = ["--fp8-format", "e4m3", "--fp8-param-gather"]
    # Of a checkpoint that is not in FP8 a rank would refuse it.
    fp8 += ["--megatron-deepgemm-forward-layers", "0", "--megatron-deepgemm-forward-modules", "mlp"]
    again = ["--recompute-granularity", "selective", "--recompute-modules", "layernorm"]
    show(arguments(*fp8, *again))
    text = capsys.readouterr().out
    assert "--recompute-modules layernorm: the rehearsal keeps what they made" in text
    assert "--fp8-format: the rehearsal goes without" in text
    assert "--megatron-deepgemm-forward-layers: the rehearsal goes without" in text


def test_what_stops_a_save_is_named_on_every_rank(arguments, rehearse, tmp_path):
    args = arguments("--save", str(tmp_path), "--save-interval", "1")
    # Nothing but the save asks for it.
    del args.ckpt_fully_parallel_save
    failure = rehearse(args, 1, [[(16, 8)]] * 2).failure
    assert failure.phase == "save" and "no attribute 'ckpt_fully_parallel_save'" in failure.error


def test_what_does_not_fit_stops_it_and_is_named(arguments, show, capsys):
    args = arguments("--custom-pg-loss-reducer-function-path", "tests.rehearsal.test_rehearsal.reducer_on_the_host")
    with pytest.raises(RunError, match="rank 0 stopped in the phase first step"):
        show(args)
    text = capsys.readouterr().out
    assert "STOPPED in the phase first step, at slime/" in text and "NOT REHEARSED" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--train-backend", "fsdp"], "--train-backend fsdp: it cannot be rehearsed yet"),
        (["--rehearse-ranks", "1,2"], "--rehearse-ranks 2: the run has 2 training ranks"),
        (["--dry-run-json", "-"], "--rehearse makes no plan"),
        (["--debug-rollout-only"], "rehearses training ranks"),
        (["--num-rollout", "0"], "with --num-rollout 0 none is taken"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(arguments, words, said):
    with pytest.raises(UserError, match=said):
        show_rehearsal(arguments(*words))


def test_micro_batches_are_full(arguments):
    args = arguments("--use-dynamic-batch-size", "--max-tokens-per-gpu", "150", "--rollout-max-response-len", "40")
    layout = parallel_layout(args)
    assert micro_batches(args, layout) == [[(64, 63), (64, 63), (22, 21)]] * 2


@pytest.mark.parametrize(
    ("words", "count"),
    [
        # The first stage holds a micro-batch for each stage; a step has 16 samples.
        (["--pipeline-model-parallel-size", "4"], 4),
        (["--pipeline-model-parallel-size", "4", "--global-batch-size", "2"], 2),
        # It still goes forward when each stage has had one; 1 + 2 · (2 − 1) + 2 chunks of two layers are its most.
        (["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"], 4),
    ],
)
def test_micro_batches_fill_a_pipeline(arguments, words, count):
    args = arguments("--actor-num-gpus-per-node", "4", *words, model="deep and tied")
    assert len(micro_batches(args, parallel_layout(args))) == count


@pytest.mark.parametrize(
    ("second", "said"),
    [(["b", "a"], "sent twice: a"), (["b"], "1 tensors of the checkpoint of the engines were not sent: c")],
)
def test_pushes_of_stages_that_do_not_fit_together_are_an_error(arguments, monkeypatch, capsys, second, said):
    nothing = Rehearsed(0, {}, {"push": {}}, {}, {}, {}, {}, None, [], None)

    def rehearse(args, rank, batches, stand_in):
        return dataclasses.replace(nothing, rank=rank, pushed=Pushed([["a"], second][rank], 1, ["a", "b", "c"]))

    monkeypatch.setattr(run, "rehearse_rank", rehearse)
    with pytest.raises(RunError, match=said):
        show_rehearsal(arguments("--pipeline-model-parallel-size", "2"))
    text = capsys.readouterr().out
    assert f"ALL STAGES\n  weight push: {said}" in text
    # Of one stage alone nothing is said.
    show_rehearsal(arguments("--pipeline-model-parallel-size", "2", "--rehearse-ranks", "1"))
    assert "ALL STAGES" not in capsys.readouterr().out


def test_the_driver_rehearses_in_place_of_a_run(directory, monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cuda")
    asked = []
    monkeypatch.setattr(run, "show_rehearsal", asked.append)
    words = [*command_line(directory.parent / "unused"), "--rehearse", "--rehearse-ranks", "0"]
    assert main(lambda args: pytest.fail("the run started"), words) == 0
    (args,) = asked
    # As a plan does, it takes missing files and a machine without GPUs as they are.
    assert args.dry_run and args.rehearse_ranks == [0] and args.params_dtype_name == "bfloat16"
