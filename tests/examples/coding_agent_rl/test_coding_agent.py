"""The example of coding agents, with real sandboxes and agents of a few lines: what is trained, what is graded, what fails."""

import asyncio
import textwrap

import pytest

from examples.coding_agent_rl import coding_agent, toy_task
from examples.coding_agent_rl.coding_agent import Endpoint, Task, generate
from examples.coding_agent_rl.settings import Settings
from slime.agent.sandbox import LocalSandbox
from slime.rollout.failures import SampleFailed
from slime.rollout.generation import generate_and_rm
from slime.utils.errors import UserError
from slime.utils.misc import SingletonMeta
from slime.utils.sample_fields import held
from slime.utils.types import Sample
from tests.support.models.toy_rows import toy_rows
from tests.support.processes.spoken import spoken

PLUG_INS = """
from pathlib import Path
from slime.agent.adapters import OpenAIAdapter
from slime.rollout.generation_call import current_call
from slime.agent.harness import BaseHarness, run_agent
from slime.agent.sandbox import LocalSandbox, SandboxError
import examples.coding_agent_rl.sandboxes as sandboxes

failures, made = [], []

def unsteady(metadata, purpose):
    made.append(purpose)
    if failures and failures[0] == purpose:
        failures.pop(0)
        return Unborn()
    return sandboxes.local(metadata, purpose)

class Unborn(LocalSandbox):
    async def __aenter__(self): raise SandboxError("no room left")

def breaking(metadata, purpose):
    return Breaking(network="host", readable=[sandboxes.HERE]) if purpose == "work" else sandboxes.local(metadata, purpose)

class Breaking(LocalSandbox):
    '''It is gone when the agent has done its work.'''
    async def exec(self, cmd, **options):
        if "diff --cached" in cmd:
            self._keeper.kill()
            await self._keeper.wait()
        return await super().exec(cmd, **options)

class Vanishing(LocalSandbox):
    '''It is gone while the diff is made; nothing but the status of that command tells.'''
    async def exec(self, cmd, **options):
        if "diff --cached" in cmd:
            self._keeper.kill()
            await self._keeper.wait()
            return 137, "", ""
        return await super().exec(cmd, **options)

class Sluggish(LocalSandbox):
    async def exec(self, cmd, **options):
        return (124, "", "") if "diff --cached" in cmd else await super().exec(cmd, **options)

class Unapplied(LocalSandbox):
    async def write_file(self, path, content, **options):
        await super().write_file(path, "no diff" if path.endswith(".patch") else content, **options)

def vanishing(metadata, purpose): return Vanishing(network="host", readable=[sandboxes.HERE])
def sluggish(metadata, purpose): return Sluggish(network="host", readable=[sandboxes.HERE])
def unapplied(metadata, purpose): return Unapplied(network="host", readable=[sandboxes.HERE])

class Failing(OpenAIAdapter):
    def failure_of(self, sid): return "the engine answered 503"

class Inconsistent(OpenAIAdapter):
    async def finish_session(self, sid, **options): raise ValueError("a turn has 2 log-probs for 3 output ids")

class Noting(OpenAIAdapter):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        made.append(options["chat_template_kwargs"])
    def open_session(self, *args, **options):
        super().open_session(*args, **options)
        made.append(options["chat_template_kwargs"])

class Shell(BaseHarness):
    '''Runs a shell command; it asks no model.'''
    name, cmd = "shell", "true"
    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        return await run_agent(
            sb, name=self.name, cmd=self.cmd, ctx=ctx, prompt=prompt, time_budget_sec=time_budget_sec,
            env={"AGENT_URL": ctx.adapter_url, "AGENT_KEY": ctx.session_id}, poll_interval_sec=0.05,
        )

AGENT = f"python -I -S -B {Path(sandboxes.HERE, 'toy_agent.py')}"
class Cheating(Shell):
    cmd = f"cat > issue; {AGENT} < issue; echo pass > test_f.py; git config core.hooksPath /tmp; touch own; git add own"
SETTINGS = ("diff.noprefix true", "color.ui always", "diff.external true", "diff.context 0", "diff.relative true")
class Setting(Shell):
    cmd = f"cat > issue; {AGENT} < issue; rm issue; " + "; ".join(f"git config {words}" for words in SETTINGS)
class Deceiving(Shell): cmd = f"cat > issue; {AGENT} < issue; rm test_f.py; mkdir test_f.py; touch test_f.py/x"
class Large(Shell): cmd = f"cat > issue; {AGENT} < issue; yes 0123456789abcdef | head -c 3000000 > large"
class Killed(Shell): cmd = f"cat > issue; {AGENT} < issue; rm issue; touch .git/index.lock"
class Wrecking(Shell): cmd = f"cat > issue; {AGENT} < issue; rm -rf .git"
class Slow(Shell): cmd = f"cat > issue; {AGENT} < issue; rm issue; sleep 1000"
class Hanging(Shell): cmd = "sleep 1000"
class Ending(Shell):
    '''The step is wound down while the agent works.'''
    cmd = f"cat > issue; {AGENT} < issue"
    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        status = await super().launch_and_wait(sb, ctx, prompt, time_budget_sec)
        current_call().aborted = True
        return status
"""


