"""What a check tries of a function that generates: an evaluation, and an answer that was cut off."""

import pytest

from slime.plugins import check

FUNCTIONS = """
from slime.rollout.dialogue import dialogue
from slime.rollout.sglang_rollout import generate
from slime.utils.types import Sample

async def told(args, sample, sampling_params, evaluation=False):
    open(f"{__file__}.seen", "a").write(f"{evaluation} ")
    return await generate(args, sample, sampling_params)
async def for_groups(args, samples, evaluation):
    open(f"{__file__}.seen", "a").write(f"{evaluation} ")
    return [await generate(args, sample, {"max_new_tokens": 9}) for sample in samples]
async def only_trains(args, sample, sampling_params, evaluation=False):
    if evaluation:
        raise KeyError("no tools in evaluations")
    return await generate(args, sample, sampling_params)
async def plain(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)
async def turns(args, sample, sampling_params):
    return await dialogue(args, sample, sampling_params, lambda said: None if "4" in said else " go on:")
async def drops(args, sample, sampling_params):
    sample.reset_for_retry()
    return await generate(args, sample, sampling_params)
async def completes(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.status = Sample.Status.COMPLETED
    return sample
def text_alone(args, sample, sampling_params):
    sample.response = "4"
    return sample
"""


def problems_of(path, name, *words):
    path.write_text(FUNCTIONS)
    (finding,) = check(["--custom-generate-function-path", f"{path}:{name}", *words], answers=["It is 3", "It is 4"])
    return finding.problems


@pytest.mark.parametrize("name", ["told", "for_groups"])
def test_a_function_that_is_told_of_evaluations_is_called_in_one(tmp_path, name):
    path = tmp_path / "own.py"
    assert problems_of(path, name) == ()
    assert set(path.with_name("own.py.seen").read_text().split()) == {"True", "False"}


def test_what_raises_in_an_evaluation_alone_is_told(tmp_path):
    (problem,) = problems_of(tmp_path / "own.py", "only_trains")
    assert "no tools in evaluations" in problem


@pytest.mark.parametrize("name", ["plain", "turns", "told", "for_groups", "text_alone"])
def test_what_continues_an_answer_that_was_cut_off_is_fine(tmp_path, name):
    assert problems_of(tmp_path / "own.py", name, "--partial-rollout") == ()


@pytest.mark.parametrize(
    "name, told",
    [
        ("drops", "dropped the "),
        ("completes", "an engine aborted an answer, and what it returned is completed"),
    ],
)
def test_what_loses_an_answer_that_was_cut_off_is_told(tmp_path, name, told):
    (problem,) = problems_of(tmp_path / "own.py", name, "--partial-rollout")
    assert told in problem and "--partial-rollout" in problem
    assert problems_of(tmp_path / "own.py", name) == ()
