"""The page on agents: its generate function makes samples of a conversation, and its adapter passes the check."""

import shlex
import sys

import pytest

from slime.plugins.__main__ import main as try_functions
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.rollout_args import make_checkpoint
from tests.support.processes.spoken import spoken
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT

BLOCKS = blocks(ROOT / "docs/en/advanced/agents.md")
AGENT, ADAPTER = (text for kind, text in BLOCKS if kind == "python")
RUN, CHECK = (text for kind, text in BLOCKS if kind == "bash")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_adapter.py").write_text(ADAPTER)
    monkeypatch.chdir(tmp_path)
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


def conversation(tmp_path, *turns):
    generate = load_function("my_agent.py:generate", flag="--custom-generate-function-path")
    sample = Sample(index=3, group_index=1, prompt="47+38?", label="85")
    try:
        return spoken(make_checkpoint(tmp_path / "checkpoint"), generate, sample, turns)
    finally:
        for endpoint in [one for one in SingletonMeta._instances.values() if hasattr(one, "served")]:
            endpoint.served.stop()


def test_an_agents_conversation_is_one_sample(tmp_path):
    (tmp_path / "checkpoint").mkdir()
    (sample,), requests = conversation(tmp_path, "It is 85<|im_end|>", "Yes, 85<|im_end|>")
    assert len(requests) == 2 and requests[1]["input_ids"] == sample.tokens[: len(requests[1]["input_ids"])]
    assert sample.response.startswith("It is 85<|im_end|>\n") and sample.response.endswith("Yes, 85<|im_end|>")
    assert (sample.reward, sample.rollout_id, sample.metadata["round_number"]) == (1.0, 3, 2)
    assert sample.status is Sample.Status.COMPLETED and len(sample.rollout_log_probs) == sample.response_length


def test_the_command_is_accepted(tmp_path):
    args = parse(tmp_path, *shlex.split(RUN)[2:])
    assert args.custom_generate_function_path.endswith("my_agent.py:generate")


def test_the_adapter_passes_the_check(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", shlex.split(CHECK)[2:])
    assert try_functions() == 0
    assert "trained, with log-probs, completed" in capsys.readouterr().out
