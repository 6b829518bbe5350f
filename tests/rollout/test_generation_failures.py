"""Samples whose generation or reward raises, never comes or is none: limits, second attempts, fault tolerance."""

import re
from types import SimpleNamespace

import pytest

from slime.rollout.failures import mark_failed
from slime.rollout.generation import generate_and_rm, generate_and_rm_group
from slime.utils.errors import UserError
from slime.utils.http_utils import HttpError
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample, failed_and_masked
from tests.support.models.rollout_args import make_args
from tests.support.models.rollout_steps import params, plugin, run

Status = Sample.Status


def test_r14_a_reward_that_never_returns_fails_the_sample_after_a_second_attempt(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "async def fn(args, sample, **kwargs):\n    args.asked.append(sample.response)\n    await asyncio.Event().wait()\n",
    )
    args = make_args(checkpoint, server.port, custom_rm_path=path, rm_timeout=0.05)
    args.asked = []
    sample = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert sample.status is Status.FAILED
    assert "no reward for sample 4 within --rm-timeout 0.05 s, asked twice" in sample.metadata["fail_reason"]
    assert len(server.requests) == 1, "what was generated is there; only its reward is asked for again"
    assert args.asked == [sample.response] * 2
    assert sample.remove_sample


RAISING = "def fn(args, sample, *arguments):\n    raise KeyError('no entry')\n"
RAISING_FOR_GROUPS = "def fn(args, samples, evaluation):\n    raise KeyError('no entry')\n"
LEAVING = "def fn(args, sample, *arguments):\n    raise SystemExit('no entry')\n"
CANCELLING = (
    "async def fn(args, sample, *arguments):\n"
    "    task = asyncio.ensure_future(asyncio.Event().wait())\n    await asyncio.sleep(0)\n"
    "    task.cancel('no entry')\n    await task\n"
)
LATE = "class TooLate(BaseException): ...\n" + LEAVING.replace("SystemExit", "TooLate")
FAULTS = {
    "a generate function": ("custom_generate_function_path", RAISING, "KeyError"),
    "one for groups": ("custom_generate_function_path", RAISING_FOR_GROUPS, "KeyError"),
    "a reward": ("custom_rm_path", RAISING, "KeyError"),
    "a generate function that leaves": ("custom_generate_function_path", f"async {LEAVING}", "SystemExit"),
    "a reward that leaves": ("custom_rm_path", f"async {LEAVING}", "SystemExit"),
    "a plain reward that leaves": ("custom_rm_path", LEAVING, "SystemExit"),
    "a reward whose time limit is no Exception": ("custom_rm_path", LATE, "TooLate"),
    "a generate function that cancels a task of its own": (
        "custom_generate_function_path", CANCELLING, "CancelledError",
    ),
    "a reward that cancels a task of its own": ("custom_rm_path", CANCELLING, "CancelledError"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_with_fault_tolerance_a_function_that_raises_fails_its_samples_and_not_the_run(
    server, checkpoint, tmp_path, fault
):
    flag, program, raised = FAULTS[fault]
    args = make_args(checkpoint, server.port, **{flag: plugin(tmp_path, program)})
    prompts = [Sample(index=index, prompt="p") for index in (4, 5)]
    with pytest.raises(UserError, match=rf"^--[a-z-]*path .*:fn raised {raised} for sample.*no entry"):
        run(generate_and_rm_group(args, prompts, params(args)))
    args.use_fault_tolerance = True
    for sample in run(generate_and_rm_group(args, prompts, params(args))):
        assert (sample.status, sample.remove_sample, sample.reward) == (Status.FAILED, True, 0.0)
        assert f"raised {raised} for sample" in sample.metadata["fail_reason"]


@pytest.mark.parametrize("other", [False, True])
def test_what_fails_one_sample_fails_no_run_from_a_task_group_either(server, checkpoint, tmp_path, other):
    """A user's function may ask for several answers at once; errors of its own in the group are told as such."""
    program = (
        "import asyncio\nfrom slime.rollout.failures import SampleFailed\n"
        "async def asked():\n    raise SampleFailed('it cannot be gone on with')\n"
        "async def own():\n    raise KeyError('no entry')\n"
        "async def fn(args, sample, params):\n    async with asyncio.TaskGroup() as group:\n"
        f"        group.create_task(asked())\n        group.create_task({'own' if other else 'asked'}())\n"
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=plugin(tmp_path, program))
    if other:
        with pytest.raises(UserError, match="fn raised ExceptionGroup for sample"):
            run(generate_and_rm_group(args, [Sample(index=4, prompt="p")], params(args)))
        return
    (sample,) = run(generate_and_rm_group(args, [Sample(index=4, prompt="p")], params(args)))
    assert sample.status is Status.FAILED and sample.metadata["fail_reason"] == "it cannot be gone on with"


def test_the_traceback_of_a_cause_is_told_once(server, checkpoint, tmp_path, caplog):
    program = "def fn(args, sample, *arguments):\n    raise KeyError(f'no entry of {sample.index}')\n"
    path = plugin(tmp_path, program)
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, use_fault_tolerance=True)
    run(generate_and_rm_group(args, [Sample(index=index, prompt="p") for index in range(4)], params(args)))
    failed = [record.message for record in caplog.records if " failed: " in record.message]
    assert len(failed) == 4 and [message.count("Traceback") for message in failed] == [1, 0, 0, 0]
    assert [f"no entry of {index}" in message for index, message in enumerate(failed)] == [True] * 4


def test_failures_that_no_code_is_to_blame_for_are_told_in_full(caplog):
    """The answer of a service has lines too, and the next one may say something else."""
    for index, reason in enumerate(
        ["POST http://rm answered 400:\nno label", "POST http://rm answered 400:\nno prompt"]
    ):
        mark_failed(SimpleNamespace(reward_key=None, eval_reward_key=None), Sample(index=index), reason)
    assert [record.message.splitlines()[-1] for record in caplog.records] == ["no label", "no prompt"]


ONCE = """
calls = []

def fails_once(*arguments, **keywords):
    calls.append(1)
    if len(calls) == 1:
        raise ConnectionError("503")
"""
FINISHED = """
        sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])
        sample.status = type(sample).Status.COMPLETED
"""
ANSWERS_AT_THE_SECOND_CALL = {
    "a generate function": (
        "custom_generate_function_path",
        "def fn(args, sample, sampling_params):\n    for sample in [sample]:"
        + FINISHED
        + "    fails_once()\n    return sample\n",
        [2, 3],
    ),
    "one for groups": (
        "custom_generate_function_path",
        "def fn(args, samples, evaluation):\n    for sample in samples:"
        + FINISHED
        + "    fails_once()\n    return samples\n",
        [2],
    ),
    "a reward": ("custom_rm_path", "def fn(args, sample):\n    fails_once()\n    return 0.5\n", [3]),
    "one for groups of a reward": (
        "custom_rm_path",
        "def fn(args, samples):\n    fails_once()\n    return [0.5] * 2\n",
        [2],
    ),
}


@pytest.mark.parametrize("case", ANSWERS_AT_THE_SECOND_CALL)
def test_with_fault_tolerance_a_function_that_raised_once_is_called_again(server, checkpoint, tmp_path, case):
    flag, program, calls = ANSWERS_AT_THE_SECOND_CALL[case]
    path = plugin(tmp_path, ONCE + program)
    args = make_args(checkpoint, server.port, use_fault_tolerance=True, **{flag: path}, group_rm="samples)" in program)
    prompts = [Sample(index=index, prompt="p", group_index=0) for index in (4, 5)]
    for sample in run(generate_and_rm_group(args, prompts, params(args))):
        assert (sample.status, sample.remove_sample) == (Status.COMPLETED, False), sample.metadata
        assert sample.response_length == 1 or flag == "custom_rm_path", "the second attempt began with the prompt"
    assert len(load_function(path).__globals__["calls"]) in calls


def test_with_fault_tolerance_a_request_that_is_refused_fails_its_sample(server, checkpoint):
    args = make_args(checkpoint, 9, http_max_retries=1)
    with pytest.raises(HttpError):
        run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    args.use_fault_tolerance = True
    sample = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert sample.status is Status.FAILED and "failed: ClientConnectorError" in sample.metadata["fail_reason"]


def test_a_message_list_that_the_template_refuses_is_told_by_its_row(server, checkpoint):
    args = make_args(checkpoint, server.port)
    unreadable = Sample(index=4, prompt=[{"role": "user", "content": 5}])
    refusal = r"the chat template refused the prompt \(TypeError: .*\)$"
    with pytest.raises(UserError, match=f"^sample 4: {refusal}"):
        run(generate_and_rm(args, unreadable, params(args)))
    unreadable.data_place = "prompts.jsonl, line 3"
    args.use_fault_tolerance = True
    failed = run(generate_and_rm(args, unreadable, params(args)))
    assert failed.status is Status.FAILED and not server.requests
    assert re.search(f"prompts.jsonl, line 3: {refusal}", failed.metadata["fail_reason"])


def test_a_reward_that_comes_at_the_second_attempt_is_taken(server, checkpoint, tmp_path):
    path = plugin(
        tmp_path,
        "async def fn(args, sample, **kwargs):\n"
        "    args.asked += 1\n    if args.asked == 1:\n        await asyncio.Event().wait()\n    return 0.5\n",
    )
    args = make_args(checkpoint, server.port, custom_rm_path=path, rm_timeout=0.05)
    args.asked = 0
    sample = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert (sample.reward, sample.status, sample.remove_sample) == (0.5, Status.COMPLETED, False)
    assert len(server.requests) == 1


def test_leaves_of_a_fan_out_without_a_reward_fail_together(server, checkpoint, tmp_path):
    (tmp_path / "both.py").write_text(
        "import asyncio, copy\nfrom slime.utils.types import Sample\n"
        "async def generate(args, sample, sampling_params):\n"
        "    parts = [copy.deepcopy(sample) for _ in range(2)]\n"
        "    for part in parts:\n"
        "        part.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "        part.status = Sample.Status.COMPLETED\n"
        "    return parts\n"
        "async def reward(args, samples):\n    await asyncio.Event().wait()\n"
    )
    args = make_args(
        checkpoint, server.port, custom_generate_function_path=f"{tmp_path}/both.py:generate",
        custom_rm_path=f"{tmp_path}/both.py:reward", rm_timeout=0.05,
    )  # fmt: skip
    entry = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert [(leaf.status, leaf.remove_sample, leaf.response_length) for leaf in entry] == [(Status.FAILED, True, 1)] * 2


def test_r14_a_plain_reward_that_never_returns_does_not_block_the_loop(server, checkpoint, tmp_path):
    path = plugin(tmp_path, "import threading\ndef fn(args, sample):\n    threading.Event().wait(20)\n")
    args = make_args(checkpoint, server.port, custom_rm_path=path, rm_timeout=0.05)
    sample = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert sample.status is Status.FAILED


def test_r14_a_generate_function_that_never_returns_fails_the_sample(server, checkpoint, tmp_path):
    path = plugin(tmp_path, "async def fn(args, sample, sampling_params):\n    await asyncio.Event().wait()\n")
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, http_request_timeout=0.1)
    sample = run(generate_and_rm(args, Sample(index=4, prompt="p"), params(args)))
    assert sample.status is Status.FAILED
    assert "did not return within --http-request-timeout 0.1 s" in sample.metadata["fail_reason"]


