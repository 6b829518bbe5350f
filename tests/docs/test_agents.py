"""The page on agents: its generate function makes samples of a conversation, and its adapter passes the check. The page that
leads to it: examples that it names are there, and its check passes."""

import copy
import shlex
import subprocess
import sys

import pytest

from slime.arguments import parse_args
from slime.plugins.__main__ import main as try_functions
from slime.rollout.data_source import create_data_source
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.processing_utils import render_chat
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.rollout_args import make_checkpoint
from tests.support.models.tokenizer import build_tokenizer
from tests.support.processes.spoken import spoken
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT, bash

BLOCKS = blocks(ROOT / "docs/en/advanced/agents.md")
AGENT, ADAPTER = (text for kind, text in BLOCKS if kind == "python")
RUN, CHECK = (text for kind, text in BLOCKS if kind == "bash")
TRY, TRY_FUNCTION = (text for _, text in blocks(ROOT / "docs/en/get_started/agent.md"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_adapter.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


@pytest.fixture(scope="module")
def sample_of_a_run(tmp_path_factory):
    """The first sample that a run by the command of the page gives the function."""
    home = tmp_path_factory.mktemp("home")
    printed = bash(RUN, HOME=str(home), PRINT_COMMAND="1")
    assert printed.returncode == 0, printed.stderr
    words = shlex.split(printed.stdout)[2:]
    assert words[-2:] == ["--custom-generate-function-path", "my_agent.py:generate"]
    make = [sys.executable, str(ROOT / "tools/make_toy_task.py"), str(home / "slime/toy"), "--sft-size", "64"]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    args = parse_args(argv=[*words[:-2], "--dry-run"])
    return create_data_source(args).get_samples(1)[0][0]


def conversation(tmp_path, sample, *turns, arguments=()):
    generate = load_function("my_agent.py:generate", flag="--custom-generate-function-path")
    (tmp_path / "checkpoint").mkdir()
    try:
        return spoken(make_checkpoint(tmp_path / "checkpoint"), generate, sample, turns, arguments)
    finally:
        for endpoint in [one for one in SingletonMeta._instances.values() if hasattr(one, "served")]:
            endpoint.served.stop()


def test_an_agents_conversation_is_one_sample(tmp_path, sample_of_a_run):
    given, label = copy.deepcopy(sample_of_a_run), sample_of_a_run.label
    (sample,), requests = conversation(tmp_path, given, f"It is {label}<|im_end|>", f"Yes, {label}<|im_end|>")
    tokenizer = build_tokenizer()
    asked = tokenizer.decode(requests[0]["input_ids"])
    assert asked == render_chat(tokenizer, sample_of_a_run.prompt) and asked.count("<|im_start|>") == 2
    assert len(requests) == 2 and requests[1]["input_ids"] == sample.tokens[: len(requests[1]["input_ids"])]
    assert sample.response.startswith(f"It is {label}<|im_end|>\n")
    assert sample.response.endswith(f"Yes, {label}<|im_end|>")
    assert (sample.reward, sample.rollout_id, sample.metadata["round_number"]) == (1.0, sample_of_a_run.index, 2)
    assert sample.status is Sample.Status.COMPLETED and len(sample.rollout_log_probs) == sample.response_length


@pytest.mark.parametrize("evaluation", [False, True])
def test_a_conversation_that_branches_counts_once_in_an_evaluation(tmp_path, sample_of_a_run, evaluation):
    # The second turn does not go on with the first one.
    branching = AGENT.replace('messages.append({"role": "user"', 'messages = [{"role": "user"').replace(
        "further})", "further}]"
    )
    assert branching.count("messages = [") == 2
    (tmp_path / "my_agent.py").write_text(branching)
    turns = ("It is 1<|im_end|>", f"No, {sample_of_a_run.label}<|im_end|>")
    given = copy.deepcopy(sample_of_a_run)
    result, _ = conversation(tmp_path, given, *turns, arguments=(evaluation,))
    samples = [result] if evaluation else result
    assert [sample.response for sample in samples] == list(turns[-1:] if evaluation else turns)
    assert all(sample.reward == 1.0 for sample in samples)


def test_the_command_is_accepted(tmp_path):
    args = parse(tmp_path, *shlex.split(RUN)[-2:])
    assert args.custom_generate_function_path == f"{tmp_path}/my_agent.py:generate"


def test_the_adapter_passes_the_check(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", shlex.split(CHECK)[2:])
    assert try_functions() == 0
    assert "trained, with log-probs, completed" in capsys.readouterr().out


def test_examples_of_the_page_that_leads_here_have_a_toy_task():
    named = [words[-1] for words in (shlex.split(line, comments=True) for line in TRY.splitlines())]
    assert len(named) == 2 and all((ROOT / "examples" / name / "quickstart.sh").exists() for name in named)


def test_the_function_of_the_page_that_leads_here_passes_the_check(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", shlex.split(TRY_FUNCTION.replace("\\\n", " "))[2:])
    assert try_functions() == 0
    said = capsys.readouterr().out
    assert "trained, with log-probs, completed" in said and said.rstrip().endswith("fine")
