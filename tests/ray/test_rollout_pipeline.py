"""What a rollout and an evaluation consist of, without Ray: plug-ins that fail, states, shards, and two calls at once."""

import array
import asyncio
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist

from slime.observability.console import evaluation_name, generation_name
from slime.ray.driver import RunLength
from slime.ray.rollout_pipeline import RolloutPipeline
from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.draws import DataSourceSnapshots, draw_groups, give_back
from slime.rollout.rm_hub import grading
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.scheduling.dp_schedule import DPSchedule
from slime.training.reports import rollout_data_metrics
from slime.training.rollout_batch import split_for_data_parallel, to_tensors
from slime.utils.errors import RunError, UserError
from slime.utils.types import Sample
from tests.support.models.args import parse

PLUG_INS = """
import threading

from slime.observability.logging_utils import log
from slime.rollout.generation_call import current_call
from slime.rollout.rm_hub.grading import compute_builtin_reward
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample

def fails(*arguments, **keywords):
    raise KeyError("lost")

def never_returns(args, data):
    args.goes_on.wait(60)

def never_returns_a_log(rollout_id, args, *given):
    args.waiting.append(rollout_id)
    args.goes_on.wait(60)

def leaves(*arguments):
    raise SystemExit("x")

def logs_from_a_thread_of_its_own(args, rollout_id, data_source, evaluation=False):
    thread = threading.Thread(target=log, args=(args, {"own/x": 1, "own/step": rollout_id}, "own/step"))
    thread.start()
    thread.join()
    return groups(args, rollout_id, data_source, evaluation)

def groups(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        samples = [Sample(index=0, tokens=[1, 2], response_length=1, reward=1.0)]
        return {"held_out": {"rewards": [1.0], "truncated": [False], "samples": samples}}
    return [[Sample(index=0, tokens=[1, 2], response_length=1)]]

def both_at_once(args, rollout_id, data_source, evaluation=False):
    call = current_call()
    with call.progress.start("evaluation" if evaluation else f"rollout {rollout_id}", 4) as progress:
        progress.advance(1 + rollout_id)
        log(args, {"own/x": rollout_id, "own/step": rollout_id}, "own/step")
        args.all_inside.wait(60)
        args.looked.wait(60)
        assert call.rollout_id == rollout_id == GenerateState(args).rollout_id and call.evaluation == evaluation
    return groups(args, rollout_id, data_source, evaluation)

def draws_itself(args, rollout_id, data_source, evaluation=False):
    if rollout_id == 1:
        assert args.first_drew.wait(60)
    ((sample, *_),) = data_source.get_samples(1)
    args.prompts[rollout_id] = sample.prompt
    if rollout_id == 0:
        args.first_drew.set()
        assert args.second_is_over.wait(60)
    return groups(args, rollout_id, data_source)

def tells_the_source(args, rollout_id, data_source, evaluation=False):
    args.level = 3
    return data_source.get_samples(1)

class KnowsTheRun:
    def __init__(self, args):
        self.args = args
    def lengths(self):
        return {"train": 8}
    def get_samples(self, num_samples):
        found = [self.args.num_rollout, self.args.rollouts_per_epoch, self.args.level]
        return [[Sample(index=0, tokens=[1, 2], response_length=1, metadata={"found": found})]]

def graded(args, rollout_id, data_source, evaluation=False):
    common = {"group_index": 0, "tokens": [1, 2], "response_length": 1}
    failed = Sample(index=2, reward=0.0, status=Sample.Status.FAILED, remove_sample=True, **common)
    told = Sample(index=0, reward=1.0, metadata={"raw_reward": 3.0}, **common)
    return [[told, Sample(index=1, reward=2.0, **common), failed]]

def ungraded(args, rollout_id, data_source, evaluation=False):
    return [[Sample(index=0, group_index=0, tokens=[1, 2], response_length=1)]]

def unjudged(args, rollout_id, data_source, evaluation=False):
    sample = Sample(index=0, group_index=0, tokens=[1, 2], response_length=1, response="85", label="85")
    sample.reward = compute_builtin_reward(args, sample)
    return [[sample]]

def doubled(args, samples):
    return [2 * sample.reward for sample in samples], [0.0 for _ in samples]

async def logs_later(rollout_id, args, *given):
    log(args, {"own/x": 1, "own/step": rollout_id}, "own/step")
    return True


def returns_what_is_asked_for(args, rollout_id, data_source, evaluation=False):
    return args.returned

def keeps_the_first(args, data):
    return data[:1]

def deletes_the_first(args, data):
    del data[0][:1]

def returns_its_data(args, data):
    return data


def gives_a_coroutine(*given):
    return logs_later(*given)

async def drops_all(args, data):
    for group in data:
        for sample in group:
            sample.remove_sample = True

async def doubled_later(args, samples):
    return doubled(args, samples)

async def converted_later(args, samples):
    return {
        "tokens": [[1, 2]], "response_lengths": [1], "rewards": [7.0], "raw_reward": [7.0], "truncated": [0],
        "sample_indices": [0], "loss_masks": [[1]],
    }

class NoConstructor:
    def __init__(self, args):
        raise KeyError("lost")

class Failing:
    def __init__(self, args): ...
    get_samples = add_samples = save = load = fails

class FailingState(Failing):
    save = load = None
    state_dict = fails
    def load_state_dict(self, state): ...
"""


