"""A run that stops at a checkpoint and goes on is, bit for bit, the run that did not stop: in every precision and layout."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import (
    FLOAT16,
    ResumableRun,
    changed,
    lines_of_slime,
    resumable_args,
    resumed,
)

BEFORE, AFTER = 2, 3
BFLOAT16 = {"bf16": True}
PLAIN = {"use_distributed_optimizer": False}
CRITIC = {"role": "critic", "untie_embeddings_and_output_weights": True}
DATA, CONTEXT = {"data_parallel_size": 2}, {"context_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
STATELESS = {"use_stateless_adam": True, "no_save_optim": True}
NARROW = {
    "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8",
    "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5,
}  # fmt: skip
SECOND_STAGE = {**PIPELINE, "only_train_params_name_list": [r"layers\.1\.", "final"]}
CASES = {
    "bf16, data": {**BFLOAT16, **DATA},
    "fp16, tensor": {**FLOAT16, **TENSOR},
    "bf16, critic, pipeline, plain optimizer": {**BFLOAT16, **PIPELINE, **CRITIC, **PLAIN},
    "bf16, two optimizers": {**BFLOAT16, **DATA, "num_distributed_optimizer_instances": 2},
    "bf16, data, stateless": {**BFLOAT16, **DATA, **STATELESS},
    "fp16, pipeline, stateless, plain optimizer": {**FLOAT16, **PIPELINE, **STATELESS, **PLAIN},
    "bf16, data, narrow": {**BFLOAT16, **DATA, **NARROW},
    "only the second stage learns": SECOND_STAGE,
    "only the second stage learns, plain optimizer": {**SECOND_STAGE, **PLAIN},
    "bf16, only the second stage learns, plain optimizer": {**BFLOAT16, **SECOND_STAGE, **PLAIN},
}
# On every change their like runs with the other optimizer, and without moments in `test_optimizer_state.py`.
SLOW = (
    "bf16, data, stateless", "fp16, pipeline, stateless, plain optimizer", "only the second stage learns, plain optimizer",
)  # fmt: skip
LAYOUTS = {
    "data": DATA, "tensor": TENSOR, "pipeline": PIPELINE, "context": CONTEXT,
    "virtual": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2},
}  # fmt: skip
EXPERTS = {
    "num_layers": 2, "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48,
    "moe_router_load_balancing_type": "none", "expert_tensor_parallel_size": 1, "bf16": True,
}  # fmt: skip
EXPERT_CASES = {
    "experts": {**EXPERTS, **DATA, "expert_model_parallel_size": 2},
    "experts, plain optimizer": {**EXPERTS, **TENSOR, **PLAIN},
    "experts, stateless": {**EXPERTS, **DATA, **STATELESS, "expert_model_parallel_size": 2},
    "only experts learn, stateless": {**EXPERTS, **DATA, **STATELESS, "only_train_params_name_list": ["experts"]},
    "only experts learn": {**EXPERTS, **DATA, "only_train_params_name_list": ["experts"]},
    "only experts learn, plain optimizer": {**EXPERTS, **DATA, **PLAIN, "only_train_params_name_list": ["experts"]},
    # Rank 0 has no experts.
    "only the second stage has experts, plain optimizer": {**EXPERTS, **PIPELINE, **PLAIN, "moe_layer_freq": [0, 1]},
}
MODELS = {
    "bf16": {**BFLOAT16},
    "bf16, plain optimizer": {**BFLOAT16, **PLAIN},
    "bf16, critic": {**BFLOAT16, **CRITIC},
    "bf16, stateless": {**BFLOAT16, **STATELESS},
    "fp16": {**FLOAT16},
    "fp16, critic, plain optimizer": {**FLOAT16, **CRITIC, **PLAIN},
}
SGD = {**PLAIN, **DATA, "optimizer": "sgd", "lr": 1e-3}
SGD_CASES = {
    "sgd": {**SGD, **BFLOAT16, "sgd_momentum": 0.0},
    "sgd, momentum": {**SGD, **BFLOAT16, "sgd_momentum": 0.9},
    "sgd, momentum, fp32": {**SGD, "sgd_momentum": 0.9},
    "sgd, momentum, only the second stage learns": {
        **SGD,
        **BFLOAT16,
        **SECOND_STAGE,
        "sgd_momentum": 0.9,
        "data_parallel_size": 1,
    },
}
HOST = {"optimizer_cpu_offload": True, "accumulate_allreduce_grads_in_fp32": True}
ON_WEIGHTS = {
    "fp16, host": {**FLOAT16, **DATA, **HOST},
    "fp32, host": {**TENSOR, **HOST},
    "experts, narrow": {**EXPERTS, **DATA, **NARROW, "expert_model_parallel_size": 2},
    "experts, narrow, main parameters": {**EXPERTS, **DATA, **NARROW, "main_params_dtype": "fp16"},
}
GRID = {
    "on weights": ON_WEIGHTS,
    "experts": EXPERT_CASES,
    "sgd": SGD_CASES,
    **{
        layout: {f"{layout}, {model}": {**sizes, **flags} for model, flags in MODELS.items()}
        for layout, sizes in LAYOUTS.items()
    },
}


def interrupted(cases) -> dict[str, tuple]:
    """Per case what the next step depends on, at the checkpoint and after each further step: uninterrupted, and resumed."""
    results = {}
    for name, args in cases.items():
        from slime.training.rollout_data import RolloutData

        run = ResumableRun(args, loads=args.num_experts is None)
        run.prepare()
        data = RolloutData(run.data, run.cp)
        for _ in range(BEFORE):
            run.step()
        run.save()
        whole = [run.fingerprints(), *(after_step(run) for _ in range(AFTER))]
        run = resumed(args, args.save, data)
        results[name] = (whole, [run.fingerprints(), *(after_step(run) for _ in range(AFTER))])
    return results


def after_step(run) -> dict:
    metrics = run.step()
    return {**run.fingerprints(), "metrics": metrics}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=True)
    return directory


def assert_uninterrupted(ranks, name) -> None:
    for rank in ranks:
        whole, again = rank[name]
        for step, (found, expected) in enumerate(zip(again, whole, strict=True)):
            different = [key for key in expected if found[key] != expected[key]]
            assert not different, f"{name}, {step} steps after the checkpoint: {different}"
    # Not for want of a difference: every step changes some rank's float32 copies.
    states = [[rank[name][0][step]["masters"] for rank in ranks] for step in range(1 + AFTER)]
    assert all(state != following for state, following in itertools.pairwise(states))


@pytest.fixture(scope="module")
def two_ranks(hf_dir, tmp_path_factory, selected):
    root = tmp_path_factory.mktemp("runs")
    names = [case["name"] for case in selected(test_a_resumed_run_is_the_uninterrupted_one)]
    cases = {name: resumable_args(hf_dir, root / str(i), **CASES[name]) for i, name in enumerate(names)}
    return run_distributed(interrupted, 2, (cases,), timeout=300)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_a_resumed_run_is_the_uninterrupted_one(two_ranks, name):
    assert_uninterrupted(two_ranks, name)


def stays(cases) -> dict[str, tuple]:
    """Per case the data, and what the next step depends on after each step; the checkpoint is that of the first."""
    found = {}
    for name, args in cases.items():
        run = ResumableRun(args)
        run.prepare()
        states = [after_step(run)]
        run.save(0)
        found[name] = dict(run.data), states + [after_step(run) for _ in range(AFTER - 1)]
    return found


def comes_back(cases, data, step) -> dict[str, tuple]:
    """Per case the state that a process finds in the checkpoint of the step before, and that after its own, which it saves."""
    from slime.training.rollout_data import RolloutData

    found = {}
    for name, args in cases.items():
        run = resumed(args, args.save)
        run.data = RolloutData(data[name], run.cp)
        loaded = run.fingerprints()
        found[name] = loaded, after_step(run)
        run.save(step)
    return found


@pytest.mark.slow
def test_a_trainer_that_is_another_process_in_every_step_has_the_bits_of_one_that_stays(hf_dir, tmp_path):
    """As with --release-train; in both precisions, whatever the number of threads."""
    flags = {"float32": {}, "bf16": BFLOAT16, "bf16, plain optimizer": {**BFLOAT16, **PLAIN}}
    cases = {name: resumable_args(hf_dir, tmp_path / name, **of_case) for name, of_case in flags.items()}
    (whole,) = run_distributed(stays, 1, (cases,), env={"OMP_NUM_THREADS": "2"})
    data = {name: of_case for name, (of_case, _) in whole.items()}
    for step in range(1, AFTER):
        threads = {"OMP_NUM_THREADS": str(step)}
        (found,) = run_distributed(comes_back, 1, (cases, data, step), env=threads)
        for name, (loaded, after) in found.items():
            before, expected = whole[name][1][step - 1 : step + 1]
            assert loaded == {key: before[key] for key in loaded}, (name, step)
            assert after == expected and after["masters"] != loaded["masters"], (name, step)


def overflow_worker(args) -> dict:
    """A run whose loss scale overflows before its first update, and what runs that resume from its checkpoint do and say."""
    whole, again = interrupted({"run": args})["run"]
    lines = {}
    flags = {"no_load_optim": True}, {"use_checkpoint_opt_param_scheduler": True}
    common = Path(args.save) / "iter_0000000/common.pt"
    for further in flags:
        with lines_of_slime() as lines[next(iter(further))]:
            run = resumed(changed(args, **further), args.save)
        if "no_load_optim" in further:
            fresh = run.fingerprints()
            state = torch.load(common, weights_only=True)
            state["parameter_groups"] = [group for group in state["parameter_groups"] if group["wd_mult"]]
            torch.save(state, common)
    return {"whole": whole, "again": again, "fresh": fresh, **lines}


def _without_metrics(step) -> dict:
    """A gradient norm that is not a number is like nothing."""
    return {name: value for name, value in step.items() if name != "metrics"}


def test_a_loss_scale_that_was_lowered_before_any_update_goes_on(hf_dir, tmp_path):
    flags = {**FLOAT16, "initial_loss_scale": 2.0**40}
    (found,) = run_distributed(overflow_worker, 1, (resumable_args(hf_dir, tmp_path / "run", **flags),), timeout=120)
    whole = [_without_metrics(step) for step in found["whole"]]
    assert [_without_metrics(step) for step in found["again"]] == whole
    scales = [step["loss scale"] for step in whole]
    # No step was taken, and each lowered the scale further.
    assert all(step["steps"] == whole[0]["steps"] and step["masters"] == whole[0]["masters"] for step in whole)
    assert len({str(scale) for scale in scales}) == 1 + AFTER and str(2.0**40) not in str(scales)
    assert "1.0995e+12" in str(found["fresh"]["loss scale"])
    (line,) = [line for line in found["no_load_optim"] if "float32" in line]
    assert (
        "float32 copies of the weights are made of the 16-bit weights" in line
        and "--no-load-optim takes no others" in line
    )
    (line,) = [line for line in found["use_checkpoint_opt_param_scheduler"] if "parameter groups" in line]
    assert "no settings for the parameter groups with wd_mult=0.0" in line and "wd_mult=1.0" not in line


@pytest.mark.slow
@pytest.mark.parametrize("layout", GRID)
def test_every_precision_and_role_resumes_bitwise_in_the_layout(tmp_path, layout):
    hf_dir = tmp_path / "model"
    write_tiny_model(hf_dir, tied=True, layers=4)
    cases = {
        name: resumable_args(hf_dir, tmp_path / str(i), **flags) for i, (name, flags) in enumerate(GRID[layout].items())
    }
    ranks = run_distributed(interrupted, 2, (cases,), timeout=600)
    for name in cases:
        assert_uninterrupted(ranks, name)
