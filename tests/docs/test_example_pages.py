"""The pages on single launch scripts: settings, paths and plans are those of the scripts, and each command is taken."""

import json
import re
import shlex
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.plan import Plan, make_plan
from slime.plan.structure import GIB
from slime.rollout.data_source import create_data_source
from tests.support.models.args import parse
from tests.support.tables.launch_table import launches, value_of
from tests.support.tables.page import blocks
from tests.support.tables.shell_arrays import ROOT, bash
from tools.published_models import PUBLISHED_MODELS

DOCS = ROOT / "docs/en"
EXAMPLES = sorted((DOCS / "examples").glob("*.md"))
PAGES = {page.stem: page for page in [*EXAMPLES, DOCS / "platform_support/amd_tutorial.md"]}
EVERY_PAGE = pytest.mark.parametrize("name", PAGES)
TABLE = launches()
_RUN = re.compile(r"^((?:[A-Z_]+=\S+ )*)bash (scripts/(?:low_precision/)?run-[\w.-]+\.sh)(.*)$")
# By the directory's name, where it is not the model of the script.
OTHER_MODELS = {"GLM-4.5": "glm4.5-355B-A32B", "GLM-4.5-Air": "glm4.5-106B-A12B", "GLM-Z1-9B-0414": "glm-z1-9B"}
# As the checkpoint of this name is published.
QUANTISED = {
    "DeepSeek-R1": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    }
}  # fmt: skip
# What a plan notes on a machine without the files, and without a GPU. All else would be refused by a run.
NOTED = re.compile(r"there is no|no flag limits the prompt|no dtype was typed|--train-backend fsdp: training memory")


def commands_of(page: Path) -> list[str]:
    """The lines of the page that start launch scripts, as they stand, with the variables that a line before exports."""
    found = []
    for kind, text in blocks(page):
        exported = ""
        for line in text.splitlines() if kind == "bash" else ():
            line = line.partition("  #")[0].rstrip()
            if line.startswith("export "):
                exported = line.removeprefix("export ") + " "
            elif _RUN.match(line):
                found.append(exported + line)
    return found


def script_of(page: Path) -> str:
    """The script that the page is about: the first one that it names."""
    return re.search(r"`(scripts/run-[\w.-]+\.sh)`", page.read_text())[1]


def rows_of(page: Path) -> list[tuple[str, list[str]]]:
    """(command, other cells) of each row of the table of plans."""
    section = page.read_text().partition("| Flags behind the script |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()[2:]]
    found = []
    for flags, *cells in rows:
        words = flags.strip("`–").split()
        behind = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        before = [word for word in words if word not in behind]
        found.append((" ".join([*before, "bash", script_of(page), *behind]), cells))
    return found


ALL = [(name, command) for name, page in PAGES.items() for command in commands_of(page)]
ROWS = [(name, command, cells) for name, page in PAGES.items() for command, cells in rows_of(page)]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def words(home: Path) -> dict[str, list[str]]:
    """Command → the words behind `python train.py` that it starts."""
    commands = sorted({command for _, command in ALL} | {command for _, command, _ in ROWS} | {
        f"bash {script_of(page)}" for page in PAGES.values()
    })  # fmt: skip
    runs = "\n".join(f"echo '<<>>'; {command}" for command in commands)
    result = bash(f"set -e\n{runs}", HOME=str(home), PRINT_COMMAND="1")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    parts = result.stdout.split("<<>>\n")[1:]
    return {command: shlex.split(part)[2:] for command, part in zip(commands, parts, strict=True)}


@pytest.fixture
def planned(words, monkeypatch):
    """Command → (plan, what a run would refuse); the configs of models lie where the command says."""
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)

    def plan(command: str) -> tuple[Plan, list[str]]:
        model = TABLE[re.search(r"scripts/((?:low_precision/)?run-[\w.-]+)\.sh", command)[1]].model
        for flag in ("--hf-checkpoint", "--ref-load"):
            directory = Path(value_of(words[command], flag))
            directory.mkdir(parents=True, exist_ok=True)
            config = dict(PUBLISHED_MODELS[OTHER_MODELS.get(directory.name, model)])
            if directory.name in QUANTISED:
                config["quantization_config"] = QUANTISED[directory.name]
            (directory / "config.json").write_text(json.dumps(config))
        memory = [] if "--dry-run-gpu-memory-gib" in command else ["--dry-run-gpu-memory-gib", "80"]
        args = parse_args(argv=[*words[command], *memory, *([] if "--dry-run" in words[command] else ["--dry-run"])])
        return make_plan(args), [note for note in args.plan_notes if not NOTED.search(note)]

    return plan