@pytest.fixture
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def plug_ins(tmp_path):
    file = tmp_path / "plug_ins.py"
    file.write_text(PLUG_INS)
    return file


def sample():
    return Sample(index=0, group_index=0, tokens=[1, 2], response_length=1, reward=1.0)


def take_from_buffer(args):
    source = RolloutPipeline(args).data_source
    source.add_samples([[sample(), sample()]])
    source.get_samples(1, 3)


@pytest.mark.parametrize(("interval", "due"), [(3, [2, 5, 8]), (1, [*range(2, 9)]), (0, [])])
def test_samples_of_any_function_are_shown_first_and_after_every_interval(tmp_path, plug_ins, caplog, interval, due):
    caplog.set_level("INFO")
    words = f"--rollout-function-path {plug_ins}:graded --eval-function-path {plug_ins}:groups --log-samples-interval"
    pipeline = RolloutPipeline(parse(tmp_path, *words.split(), str(interval)))
    for rollout_id in range(2, 9):
        pipeline.samples_of(rollout_id)
        pipeline.evaluate(rollout_id)
    shown = [message.partition(" sample: ")[0] for message in caplog.messages if " sample: " in message]
    assert shown == [
        what for n in due for what in (f"rollout {n}, first", f"rollout {n}, last", "evaluation set held_out, first")
    ]


FAILURES = {
    "--rollout-function-path fails": lambda args: RolloutPipeline(args).samples_of(3),
    "--eval-function-path fails": lambda args: RolloutPipeline(args).evaluate(3, before=False),
    "--rollout-sample-filter-path fails": lambda args: RolloutPipeline(args).samples_of(3),
    "--data-source-path NoConstructor": RolloutPipeline,
    "--data-source-path Failing": lambda args: draw_groups(args, RolloutPipeline(args).data_source, 2, 3),
    "--data-source-path Failing add": lambda args: give_back(args, RolloutPipeline(args).data_source, [], 3),
    "--data-source-path Failing save": lambda args: RolloutPipeline(args).states.save(3),
    "--data-source-path Failing load": lambda args: RolloutPipeline(args).states.load(3),
    "--data-source-path FailingState": lambda args: RolloutPipeline(args).states.remember(3),
    "--buffer-filter-path fails": take_from_buffer,
    "--custom-reward-post-process-path fails": lambda args: convert_samples_to_train_batch(args, [sample()]),
    "--custom-convert-samples-to-train-data-path fails": lambda args: convert_samples_to_train_batch(args, [sample()]),
}


