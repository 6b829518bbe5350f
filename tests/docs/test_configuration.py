"""The page on configuration: its files are read by a run, and its tables have every key and variable."""

import re
from pathlib import Path

from slime.backends.sglang_utils.sglang_config import SglangConfig
from slime.utils import env
from slime.utils.eval_config import eval_dataset_keys
from tests.support.models.args import command_line, parse, write_config, write_rows
from tests.support.tables.page import blocks

PAGE = Path(__file__).parents[2] / "docs/en/get_started/configuration.md"
CUSTOM, EVALUATION, ROLES, SERVING = [text for kind, text in blocks(PAGE) if kind == "yaml"]
# Of benches, and what scripts and sandboxes tell processes that they start.
NOT_OF_USERS = {"SLIME_BENCH_RUN", "SLIME_ENGINE_API_KEY", "SLIME_SESSION", "SLIME_START_COMMAND"}


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the tables under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \| ", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w*]+)(?:=\w+)?`", cell)}


def test_the_files_of_the_page_are_read(tmp_path):
    words = []
    for flag, text in (
        ("--custom-config-path", CUSTOM),
        ("--eval-config", EVALUATION),
        ("--megatron-config-path", ROLES),
    ):
        path = tmp_path / f"{flag.strip('-')}.yaml"
        # The tiny model has 512 positions.
        path.write_text(text.replace("data/", f"{tmp_path}/").replace("8192", "256"))
        words += [flag, str(path)]
    for name in ("aime", "gsm8k"):
        write_rows(tmp_path / f"{name}.jsonl")
    args = parse(tmp_path, *words, "--eval-interval", "2")
    assert (args.lr, args.rollout_max_response_len, args.search_url) == (1e-6, 256, "http://127.0.0.1:8000")
    assert [(one.name, one.n_samples_per_eval_prompt, one.temperature) for one in args.eval_datasets] == [
        ("aime", 16, 0.6), ("gsm8k", 2, 0.6),
    ]  # fmt: skip
    serving = tmp_path / "serving.yaml"
    serving.write_text(SERVING.replace("/models/judge", str(write_config(tmp_path / "judge"))))
    models = SglangConfig.from_yaml(serving, hf_checkpoint=command_line(tmp_path)[1]).models
    assert [model.name for model in models] == ["actor", "judge"]


def test_every_key_of_an_evaluation_set_is_in_the_table():
    assert first_cells("Files") == set(eval_dataset_keys())


def test_every_variable_of_ours_is_in_the_table():
    named = first_cells("Variables of the environment")
    assert "TENSORBOARD_DIR" in named and "SLIME_AGENT_*" in named
    assert set(env._READ) - NOT_OF_USERS - named == set()
    assert {name for name in named if name.startswith("SLIME_")} - set(env._READ) == {"SLIME_AGENT_*"}
