"""What the manager does around a rollout function, without Ray: plug-ins that fail, states, and a router it was given."""

import asyncio
from types import SimpleNamespace

import pytest

from slime.ray.rollout_manager import RolloutManager
from slime.rollout.data_source import DataSourceSnapshots
from slime.rollout.data_source_files import draw_groups, give_back
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils.errors import RunError, UserError
from slime.utils.types import Sample
from tests.support.args import parse

PLUG_INS = """
from slime.utils.types import Sample

def fails(*arguments, **keywords):
    raise KeyError("lost")

def groups(args, rollout_id, data_source, evaluation=False):
    if evaluation:
        samples = [Sample(index=0, tokens=[1, 2], response_length=1, reward=1.0)]
        return {"held_out": {"rewards": [1.0], "truncated": [False], "samples": samples}}
    return [[Sample(index=0, tokens=[1, 2], response_length=1)]]

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


@pytest.fixture(autouse=True)
def logs_stay_with_the_test(monkeypatch):
    monkeypatch.setattr("slime.ray.rollout_manager.configure_logger", lambda level: None)


@pytest.fixture
def plug_ins(tmp_path):
    file = tmp_path / "plug_ins.py"
    file.write_text(PLUG_INS)
    return file


def manager_with_source(args):
    manager = RolloutManager(args)
    manager._load_data_source()
    return manager


def sample():
    return Sample(index=0, group_index=0, tokens=[1, 2], response_length=1, reward=1.0)


def take_from_buffer(args):
    source = manager_with_source(args).data_source
    source.add_samples([[sample(), sample()]])
    source.get_samples(1, 3)


FAILURES = {
    "--rollout-function-path fails": lambda args: RolloutManager(args)._samples_of(3),
    "--eval-function-path fails": lambda args: RolloutManager(args)._evaluate(3, before=False),
    "--rollout-sample-filter-path fails": lambda args: RolloutManager(args)._samples_of(3),
    "--data-source-path NoConstructor": lambda args: manager_with_source(args),
    "--data-source-path Failing": lambda args: draw_groups(args, manager_with_source(args).data_source, 2, 3),
    "--data-source-path Failing add": lambda args: give_back(args, manager_with_source(args).data_source, [], 3),
    "--data-source-path Failing save": lambda args: manager_with_source(args)._states.save(3),
    "--data-source-path Failing load": lambda args: manager_with_source(args)._states.load(3),
    "--data-source-path FailingState": lambda args: manager_with_source(args)._states.remember(3),
    "--buffer-filter-path fails": take_from_buffer,
    "--custom-reward-post-process-path fails": lambda args: convert_samples_to_train_batch(args, [sample()]),
    "--custom-convert-samples-to-train-data-path fails": lambda args: convert_samples_to_train_batch(args, [sample()]),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_plug_in_that_raises_ends_the_run_with_flag_path_and_its_own_traceback(case, tmp_path, plug_ins):
    flag, name = case.split()[:2]
    args = parse(tmp_path, flag, f"{plug_ins}:{name}", "--save", str(tmp_path / "out"))
    if flag == "--rollout-sample-filter-path":
        args.rollout_function_path = f"{plug_ins}:groups"
    with pytest.raises(UserError) as caught:
        FAILURES[case](args)
    message = str(caught.value)
    assert message.startswith(f"{flag} {plug_ins}:{name} raised KeyError for ")
    assert ("for evaluation after rollout 3: " in message) == (flag == "--eval-function-path")
    assert 'raise KeyError("lost")' in message and "rollout_manager.py" not in message


def test_a_log_function_is_loaded_by_its_flag_and_its_failure_is_only_reported(tmp_path, plug_ins, caplog):
    (tmp_path / "logs.py").write_text("def rollout_log_function(*arguments):\n    return len(arguments) == 5\n")
    args = parse(tmp_path, "--custom-rollout-log-function-path", str(tmp_path / "logs.py"))
    assert RolloutManager(args)._logged_by_user(3, [], {}, 1.0) is True, "a conventional name, which the flag decides"
    args.custom_rollout_log_function_path = f"{plug_ins}:fails"
    assert RolloutManager(args)._logged_by_user(3, [], {}, 1.0) is False
    assert "--custom-rollout-log-function-path" in caplog.text


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
    args.rollouts_per_epoch = None
    manager, source = RolloutManager(args), Counting()
    manager._states = DataSourceSnapshots(args, source)
    for rollout_id in range(7):
        manager._remember_state(rollout_id)
    assert sorted(manager._states._kept) == remembered and source.calls == len(remembered)
    for rollout_id in remembered[:1]:
        manager._states.save(rollout_id)
        assert sorted(manager._states._kept) == remembered[1:], "what was saved is not held any longer"


class GivenRouter:
    """Remembers the order of what is done at the end."""

    ip, port, process = "127.0.0.1", 1, None

    def __init__(self, events, error=None):
        self.events, self.error = events, error

    def remove_workers(self, urls, timeout):
        self.events.append(("remove", list(urls)))
        if self.error:
            raise self.error

    def shutdown(self):
        self.events.append("router")


@pytest.mark.parametrize("error", [None, RunError("the router is dead")])
def test_our_engines_leave_a_given_router_before_they_end(tmp_path, error, caplog):
    events = []
    manager = RolloutManager(parse(tmp_path))
    manager._router = GivenRouter(events, error)
    manager._engine_group = SimpleNamespace(urls=["http://a", "http://b"], shutdown=lambda: events.append("engines"))
    manager._shutdown()
    assert events == [("remove", ["http://a", "http://b"]), "engines", "router"]
    assert ("our engines may still be registered" in caplog.text) == (error is not None)


def test_the_manager_falls_silent_before_its_engines_end(tmp_path, monkeypatch):
    """Requests that lose their engines, and groups that are given up, are no news at the end of a run."""
    events = []
    monkeypatch.setattr("logging.disable", lambda level: events.append("silent"))
    manager = RolloutManager(parse(tmp_path))
    manager._router = GivenRouter(events)
    manager._engine_group = SimpleNamespace(urls=["http://a"], shutdown=lambda: events.append("engines"))
    manager._shutdown()
    assert "silent" not in events
    events.clear()
    asyncio.run(manager.shutdown())
    assert events == [("remove", ["http://a"]), "silent", "engines", "router"]


def test_our_own_router_just_ends(tmp_path):
    events = []
    manager = RolloutManager(parse(tmp_path))
    manager._router = GivenRouter(events)
    manager._router.process = object()
    manager._shutdown()
    assert events == ["router"]


@pytest.mark.parametrize(("given_ip", "given_key"), [(None, None), ("127.0.0.1", None), ("127.0.0.1", "mine")])
def test_engines_always_have_a_key_but_a_given_router_is_tried_with_its_own(tmp_path, monkeypatch, given_ip, given_key):
    asked = []

    def start_router(args, log_dir):
        asked.append(args.router_api_key)
        return GivenRouter([])

    class Group:
        def __init__(self, args, *arguments):
            self.key = args.router_api_key

        def start(self): ...

    monkeypatch.setattr("slime.serving.router.start_router", start_router)
    monkeypatch.setattr("slime.serving.engine_group.EngineGroup", Group)
    args = parse(tmp_path)
    args.sglang_router_ip, args.router_api_key, args.log_dir = given_ip, given_key, tmp_path
    manager = RolloutManager(args)
    manager._start_serving(None, [])
    engine_key = manager._engine_group.key
    assert engine_key == args.router_api_key and (engine_key == given_key or len(engine_key) >= 32)
    assert asked == [given_key if given_ip else engine_key]


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
    actor, critic, _ = RolloutManager(parse(tmp_path, *words))._build_shards(samples)
    assert (len(actor), len(critic)) == (1, shards)
    assert (actor is critic) == (overrides == "lr: 0.1")
    assert actor[0].inner["num_microbatches"] == [4]
    assert sorted(i for box in critic for i in box.inner["sample_indices"].tolist()) == list(range(8))
    if "tokens" in overrides:
        assert critic[0].inner["num_microbatches"] == [8]


def test_no_two_evaluations_share_a_step_or_a_dump(tmp_path, plug_ins):
    """An evaluation stands at the number of rollouts that its weights were trained on."""
    args = parse(tmp_path, "--eval-function-path", f"{plug_ins}:groups")
    args.save_debug_rollout_data = str(tmp_path / "dumps/{rollout_id}.pt")
    manager = RolloutManager(args)
    logged = [
        *manager._evaluate(0, before=True),
        *manager._evaluate(0, before=False),
        *manager._evaluate(1, before=False),
    ]
    assert [(key, metrics["eval/step"]) for metrics, key in logged] == [("eval/step", step) for step in (0, 1, 2)]
    assert {path.stem for path in (tmp_path / "dumps").iterdir()} == {"eval_before_0", "eval_0", "eval_1"}