@EVERY_PAGE
def test_settings_that_a_page_names_are_those_of_its_script(name, words):
    section = PAGES[name].read_text().partition("## What the script sets\n")[2].partition("\n## ")[0]
    named = [shlex.split(flag) for row in re.findall(r"^\| (`--.*?) \|", section, re.MULTILINE)
             for flag in re.findall(r"`(--[^`]+)`", row)]  # fmt: skip
    # The page on GLM-4.5 is about a script that has its page.
    assert bool(section) == (name != "glm4.5-355B-A32B") and (not section or len(named) > 4)
    command = words[f"bash {script_of(PAGES[name])}"]
    for flag, *values in named:
        place = len(command) - command[::-1].index(flag) if flag in command else 0
        following = command[place : place + max(len(values), 1)]
        assert place, f"{flag} is not set by the script"
        assert following == values or (not values and (not following or following[0].startswith("--"))), flag


@EVERY_PAGE
def test_paths_that_a_page_names_are_those_of_its_commands(name, words, home):
    text = PAGES[name].read_text()
    commands = [words[command] for page, command in ALL if page == name]
    used = {value_of(command, flag) for command in commands for flag in ("--save", "--hf-checkpoint", "--prompt-data")}
    used |= {words_after(command, "--eval-prompt-data")[-1] for command in commands if "--eval-prompt-data" in command}
    named = {path.rstrip(".") for path in re.findall(r"~/slime/[\w./-]+", text)}
    # Made by the tool that the page shows, or by the run that another page is about.
    assert sorted(path for path in named if path.replace("~", str(home)) not in used) == []
    downloads = re.findall(r"^hf download [\w.-]+/(\S+) --local-dir (\S+)$", text, re.MULTILINE)
    assert downloads and all(Path(directory).name == repository for repository, directory in downloads)


def words_after(words: list[str], flag: str) -> list[str]:
    """What stands between `flag` and the next one."""
    behind = words[words.index(flag) + 1 :]
    return behind[: next((place for place, word in enumerate(behind) if word.startswith("--")), len(behind))]


@pytest.mark.parametrize("command", sorted({command for _, command in ALL if "MODEL=toy" not in command}))
def test_a_command_is_taken(command, planned):
    """With the toy model `tests/scripts/test_launch_scripts.py` tries all scripts."""
    _, refused = planned(command)
    assert refused == []


@pytest.mark.parametrize("command, cells", [row[1:] for row in ROWS], ids=[row[1].split("scripts/")[1] for row in ROWS])
def test_a_row_of_plans_is_what_the_plan_says(command, cells, planned):
    plan, refused = planned(command)
    phases = {phase.name: phase for phase in plan.memory.phases}
    assert refused == [] and all(phase.fits for phase in phases.values())
    sizes = [phases[name].total if name in phases else 0 for name in ("training", "generation")]
    sizes.append(plan.memory.training.host_of_node)
    assert cells == [str(plan.placement.num_gpus), *(f"{size / GIB:.2f}" if size else "–" for size in sizes)]


def test_engines_of_glm_4_7_flash_have_groups_of_attention_that_share_its_heads(words, planned, monkeypatch):
    command = "bash scripts/run-glm4.7-30B-A3B.sh"
    assert planned(command)[1] == []
    without = [*words[command], "--no-sglang-enable-dp-attention", "--sglang-dp-size", "1"]
    monkeypatch.setitem(words, command, without)
    (refused,) = planned(command)[1]
    assert "20 attention heads" in refused


def test_conversations_are_written_as_a_run_reads_them(tmp_path, monkeypatch):
    (code,) = [text for kind, text in blocks(PAGES["qwen3-4b-base-openhermes"]) if kind == "python"]
    turns = [("system", "Add."), ("human", "What is 40+2?"), ("gpt", "42"), ("human", "And 1?"), ("gpt", "43")]
    whole = [{"from": who, "value": text, "weight": None} for who, text in turns]
    rows = [{"conversations": chat, "source": "made up"} for chat in (whole, whole[1:])]
    (tmp_path / "openhermes2_5.json").write_text(json.dumps(rows))
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "convert.py", "exec"), {})
    args = parse(
        tmp_path, "--prompt-data", str(tmp_path / "openhermes2_5.parquet"), "--input-key", "messages",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
        "--debug-train-only", "--disable-compute-advantages-and-returns", "--n-samples-per-prompt", "1",
    )  # fmt: skip
    chats = [group[0].prompt for group in create_data_source(args).get_samples(2)]
    roles = {"system": "system", "human": "user", "gpt": "assistant"}
    read = [{"role": roles[who], "content": text} for who, text in turns]
    assert chats == [read, read[1:]]


@EVERY_PAGE
def test_a_page_says_what_was_not_tried_and_the_page_on_launch_scripts_leads_to_it(name):
    text = PAGES[name].read_text()
    assert "\n**This script has not run on GPUs yet" in text.partition("\n## What was tried\n")[2]
    path = PAGES[name].relative_to(DOCS)
    assert f"](../{path})" in (DOCS / "get_started/launch_scripts.md").read_text()
