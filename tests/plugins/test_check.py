"""Functions of a user's own, tried alone: what is said of good ones, and of those that a run would stumble over."""

import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from slime.arguments.flag import flag_of
from slime.arguments.paths import MANAGER_PLUG_INS, RANK_PLUG_INS
from slime.plugins import POINTS, check
from slime.plugins.__main__ import main
from slime.utils import device
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

PLUG_INS = """
import asyncio, functools, threading, time
import torch
from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import generate
from slime.rollout.sglang_rollout import generate_rollout as default_rollout
from slime.data import Sample
from slime.training.actor_rank import ActorRank
from slime.utils.accelerator import Accelerator

forever = threading.Event()
def written(args, version_dir, rollout_engines): assert rollout_engines == []
def before_read(source_dir, target_version): assert target_version == 1
def at_start(args): assert (args.rank, args.world_size) == (0, 1)
def before_pass(args, model, store_prefix): assert store_prefix in ("", "ref_")
def before_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): optimizer.zero_grad()
def wrong_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler): raise KeyError("no such layer")

def layers(args, config, vp_stage):
    from slime.backends.megatron_utils.layer_spec import get_decoder_spec
    return get_decoder_spec(config, vp_stage)

def provider(pre_process, post_process, vp_stage=None, args=None):
    from slime.backends.megatron_utils.model_provider import get_model_provider_func
    return get_model_provider_func(args)(pre_process, post_process, vp_stage)

def rollout(args, rollout_id, data_source, evaluation=False):
    output = default_rollout(args, rollout_id, data_source, evaluation=evaluation)
    return output if evaluation else RolloutFnTrainOutput(output.samples, {"own": 1})

async def two_turns(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.append_response_tokens(args, tokens=[1, 2], trainable=False, text="..")
    return await generate(args, sample, sampling_params)

def hook(args, sample, *, rollout_id=None, evaluation=False):
    sample.metadata["seen"] = True

async def reward(args, sample, **kwargs): return float("4" in sample.response)
class Judge:
    def compute_reward(self, prompts, responses, labels): return [0.5 for _ in prompts]
def group_filter(args, samples, **kwargs): return DynamicFilterOutput(keep=True)
def take(args, rollout_id, buffer, num_samples):
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
def mark(args, data): data[0][0].remove_sample = True
def see_all(args, all_groups, data_source): assert len(all_groups) >= 2
def post_process(args, samples): return [s.reward for s in samples], [1.0 for s in samples]
def convert(args, samples):
    return {"tokens": [s.tokens for s in samples], "response_lengths": [s.response_length for s in samples],
            "rewards": [1.0 for s in samples], "raw_reward": [s.reward for s in samples],
            "truncated": [0 for s in samples], "sample_indices": [s.index for s in samples],
            "loss_masks": [[1] * s.response_length for s in samples]}
class Source:
    def __init__(self, args): self.back = []
    def get_samples(self, num_samples): return [Sample(prompt="1+1?", label="2") for _ in range(num_samples)]
    def add_samples(self, groups): self.back += groups
def log(rollout_id, args, samples, rollout_extra_metrics, rollout_time): return False
def log_evaluation(rollout_id, args, data, extra_metrics): return True
def postprocess(args, rollout_id, rollout_data): rollout_data["loss_masks"][0].zero_()
def own_number(args, rollout_id, rollout_data): rollout_data["mine"] = 3
def advantages(args, rollout_data):
    rollout_data["advantages"] = [torch.ones(n) for n in rollout_data["response_lengths"]]
    rollout_data["returns"] = rollout_data["advantages"]
def loss(args, batch, logits, sum_of_sample_mean): return 0.0 * logits.sum(), {"own": torch.zeros(())}
def tis(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs): return pg_loss * 0.5, loss_masks, {}
def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss): return lambda flat: flat.sum() / 100

class Rank(ActorRank):
    def train(self, rollout_id, shards):
        return [*super().train(rollout_id, shards), ({"train/own": 1.0, "train/step": rollout_id}, "train/step")]
class Silent:
    def __init__(self, args, rank, world_size, local_rank): pass
    def rendezvous_address(self): return None
    def init(self, address): return 0
    def train(self, rollout_id, shards): return {"loss": 1.0}
    def dispose(self): pass
class Unprepared(Silent):
    def train(self, rollout_id, shards): return []
    def open_weight_push(self): return 3
class Unborn(Silent):
    def __init__(self, args, rank, world_size, local_rank): raise KeyError("no such part")

class Endpoint(OpenAIAdapter):
    def _preprocess_body(self, body): return body | {"messages": [{"role": "system", "content": "Add."}, *body["messages"]]}
class Messages(AnthropicAdapter): pass
class Deaf(OpenAIAdapter):
    def _session_id(self, request, body): return "somebody else"
class Mute(OpenAIAdapter):
    def _build_reply(self, body, output, turn): raise KeyError("no words")
class Foreign(BaseAdapter): pass

class Abacus(Accelerator): name = "abacus"
class Unnamed(Accelerator): pass
class Asleep(Accelerator):
    name = "asleep"
    def synchronize(self): forever.wait()
class Full(Accelerator):
    name = "full"
    def memory_of_device(self): return 7, 3
class Lossy(Accelerator):
    name = "lossy"
    def mark(self): return self.buffer.zero_
    def host_buffer(self, size):
        self.buffer = super().host_buffer(size)
        return self.buffer
class Broken(Accelerator):
    name = "broken"
    def synchronize(self): raise RuntimeError("no such device")
def nothing(args, sample, sampling_params): return None
async def two_arguments(args, sample): return sample
wrapped_wrongly = functools.partial(two_arguments)
async def raises(args, sample, sampling_params): raise KeyError("no such tool")
async def hangs(args, sample, sampling_params): await asyncio.Event().wait()
def hangs_plainly(args, rollout_id, data_source, evaluation=False): forever.wait()
async def writes_around_args(args, sample):
    args.__dict__["rollout_temperature"] = 0.5
    return 0.0

async def writes_args(args, sample):
    args.rollout_temperature = 0.5
    return 1.0
async def awaited_filter(args, samples): return True
async def awaited(args, rollout_id, rollout_data): ...
async def endless_log(rollout_id, args, samples, metrics, seconds): await asyncio.Event().wait()
def endless_plain_log(rollout_id, args, samples, metrics, seconds): forever.wait()
def leaving_log(rollout_id, args, samples, metrics, seconds): raise SystemExit("x")
class TimeLimit(BaseException): ...
def limited_log(rollout_id, args, samples, metrics, seconds): raise TimeLimit("5 s")
class AwaitedSource:
    def __init__(self, args): ...
    def get_samples(self, num_samples): return []
    async def add_samples(self, groups): ...
def greedy_filter(args, samples):
    samples[0].reward = 7.0
    return True
def text_reward(args, sample): return "good"
async def begun(args, sample, sampling_params):
    sample = await generate(args, sample, sampling_params)
    sample.status = "done"
    return sample
def notes_something(args, sample):
    args.judge = "one for all"
    return 1.0
def notes_the_sample(args, sample):
    args.judged = sample.index
    return 1.0
def old_log_probs(args, batch, logits, sum_of_sample_mean): return sum_of_sample_mean(-torch.cat(batch["log_probs"])), {}
def plain_metrics(args, batch, logits, sum_of_sample_mean): return logits.sum(), {"fine": logits.sum(), "own": 0.5}
def long_advantages(args, rollout_data):
    rollout_data["advantages"] = rollout_data["returns"] = [torch.ones(n + 1) for n in rollout_data["response_lengths"]]
def broken_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time): raise RuntimeError("disk is full")
"""
# Beside the others: a file that mentions `exec` may hold names that its source does not show.
OF_AGENTS = """
from slime.agent.harness import BaseHarness, run_agent
from slime.agent.sandbox import LocalSandbox

class Room(LocalSandbox): pass
class Nameless(LocalSandbox):
    async def __aenter__(self):
        await super().__aenter__()
        self.sandbox_id = ""
        return self
class Forgetful(LocalSandbox):
    async def exec(self, cmd, *, env=None, **options): return await super().exec(cmd, **options)
class Lenient(LocalSandbox):
    async def exec(self, cmd, *, check=False, **options): return await super().exec(cmd, **options)
class Garbling(LocalSandbox):
    async def read_file(self, path, **options): return (await super().read_file(path, **options)).strip()
class Immortal(LocalSandbox):
    async def exec(self, cmd, **options): return await super().exec(cmd.replace("kill -s KILL", "true"), **options)
class Closed(LocalSandbox):
    async def __aenter__(self): raise OSError("no room left")

AGENT = '''
import json, sys, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": sys.stdin.read()}], "stream": True}).encode()
headers = {"Authorization": "Bearer " + sys.argv[2], "Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", body, headers)
assert "Hello." in urllib.request.urlopen(request, timeout=30).read().decode()
'''
class Speaker(BaseHarness):
    name = "speaker"
    key, script = None, AGENT
    async def write_config(self, sb, ctx): await sb.write_file("agent.py", self.script)
    async def launch_and_wait(self, sb, ctx, prompt, time_budget_sec):
        cmd = f"python ../agent.py {ctx.adapter_url} {self.key or ctx.session_id}"
        return await run_agent(
            sb, name=self.name, cmd=cmd, ctx=ctx, prompt=prompt, time_budget_sec=time_budget_sec,
            poll_interval_sec=self.poll_interval_sec,
        )
class Stranger(Speaker): key = "somebody-else"
class Mute(Speaker): script = ""
class Failing(Speaker): script = "raise SystemExit(3)"
class Unlabelled(Speaker): name = ""
class Idle(BaseHarness): name = "idle"
"""
GOOD = {
    "--rollout-function-path": "rollout",
    "--eval-function-path": "rollout",
    "--custom-generate-function-path": "two_turns",
    "--rollout-sample-hook-path": "hook",
    "--custom-rm-path": "reward",
    "--dynamic-sampling-filter-path": "group_filter",
    "--buffer-filter-path": "take",
    "--rollout-sample-filter-path": "mark",
    "--rollout-all-samples-process-path": "see_all",
    "--custom-reward-post-process-path": "post_process",
    "--custom-convert-samples-to-train-data-path": "convert",
    "--data-source-path": "Source",
    "--custom-rollout-log-function-path": "log",
    "--custom-eval-rollout-log-function-path": "log_evaluation",
    "--rollout-data-postprocess-path": "postprocess",
    "--custom-advantage-function-path": "advantages",
    "--custom-loss-function-path": "loss",
    "--custom-tis-function-path": "tis",
    "--custom-pg-loss-reducer-function-path": "reducer",
    "--custom-update-weight-post-write-path": "written",
    "--sglang-custom-pull-weights-pre-read-hook": "before_read",
    "--custom-model-provider-path": "provider",
    "--custom-megatron-init-path": "at_start",
    "--custom-megatron-before-log-prob-hook-path": "before_pass",
    "--custom-megatron-before-train-step-hook-path": "before_step",
    "--actor-cls": "Rank",
    "--adapter-cls": "Endpoint",
    "--accelerator": "Abacus",
    "--sandbox-cls": "Room",
    "--harness-cls": "Speaker",
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """A device that is tried stays registered in its process, which ends in a command."""
    monkeypatch.setattr(device, "_FACTORIES", dict(device._FACTORIES))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("plug_ins") / "own.py"
    path.write_text(textwrap.dedent(PLUG_INS))
    path.with_name("agents.py").write_text(OF_AGENTS)
    return path


def file_of(file, flag):
    return file.with_name("agents.py") if flag in ("--sandbox-cls", "--harness-cls") else file


def checked(file, flag, name, **options):
    (finding,) = check([flag, f"{file_of(file, flag)}:{name}"], **{"time_limit": 20.0, **options})
    return finding


@pytest.mark.parametrize(
    "flag", [flag for flag, point in POINTS.items() if flag in GOOD and not point.in_megatron and flag != "--actor-cls"]
)
def test_a_good_function_of_every_point(file, flag):
    finding = checked(file, flag, GOOD[flag])
    assert finding.problems == () and finding.record.calls >= 1 and finding.record.returned
    assert finding.text().endswith("\n  fine") and POINTS[flag].call in finding.text()


def test_every_plug_in_of_the_command_line_is_a_point():
    plug_ins = {flag_of(name) for name in (*MANAGER_PLUG_INS, *RANK_PLUG_INS)}
    # --spec is a module and a name, a generator a module.
    assert plug_ins == {flag for flag, point in POINTS.items() if not point.in_python} - {"--spec"}
    assert set(GOOD) == set(POINTS) - {"--spec", "--buffer-generator"}


@pytest.mark.slow
def test_what_a_training_rank_calls_is_called_by_a_real_one(file, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{file.parent}:{Path.cwd()}")
    words = ["--spec", "own", "layers"]
    for flag, point in POINTS.items():
        if point.in_megatron and flag != "--spec":
            words += [flag, f"{file}:{GOOD[flag]}"]
    done = subprocess.run(
        [sys.executable, "-m", "slime.plugins", "check", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n  fine") == 5 and "PROBLEM" not in done.stdout
    # The reference's pass has its prefix, and the step the number of its rollout.
    assert "2 calls" in done.stdout.partition("before_pass")[2].partition("--custom")[0]


@pytest.mark.slow
def test_a_hook_of_megatron_that_raises_is_told(file):
    words = ["--custom-megatron-before-train-step-hook-path", f"{file}:wrong_step"]
    done = subprocess.run(
        [sys.executable, "-m", "slime.plugins", "check", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "PROBLEM" in done.stdout and "rollout 0, step 0" in done.stdout and "no such layer" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("Rank", 0, "\n  fine\n"),
        ("Silent", 1, "train of the training ranks returned {'loss': 1.0}; expected a list of (metrics, step key)"),
        ("Unprepared", 1, "open_weight_push returned 3; expected a slime.weights.push.Opening"),
        ("Unborn", 1, "KeyError: 'no such part'"),
    ],
)
def test_a_class_of_training_ranks_starts_trains_and_gets_ready_to_push(file, name, status, told):
    """In a process of its own, as the driver of a run starts it."""
    command = [sys.executable, "-m", "slime.plugins", "check", "--actor-cls", f"{file}:{name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    assert told in done.stdout and f"--actor-cls {file}:{name}" in done.stdout


GENERATOR = """
from slime_plugins.rollout_buffer.base_generator import BaseGenerator
TASK_TYPE = "sums"

class Sums(BaseGenerator):
    async def trajectory(self, row):
        turn = await self.chat(row["prompt"])
        return self.item(turn, reward=float(str(row["label"]) in turn.text))

def run_rollout(data):
    Sums(data).run()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "", None),
        ("turn.text))", "turn.text) / 0)", "32 trajectories in a row failed, the last with ZeroDivisionError"),
        (
            "self.item(turn, reward=float(str(row",
            "dict(messages=3, reward=float(str(row",
            "`messages` is 3; expected a list",
        ),
        ("Sums(data).run()", "raise KeyError('no such tool')", "KeyError: 'no such tool'"),
        ("TASK_TYPE", "TASK", "TASK_TYPE is None; give the module a name"),
    ],
)
def test_a_generator_of_the_rollout_buffer(tmp_path, old, new, told):
    module = tmp_path / "own_generator.py"
    module.write_text(GENERATOR.replace(old, new))
    (finding,) = check(["--buffer-generator", str(module)], answers=["It is 4"], time_limit=1.0)
    if told is None:
        assert finding.problems == () and "with log-probs, completed, reward 1.0" in finding.record.returned
    else:
        assert any(told in problem for problem in finding.problems), finding.problems
        assert f"--buffer-generator {module}" in finding.text()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Unnamed", "its name is 'cpu'; give the class a `name` of its own, which SLIME_ACCELERATOR selects"),
        ("Full", "memory_of_device() gave (7, 3); expected (free, all) bytes"),
        ("Lossy", "a copy to host_buffer() in aside() gave False; expected the same bytes once mark() returns"),
        ("Broken", "raised RuntimeError for its questions: no such device"),
    ],
)
def test_a_device_that_a_run_could_not_go_by(file, monkeypatch, name, problem):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    finding = checked(file, "--accelerator", name)
    assert any(problem in found for found in finding.problems), finding.problems
    assert os.environ["SLIME_ACCELERATOR"] == "cpu" and get_accelerator().name == "cpu", "as it was before"


@pytest.mark.parametrize("name", ["Endpoint", "Messages"])
def test_an_endpoint_for_agents_has_two_turns_that_become_a_sample(file, name):
    (finding,) = check(["--adapter-cls", f"{file}:{name}"], answers=["It is 2<|im_end|>", "It is 4<|im_end|>"])
    assert finding.problems == () and finding.record.given == "'What is 1+1?', 'What is 2+2?'"
    # Two answers of seven bytes and a mark.
    said = r"\[Sample\(\d+ tokens, response \d+, 16 of them trained, with log-probs, completed, reward 0.0\)\]"
    assert re.fullmatch(said, finding.record.returned)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Deaf", "answered 503: "),
        ("Mute", "answered 500: "),
        ("Foreign", "inherits from neither OpenAIAdapter nor AnthropicAdapter"),
        ("hook", "inherits from neither"),
    ],
)
def test_an_endpoint_that_agents_could_not_talk_to(file, name, problem):
    finding = checked(file, "--adapter-cls", name)
    assert any(problem in found for found in finding.problems), finding.problems
    assert f"--adapter-cls {file}:{name}" in finding.problems[0]


@pytest.mark.parametrize(
    ("flag", "name", "problem"),
    [
        ("--sandbox-cls", "Nameless", "its sandbox_id is ''; give it a name of its own"),
        ("--sandbox-cls", "Forgetful", "exec with env gave (0, '\\n', ''); expected (0, 'b c\\n', '')"),
        (
            "--sandbox-cls",
            "Lenient",
            "exec with check of a command that fails gave \"(3, '', '')\"; expected 'a SandboxError'",
        ),
        ("--sandbox-cls", "Garbling", "a text, written and read gave 'täxt'; expected 'täxt\\n'"),
        (
            "--sandbox-cls",
            "Immortal",
            "exec_and_wait over budget, and whether it goes on gave (-1, 1); expected (-1, 0)",
        ),
        ("--sandbox-cls", "Closed", "raised OSError for its questions: no room left"),
        ("--harness-cls", "Stranger", "asked with the keys ['somebody-else']; expected the session"),
        ("--harness-cls", "Mute", "asked with the keys []; expected the session"),
        ("--harness-cls", "Failing", "run returned 3: is the agent on PATH here?"),
        ("--harness-cls", "Unlabelled", "its name is ''; give the class a `name`"),
        ("--harness-cls", "Idle", "Idle has no launch_and_wait"),
    ],
)
def test_a_sandbox_or_a_harness_that_no_agent_could_go_by(file, flag, name, problem):
    finding = checked(file, flag, name)
    assert any(problem in found for found in finding.problems), finding.problems
    assert f"{flag} {file_of(file, flag)}:{name}" in finding.text()


def test_several_functions_work_together_and_a_class(file):
    words = ["--custom-generate-function-path", f"{file}:two_turns", "--custom-rm-path", f"{file}:Judge"]
    generate, reward = check(words, answers=["first", "second"])
    assert (generate.problems, reward.problems) == ((), ())
    assert "with log-probs, completed" in generate.record.returned and "loss_mask" in generate.record.changed
    given = "['What is 1+1?'], ['first<|im_end|>..second<|im_end|>'], ['2']"
    assert (reward.record.given, reward.record.returned) == (given, "[0.5]")


@pytest.mark.parametrize(
    ("flag", "name", "problem"),
    [
        ("--custom-generate-function-path", "nothing", "returned None (NoneType) for sample "),
        ("--custom-generate-function-path", "wrapped_wrongly", "takes 2 positional arguments but 3 were given"),
        ("--custom-generate-function-path", "raises", "raised KeyError for sample "),
        (
            "--custom-rm-path",
            "writes_args",
            "args.rollout_temperature was to become 0.5 and is 1.0; all functions of the run",
        ),
        ("--custom-rm-path", "writes_around_args", "it changed args.rollout_temperature: args are shared"),
        ("--custom-rm-path", "notes_the_sample", "it changed args.judged: args are shared"),
        ("--custom-rm-path", "text_reward", "is 'good' (str); expected a finite number"),
        (
            "--custom-generate-function-path",
            "begun",
            "sample 0 with status 'done'; expected one of Sample.Status: PENDING",
        ),
        ("--custom-loss-function-path", "old_log_probs", "its loss has no gradient"),
        ("--custom-loss-function-path", "plain_metrics", "returned the metrics 'own', float; expected {name: scalar"),
        ("--rollout-data-postprocess-path", "own_number", "left int in rollout_data['mine']; expected a list"),
        (
            "--data-source-path",
            "AwaitedSource",
            ":AwaitedSource: AwaitedSource.add_samples is async, and nobody awaits",
        ),
        ("--dynamic-sampling-filter-path", "greedy_filter", "it changed reward of samples, not its own"),
        ("--custom-advantage-function-path", "long_advantages", "38"),
        ("--custom-rollout-log-function-path", "broken_log", "it raised RuntimeError: disk is full"),
        ("--custom-rollout-log-function-path", "leaving_log", "it raised SystemExit: x; a run reports that"),
        ("--custom-rollout-log-function-path", "limited_log", "it raised TimeLimit: 5 s; a run reports that"),
    ],
)
def test_what_a_run_would_stumble_over(file, flag, name, problem):
    finding = checked(file, flag, name)
    assert any(problem in found for found in finding.problems), finding.problems
    assert f"{flag} {file}:{name}" in finding.text()


def test_coroutines_that_nobody_awaits_and_other_parameters_are_refused_by_their_source(file):
    awaited, other = "is async, and nobody awaits it here; write `def`", "is `async def two_arguments(args, sample)`"
    asked = {
        "--dynamic-sampling-filter-path": ("awaited_filter", awaited),
        "--rollout-data-postprocess-path": ("awaited", awaited),
        "--custom-generate-function-path": ("two_arguments", other),
    }
    for flag, (name, message) in asked.items():
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            checked(file, flag, name)
        assert f"{flag} {file}:{name}" in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "name", "problem"),
    [
        ("--custom-generate-function-path", "hangs", "did not return within --http-request-timeout 0.3 s"),
        ("--rollout-function-path", "hangs_plainly", "did not return within 0.3 s; it is here:"),
        ("--custom-rollout-log-function-path", "endless_log", "it did not return in time; a run reports that"),
        ("--custom-rollout-log-function-path", "endless_plain_log", "it did not return in time; a run reports that"),
        ("--accelerator", "Asleep", "did not return within 0.3 s; it is here:"),
    ],
)
def test_functions_that_never_return(file, monkeypatch, flag, name, problem):
    # A device that hangs is the one of the process: a command ends then.
    monkeypatch.setenv("SLIME_ACCELERATOR", os.environ["SLIME_ACCELERATOR"])
    finding = checked(file, flag, name, time_limit=0.3)
    get_accelerator.cache_clear()
    assert problem in finding.problems[0]
    assert name != "hangs_plainly" or "forever.wait()" in finding.problems[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--custom-rm-path", "{file}:rewards"], "did you mean 'reward'"),
        (["--custom-rm-path", "nowhere.module.function"], "there is no module or package 'nowhere'"),
        (["--custom-rm-path", "{file}x.py:reward"], "there is no file"),
        (["--custom-rm-path", "{file}:reward", "--rm-concurency", "3"], "--rm-concurrency"),
        (["--accelerator"], "--accelerator needs a path, such as my_file.py:MyClass"),
        (["--actor-cls", "--rm-type", "math"], "--actor-cls needs a path"),
        (["--buffer-generator"], "--buffer-generator needs a path, such as my_file.py: module with TASK_TYPE"),
        (["--rm-type", "math"], "no plug-in is named; give one of --rollout-function-path"),
        (["--custom-rm-pth={file}:reward"], r"is named; did you mean --custom-rm-path, not --custom-rm-pth\?"),
    ],
)
def test_commands_that_a_run_refuses(file, words, message):
    with pytest.raises(UserError, match=message):
        check([word.format(file=file) for word in words])


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [("reward", 0, "\n  fine\n"), ("text_reward", 1, "PROBLEM"), ("rewards", 1, "did you mean")],
)
def test_the_status_of_the_command(file, monkeypatch, capsys, name, status, told):
    monkeypatch.setattr(sys, "argv", ["slime.plugins", "check", "--custom-rm-path", f"{file}:{name}"])
    assert main() == status
    assert told in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_command(file):
    def run(*words):
        command = [sys.executable, "-W", "ignore", "-m", "slime.plugins", "check", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])

    good = run("--custom-rm-path", f"{file}:reward", "--answer", "it is 4")
    assert good.returncode == 0, good.stderr
    assert "given       args, Sample(" in good.stdout and "returned    1.0" in good.stdout and "4 calls" in good.stdout
    bad = run("--rollout-function-path", f"{file}:hangs_plainly", "--time-limit", "0.5")
    assert bad.returncode == 1 and "PROBLEM" in bad.stdout, bad.stderr


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_limit_that_leaves_no_time_is_refused_by_its_own_name(file, limit):
    with pytest.raises(UserError, match=f"^--time-limit {limit:g}: it must be above 0$"):
        check(["--custom-rm-path", f"{file}:reward"], time_limit=limit)


def test_an_attribute_of_its_own_is_no_change_of_args(file):
    assert checked(file, "--custom-rm-path", "notes_something").problems == ()


def test_what_was_watched_is_as_it_was(file):
    from slime.utils.plugin_loader import load_function

    checked(file, "--custom-rm-path", "reward")
    assert not hasattr(load_function(f"{file}:reward"), "__wrapped__")
    assert inspect.iscoroutinefunction(load_function(f"{file}:reward"))


def test_flags_of_a_driver_of_ones_own_are_there_for_its_functions(tmp_path):
    (tmp_path / "own.py").write_text("def reward(args, sample): return args.worth\n")

    def add(parser):
        parser.add_argument("--worth", type=float, default=0.0)
        return parser

    words = ["--custom-rm-path", f"{tmp_path}/own.py:reward", "--worth", "0.25"]
    (finding,) = check(words, add_custom_arguments=add)
    assert (finding.problems, finding.record.returned) == ((), "0.25")
