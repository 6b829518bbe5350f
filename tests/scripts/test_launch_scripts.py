"""The launch scripts: their settings against a hand-written table, and each as a plan by the real argument code."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from slime.arguments import parse_args
from slime.arguments.sizes import layout_of
from slime.plan import make_plan, render
from slime.plan.before_start import check_before_start, divided_blocks
from slime.weights.hf_reader import Place
from tests.support.tables.launch_table import SCRIPTS, SCRIPTS_DIR, launches, value_of, write_configs
from tests.support.tables.model_scripts import script_flags
from tests.support.tables.shell_arrays import ROOT, bash, script_environment

TABLE = launches()
MODELS = script_flags()
# The engines' weights are planned in BF16 here, because the configs of the tests name no quantisation; and MiniMax-M2 says
# in its script what larger GPUs it wants. Everything else is meant to run on GPUs of 80 GB.
TOO_LARGE_FOR_80_GIB = {
    "run-kimi-k2-Instruct": ["weight sync", "generation"],
    "run-kimi-k2-Thinking": ["weight sync", "generation"],
    "low_precision/run-kimi-k2-Thinking-int4": ["weight sync", "generation"],
    "run-minimax-m2": ["training", "weight sync"],
}
SHELLCHECK = f"{sysconfig.get_path('scripts')}/shellcheck"
EVERY_SCRIPT = pytest.mark.parametrize("name", SCRIPTS)


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def commands(home: Path) -> dict[str, list[str]]:
    """The words after `python train.py` of every script, with one more flag from the user."""
    runs = "\n".join(f"echo '<<{name}>>'; bash {path} --seed 7" for name, path in SCRIPTS.items())
    result = bash(f"set -e\n{runs}", HOME=str(home), PRINT_COMMAND="1")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    parts = re.split(r"<<(.*)>>\n", result.stdout)[1:]
    words = {name: shlex.split(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    assert all(command[1] == str(ROOT / "train.py") for command in words.values())
    return {name: command[2:] for name, command in words.items()}


def test_there_is_a_script_for_every_row() -> None:
    assert sorted(SCRIPTS) == sorted(TABLE)


@EVERY_SCRIPT
def test_settings_are_those_of_the_table(name: str, commands) -> None:
    expected = TABLE[name].flags
    assert {flag: value_of(commands[name], flag) for flag in expected} == expected


@EVERY_SCRIPT
def test_model_flags_are_those_of_the_model_script(name: str, commands) -> None:
    for flag, values in MODELS[TABLE[name].model].items():
        place = commands[name].index(flag)
        assert tuple(commands[name][place + 1 : place + 1 + len(values)]) == values, flag


@EVERY_SCRIPT
def test_arguments_of_the_user_come_last(name: str, commands) -> None:
    assert commands[name][-2:] == ["--seed", "7"]


@EVERY_SCRIPT
def test_parallel_sizes_divide_the_world_and_stages_hold_all_layers(name: str) -> None:
    row = TABLE[name]
    world = row.size("--actor-num-nodes") * row.size("--actor-num-gpus-per-node")
    tensor, stages = row.size("--tensor-model-parallel-size"), row.size("--pipeline-model-parallel-size")
    assert world % (tensor * stages * row.size("--context-parallel-size")) == 0
    assert world % (row.size("--expert-model-parallel-size") * stages) == 0
    layers = int(MODELS[row.model]["--num-layers"][0])
    last = row.flags["--decoder-last-pipeline-num-layers"]
    if last is None:
        assert layers % stages == 0
    else:
        assert (layers - int(last)) % (stages - 1) == 0


@EVERY_SCRIPT
def test_dry_run_makes_a_plan(name: str, commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process; `test_dry_run_as_a_process` goes the whole way."""
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    words = commands[name]
    write_configs(words, TABLE[name])
    args = parse_args(argv=[*words, "--dry-run", "--dry-run-gpu-memory-gib", "80"])
    plan = make_plan(args)
    assert render(plan).strip()
    assert not [note for note in args.plan_notes if "not built" in note]
    # FSDP's trainer is not estimated: nothing is said of it.
    assert [phase.name for phase in plan.memory.phases if phase.fits is False] == TOO_LARGE_FOR_80_GIB.get(name, [])


