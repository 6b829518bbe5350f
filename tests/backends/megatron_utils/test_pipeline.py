"""Pipeline stages, virtual stages and experts: every layout computes what one rank computes."""

from types import SimpleNamespace

import numpy as np
import pytest

from slime.arguments.checkpoints import WeightSource
from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch
from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.rounding import assert_equal_gradients, assert_equal_metrics, assert_equal_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, assert_equal_runs, layout_args, train_steps

PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = {**PIPELINE, "virtual_pipeline_model_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2}
DATA = {"data_parallel_size": 2}
INSTANCES = {"num_distributed_optimizer_instances": 2}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 2000}
EMBEDDINGS = ("tied", "untied")
EXPERTS = {
    "num_layers": 2, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "none", "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
    "use_distributed_optimizer": False,
}  # fmt: skip
BAD_SAMPLE = 2


@pytest.fixture(scope="module")
def hf_dirs(tmp_path_factory):
    """Models of four layers by what they do with their embeddings."""
    root = tmp_path_factory.mktemp("models")
    for name in EMBEDDINGS:
        write_tiny_model(root / name, tied=name == "tied", layers=4)
    return {name: str(root / name) for name in EMBEDDINGS}


@pytest.fixture(scope="module")
def one_rank(hf_dirs):
    cases = {name: layout_args(directory) for name, directory in hf_dirs.items()}
    cases["token"] = layout_args(hf_dirs["tied"], calculate_per_token_loss=True)
    return run_distributed(_one_rank, 1, (cases, layout_args(hf_dirs["tied"], **EXPERTS)))[0]


def _one_rank(cases, experts):
    return {**train_steps(cases), "experts": _expert_gradients(experts)}


def _expert_gradients(args):
    run = LayoutRun(args, loads=False)
    from slime.backends.megatron_utils.parameter_names import global_named_parameters

    run.prepare()
    metrics = run.step()
    return metrics, {name: p.main_grad.numpy().copy() for name, p in global_named_parameters(run.model[0])}


def _start_and_fail(args, bad_sample):
    """Random weights under their exported names, and what every rank raises when one sample has a NaN."""
    import torch

    from slime.utils.errors import RunError

    run = LayoutRun(args, loads=False)
    random = run.weights()
    run.prepare()
    if run.is_last_stage and bad_sample in run.data["sample_indices"]:
        position = run.data["sample_indices"].index(bad_sample)
        run.data["log_probs"][position] = torch.full_like(run.data["log_probs"][position], float("nan"))
    try:
        run.step()
        message = None
    except RunError as error:
        message = str(error)
    untouched = all(np.array_equal(weight, random[name]) for name, weight in run.weights().items())
    return random, message, untouched


def _two_ranks(cases, random_starts, experts):
    starts = {name: _start_and_fail(args, BAD_SAMPLE) for name, args in random_starts.items()}
    return {"trained": train_steps(cases), "started": starts, "experts": _expert_gradients(experts)}


@pytest.fixture(scope="module")
def two_ranks(hf_dirs):
    """One group of two ranks: by rank what `train_steps`, `_start_and_fail` and `_expert_gradients` gave."""
    cases = {
        "tied": layout_args(hf_dirs["tied"], **PIPELINE, **OVERLAP),
        "untied": layout_args(hf_dirs["untied"], **PIPELINE, decoder_first_pipeline_num_layers=1),
        "token": layout_args(hf_dirs["tied"], **PIPELINE, calculate_per_token_loss=True),
        "virtual": layout_args(hf_dirs["untied"], **VIRTUAL, **OVERLAP),
        "not initialized": layout_args(hf_dirs["untied"], **TENSOR, perform_initialization=False),
        "instances": layout_args(hf_dirs["untied"], **DATA, **OVERLAP, **INSTANCES),
        "averaged": layout_args(hf_dirs["tied"], **DATA, **OVERLAP, ddp_average_in_collective=True),
    }
    layouts = {"one": {"data_parallel_size": 2}, "pipeline": PIPELINE, "virtual": VIRTUAL, "tensor": TENSOR}
    starts = {name: layout_args(hf_dirs["tied"], **layout) for name, layout in layouts.items()}
    experts = layout_args(hf_dirs["tied"], **EXPERTS, **TENSOR, sequence_parallel=True)
    return run_distributed(_two_ranks, 2, (cases, starts, experts), timeout=240)