@pytest.mark.parametrize("group", [False, True])
def test_what_was_given_up_writes_into_no_sample_of_the_batch(server, checkpoint, tmp_path, group):
    """A plain function goes on in its thread after its time."""
    path = plugin(
        tmp_path,
        "import threading\n"
        "go_on, done = threading.Event(), threading.Event()\n"
        f"def fn(args, {'samples, *, evaluation=False' if group else 'sample, sampling_params'}):\n"
        f"    sample = {'samples[0]' if group else 'sample'}\n"
        "    sample.tokens, sample.response_length = [7], 3\n"
        "    go_on.wait(20)\n"
        "    sample.tokens, sample.status = [7, 8], type(sample).Status.COMPLETED\n"
        "    done.set()\n",
    )
    args = make_args(checkpoint, server.port, custom_generate_function_path=path, http_request_timeout=0.1)
    (sample,) = run(generate_and_rm_group(args, [Sample(index=4, prompt="p")], params(args)))
    function = load_function(path)
    function.__globals__["go_on"].set()
    assert function.__globals__["done"].wait(20)
    assert (sample.status, sample.tokens, sample.response_length) == (Status.FAILED, [], 0)


@pytest.mark.parametrize("kind", ["custom_generate_function_path", "custom_rm_path"])
def test_a_raising_user_function_stops_with_flag_path_sample_and_traceback(server, checkpoint, tmp_path, kind):
    path = plugin(tmp_path, "async def fn(args, sample, *rest, **kwargs):\n    raise KeyError('lost key')\n")
    args = make_args(checkpoint, server.port, **{kind: path})
    with pytest.raises(UserError) as info:
        run(generate_and_rm_group(args, [Sample(index=i, prompt="p") for i in (8, 9)], params(args)))
    message = str(info.value)
    assert f"--{kind.replace('_', '-')} {path} raised KeyError for sample" in message
    assert "line 4, in fn" in message and "lost key" in message