@pytest.mark.parametrize(
    ("name", "words"), [("run-deepseek-r1", ""), ("run-kimi-k2-Instruct", ""), ("run-kimi-k2-Instruct", "of its head")]
)
def test_engines_of_published_fp8_checkpoints_hold_whole_blocks(name, words, commands, monkeypatch) -> None:
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    if words:
        words = re.search(r"GPUs of 80 GB add\n((?:#   .*\n)+)", SCRIPTS[name].read_text())[1].replace("#", "")
    command, settings = [*commands[name], *words.split()], {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_configs(command, TABLE[name], quantization_config=settings)
    args = parse_args(argv=[*command, "--dry-run"])
    places = {}
    for layer, width in (("0.mlp", 18432), ("3.mlp.shared_experts", 2048), ("3.mlp.experts.0", 2048)):
        weight = f"model.layers.{layer}.down_proj.weight"
        places |= {weight: Place(Path(), 0, 0, "F8_E4M3", (7168, width)), f"{weight}_scale_inv": None}
    assert list(divided_blocks(args, args.hf_checkpoint, places)) == []
    args.sglang_moe_dense_tp_size = args.sglang_moe_a2a_backend = None
    # 144 and 16 blocks.
    assert len(list(divided_blocks(args, args.hf_checkpoint, places))) == 2 * (args.rollout_num_gpus_per_engine > 16)


@pytest.mark.parametrize("arguments, variables", [(["--dry-run"], {}), ([], {"DRY_RUN": "1"})])
def test_dry_run_as_a_process(arguments: list[str], variables: dict[str, str], home: Path, commands, tmp_path) -> None:
    """From another directory, without Ray: what stands for its program would fail."""
    write_configs(commands["run-qwen3-4B"], TABLE["run-qwen3-4B"])
    # The flags of the large packages, described once per user, are kept where they are.
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    environment = script_environment(HOME=str(home), XDG_CACHE_HOME=cache, RAY="/bin/false", **variables)
    result = subprocess.run(
        ["bash", str(SCRIPTS["run-qwen3-4B"]), *arguments, "--dry-run-json", "plan.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "plan.json").read_text())


def test_a_rehearsal_needs_no_ray(home: Path, commands) -> None:
    """The script hands the flag to the driver, whose word about another flag of a plan comes at once."""
    environment = script_environment(HOME=str(home), XDG_CACHE_HOME=str(Path.home() / ".cache"), RAY="/bin/false")
    result = subprocess.run(
        ["bash", str(SCRIPTS["run-qwen3-4B"]), "--rehearse", "--dry-run-json", "plan.json"],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert result.returncode == 2 and "--rehearse makes no plan" in result.stderr


def test_serving_file_covers_all_gpus_of_the_run() -> None:
    text = (SCRIPTS_DIR / "run-glm5.2-744B-A40B.serving.yaml").read_text()
    assert sum(int(number) for number in re.findall(r" num_gpus: (\d+)", text)) == 32 * 8


def test_kimi_from_int4_differs_from_the_other_script_in_where_training_starts_and_in_the_temperature(commands) -> None:
    """The engines of both serve the same weights."""

    def by_flag(name: str) -> dict[str, list[str]]:
        values: dict[str, list[str]] = {}
        for word in commands[name]:
            if word.startswith("--"):
                values[word] = []
            else:
                values[list(values)[-1]].append(word)
        return values

    base, int4 = by_flag("run-kimi-k2-Thinking"), by_flag("low_precision/run-kimi-k2-Thinking-int4")
    differing = {flag for flag in base.keys() | int4.keys() if base.get(flag) != int4.get(flag)}
    assert differing == {"--load", "--ref-load", "--save", "--rollout-temperature"}


def test_nodes_and_context_parallelism_come_from_the_environment() -> None:
    script = SCRIPTS["run-qwen3-next-80B-A3B"]
    result = bash(f"bash {script}", PRINT_COMMAND="1", ACTOR_NUM_NODES="8", CONTEXT_PARALLEL_SIZE="4")
    words = shlex.split(result.stdout)
    assert (value_of(words, "--actor-num-nodes"), value_of(words, "--context-parallel-size")) == ("8", "4")


def test_no_script_asks_for_an_attention_kernel_that_may_not_be_there(commands) -> None:
    """`flash` switches the others off, and flash-attn is optional beside Transformer Engine."""
    assert {value_of(words, "--attention-backend") for words in commands.values()} <= {None, "auto"}


def test_the_shape_of_another_model_replaces_that_of_the_script() -> None:
    words = shlex.split(bash(f"bash {SCRIPTS['run-qwen3-4B']} --model-args-from-hf", PRINT_COMMAND="1").stdout)
    assert "--num-layers" not in words and value_of(words, "--tensor-model-parallel-size") == "2"


@pytest.fixture(scope="module")
def toy_commands(home: Path) -> dict[str, list[str]]:
    """As `commands`, with the toy model."""
    runs = "\n".join(f"echo '<<{name}>>'; bash {path}" for name, path in SCRIPTS.items())
    result = bash(f"set -e\n{runs}", HOME=str(home), PRINT_COMMAND="1", MODEL="toy", NUM_GPUS="2")
    assert result.returncode == 0 and result.stderr == "", result.stderr
    parts = re.split(r"<<(.*)>>\n", result.stdout)[1:]
    return {name: shlex.split(text)[2:] for name, text in zip(parts[::2], parts[1::2], strict=True)}


@pytest.fixture(scope="module")
def toy_task(home: Path) -> Path:
    directory = home / "slime" / "toy"
    make = [sys.executable, str(ROOT / "tools" / "make_toy_task.py"), str(directory), "--sft-size", "64"]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    return directory


@EVERY_SCRIPT
def test_every_script_can_be_tried_with_the_toy_model(name: str, toy_commands, toy_task, monkeypatch) -> None:
    """What the run itself checks, but for features that are not built."""
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    words = toy_commands[name]
    args = parse_args(argv=[*words, "--dry-run"])
    assert [note for note in args.plan_notes if "not built" in note] == []
    assert layout_of(args).gpus == 2 and args.num_layers == 2
    assert args.save.endswith(f"/{Path(name).name.removeprefix('run-')}-toy")
    check_before_start(args)


def test_the_toy_model_asks_for_two_devices(home: Path) -> None:
    refused = bash(f"bash {SCRIPTS['run-qwen3-4B']}", HOME=str(home), MODEL="toy", NUM_GPUS="1", PRINT_COMMAND="1")
    assert refused.returncode == 2 and "give NUM_GPUS=2" in refused.stderr
    refused = bash(f"bash {SCRIPTS['run-qwen3-4B']}", HOME=str(home), MODEL="qwen3-8B", PRINT_COMMAND="1")
    assert refused.returncode == 2 and "MODEL='qwen3-8B'" in refused.stderr


def test_paths_come_from_the_environment() -> None:
    paths = {
        "HF_CHECKPOINT": "/m/hf",
        "REF_LOAD": "/m/ref",
        "LOAD": "/c/l",
        "SAVE": "/c/s",
        "PROMPT_DATA": "/d/p.jsonl",
    }
    words = shlex.split(bash(f"bash {SCRIPTS['run-qwen3-4B']}", PRINT_COMMAND="1", **paths).stdout)
    assert {name: value_of(words, "--" + name.lower().replace("_", "-")) for name in paths} == paths


def test_no_path_is_written_into_a_script() -> None:
    for path in [*SCRIPTS.values(), *(SCRIPTS_DIR / "lib").glob("*.sh")]:
        assert not re.search(r"[ =\"'](/root|/mnt|/data|/home|/workspace)\b", path.read_text()), path


def test_wandb_key_never_becomes_an_argument() -> None:
    without = bash(f"bash {SCRIPTS['run-qwen3-4B']}", PRINT_COMMAND="1").stdout
    result = bash(f"bash {SCRIPTS['run-qwen3-4B']}", PRINT_COMMAND="1", WANDB_API_KEY="s3cret-key")
    assert "--use-wandb" not in without
    assert "--use-wandb" in result.stdout
    assert "s3cret-key" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "script",
    ["scripts/run-qwen3-4B.sh", "scripts/low_precision/run-qwen3-4b-fp8.sh", "examples/geo3k_vlm/run-qwen3.5-4B.sh"],
)
def test_help_names_the_script_and_the_variables_and_starts_nothing(script: str, tmp_path: Path) -> None:
    result = bash(f"bash {ROOT / script} --help", cwd=tmp_path, HF_CHECKPOINT="/my/model", RAY="/bin/false")
    assert result.returncode == 0
    assert result.stdout.startswith(f"usage: bash {script} ")
    assert f"MODEL=toy NUM_GPUS=2 bash {script}\n" in result.stdout
    assert "/my/model" in result.stdout


def test_runs_of_examples_are_named_after_them() -> None:
    """So that none takes the checkpoints of another example, or of the script that it builds on, for its own."""
    paths = sorted((ROOT / "examples").glob("*/run-*.sh"))
    result = bash(
        "set -e\n" + "\n".join(f"bash {path}" for path in paths), PRINT_COMMAND="1", RM_URL="http://h:1/grade"
    )
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    places = [Path(words[place + 1]).name for place, word in enumerate(words) if word == "--save"]
    assert len(places) == len(paths) == len(set(places)) > 15
    names = [path.parent.name for path in paths]
    assert [(name, place) for name, place in zip(names, places, strict=True) if not place.startswith(f"{name}-")] == []


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"TEACHER_URL": "http://h:1"}, {"--opd-type sglang", "--rm-url http://h:1"}),
        ({"TEACHER_LOAD": "{tmp}/teacher"}, {"--opd-type megatron", "--opd-teacher-load {tmp}/teacher"}),
    ],
)
def test_a_teacher_is_a_server_or_weights_of_the_trainer(variables, words, tmp_path: Path) -> None:
    given = {name: value.format(tmp=tmp_path) for name, value in variables.items()}
    script = ROOT / "examples/on_policy_distillation/run-qwen3-8B.sh"
    result = bash(f"bash {script}", PRINT_COMMAND="1", **given)
    assert result.returncode == 0, result.stderr
    command = " ".join(shlex.split(result.stdout))
    assert all(word.format(tmp=tmp_path) in command for word in words)
    assert ("--custom-rm-path" in command) == ("TEACHER_URL" in variables) != ("--rm-type" in command)


def test_shellcheck_finds_nothing() -> None:
    scripts = sorted(str(path) for folder in ("scripts", "examples") for path in (ROOT / folder).glob("**/*.sh"))
    result = subprocess.run([SHELLCHECK, *scripts], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