@pytest.fixture(autouse=True)
def own_settings(monkeypatch):
    monkeypatch.setenv("ADAPTER_PORT", "0")
    monkeypatch.setenv("ADAPTER_BIND_HOST", "127.0.0.1")
    SingletonMeta.clear_instances()
    yield
    endpoint = SingletonMeta._instances.get(Endpoint)
    if endpoint is not None:
        endpoint.served.stop()
    SingletonMeta.clear_instances()


@pytest.fixture
def plug_ins(tmp_path):
    """A module of sandboxes and harnesses, and its path."""
    from slime.utils.plugin_loader import load_function

    path = tmp_path / "own.py"
    path.write_text(textwrap.dedent(PLUG_INS))
    return load_function(f"{path}:unsteady", flag="agent_sandbox").__globals__, path


def a_sample(**metadata):
    (row,) = [toy_task.problem((47, 38), FixedDraws())]
    return Sample(index=3, rollout_id=3, prompt=row["prompt"], label=row["label"], metadata=row["metadata"] | metadata)


class FixedDraws:
    def integers(self, low, high):
        return low + 1


AGENT_SETTINGS = {
    "agent_sandbox": "examples.coding_agent_rl.sandboxes.local",
    "agent_harness": "examples.coding_agent_rl.toy_harness.ToyHarness",
    "agent_adapter": "slime.agent.adapters.OpenAIAdapter",
    "agent_tool_parser": None,
    "agent_reasoning_parser": None,
    "agent_installs_cli": False,
    "agent_poll_interval_sec": 0.05,
    "max_turns": 2,
}


def work_of(checkpoint, *said, function=generate, arguments=(), setup_cmd="true", **changes):
    """(what `generate` returned for an agent whose model says this, the requests to the engine)."""
    turns = [f"{turn}<|im_end|>" for turn in said]
    return spoken(
        checkpoint, function, a_sample(setup_cmd=setup_cmd), turns, arguments, **{**AGENT_SETTINGS, **changes}
    )


def test_agents_are_asked_by_the_template_arguments_of_the_run_and_of_the_evaluation_set(checkpoint, plug_ins):
    module, path = plug_ins
    of_run, of_set = {"enable_thinking": True}, {"enable_thinking": False}
    sample = a_sample()
    sample.apply_chat_template_kwargs = of_set
    changes = {"apply_chat_template_kwargs": of_run, "agent_adapter": f"{path}:Noting"}
    spoken(checkpoint, generate, sample, ["it is fine<|im_end|>"], (True,), **{**AGENT_SETTINGS, **changes})
    assert module["made"] == [of_run, of_set]