@pytest.mark.parametrize("case", ["tied", "untied", "token"])
def test_two_ranks_compute_what_one_rank_does(one_rank, two_ranks, case):
    ranks = [rank["trained"][case] for rank in two_ranks]
    assert_equal_runs(ranks, one_rank[case])
    # Log-probs and what follows from them are on the last stage; the numbers of a step are on both, to the last bit.
    assert ["batch" in rank for rank in ranks] == [False, True]
    assert ranks[0]["steps"] == ranks[1]["steps"]


def test_l28_virtual_stages_compute_what_one_rank_does(one_rank, two_ranks):
    assert_equal_runs([rank["trained"]["virtual"] for rank in two_ranks], one_rank["untied"])


def test_without_random_weights_the_gradient_norm_still_counts_every_rank(one_rank, two_ranks):
    """`--no-initialization`: the weights come from the checkpoint alone."""
    assert_equal_runs([rank["trained"]["not initialized"] for rank in two_ranks], one_rank["untied"])


def test_a_mean_that_the_collective_takes_is_the_one_that_is_taken_before(one_rank, two_ranks):
    assert_equal_runs([rank["trained"]["averaged"] for rank in two_ranks], one_rank["tied"])


def test_ranks_that_keep_whole_optimizers_compute_what_one_rank_does(one_rank, two_ranks):
    assert_equal_runs([rank["trained"]["instances"] for rank in two_ranks], one_rank["untied"])


@pytest.mark.parametrize("case", ["tied", "untied", "token", "virtual"])
def test_l19_the_log_prob_pass_sees_what_training_sees(one_rank, two_ranks, case):
    """Before the first update old and new log-probs are those of one policy: their difference is nothing at all."""
    runs = [rank["trained"][case] for rank in two_ranks] + [one_rank[case if case in one_rank else "untied"]]
    for run in runs:
        assert run["steps"][0]["ppo_kl"] == 0
        assert run["steps"][1]["ppo_kl"] != 0


def test_random_weights_do_not_depend_on_the_layout(two_ranks):
    for rank in two_ranks:
        expected = rank["started"]["one"][0]
        assert len({weight.tobytes() for weight in expected.values() if weight.ndim == 2}) == 1 + 7 * 4
        for random, *_ in rank["started"].values():
            assert list(random) == list(expected)
            assert all(np.array_equal(weight, expected[name]) for name, weight in random.items())


@pytest.mark.parametrize("layout", ["one", "pipeline", "virtual", "tensor"])
def test_a_loss_that_is_not_finite_stops_all_ranks_alike(two_ranks, layout):
    (message,) = {rank["started"][layout][1] for rank in two_ranks}
    assert message.startswith("rollout 0, step 0") and "the loss is nan" in message
    assert f"{BAD_SAMPLE}" in message.partition("samples ")[2].partition("]")[0]
    assert all(rank["started"][layout][2] for rank in two_ranks), "the weights were changed"


def test_tied_embeddings_are_exported_once(two_ranks):
    for rank in two_ranks:
        assert "lm_head.weight" not in rank["trained"]["tied"]["weights"]
        assert "lm_head.weight" in rank["trained"]["untied"]["weights"]


@pytest.mark.parametrize("rank", [0, 1])
def test_l27_whole_experts_under_tensor_parallelism_have_the_gradients_of_one_rank(one_rank, two_ranks, rank):
    metrics, gradients = one_rank["experts"]
    metrics_of_two, gradients_of_two = two_ranks[rank]["experts"]
    assert_equal_metrics(metrics_of_two, metrics, bounds_of_batch())
    whole = [name for name in gradients if ".experts." in name or "norm" in name or "router" in name]
    assert len(whole) == 2 * (4 * 2 + 5) + 1
    found, expected = ({name: of[name] for name in whole} for of in (gradients_of_two, gradients))
    assert_equal_gradients(found, expected, TRAINED_TOKENS)


