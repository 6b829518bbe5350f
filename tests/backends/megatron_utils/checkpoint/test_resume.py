"""A run that stops at a checkpoint and goes on is, to the last bit, the run that did not stop, in all precisions and layouts."""

import itertools

import pytest

from tests.support.distributed import run_distributed
from tests.support.resumed_run import FLOAT16, ResumableRun, resumable_args, resumed
from tests.support.tiny_model import write_tiny_model

BEFORE, AFTER = 2, 3
BFLOAT16 = {"bf16": True}
PLAIN = {"use_distributed_optimizer": False}
CRITIC = {"role": "critic", "untie_embeddings_and_output_weights": True}
DATA, CONTEXT = {"data_parallel_size": 2}, {"context_parallel_size": 2}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
SECOND_STAGE = {**PIPELINE, "only_train_params_name_list": [r"layers\.1\.", "final"]}
CASES = {
    "bf16, data": {**BFLOAT16, **DATA},
    "fp16, tensor": {**FLOAT16, **TENSOR},
    "bf16, critic, pipeline, plain optimizer": {**BFLOAT16, **PIPELINE, **CRITIC, **PLAIN},
    "only the second stage learns": SECOND_STAGE,
    "only the second stage learns, plain optimizer": {**SECOND_STAGE, **PLAIN},
}
PRECISIONS = {"bf16": BFLOAT16, "fp16": FLOAT16, "fp32": {}}
LAYOUTS = {
    "data": DATA, "tensor": TENSOR, "pipeline": PIPELINE, "context": CONTEXT,
    "virtual": {**PIPELINE, "virtual_pipeline_model_parallel_size": 2},
}  # fmt: skip
ALL_CASES = {
    f"{precision}, {layout}, {role}, {optimizer}": {**flags, **sizes, **model, **kind}
    for precision, flags in PRECISIONS.items()
    for layout, sizes in LAYOUTS.items()
    for role, model in {"actor": {}, "critic": CRITIC}.items()
    for optimizer, kind in {"distributed": {}, "plain": PLAIN}.items()
}


def interrupted(cases) -> dict[str, tuple]:
    """Per case what the next step depends on, at the checkpoint and after each further step: uninterrupted, and resumed."""
    results = {}
    for name, args in cases.items():
        run = ResumableRun(args)
        run.prepare()
        data = dict(run.data)
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
def two_ranks(hf_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    cases = {name: resumable_args(hf_dir, root / str(i), **flags) for i, (name, flags) in enumerate(CASES.items())}
    return run_distributed(interrupted, 2, (cases,), timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(two_ranks, name):
    assert_uninterrupted(two_ranks, name)


@pytest.mark.slow
def test_every_precision_layout_and_role_resumes_bitwise(tmp_path):
    hf_dir = tmp_path / "model"
    write_tiny_model(hf_dir, tied=True, layers=4)
    cases = {
        name: resumable_args(hf_dir, tmp_path / str(i), **flags) for i, (name, flags) in enumerate(ALL_CASES.items())
    }
    ranks = run_distributed(interrupted, 2, (cases,), timeout=900)
    for name in cases:
        assert_uninterrupted(ranks, name)