def test_a_repair_that_passes_is_rewarded_and_what_the_model_said_is_trained(checkpoint):
    (sample,), requests = work_of(checkpoint, "<edit>x*47+38</edit>", "ok")
    assert sample.reward == 1.0 and sample.status is Sample.Status.COMPLETED and sample.rollout_id == 3
    assert len(requests) == 2 and requests[0]["sampling_params"]["max_new_tokens"] <= 200
    # One sample of both turns; what the agent told of its own run lies between them, and is not trained.
    assert sample.response.startswith("<edit>x*47+38</edit>") and "132" in sample.response and "ok" in sample.response
    mask = held(sample, "loss_mask")
    assert 0 < sum(mask) < len(mask) == sample.response_length
    assert sample.metadata["agent_status"] == 0


@pytest.mark.parametrize(
    "edit", ["x*47", "x*47+", *(pytest.param(e, marks=pytest.mark.slow) for e in ("x*11-2", "while True"))]
)
def test_a_repair_that_fails_is_not_rewarded(checkpoint, edit):
    (sample,), _ = work_of(checkpoint, f"<edit>{edit}</edit>", "ok")
    assert sample.reward == 0.0 and sample.status is Sample.Status.COMPLETED


def test_an_agent_that_changes_nothing_is_graded_without_a_sandbox(checkpoint, plug_ins):
    module, path = plug_ins
    (sample,), requests = work_of(checkpoint, "it is fine", agent_sandbox=f"{path}:unsteady")
    assert sample.reward == 0.0 and len(requests) == 1 and module["made"] == ["work"]


@pytest.mark.parametrize(("edit", "reward"), [("x", 0.0), ("x*47+38", 1.0)])
def test_an_agent_cannot_write_its_own_tests(checkpoint, plug_ins, edit, reward):
    (sample,), _ = work_of(checkpoint, f"<edit>{edit}</edit>", "ok", agent_harness=f"{plug_ins[1]}:Cheating")
    assert sample.reward == reward


def test_an_agent_that_wrecks_its_repository_has_repaired_nothing(checkpoint, plug_ins):
    (sample,), _ = work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_harness=f"{plug_ins[1]}:Wrecking")
    assert sample.reward == 0.0 and sample.status is Sample.Status.COMPLETED


@pytest.mark.parametrize(("harness", "reward"), [("Setting", 1.0), ("Deceiving", 1.0), ("Killed", 1.0), ("Large", 0.0)])
def test_what_an_agent_does_to_its_repository_is_no_failure_of_a_sandbox(
    checkpoint, plug_ins, monkeypatch, harness, reward
):
    monkeypatch.setattr(coding_agent, "PATCH_BYTES", 2**20)
    (sample,), _ = work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_harness=f"{plug_ins[1]}:{harness}")
    assert sample.reward == reward and sample.status is Sample.Status.COMPLETED


# What setting up leaves untracked and changed, with a repository of its own that wants signatures.
DIRTY = (
    "git init --quiet && echo first > tracked && git add f.py tracked && "
    "git -c user.name=row -c user.email=row@localhost commit --quiet -m first && "
    "echo second > tracked && echo built > untracked && git config commit.gpgsign true"
)


@pytest.mark.parametrize(("said", "reward", "made"), [("<edit>x*47+38</edit>", 1.0, 2), ("it is fine", 0.0, 1)])
def test_a_diff_has_nothing_that_was_there_before_the_agent(checkpoint, plug_ins, said, reward, made):
    module, path = plug_ins
    (sample,), _ = work_of(checkpoint, said, "ok", setup_cmd=DIRTY, agent_sandbox=f"{path}:unsteady")
    assert sample.reward == reward and sample.status is Sample.Status.COMPLETED and len(module["made"]) == made


def test_a_diff_that_cannot_be_applied_is_no_wrong_answer(checkpoint, plug_ins):
    with pytest.raises(SampleFailed, match="cannot be applied.*No valid patches"):
        work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_sandbox=f"{plug_ins[1]}:unapplied")