GRID = {
    "pipeline 2 x tensor 2": {**PIPELINE, **TENSOR},
    "pipeline 2 x tensor 2 x sequence": {**PIPELINE, **TENSOR, "sequence_parallel": True},
    "pipeline 2 x data 2": {**PIPELINE, "data_parallel_size": 2},
    "pipeline 2 x data 2, overlap": {**PIPELINE, **OVERLAP, "data_parallel_size": 2},
    "pipeline 2 x data 2, not aligned": {
        **PIPELINE,
        **OVERLAP,
        "data_parallel_size": 2,
        "align_grad_reduce": False,
    },
    "virtual 2 x data 2, overlap": {**VIRTUAL, **OVERLAP, "data_parallel_size": 2},
    "virtual 2 x tensor 2": {**VIRTUAL, **TENSOR},
    "pipeline 4": {"pipeline_model_parallel_size": 4},
    "pipeline 2 x context 2": {**PIPELINE, "context_parallel_size": 2},
    "data 4, two optimizers": {**OVERLAP, **INSTANCES, "data_parallel_size": 4},
    "data 2 x context 2, two optimizers, averaged": {
        **DATA,
        **INSTANCES,
        "context_parallel_size": 2,
        "ddp_average_in_collective": True,
    },
    "pipeline 2 x data 2, two optimizers": {**PIPELINE, **DATA, **INSTANCES},
}


@pytest.mark.slow
def test_four_ranks_compute_what_one_rank_does(hf_dirs, one_rank):
    cases = {
        (embeddings, name): layout_args(hf_dirs[embeddings], **layout)
        for embeddings in EMBEDDINGS
        for name, layout in GRID.items()
    }
    ranks = run_distributed(train_steps, 4, (cases,), timeout=600)
    for embeddings, name in cases:
        try:
            assert_equal_runs([rank[embeddings, name] for rank in ranks], one_rank[embeddings])
        except AssertionError as error:
            raise AssertionError(f"{embeddings}, {name}: {error}") from error


# With one rank in each, a reduction that is done twice is one that is done once.
LARGE_INSTANCES = {
    "one chunk": {**PIPELINE, **OVERLAP, **INSTANCES, "data_parallel_size": 4},
    "virtual": {**VIRTUAL, **OVERLAP, **INSTANCES, "data_parallel_size": 4},
}


@pytest.mark.slow
def test_stages_reduce_once_over_several_optimizers_of_several_ranks(hf_dirs, one_rank):
    cases = {name: layout_args(hf_dirs["tied"], **layout) for name, layout in LARGE_INSTANCES.items()}
    ranks = run_distributed(train_steps, 8, (cases,), timeout=300)
    for name in cases:
        assert_equal_runs([rank[name] for rank in ranks], one_rank["tied"])


@pytest.mark.slow
def test_l28_messages_of_virtual_stages_are_never_swapped(hf_dirs, one_rank):
    cases = {
        number: layout_args(hf_dirs["untied"], **VIRTUAL, max_tokens_per_gpu=16 + 8 * (number % 2))
        for number in range(20)
    }
    ranks = run_distributed(train_steps, 2, (cases,), timeout=600)
    for number in cases:
        assert_equal_runs([rank[number] for rank in ranks], one_rank["untied"])