@pytest.mark.parametrize(
    ("kind", "statement"), [("KeyError", 'raise KeyError("lost")'), ("SystemExit", 'raise SystemExit("lost")')]
)
@pytest.mark.parametrize("case", FAILURES)
def test_a_plug_in_that_raises_ends_the_run_with_flag_path_and_its_own_traceback(
    case, kind, statement, tmp_path, plug_ins
):
    flag, name = case.split()[:2]
    plug_ins.write_text(PLUG_INS.replace('raise KeyError("lost")', statement))
    args = parse(tmp_path, flag, f"{plug_ins}:{name}", "--save", str(tmp_path / "out"))
    if flag == "--rollout-sample-filter-path":
        args.rollout_function_path = f"{plug_ins}:groups"
    with pytest.raises(UserError) as caught:
        FAILURES[case](args)
    message = str(caught.value)
    assert message.startswith(f"{flag} {plug_ins}:{name} raised {kind} for ") and "lost" in message.splitlines()[0]
    assert ("for evaluation after rollout 3: " in message) == (flag == "--eval-function-path")
    assert statement in message and "rollout_pipeline.py" not in message


def test_a_sample_filter_that_never_returns_ends_the_run_by_its_name(tmp_path, plug_ins):
    words = ["--rollout-sample-filter-path", f"{plug_ins}:never_returns", "--http-request-timeout", "0.2"]
    args = parse(tmp_path, *words, "--rollout-function-path", f"{plug_ins}:groups")
    args.goes_on = threading.Event()
    late = f"{' '.join(words[:2])} did not return within --http-request-timeout 0.2 s; it was called for rollout 3"
    try:
        with pytest.raises(UserError, match="^" + re.escape(late)):
            RolloutPipeline(args).samples_of(3)
    finally:
        args.goes_on.set()


@pytest.mark.parametrize("name", ["fails", "leaves", "never_returns_a_log"])
def test_a_log_function_that_fails_or_never_returns_is_only_reported(tmp_path, plug_ins, caplog, name):
    # Those that return have time to, also where the machine is busy.
    words = ["--debug-rollout-only", "--http-request-timeout", "0.2" if name == "never_returns_a_log" else "60"]
    flags = ["--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path"]
    for flag in flags:
        words += [flag, f"{plug_ins}:{name}"]
    words += ["--rollout-function-path", f"{plug_ins}:groups", "--eval-function-path", f"{plug_ins}:groups"]
    args = parse(tmp_path, *words)
    args.goes_on, args.waiting = threading.Event(), []
    try:
        pipeline = RolloutPipeline(args)
        for rollout_id in (3, 4):
            assert "rollout/response_len/mean" in pipeline.generate(rollout_id).logged[-1][0], "the usual metrics"
            assert "eval/held_out" in pipeline.evaluate(rollout_id)[-1][0]
    finally:
        args.goes_on.set()
    told = {"fails": "", "leaves": "", "never_returns_a_log": " from here on"}[name]
    for flag in flags:
        assert f"{flag} {plug_ins}:{name} failed; default logging is used{told}\n" in caplog.text
    if name == "never_returns_a_log":
        assert f"{plug_ins}:{name} did not return within --http-request-timeout 0.2 s" in caplog.text
        assert args.waiting == [3, 3], "of every later step nobody waits for it"