def test_an_evaluation_has_one_sample(checkpoint):
    sample, _ = work_of(checkpoint, "<edit>x*47+38</edit>", "ok", arguments=(True,))
    assert isinstance(sample, Sample) and sample.reward == 1.0


def test_a_program_that_does_not_end_is_a_wrong_answer(checkpoint, monkeypatch):
    monkeypatch.setenv("SWE_EVAL_TIMEOUT_SEC", "2")
    (sample,), _ = work_of(checkpoint, "<edit>x+next(iter(int, 1))</edit>", "ok")
    assert sample.reward == 0.0


@pytest.mark.slow
def test_over_budget_the_diff_is_graded_as_it_is(checkpoint, plug_ins, monkeypatch):
    monkeypatch.setenv("SWE_AGENT_TIME_BUDGET_SEC", "12")
    (sample,), _ = work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_harness=f"{plug_ins[1]}:Slow")
    assert sample.reward == 1.0 and sample.metadata["agent_status"] == -1


# -- what fails -----------------------------------------------------------------------------------------------------------


def marked(checkpoint, plug_ins, *said, **changes):
    """What the framework makes of it."""
    path = "examples.coding_agent_rl.coding_agent.generate"
    changes = {"custom_generate_function_path": path, **changes}
    return work_of(checkpoint, *said, function=generate_and_rm, **changes)[0]


@pytest.mark.parametrize(("failures", "fails"), [(["work"] * 2, False), (["work"] * 3, True), (["grade"] * 3, True)])
def test_a_sandbox_that_does_not_start_is_tried_again_and_then_fails_its_sample(checkpoint, plug_ins, failures, fails):
    module, path = plug_ins
    module["failures"].extend(failures)
    result = marked(checkpoint, plug_ins, "<edit>x*47+38</edit>", "ok", agent_sandbox=f"{path}:unsteady")
    assert module["made"].count(failures[0]) == 3 and not module["failures"]
    if fails:
        assert result.status is Sample.Status.FAILED and result.remove_sample and result.response_length == 0
        assert result.metadata["fail_reason"] == "no room left"
    else:
        assert result[0].reward == 1.0


def test_a_sandbox_that_breaks_fails_its_sample_and_gives_no_reward(checkpoint, plug_ins):
    result = marked(checkpoint, plug_ins, "<edit>x</edit>", "ok", agent_sandbox=f"{plug_ins[1]}:breaking")
    assert result.status is Sample.Status.FAILED and result.remove_sample
    assert "ran no command" in result.metadata["fail_reason"]
    assert SingletonMeta._instances[Endpoint].adapter._sessions == {}


@pytest.mark.parametrize(("sandbox", "told"), [("vanishing", "ran no command"), ("sluggish", "git did not end")])
def test_a_sandbox_that_breaks_while_the_diff_is_made_is_no_wrecked_repository(checkpoint, plug_ins, sandbox, told):
    with pytest.raises(SampleFailed, match=told):
        work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_sandbox=f"{plug_ins[1]}:{sandbox}")


@pytest.mark.parametrize("evaluation", [False, True])
def test_what_was_not_graded_because_the_step_ends_is_aborted_and_has_no_reward(checkpoint, plug_ins, evaluation):
    harness = f"{plug_ins[1]}:Ending"
    sample, _ = work_of(checkpoint, "<edit>x*47+38</edit>", "ok", arguments=(evaluation,), agent_harness=harness)
    assert sample.status is Sample.Status.ABORTED and sample.reward is None and sample.response_length == 0
    assert SingletonMeta._instances[Endpoint].adapter._sessions == {}


@pytest.mark.parametrize(
    ("adapter", "told"),
    [("Failing", "last turn failed: the engine answered 503"), ("Inconsistent", "2 log-probs for 3")],
)
def test_an_engine_that_fails_or_tells_nonsense_fails_the_sample(checkpoint, plug_ins, adapter, told):
    with pytest.raises(SampleFailed, match=told):
        work_of(checkpoint, "<edit>x*47+38</edit>", "ok", agent_adapter=f"{plug_ins[1]}:{adapter}")
    assert SingletonMeta._instances[Endpoint].adapter._sessions == {}


