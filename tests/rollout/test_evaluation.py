"""Evaluation of several sets against a server that speaks `/generate`.

An evaluation set that ends before its last prompt.
"""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from slime.observability.rollout_metrics import compute_eval_metrics
from slime.rollout import abort, evaluation
from slime.rollout.evaluation import eval_rollout, finished_prompts
from slime.utils.errors import RunError, UserError
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args
from tests.support.models.rollout_steps import plugin
from tests.support.processes.clocks import LeapingLoop, run_in_no_time

# Only ever reached by a test that fails.
LIMIT_S = 200.0


@pytest.fixture
def server(server):
    evaluation.clear_dataset_cache()
    yield server
    evaluation.clear_dataset_cache()


def write_set(path, n):
    rows = [{"prompt": f"{path.stem} {i}", "label": str(i), "metadata": {"row": i}} for i in range(n)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def run(args, rollout_id=4, limit_s=LIMIT_S, loop_factory=None):
    async def main():
        try:
            return await asyncio.wait_for(eval_rollout(args, rollout_id), limit_s)
        finally:
            await close_http_client()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def make_eval_args(checkpoint, server, tmp_path, **overrides):
    args = make_args(checkpoint, server.port, **overrides)
    entries = [
        {"name": "easy", "path": write_set(tmp_path / "easy.jsonl", 3), "n_samples_per_eval_prompt": 2},
        {"name": "hard", "path": write_set(tmp_path / "hard.jsonl", 2), "temperature": 0.0, "rm_type": "f1"},
    ]
    args.eval_datasets = build_eval_dataset_configs(args, entries, {"min_new_tokens": 1, "max_response_len": 3})
    return args


def test_all_sets_are_generated_and_graded_in_order(server, checkpoint, tmp_path):
    args = make_eval_args(checkpoint, server, tmp_path, group_rm=True)
    data = run(args).data
    assert list(data) == ["easy", "hard"]
    easy = data["easy"]["samples"]
    assert [(s.group_index, s.index, s.metadata["row"]) for s in easy] == [
        (0, 0, 0), (0, 1, 0), (1, 2, 1), (1, 3, 1), (2, 4, 2), (2, 5, 2),
    ]  # fmt: skip
    assert data["easy"]["rewards"] == [s.reward for s in easy]
    assert {reward in (0, 1) for one in data.values() for reward in one["rewards"]} == {True}
    assert data["easy"]["truncated"] == [True] * 6, "three tokens are the limit of the set"
    assert [s.metadata["rm_type"] for s in data["hard"]["samples"]] == ["f1", "f1"]
    by_temperature = [r["sampling_params"] for r in server.requests if r["sampling_params"]["temperature"] == 0.0]
    assert len(by_temperature) == 2
    assert all((p["min_new_tokens"], p["max_new_tokens"]) == (1, 3) for p in by_temperature)


def test_copies_of_a_set_are_made_beside_the_event_loop(server, checkpoint, tmp_path, monkeypatch):
    """A set may have a hundred thousand samples, and a rollout may be under way on this loop."""
    threads, copies = [], evaluation._copies

    def noted(*given):
        threads.append(threading.current_thread())
        return copies(*given)

    monkeypatch.setattr(evaluation, "_copies", noted)
    run(make_eval_args(checkpoint, server, tmp_path))
    assert len(threads) == 5 and threading.main_thread() not in threads


def test_samples_of_a_prompt_have_containers_of_their_own(tmp_path):
    prompt = Sample(prompt=[{"role": "user", "content": ["a"]}], metadata={"tools": [{"name": "b"}]})
    config = EvalDatasetConfig("set", "/set", n_samples_per_eval_prompt=2)
    first, second = evaluation._copies(config, prompt, 3)
    assert [(sample.group_index, sample.index) for sample in (first, second)] == [(3, 6), (3, 7)]
    first.prompt[0]["content"].append("changed")
    first.metadata["tools"][0]["name"] = "changed"
    assert second.prompt == prompt.prompt == [{"role": "user", "content": ["a"]}]
    assert second.metadata == prompt.metadata == {"tools": [{"name": "b"}]}


def test_engines_are_not_asked_for_the_tokens_that_they_kept(server, checkpoint, tmp_path):
    """A top-k is no condition of theirs for an evaluation, which trains nothing."""
    run(make_eval_args(checkpoint, server, tmp_path, rollout_top_p=0.9, rollout_top_k=50))
    assert server.requests and not any("return_sampling_mask" in request for request in server.requests)


def test_sets_are_read_once(server, checkpoint, tmp_path):
    args = make_eval_args(checkpoint, server, tmp_path)
    first = run(args).data
    (tmp_path / "easy.jsonl").unlink()
    second = run(args).data
    assert [s.prompt for s in second["easy"]["samples"]] == [s.prompt for s in first["easy"]["samples"]]


def test_custom_functions_of_a_set_and_the_eval_reward_key(server, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def generate(args, sample, sampling_params, evaluation):\n"
        "    assert evaluation\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = type(sample).Status.COMPLETED\n"
        "    return sample\n"
        "def grade(args, sample):\n    return {'acc': 0.5, 'other': 'x'}\n"
    )
    args = make_args(checkpoint, server.port, eval_reward_key="acc")
    entry = {
        "name": "own",
        "path": write_set(tmp_path / "own.jsonl", 2),
        "custom_generate_function_path": f"{tmp_path}/mine.py:generate",
        "custom_rm_path": f"{tmp_path}/mine.py:grade",
        "metadata_overrides": {"row": "over"},
    }
    args.eval_datasets = build_eval_dataset_configs(args, [entry], {})
    data = run(args).data["own"]
    assert data["rewards"] == [0.5, 0.5]
    assert [s.metadata["row"] for s in data["samples"]] == ["over", "over"]
    assert server.requests == []


def dead_for(tmp_path, condition):
    """The path of a reward that is 1, and never comes where `condition` holds."""
    (tmp_path / "service.py").write_text(
        "import asyncio\n"
        "async def grade(args, sample):\n"
        f"    if {condition}:\n        await asyncio.Event().wait()\n"
        "    return 1.0\n"
    )
    return f"{tmp_path}/service.py:grade"


def test_samples_without_a_reward_are_counted_and_left_out(server, checkpoint, tmp_path):
    path = dead_for(tmp_path, "sample.metadata['row'] == 1")
    args = make_eval_args(checkpoint, server, tmp_path, custom_rm_path=path, rm_timeout=0.05)
    args.eval_datasets = args.eval_datasets[:1]
    output = run(args)
    easy = output.data["easy"]
    assert easy["rewards"] == [1.0] * 4
    assert [sample.index for sample in easy["samples"]] == [0, 1, 4, 5] and len(easy["truncated"]) == 4
    assert [(sample.index, sample.status.name) for sample in easy["failed"]] == [(2, "FAILED"), (3, "FAILED")]
    assert "no reward for sample 2" in easy["failed"][0].metadata["fail_reason"]
    metrics = compute_eval_metrics(SimpleNamespace(log_passrate=True, log_reward_category=None), output.data)
    assert (metrics["eval/easy"], metrics["eval/easy-pass@2"]) == (1.0, 1.0)
    assert metrics["eval/easy-failed_samples"] == 2
    assert len(server.requests) == 6, "the reward is asked for again, the text is not generated again"


def test_a_reward_service_that_is_down_stops_the_evaluation_with_the_first_cause(server, checkpoint, tmp_path):
    path = dead_for(tmp_path, "sample.metadata['row'] > 0")
    args = make_eval_args(checkpoint, server, tmp_path, custom_rm_path=path, rm_timeout=0.05)
    args.eval_datasets = args.eval_datasets[:1]
    with pytest.raises(RunError, match=r"4 of 6 samples of evaluation set easy failed, .*sample [2-5]: no reward for"):
        run(args)


def test_the_rest_of_a_set_is_not_waited_for_once_most_of_it_has_failed(server, checkpoint, tmp_path):
    path = dead_for(tmp_path, "sample.metadata['row'] > 0")
    (tmp_path / "slow.py").write_text(
        "import asyncio\n"
        "async def generate(args, sample, sampling_params):\n"
        "    if sample.metadata['row'] == 0:\n        await asyncio.Event().wait()\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    return sample\n"
    )
    args = make_eval_args(
        checkpoint, server, tmp_path, custom_rm_path=path, rm_timeout=0.05, http_request_timeout=3600.0,
        custom_generate_function_path=f"{tmp_path}/slow.py:generate",
    )  # fmt: skip
    args.eval_datasets = args.eval_datasets[:1]
    with pytest.raises(RunError, match="4 of 6 samples of evaluation set easy failed"):
        run(args)


def test_what_an_engine_interrupts_is_continued(server, checkpoint, tmp_path):
    args = make_eval_args(checkpoint, server, tmp_path)
    server.text_of = lambda ids: "x" * len(ids)
    held = []

    def hold(payload):
        first = not held
        held.append(payload)
        return first

    async def main():
        server.hold = hold
        task = asyncio.create_task(eval_rollout(args, 0))
        while not held:
            await asyncio.sleep(0.01)
        from slime.utils.http_utils import post_control

        await post_control(f"{server.url}/abort_request", {"abort_all": True})
        try:
            return await task
        finally:
            await close_http_client()

    data = asyncio.run(main()).data
    assert all(r is not None for result in data.values() for r in result["rewards"])
    assert len(server.requests) == 9, "eight samples, one of them in two parts"


def test_a_prompt_that_is_always_aborted_is_an_error(server, checkpoint, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def generate(args, sample, sampling_params):\n"
        "    sample.status = type(sample).Status.ABORTED\n    return sample\n"
    )
    args = make_eval_args(checkpoint, server, tmp_path, custom_generate_function_path=f"{tmp_path}/mine.py:generate")
    with pytest.raises(RunError, match="was aborted 5 times"):
        run(args)


def test_missing_sets_and_files_are_named(server, checkpoint, tmp_path):
    with pytest.raises(UserError, match="--eval-prompt-data NAME PATH"):
        run(make_args(checkpoint, server.port))
    args = make_args(checkpoint, server.port)
    args.eval_datasets = build_eval_dataset_configs(args, [{"name": "a", "path": "/no/such.jsonl"}], {})
    with pytest.raises(UserError, match=r"--eval-prompt-data.*/no/such.jsonl"):
        run(args)


def test_the_context_limit_of_evaluation_is_its_own(server, checkpoint, tmp_path):
    args = make_args(checkpoint, server.port, rollout_max_context_len=9, eval_max_context_len=20)
    text = "a b c d e f g h"
    (tmp_path / "own.jsonl").write_text(json.dumps({"prompt": text, "label": "1"}))
    args.eval_datasets = build_eval_dataset_configs(args, [{"name": "own", "path": str(tmp_path / "own.jsonl")}], {})
    server.answer = lambda payload: [70] * 100
    args.eval_datasets[0].max_response_len = 100
    (sample,) = run(args).data["own"]["samples"]
    assert 9 <= len(sample.tokens) - sample.response_length < 20 == len(sample.tokens)
    assert args.rollout_max_context_len == 9
    args.eval_max_context_len = 10
    with pytest.raises(
        RunError, match="1 of 1 samples of evaluation set own failed.*with its response it may have 10 "
    ):
        run(args)


def test_prompts_over_the_limit_of_evaluation_are_left_out(server, checkpoint, tmp_path):
    (tmp_path / "long.jsonl").write_text('{"prompt": "abc", "label": "1"}\n{"prompt": "abcde", "label": "2"}\n')
    args = make_args(checkpoint, server.port)
    args.eval_datasets = build_eval_dataset_configs(args, [{"name": "long", "path": str(tmp_path / "long.jsonl")}], {})
    for limit, labels in ((None, ["1", "2"]), (3, ["1"])):
        args.eval_max_prompt_len = limit
        assert [sample.label for sample in run(args).data["long"]["samples"]] == labels


def test_bad_rows_are_left_out_on_request(server, checkpoint, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p", "label": "1"}\n{"prompt": \n')
    args = make_args(checkpoint, server.port)
    args.eval_datasets = build_eval_dataset_configs(args, [{"name": "bad", "path": str(tmp_path / "bad.jsonl")}], {})
    with pytest.raises(UserError, match="bad.jsonl"):
        run(args)
    args.allow_bad_rows = True
    assert len(run(args).data["bad"]["samples"]) == 1


def test_a_set_may_end_without_its_stragglers(server, checkpoint, tmp_path, caplog):
    args = make_eval_args(checkpoint, server, tmp_path)
    args.eval_datasets[0].eval_task_timeout = 100.0
    held = []

    def hold(payload):
        # Both samples of one prompt of the first set.
        first = held or [payload["input_ids"]]
        stays = payload["input_ids"] == first[0] and payload["sampling_params"]["temperature"] != 0.0
        if stays:
            held.append(payload["input_ids"])
        return stays

    def one_is_left(loop):
        names = [task.get_name() for task in asyncio.all_tasks(loop)]
        return bool(held) and sum(name.endswith(" of evaluation set easy") for name in names) == 1

    server.hold = hold
    output = run(args, limit_s=2 * LIMIT_S, loop_factory=lambda: LeapingLoop(one_is_left, 100.0))
    server.release()
    assert output.metrics == {"eval/easy-unfinished_prompts": 1}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["evaluation set easy: 1 of 3 prompts were left unfinished"]
    assert len(output.data["easy"]["samples"]) == 4 and len(output.data["hard"]["samples"]) == 2
    assert set(output.data["easy"]) == {"rewards", "truncated", "samples"}


def test_a_straggler_that_refuses_to_end_does_not_stretch_the_limit_of_a_set(server, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(abort, "CANCEL_TIMEOUT_S", 0.1)
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "async def generate(args, sample, sampling_params):\n"
        "    while sample.group_index == 0 and not args.released:\n"
        "        args.holding.set()\n"
        "        try:\n            await asyncio.sleep(0.01)\n        except asyncio.CancelledError:\n            pass\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = type(sample).Status.COMPLETED\n    return sample\n"
    )
    args = make_eval_args(checkpoint, server, tmp_path, custom_generate_function_path=f"{tmp_path}/mine.py:generate")
    del args.eval_datasets[1]
    args.eval_datasets[0].eval_early_stop_remaining = 1
    args.released, args.holding = False, asyncio.Event()

    async def main():
        try:
            return await asyncio.wait_for(eval_rollout(args, 4), LIMIT_S)
        finally:
            args.released = True
            await close_http_client()

    output = asyncio.run(main())
    assert args.holding.is_set()
    assert output.metrics == {"eval/easy-unfinished_prompts": 1}
    assert len(output.data["easy"]["samples"]) == 4


@pytest.mark.parametrize("failing", [1, 2])
def test_failures_that_a_generate_function_tells_of_stop_a_set_as_well(server, checkpoint, tmp_path, failing):
    (tmp_path / "mine.py").write_text(
        "def generate(args, sample, sampling_params):\n"
        f"    if sample.metadata['row'] < {failing}:\n"
        "        sample.status = type(sample).Status.FAILED\n        return sample\n"
        "    sample.append_response_tokens(args, tokens=[5], log_probs=[-1.0])\n"
        "    sample.status = type(sample).Status.COMPLETED\n    return sample\n"
    )
    args = make_eval_args(checkpoint, server, tmp_path, custom_generate_function_path=f"{tmp_path}/mine.py:generate")
    del args.eval_datasets[1]
    if failing == 2:
        with pytest.raises(RunError, match="4 of 6 samples of evaluation set easy failed.*no reason was given"):
            run(args)
        return
    easy = run(args).data["easy"]
    assert (len(easy["samples"]), len(easy["failed"])) == (4, 2)


@pytest.mark.parametrize("limit_s", [None, 100.0])
def test_a_function_that_cancels_prompts_ends_the_evaluation_with_their_names(server, checkpoint, tmp_path, limit_s):
    path = plugin(
        tmp_path,
        "async def fn(args, sample):\n"
        "    for task in asyncio.all_tasks():\n        task.cancel() if task.get_name().startswith('prompt 1 ') else None\n"
        "    await asyncio.Event().wait()\n",
    )
    args = make_eval_args(checkpoint, server, tmp_path, custom_rm_path=path)
    args.eval_datasets = args.eval_datasets[:1]
    args.eval_datasets[0].eval_task_timeout = limit_s
    with pytest.raises(
        RunError, match=r"^prompt 1 of evaluation set easy was cancelled; does a function of yours cancel"
    ):
        run(args)


NEVER = 3600.0


def until_stopped(seconds, **limits):
    """The prompts (by number) that were finished when the set ended; prompt i takes `seconds[i]`."""

    async def prompt(number):
        await asyncio.sleep(seconds[number])
        return number

    async def main():
        config = EvalDatasetConfig("aime", "p", n_samples_per_eval_prompt=2, **limits)
        tasks = [asyncio.create_task(prompt(number)) for number in range(len(seconds))]
        try:
            return await finished_prompts(tasks, config)
        finally:
            for task in tasks:
                task.cancel()

    return run_in_no_time(main())


def test_without_limits_all_prompts_finish():
    assert until_stopped([0.02, 0.0, 0.01]) == [0, 1, 2]


def test_limits_that_nothing_reaches_change_nothing():
    assert until_stopped([0.02, 0.0], eval_task_timeout=20, eval_early_stop_idle_timeout=15) == [0, 1]


def test_the_time_limit_leaves_the_rest_out(caplog):
    assert until_stopped([0.0, NEVER, 0.01], eval_task_timeout=0.3) == [0, 2]
    assert "evaluation set aime: 1 of 3 prompts were left unfinished" in caplog.text


def test_the_time_limit_is_an_error_when_too_little_finished():
    with pytest.raises(
        RunError, match=r"2 of 3 prompts \(4 samples\) finished within eval_task_timeout 0.3 s.*at least 5"
    ):
        until_stopped([0.0, NEVER, 0.01], eval_task_timeout=0.3, min_eval_samples=5)
    with pytest.raises(RunError, match=r"0 of 1 prompts"):
        until_stopped([NEVER], eval_task_timeout=0.05)


def test_stragglers_are_left_as_soon_as_few_remain():
    assert until_stopped([0.0, NEVER, 0.0, NEVER], eval_early_stop_remaining=2) == [0, 2]


def test_stragglers_are_waited_for_until_nothing_finishes():
    seconds = [0.0, 0.1, NEVER]
    assert until_stopped(seconds, eval_early_stop_remaining=2, eval_early_stop_idle_timeout=1.0) == [0, 1]


def test_many_that_remain_are_waited_for():
    assert until_stopped([0.0, 0.4, 0.4, 0.4], eval_early_stop_remaining=1, eval_early_stop_idle_timeout=0.1)[:2] == [
        0,
        1,
    ]


def test_an_early_stop_waits_for_enough_samples():
    assert until_stopped([0.0, 0.2, NEVER], eval_early_stop_idle_timeout=0.05, min_eval_samples=4) == [0, 1]


def test_a_failure_is_passed_on():
    async def fail():
        raise ValueError("broken prompt")

    async def main():
        task = asyncio.create_task(fail())
        return await finished_prompts([task], EvalDatasetConfig("a", "p", eval_task_timeout=5))

    with pytest.raises(ValueError, match="broken prompt"):
        asyncio.run(main())
