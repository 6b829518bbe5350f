"""Launch scripts of examples: each is taken by the real argument code with rows as its README describes them and fits its GPUs,
and its functions are there."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.plan import make_plan, render
from slime.utils.plugin_loader import load_function
from tests.support.tables.launch_table import Launch, value_of, write_configs
from tests.support.tables.shell_arrays import bash

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {str(path.relative_to(EXAMPLES)): path for path in sorted(EXAMPLES.glob("*/run-*.sh"))}
# First rows of the data of examples; of the others they are problems and chats.
ROWS = {
    "tau-bench": {"prompt": "retail 0", "metadata": {"env": "retail", "task_split": "train", "task_index": 0}},
    "coding_agent_rl": {"prompt": "Mend it.", "metadata": {"image": "python", "workdir": "/w", "eval_cmd": "true"}},
}
PROBLEM = {"prompt": "1 + 1?", "label": "2"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
BY_METADATA = {"prompt": "No commas.", "metadata": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}}


def write_rows(example: str, data: Path) -> dict[str, str]:
    """Files of one row each, also where `eval_multi_task` looks; the variables that name the others."""
    rows = {
        "PROMPT_DATA": ROWS.get(example, PROBLEM),
        "EVAL_DATA": ROWS.get(example, PROBLEM),
        "SFT_DATA": CHAT,
        "aime-2024/aime-2024": PROBLEM,
        "gpqa/gpqa_eval": {**PROBLEM, "metadata": {"choices": ["1", "2"]}},
        "ifbench/ifbench_eval": BY_METADATA,
    }
    for name, row in rows.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return {name: str(data / f"{name}.jsonl") for name in rows if "/" not in name}


def test_every_example_that_learns_a_toy_task_has_one():
    learned = {path.parent.name for path in EXAMPLES.glob("*/quickstart.sh")}
    assert len(learned) > 10 and learned - {path.parent.name for path in SCRIPTS.values()} == set()


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_makes_a_plan_and_its_functions_are_there(name, tmp_path, monkeypatch):
    data = write_rows(SCRIPTS[name].parent.name, tmp_path / "slime/data")
    result = bash(f"bash {SCRIPTS[name]}", HOME=str(tmp_path), PRINT_COMMAND="1", RM_URL="http://h:1/grade", **data)
    assert result.returncode == 0, result.stderr
    _, program, *words = shlex.split(result.stdout)
    write_configs(words, Launch(re.fullmatch(r"run-(.+?)(?:-sft)?\.sh", SCRIPTS[name].name)[1], {}))
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    asynchronous = Path(program).name == "train_async.py"
    args = parse_args(argv=[*words, "--dry-run", "--dry-run-gpu-memory-gib", "80"], asynchronous=asynchronous)
    plan = make_plan(args)
    assert render(plan).strip() and not [note for note in args.plan_notes if "not built" in note]
    assert [phase.name for phase in plan.memory.phases if phase.fits is False] == []
    own = [word for word in words if word.startswith(str(EXAMPLES)) and ".py:" in word]
    assert all(callable(load_function(word)) for word in own)


@pytest.mark.parametrize("example", ["fully_async", "delta_weight_sync"])
def test_answers_of_a_model_without_thoughts_are_graded_by_their_last_box(example):
    words = shlex.split(bash(f"bash {SCRIPTS[f'{example}/run-glm4-9B.sh']}", PRINT_COMMAND="1").stdout)
    assert value_of(words, "--hf-checkpoint").endswith("/GLM-4-9B-0414")
    assert value_of(words, "--rm-type") == "math"