@pytest.mark.parametrize(
    "changes", [{"rollout_top_p": 0.9}, {"rollout_top_k": 5}, {"use_rollout_routing_replay": True}]
)
def test_what_adapters_do_not_record_is_refused_before_anything_runs(checkpoint, changes):
    with pytest.raises(UserError, match="leave out --use-rollout-routing-replay, --rollout-top-p"):
        work_of(checkpoint, **changes)


def test_an_agent_that_asks_nothing_fails_its_sample(checkpoint, plug_ins):
    with pytest.raises(SampleFailed, match="ended with status 0, and no turn of the model's is there"):
        work_of(checkpoint, agent_harness=f"{plug_ins[1]}:Shell")


def test_a_sample_over_its_whole_time_fails(checkpoint, plug_ins, monkeypatch):
    monkeypatch.setenv("SWE_ROLLOUT_GUARD_SEC", "2")
    with pytest.raises(SampleFailed, match="longer than SWE_ROLLOUT_GUARD_SEC 2"):
        work_of(checkpoint, agent_harness=f"{plug_ins[1]}:Hanging")
    assert SingletonMeta._instances[Endpoint].adapter._sessions == {}


def test_a_row_that_says_too_little(checkpoint):
    with pytest.raises(UserError, match="metadata of sample 5 lacks eval_cmd; see --metadata-key"):
        Task.of(Sample(index=5, prompt="x", metadata={"workdir": "w"}))
    given = {"workdir": "w", "eval_cmd": "true"}
    assert Task.of(Sample(prompt=[{"content": "a"}, {"content": "b"}], metadata=given)).issue == "b"
    assert Task.of(Sample(prompt="a", metadata={**given, "issue": "c", "more": 1})).issue == "c"


# -- settings and the toy task --------------------------------------------------------------------------------------------


def test_settings_have_their_defaults_and_the_guard_is_the_sum(monkeypatch):
    for name in ("SWE_AGENT_TIME_BUDGET_SEC", "SWE_EVAL_TIMEOUT_SEC", "SWE_ROLLOUT_GUARD_SEC", "SWE_BOOT_CONCURRENCY",
                 "SWE_BOOT_RETRIES", "ADAPTER_PORT", "ADAPTER_BIND_HOST", "SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLIME_HOST_IP", "10.0.0.7")
    assert Settings.from_environment() == Settings(1800, 600, 2580, 16, 2, "10.0.0.7", 18001, 1024)
    monkeypatch.setenv("SWE_AGENT_TIME_BUDGET_SEC", "20")
    monkeypatch.setenv("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", "0")
    settings = Settings.from_environment()
    assert (settings.rollout_guard_sec, settings.fork_threshold_tokens) == (800, 0)


def test_demonstrations_repair_a_third_and_tests_tell_repairs_from_others(tmp_path):
    task = toy_rows(tmp_path, toy_task)
    right = [
        row["messages"][1]["content"] == f"<edit>{row['messages'][0]['content'].rpartition(' ')[2]}</edit>"
        for row in task["sft"]
    ]
    assert 0.25 < sum(right) / len(right) < 0.35

    async def graded(row, repair):
        metadata = row["metadata"]
        async with LocalSandbox() as sb:
            files = {**metadata["files"], **metadata["eval_files"]}
            if repair:
                files["f.py"] = f"def f(x):\n    return {row['label']}\n"
            for name, text in files.items():
                await sb.write_file(f"work/{name}", text)
            return (await sb.exec(f"cd work && {metadata['eval_cmd']}"))[0]

    for row in task["eval"][:3]:
        assert asyncio.run(graded(row, True)) == 0 and asyncio.run(graded(row, False)) == 1
        assert row["label"] in row["prompt"][0]["content"]