EVALUATIONS = {
    "set 'aime' has the keys ['reward']; expected set name → {\"rewards\": [...]": {"aime": {"reward": [1.0]}},
    "set 'aime' has list; expected": {"aime": [1.0]},
    "set 'aime': `rewards` is float; expected a list": {"aime": {"rewards": 1.0}},
    "set 'aime': `rewards` is NoneType; expected a list": {"aime": {"rewards": None}},
    "set 'aime': `rewards` is float64; expected a list": {"aime": {"rewards": np.mean([1.0])}},
    "set 'aime': `truncated` is ndarray; expected a list": {"aime": {"rewards": [1.0], "truncated": np.array(True)}},
    "set 'aime': `samples` is ndarray; expected a list": {"aime": {"rewards": [1.0], "samples": np.zeros(1)}},
    "set 'aime': samples[0] is list; expected Samples": {"aime": {"rewards": [1.0], "samples": [[Sample()]]}},
    "set 'aime': failed[0] is dict; expected Samples": {"aime": {"rewards": [1.0], "failed": [{"reward": None}]}},
    "set 'aime': truncated[0] is None; expected true or false": {"aime": {"rewards": [1.0], "truncated": [None]}},
    "set 'aime': reward 0 is {'score': 1.0}; expected a finite number": {"aime": {"rewards": [{"score": 1.0}]}},
    "set 'aime': reward 1 is None; expected a finite number": {"aime": {"rewards": [1.0, None]}},
    "set 'aime' has 1 rewards, 2 truncated; expected": {"aime": {"rewards": [1.0], "truncated": [False] * 2}},
    "returned list as data; expected a dict": RolloutFnEvalOutput([1.0]),
    "returned list as metrics; expected a dict": RolloutFnEvalOutput({"aime": {"rewards": [1.0]}}, [1]),
}


@pytest.mark.parametrize("message", EVALUATIONS)
def test_what_an_evaluation_returned_is_refused_by_flag_path_and_set(tmp_path, plug_ins, message):
    path = f"{plug_ins}:returns_what_is_asked_for"
    args = parse(tmp_path, "--eval-function-path", path)
    args.returned = EVALUATIONS[message]
    with pytest.raises(UserError, match="^" + re.escape(f"--eval-function-path {path}") + ",? " + re.escape(message)):
        RolloutPipeline(args).evaluate(3)


def test_an_evaluation_of_rewards_alone_is_reported_and_dumped(tmp_path, plug_ins):
    args = parse(tmp_path, "--eval-function-path", f"{plug_ins}:returns_what_is_asked_for")
    args.save_debug_rollout_data = str(tmp_path / "dumps/{rollout_id}.pt")
    args.returned = {"aime": {"rewards": [1.0, 0]}}
    assert RolloutPipeline(args).evaluate(3)[-1][0]["eval/aime"] == 0.5