@pytest.mark.slow
def test_splits_of_the_layers_compute_what_one_rank_does(hf_dirs, one_rank):
    splits = {
        "first": {"decoder_first_pipeline_num_layers": 3},
        "last": {"decoder_last_pipeline_num_layers": 1},
        "layout": {"pipeline_model_parallel_layout": "Ett|ttL"},
        "interleaved layout": {
            "pipeline_model_parallel_layout": "E|tt|t|tL",
            "virtual_pipeline_model_parallel_size": 2,
        },
        "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        "unbatched messages": {"batch_p2p_comm": False},
        "larger groups": {"virtual_pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 3},
    }
    cases = {name: layout_args(hf_dirs["tied"], **PIPELINE, **split) for name, split in splits.items()}
    ranks = run_distributed(train_steps, 2, (cases,), timeout=300)
    for name in cases:
        assert_equal_runs([rank[name] for rank in ranks], one_rank["tied"])


CHECKPOINT = {
    "save_hf": None, "no_save_optim": False, "no_load_optim": False, "no_load_rng": False, "keep_last": None, "world_size": 2,
}  # fmt: skip


def _save_in_layouts(cases):
    """One step, a checkpoint, two more steps; the metrics of those, per case."""
    import torch.distributed as dist

    results = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        from slime.backends.megatron_utils.checkpoint import begin_checkpoint, publish_checkpoint

        run.prepare()
        run.step()
        begin_checkpoint(args, 0, run.model, run.optimizer, run.scheduler).finish()
        if dist.get_rank() == 0:
            publish_checkpoint(args, 0)
        dist.barrier()
        results[name] = ([run.step() for _ in range(2)], run.weights())
    return results


def _resume_in_layouts(cases):
    """The two steps after the checkpoint, per case, by a run that starts from random weights."""
    results = {}
    for name, (args, directory) in cases.items():
        first = LayoutRun(args)
        first.prepare()
        run = LayoutRun(SimpleNamespace(**{**vars(args), "seed": 99}), loads=False)
        # Old log-probs and advantages are those of the run that saved.
        run.data = first.data
        from slime.backends.megatron_utils.checkpoint import load_checkpoint

        source = WeightSource("megatron", directory, resume=True)
        load_checkpoint(args, source, run.model, run.optimizer, run.scheduler)
        results[name] = ([run.step() for _ in range(2)], run.weights())
    return results


def _count_passes(cases):
    """By case what `train_steps` gives, and how often the layers of this rank computed in a step, by their numbers from 1."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward, counts = TransformerLayer.forward, {}

    def counted(layer, *given, **options):
        counts[layer.layer_number] = counts.get(layer.layer_number, 0) + layer.training
        return forward(layer, *given, **options)

    TransformerLayer.forward = counted
    found = {}
    for name, args in cases.items():
        counts.clear()
        steps = train_steps({name: args})[name]
        found[name] = steps, dict(counts)
    return found


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def test_some_micro_batches_may_be_kept_whole(hf_dirs, one_rank):
    """The first stage has two micro-batches under way, and recomputes every other one; the last one has one, and none."""
    alone = {"use_dynamic_batch_size": False, "micro_batch_size": 1, **FULL}
    partial = {"num_microbatches_with_partial_activation_checkpoints": 1}
    cases = {
        "all": layout_args(hf_dirs["untied"], **PIPELINE, **alone),
        "some": layout_args(hf_dirs["untied"], **PIPELINE, **alone, **partial),
        "virtual": layout_args(hf_dirs["untied"], **VIRTUAL, **FULL, **partial),
    }
    ranks = run_distributed(_count_passes, 2, (cases,), timeout=240)
    for name in cases:
        assert_equal_runs([rank[name][0] for rank in ranks], one_rank["untied"])
    # Three steps of nine micro-batches, each computed once and, where it is recomputed, once more.
    first, last = (rank["all"][1] for rank in ranks)
    assert first == {1: 54, 2: 54} and last == {3: 54, 4: 54}
    first, last = (rank["some"][1] for rank in ranks)
    assert first == {1: 39, 2: 39} and last == {3: 27, 4: 27}
    assert all(sum(rank["virtual"][1].values()) > 0 for rank in ranks)


@pytest.mark.slow
def test_checkpoints_go_from_layout_to_layout_with_their_optimizer(hf_dirs, one_rank, tmp_path):
    layouts = {"pipeline": PIPELINE, "tensor": TENSOR, "virtual": VIRTUAL, "data": {"data_parallel_size": 2}}
    saving, loading = {}, {}
    for embeddings in EMBEDDINGS:
        for name, layout in layouts.items():
            directory = str(tmp_path / embeddings / name)
            saving[embeddings, name] = layout_args(hf_dirs[embeddings], **CHECKPOINT, **layout, save=directory)
            for other, layout_of_other in layouts.items():
                args = layout_args(hf_dirs[embeddings], **CHECKPOINT, **layout_of_other, save="unused")
                loading[embeddings, name, other] = (args, directory)
    saved = run_distributed(_save_in_layouts, 2, (saving,), timeout=600)
    resumed = run_distributed(_resume_in_layouts, 2, (loading,), timeout=600)
    for rank, expected in zip(resumed, saved, strict=True):
        for (embeddings, name, _), (steps, weights) in rank.items():
            expected_steps, expected_weights = expected[embeddings, name]
            bounds = one_rank[embeddings]["bounds"]
            for step, expected_step in zip(steps, expected_steps, strict=True):
                assert_equal_metrics(step, expected_step, bounds["step"])
            assert_equal_weights(weights, expected_weights, bounds["weights"])