def answering(monkeypatch, **told):
    """An engine that answers two tokens, and tells this of them. Gives a list of its answers."""
    answers = []

    async def post(url, payload, **options):
        rows = [[-0.5, 70, None], [-0.5, 71, None]]
        answers.append({"output_token_logprobs": rows, "finish_reason": {"type": "stop"}, **told})
        return {"text": "FG", "meta_info": dict(answers[-1])}

    monkeypatch.setattr("slime.rollout.engine_request.post_generate", post)
    return answers


@pytest.mark.parametrize("counted", [0, 1, 3])
def test_an_answer_with_more_or_fewer_log_probs_than_tokens_is_asked_for_once_more_and_never_trained(
    server, checkpoint, monkeypatch, counted
):
    args = make_args(checkpoint, server.port)
    answers = answering(monkeypatch, completion_tokens=counted)
    failed = run(generate_and_rm(args, Sample(index=3, prompt="hello"), params(args)))
    assert failed_and_masked(failed) and failed.response_length == 0 and len(answers) == 2
    assert f"counts {counted} tokens in its answer to sample 3" in failed.metadata["fail_reason"]
    # What was interrupted is gone on with from the tokens that are told.
    answering(monkeypatch, completion_tokens=counted, finish_reason={"type": "abort"})
    aborted = run(generate_and_rm(args, Sample(index=3, prompt="hello"), params(args)))
    assert (aborted.status, aborted.response_length) == (Status.ABORTED, 2)


