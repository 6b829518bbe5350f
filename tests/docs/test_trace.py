"""The page on traces: its functions are called as a run calls them, and what they record is read as it reads it."""

import re
from pathlib import Path

import pytest

from slime.rollout.generation import generate_and_rm_group
from slime.rollout.rollout_dump import save_rollout
from slime.utils.misc import SingletonMeta
from slime.utils.plugin_loader import load_function
from slime.utils.types import Sample
from tests.support.models.rollout_args import make_args, make_checkpoint
from tests.support.models.rollout_steps import params, run
from tests.support.processes.fake_generate_server import FakeGenerateServer
from tests.support.tables.page import blocks

PAGE = Path(__file__).parents[2] / "docs/en/developer_guide/trace.md"
FILES = {re.match(r"# (\S+\.py)\n", text)[1]: text for kind, text in blocks(PAGE) if kind == "python"}


@pytest.fixture(autouse=True)
def alone():
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


def test_the_functions_of_the_page(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    with FakeGenerateServer() as server:
        path = f"{tmp_path}/my_tools.py:custom_generate"
        args = make_args(make_checkpoint(tmp_path), server.port, custom_generate_function_path=path)
        (sample,) = run(generate_and_rm_group(args, [Sample(index=0, prompt="p")], params(args)))
    records = {record["name"]: record for record in sample.trace["events"]}
    assert records["turns"]["attrs"] == {"answer": "42"} and records["asked"]["attrs"] == {"length": 3}
    assert records["sglang_generate"]["parent_id"] == records["tool"]["parent_id"] == records["turns"]["span_id"]
    assert records["asked"]["parent_id"] == records["tool"]["span_id"]
    # Every name of a span that the page lists is one, or is of two engines.
    listed = set(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [a-z]", PAGE.read_text(), re.MULTILINE))
    names = {name for cell in listed for name in re.findall(r"\w+", cell)}
    assert {"generate_and_rm", "sglang_generate", "reward_model"} <= names & set(records)
    save_rollout(str(tmp_path / "dump_{rollout_id}.pt"), 0, [sample])
    seconds = load_function(f"{tmp_path}/read_traces.py:seconds_of")(tmp_path / "dump_0.pt", "sglang_generate")
    assert len(seconds) == 1 and 0 < seconds[0] < 60