@pytest.mark.parametrize("make_array", [np.array, lambda values: array.array("d", values)], ids=["numpy", "array"])
def test_columns_of_an_evaluation_may_be_arrays(tmp_path, plug_ins, make_array):
    args = parse(tmp_path, "--eval-function-path", f"{plug_ins}:returns_what_is_asked_for")
    args.returned = {"aime": {"rewards": make_array([1.0, 0.0]), "truncated": np.array([True, False]), "samples": None}}
    metrics, _ = RolloutPipeline(args).evaluate(3)[-1]
    assert (metrics["eval/aime"], metrics["eval/aime-truncated_ratio"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("function", "subject"), [("generate_rollout_async", "rollout 3"), ("eval_rollout", "evaluation after rollout 3")]
)
def test_a_function_that_cancels_all_tasks_ends_the_run_with_a_word_about_it(tmp_path, monkeypatch, function, subject):
    async def cancelled(*arguments):
        asyncio.current_task().cancel()
        await asyncio.Event().wait()

    monkeypatch.setattr(sglang_rollout, function, cancelled)
    pipeline = RolloutPipeline(parse(tmp_path))
    with pytest.raises(RunError, match=f"^{subject} was cancelled; does a function of yours cancel tasks"):
        pipeline.samples_of(3) if subject == "rollout 3" else pipeline.evaluate(3)


def test_metrics_of_a_rollout_are_a_dict(tmp_path, plug_ins):
    path = f"{plug_ins}:returns_what_is_asked_for"
    args = parse(tmp_path, "--rollout-function-path", path)
    args.returned = RolloutFnTrainOutput([[sample()]], [1])
    with pytest.raises(UserError, match=f"^--rollout-function-path {re.escape(path)} returned list as metrics"):
        RolloutPipeline(args).samples_of(3)


def test_samples_of_a_rollout_that_cannot_be_used_are_told_by_flag_and_path(tmp_path, plug_ins):
    path = f"{plug_ins}:returns_what_is_asked_for"
    words = ["--rollout-function-path", path, "--rollout-sample-filter-path", f"{plug_ins}:returns_its_data"]
    args = parse(tmp_path, *words)
    args.returned = [[1]]
    with pytest.raises(UserError, match=f"^--rollout-function-path {re.escape(path)}: samples.0..0. is int"):
        RolloutPipeline(args).samples_of(3)


def test_a_sample_filter_that_returns_a_part_of_its_samples_is_refused(tmp_path, plug_ins):
    words = ["--rollout-function-path", f"{plug_ins}:groups", "--rollout-sample-filter-path"]
    path = f"{plug_ins}:keeps_the_first"
    match = (
        f"^--rollout-sample-filter-path {re.escape(path)} returned .* for rollout 3; expected None: a sample is left"
    )
    with pytest.raises(UserError, match=match):
        RolloutPipeline(parse(tmp_path, *words, path)).samples_of(3)
    RolloutPipeline(parse(tmp_path, *words, f"{plug_ins}:returns_its_data")).samples_of(3)


def test_a_sample_filter_that_deletes_samples_is_refused(tmp_path, plug_ins):
    path = f"{plug_ins}:deletes_the_first"
    words = ["--rollout-function-path", f"{plug_ins}:groups", "--rollout-sample-filter-path", path]
    with pytest.raises(
        UserError, match=f"^--rollout-sample-filter-path {re.escape(path)} left 0 of 1 samples in the list"
    ):
        RolloutPipeline(parse(tmp_path, *words)).samples_of(3)


def test_a_log_function_is_loaded_by_its_flag_and_its_failure_is_only_reported(tmp_path, plug_ins, caplog):
    (tmp_path / "logs.py").write_text("def rollout_log_function(*arguments):\n    return len(arguments) == 5\n")
    args = parse(tmp_path, "--custom-rollout-log-function-path", str(tmp_path / "logs.py"))
    assert RolloutPipeline(args).logged_by_user(3, [], {}, 1.0) is True, "a conventional name, which the flag decides"
    args.custom_rollout_log_function_path = f"{plug_ins}:fails"
    assert RolloutPipeline(args).logged_by_user(3, [], {}, 1.0) is False
    assert "--custom-rollout-log-function-path" in caplog.text


@pytest.mark.parametrize(("post_process", "mean"), [(None, 2.5), ("doubled", 3.0)])
def test_a_run_that_only_generates_reports_the_reward_of_one_that_trains(tmp_path, plug_ins, world, post_process, mean):
    words = ["--rollout-function-path", f"{plug_ins}:graded"]
    if post_process:
        words += ["--custom-reward-post-process-path", f"{plug_ins}:{post_process}"]
    result = RolloutPipeline(parse(tmp_path, *words, "--debug-rollout-only")).generate(3)
    assert result.logged[-1][0]["rollout/raw_reward"] == mean
    trains = parse(tmp_path, *words)
    batch = convert_samples_to_train_batch(trains, RolloutPipeline(trains).samples_of(3)[0])
    [shard] = split_for_data_parallel(batch, DPSchedule([[0, 1, 2]], [[[0, 1, 2]]], [1], [3], 0))
    assert rollout_data_metrics(trains, to_tensors(shard, "cpu"), world)["raw_reward"] == mean


def test_rewards_that_a_run_that_trains_would_refuse_are_told_and_not_reported(tmp_path, plug_ins, caplog):
    args = parse(tmp_path, "--rollout-function-path", f"{plug_ins}:ungraded", "--debug-rollout-only")
    metrics, _ = RolloutPipeline(args).generate(3).logged[-1]
    assert "rollout/raw_reward" not in metrics and "the reward of sample 0 is None" in caplog.text


def test_who_has_how_much_memory_of_a_host_is_told_with_a_rollout(tmp_path, plug_ins):
    args = parse(tmp_path, "--rollout-function-path", f"{plug_ins}:graded", "--debug-rollout-only")
    pipeline = RolloutPipeline(args)
    alone, _ = pipeline.generate(3).logged[-1]
    assert alone["perf/manager_host_memory_gib"] > 0 and "perf/engine_host_memory_gib" not in alone
    pipeline.engine_memory = lambda: 1.5
    beside_engines, _ = pipeline.generate(4).logged[-1]
    assert beside_engines["perf/engine_host_memory_gib"] == 1.5


def test_a_reward_that_finds_nothing_to_judge_is_told_by_the_first_rollout(tmp_path, plug_ins, caplog):
    grading._tell_of_missing_solutions.cache_clear()
    words = ["--rollout-function-path", f"{plug_ins}:unjudged", "--rm-type", "deepscaler", "--debug-rollout-only"]
    pipeline = RolloutPipeline(parse(tmp_path, *words))
    for rollout_id in (0, 1):
        assert pipeline.generate(rollout_id).logged[-1][0]["rollout/unjudged_samples"] == 1
        assert caplog.text.count("no answer of a whole rollout has the </think>") == 1


@pytest.mark.parametrize("name", ["logs_later", "gives_a_coroutine"])
def test_coroutines_that_log_are_awaited(tmp_path, plug_ins, name):
    """Also those of a plain function around an async one: only its result shows it."""
    words = ["--debug-rollout-only"]
    for flag in ("--custom-rollout-log-function-path", "--custom-eval-rollout-log-function-path"):
        words += [flag, f"{plug_ins}:{name}"]
    words += ["--rollout-function-path", f"{plug_ins}:groups", "--eval-function-path", f"{plug_ins}:groups"]
    pipeline = RolloutPipeline(parse(tmp_path, *words))
    own = [({"own/x": 1, "own/step": 3}, "own/step")]
    assert pipeline.generate(3).logged == pipeline.evaluate(3) == own, "they take the place of the usual metrics"


def test_coroutines_that_look_at_a_whole_step_are_awaited(tmp_path, plug_ins):
    words = ["--rollout-function-path", f"{plug_ins}:graded", "--rollout-sample-filter-path", f"{plug_ins}:drops_all"]
    args = parse(tmp_path, *words, "--custom-reward-post-process-path", f"{plug_ins}:doubled_later")
    samples, _ = RolloutPipeline(args).samples_of(3)
    assert all(sample.remove_sample for sample in samples)
    assert convert_samples_to_train_batch(args, samples)["raw_reward"].tolist() == [2.0, 4.0, 0.0]
    args.custom_convert_samples_to_train_data_path = f"{plug_ins}:converted_later"
    assert convert_samples_to_train_batch(args, samples)["rewards"].tolist() == [7.0]


def test_what_a_thread_of_the_users_own_logs_leaves_with_the_call(tmp_path, plug_ins):
    words = ["--rollout-function-path", f"{plug_ins}:logs_from_a_thread_of_its_own", "--debug-rollout-only"]
    logged = RolloutPipeline(parse(tmp_path, *words)).evaluate(3, before=False)
    assert ({"own/x": 1, "own/step": 3}, "own/step") in logged


@pytest.mark.parametrize(
    "flags, remembered",
    [
        ([], []),
        (["--save", "{}", "--save-interval", "3"], [2, 5, 6]),
        (["--save", "{}"], []),
        (["--save", "{}", "--save-interval", "1"], list(range(7))),
    ],
)
def test_the_data_state_is_kept_for_rollouts_that_will_be_saved(tmp_path, flags, remembered):
    class Counting:
        calls = 0

        def state_dict(self):
            self.calls += 1
            return {"calls": self.calls}

        def load_state_dict(self, state): ...

    args = parse(tmp_path, *[flag.format(tmp_path / "out") for flag in flags], "--num-rollout", "7")
    pipeline, source = RolloutPipeline(args), Counting()
    pipeline.length = RunLength(7)
    pipeline.states = DataSourceSnapshots(args, source)
    for rollout_id in range(7):
        pipeline._remember_state(rollout_id)
    assert sorted(pipeline.states._kept) == remembered and source.calls == len(remembered)
    for rollout_id in remembered[:1]:
        pipeline.states.save(rollout_id)
        assert sorted(pipeline.states._kept) == remembered[1:], "what was saved is not held any longer"


def answer(index, tokens):
    return Sample(index=index, group_index=index, tokens=[1] * tokens, response_length=1, reward=1.0)


@pytest.mark.parametrize(
    "overrides, shards", [("lr: 0.1", 1), ("max_tokens_per_gpu: 8", 1), ("tensor_model_parallel_size: 1", 2)]
)
def test_a_critic_takes_the_shards_of_the_actor_or_those_of_its_own_layout(tmp_path, monkeypatch, overrides, shards):
    path = tmp_path / "roles.yaml"
    path.write_text(f"megatron: [{{role: critic, overrides: {{{overrides}}}}}]\n")
    words = ["--advantage-estimator", "ppo", "--megatron-config-path", str(path), "--actor-num-gpus-per-node", "2"]
    words += ["--tensor-model-parallel-size", "2", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "16"]
    monkeypatch.setattr("ray.put", lambda value: value)
    samples = [answer(i, 6) for i in range(8)]
    actor, critic, _ = RolloutPipeline(parse(tmp_path, *words))._build_shards(samples)
    assert (len(actor), len(critic)) == (1, shards)
    assert (actor is critic) == (overrides == "lr: 0.1")
    assert actor[0].inner["num_microbatches"] == [4]
    assert sorted(i for box in critic for i in box.inner["sample_indices"].tolist()) == list(range(8))
    if "tokens" in overrides:
        assert critic[0].inner["num_microbatches"] == [8]


def test_a_source_of_the_users_sees_in_its_arguments_what_the_run_finds_out(tmp_path, plug_ins):
    words = ["--data-source-path", f"{plug_ins}:KnowsTheRun", "--rollout-function-path", f"{plug_ins}:tells_the_source"]
    args = parse(tmp_path, *words, "--num-rollout", "6")
    pipeline = RolloutPipeline(args)
    samples, _ = pipeline.samples_of(0)
    assert samples[0].metadata["found"] == [6, pipeline.length.rollouts_per_epoch, 3]
    assert "level" not in vars(args) and "rollouts_per_epoch" not in vars(args)


def test_no_two_evaluations_share_a_step_or_a_dump(tmp_path, plug_ins):
    """An evaluation stands at the number of rollouts that its weights were trained on."""
    args = parse(tmp_path, "--eval-function-path", f"{plug_ins}:groups")
    args.save_debug_rollout_data = str(tmp_path / "dumps/{rollout_id}.pt")
    pipeline = RolloutPipeline(args)
    logged = [
        *pipeline.evaluate(0, before=True),
        *pipeline.evaluate(0, before=False),
        *pipeline.evaluate(1, before=False),
    ]
    assert [(key, metrics["eval/step"]) for metrics, key in logged] == [("eval/step", step) for step in (0, 1, 2)]
    assert {path.stem for path in (tmp_path / "dumps").iterdir()} == {"eval_before_0", "eval_0", "eval_1"}


def two_sets(before):
    return {
        name: {"rewards": [reward], "truncated": [False], "samples": [graded_sample(reward, name)]}
        for name, reward in (("aime", before), ("gpqa", before + 1))
    }


def graded_sample(reward, name):
    one = sample()
    one.reward, one.metadata = {"score": 9.0, "held_out": reward}, {"source_name": f"a file of {name}"}
    return one


def test_dumps_of_evaluations_are_replayed_by_the_flags_of_the_run(tmp_path, plug_ins):
    """Before and after training on a rollout, each in its sets, with the rewards that they were judged by."""
    template = str(tmp_path / "dumps/{rollout_id}.pt")
    keys = ["--reward-key", "score", "--eval-reward-key", "held_out"]
    args = parse(tmp_path, "--eval-function-path", f"{plug_ins}:returns_what_is_asked_for", *keys)
    args.save_debug_rollout_data = template
    written = {}
    for before in (True, False):
        args.returned = two_sets(0.25 + before)
        written[before] = RolloutPipeline(args).evaluate(0, before=before)
    assert args.returned["aime"]["samples"][0].metadata == {"source_name": "a file of aime"}, "a run's own samples stay"
    words = ["--eval-function-path", "slime.rollout.forge_load.generate_rollout", "--load-forge-rollout-data", template]
    replayed = RolloutPipeline(parse(tmp_path, *words, *keys))
    for before in (True, False):
        metrics = [logged[0][0] for logged in (written[before], replayed.evaluate(0, before=before))]
        assert metrics[0] == metrics[1] and metrics[0]["eval/gpqa"] == 1.25 + before


@pytest.mark.parametrize("second", ["evaluation", "rollout"])
def test_two_calls_at_once_have_metrics_and_progress_of_their_own(tmp_path, plug_ins, second):
    args = parse(tmp_path, "--rollout-function-path", f"{plug_ins}:both_at_once", "--debug-rollout-only")
    args.eval_function_path = args.rollout_function_path
    args.all_inside, args.looked = threading.Barrier(3), threading.Event()
    pipeline = RolloutPipeline(args)

    async def main():
        other = (pipeline.evaluate, 0) if second == "evaluation" else (pipeline.generate, 2)
        tasks = [asyncio.create_task(asyncio.to_thread(*call)) for call in ((pipeline.generate, 1), other)]
        await asyncio.to_thread(args.all_inside.wait, 60)
        names = [generation_name(1), evaluation_name(0) if second == "evaluation" else generation_name(2)]
        told = [pipeline.progress(name) for name in names]
        args.looked.set()
        results = await asyncio.gather(*tasks)
        assert [pipeline.progress(name) for name in names] == [None, None]
        return told, results

    told, (rollout, other) = asyncio.run(main())
    other = other if second == "evaluation" else other.logged
    number = 0 if second == "evaluation" else 2
    axis, description = ("eval/step", "evaluation") if second == "evaluation" else ("rollout/step", "rollout 2")
    assert told == [("rollout 1", 2, 4), (description, 1 + number, 4)]
    assert [(key, metrics[key]) for metrics, key in rollout.logged] == [("own/step", 1), ("rollout/step", 1)]
    steps = [("own/step", number), (axis, 1 if second == "evaluation" else 2)]
    assert [(key, metrics[key]) for metrics, key in other] == steps


def test_a_resume_draws_what_a_rollout_had_that_was_over_before_the_saved_one(tmp_path, plug_ins, monkeypatch):
    monkeypatch.setattr(RolloutPipeline, "_build_shards", lambda self, samples: ([], [], 0))
    words = ["--rollout-function-path", f"{plug_ins}:draws_itself", "--save", str(tmp_path), "--save-interval", "1"]
    args = parse(tmp_path, *words, "--num-rollout", "2")
    args.prompts, args.first_drew, args.second_is_over = {}, threading.Event(), threading.Event()
    pipeline = RolloutPipeline(args)
    pipeline.states.load(-1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(pipeline.generate, 0)
        pipeline.generate(1)
        args.second_is_over.set()
        first.result(60)
    pipeline.states.save(0)
    pipeline.states.save(1)
    args.load = args.save
    for rollout_id in (0, 1):
        resumed = RolloutPipeline(args)
        resumed.states.load(rollout_id)
        following = resumed.data_source.get_samples(1)[0][0].prompt
        assert (following == args.prompts[1]) == (rollout_id == 0) and following != args.prompts[0]