@pytest.mark.parametrize("rows", [[["x", 70, None]], [[-0.5]], [-0.5], [[-0.5, 2**70, None]]])
def test_an_answer_that_cannot_be_read_is_asked_for_once_more_and_ends_no_run(server, checkpoint, monkeypatch, rows):
    args = make_args(checkpoint, server.port)
    answers = answering(monkeypatch, output_token_logprobs=rows)
    failed = run(generate_and_rm(args, Sample(index=3, prompt="hello"), params(args)))
    assert failed_and_masked(failed) and failed.response_length == 0 and len(answers) == 2
    assert "output_token_logprobs of the engine's answer cannot be read" in failed.metadata["fail_reason"]


@pytest.mark.parametrize("reason", [{"type": "content_filter"}, "eos"])
def test_an_answer_that_ended_for_an_unknown_reason_is_a_whole_one(server, checkpoint, monkeypatch, caplog, reason):
    """It is not interrupted: its group would be asked for again and again, with the same answer."""
    args = make_args(checkpoint, server.port)
    answering(monkeypatch, finish_reason=reason, completion_tokens=2, weight_version="4")
    samples = [Sample(index=0, prompt="hello"), Sample(index=1, prompt="hello", status=Status.ABORTED)]
    for sample in run(generate_and_rm_group(args, samples, params(args))):
        assert (sample.status, sample.response_length, sample.weight_versions) == (Status.COMPLETED, 2, ["4"])
        assert sample.reward in (0, 1)
    kind = reason if isinstance(reason, str) else reason["type"]
    assert caplog.text.count(f"reason {kind!r}, which is not known") == 1
