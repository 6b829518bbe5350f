"""The shell scripts: they parse, explain themselves, keep to one style, and refuse what they cannot serve."""

import contextlib
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.support.processes.waiting import runs, wait_until

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/**/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci" / "run"])
ENTRY_POINTS = ("scripts/install.sh", "scripts/quickstart.sh", "scripts/test.sh")


def bash(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_script_parses(script: Path) -> None:
    result = bash("-n", str(script))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_script_keeps_the_style(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert os.access(script, os.X_OK)
    # A file that is sourced (a list of model flags, functions) must not change the shell of the one who sources it.
    of_quickstart = script.parent.parent == ROOT / "examples" and script.name == "quickstart.sh"
    if script.parent.name not in ("models", "lib") and not of_quickstart:
        assert "set -euo pipefail" in lines
    assert not re.search(r"\b(pkill|killall)\b|ray stop", text), "scripts end only what they started"
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)
    assert "\t" not in text
    assert text.endswith("\n")


@pytest.mark.parametrize("script", ENTRY_POINTS)
def test_help_explains_and_does_nothing(script: str) -> None:
    result = bash(script, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"usage: bash {script}")
    assert result.stderr == ""


def test_ci_runs_exactly_the_test_script() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "bash scripts/test.sh"]


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """An interpreter that says it is Python 3.9."""
    stub = tmp_path / "python3"
    stub.write_text("#!/bin/sh\necho 3.9\n")
    stub.chmod(0o755)
    return str(stub)


def test_install_refuses_another_python_and_says_how_to_go_on(other_python: str) -> None:
    result = bash("scripts/install.sh", PYTHON=other_python)
    assert result.returncode == 2
    assert "Python 3.11 is supported" in result.stderr
    assert f"{other_python}: 3.9" in result.stderr
    assert "PYTHON=/path/to/python3.11 bash scripts/install.sh" in result.stderr


def test_install_refuses_an_interpreter_that_does_not_exist(tmp_path: Path) -> None:
    result = bash("scripts/install.sh", PYTHON=str(tmp_path / "absent"))
    assert result.returncode == 2
    assert "absent: none" in result.stderr


@pytest.fixture
def fresh_copy(tmp_path: Path) -> Path:
    """The installer in a copy of the repository without an environment."""
    for file in ("scripts/install.sh", "requirements/cpu.txt", "requirements/transformer-engine.txt", "pyproject.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    return tmp_path / "scripts" / "install.sh"


@pytest.mark.parametrize(
    ("program", "prints", "expected"),
    [("uname", "Darwin arm64", "supports Linux x86_64"), ("getconf", "glibc 2.31", "needs glibc 2.34 or newer")],
)
def test_install_refuses_another_platform(
    tmp_path: Path, fresh_copy: Path, program: str, prints: str, expected: str
) -> None:
    """In a copy of the repository without an environment, so that the checks are reached."""
    stub = tmp_path / "bin" / program
    stub.parent.mkdir()
    stub.write_text(f"#!/bin/sh\necho {prints}\n")
    stub.chmod(0o755)
    result = bash(str(fresh_copy), PATH=f"{stub.parent}:{os.environ['PATH']}", PYTHON="")
    assert result.returncode == 2
    assert expected in result.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--seed", "x"), "--seed 'x'"), (("--seed", "08"), "--seed '08'"), (("--seed",), "--seed"),
     (("--num-rollout", "0"), "--num-rollout '0'"),
     (("--sede", "1"), "'--sede'"), (("--lr", "1e-4"), "Flags of train.py come behind --, such as -- --lr"),
     (("--run", "../x"), "--run '../x'")],
)  # fmt: skip
def test_quickstart_refuses_bad_arguments(arguments: tuple[str, ...], named: str) -> None:
    result = bash("scripts/quickstart.sh", *arguments)
    assert result.returncode == 2
    assert named in result.stderr
    assert result.stdout == ""


@pytest.fixture
def quickstart_with_stub(tmp_path: Path) -> str:
    """The script in a copy of the repository whose interpreter prints its arguments, and makes the toy task."""
    for file in ("scripts/quickstart.sh", "scripts/lib/programs.sh", "scripts/lib/ray_node.sh"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    return str(tmp_path / "scripts" / "quickstart.sh")


def add_interpreter(root: Path, first: str = "") -> None:
    stub = root / ".venv" / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f'#!/bin/sh\n{first}\necho "$@"\n')
    stub.chmod(0o755)


def test_quickstart_plans_both_runs_and_leaves_nothing(tmp_path: Path, quickstart_with_stub: str) -> None:
    add_interpreter(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    result = bash(quickstart_with_stub, "--dry-run", "--dir", str(tmp_path / "out"), TMPDIR=str(temporary))
    assert result.returncode == 0, result.stderr
    made, taught, reinforced = [line for line in result.stdout.splitlines() if ".py" in line]
    directory = made.split()[1]
    assert made == f"tools/make_toy_task.py {directory} --seed 0" and directory.startswith(str(temporary))
    for line in (taught, reinforced):
        assert line.startswith(f"train.py --hf-checkpoint {directory}/model ") and line.endswith(" --dry-run")
    assert f"--prompt-data {directory}/sft.jsonl" in taught and f"held_out {directory}/eval.jsonl" in reinforced
    assert list(temporary.iterdir()) == [] and not (tmp_path / "out").exists()


def test_quickstart_passes_flags_on_to_the_second_run(tmp_path: Path, quickstart_with_stub: str) -> None:
    add_interpreter(tmp_path)
    more = ("--", "--lr", "1e-5", "--eval-prompt-data", "a b", "c")
    result = bash(quickstart_with_stub, "--dry-run", "--dir", str(tmp_path / "out"), "--run", "mine", *more)
    assert result.returncode == 0, result.stderr
    _, taught, reinforced = [line for line in result.stdout.splitlines() if ".py" in line]
    assert reinforced.endswith(" --lr 1e-5 --eval-prompt-data a b c --dry-run") and " --lr 1e-5 " not in taught
    assert f"--save {tmp_path}/out/seed-0/runs/mine/checkpoints" in reinforced
    # A Hugging Face directory, which every --train-backend starts from.
    assert (
        f"--save-hf {tmp_path}/out/seed-0/taught " in taught
        and f"--ref-load {tmp_path}/out/seed-0/taught " in reinforced
    )


def test_quickstart_reinforces_with_the_asynchronous_loop_when_asked(tmp_path: Path, quickstart_with_stub: str) -> None:
    add_interpreter(tmp_path)
    result = bash(quickstart_with_stub, "--async", "--dry-run", "--dir", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    _, taught, reinforced = [line for line in result.stdout.splitlines() if ".py" in line]
    assert taught.startswith("train.py ") and reinforced.startswith("train_async.py ")


def test_quickstart_tells_of_a_wrong_flag_before_it_teaches(tmp_path: Path, quickstart_with_stub: str) -> None:
    add_interpreter(tmp_path, 'case "$*" in *--check) echo "wrong: $*" >&2; exit 2 ;; esac')
    (tmp_path / "scripts" / "install.sh").touch()
    seed = tmp_path / "out/seed-0"
    words = ("--opd-teacher-load", str(seed / "sft"), "--kl-los-coef", "1")
    result = bash(quickstart_with_stub, "--dir", str(tmp_path / "out"), "--", *words)
    assert result.returncode == 2 and result.stderr.startswith("wrong: train.py ")
    # What is not there yet is another model's place.
    assert f"--ref-load {seed}/task/model --load" in result.stderr
    assert f"--opd-teacher-load {seed}/task/model --kl-los-coef 1" in result.stderr
    assert "make_toy_task.py" in result.stdout and "sft_loss" not in result.stdout


def test_quickstart_tells_at_once_of_what_another_version_left(tmp_path: Path, quickstart_with_stub: str) -> None:
    """Before it installs anything: with a model that is not there step 4 would be refused."""
    seed = tmp_path / "out/seed-0"
    (seed / "sft").mkdir(parents=True)
    result = bash(quickstart_with_stub, "--dir", str(tmp_path / "out"))
    # Teaching that was killed goes on.
    assert "1/5 install" in result.stdout
    (seed / "sft/latest_checkpointed_iteration.txt").write_text("29")
    result = bash(quickstart_with_stub, "--dir", str(tmp_path / "out"))
    assert result.returncode == 2 and result.stdout == ""
    assert f"Remove {seed}/sft to teach again" in result.stderr and f"{seed}/taught, is not there" in result.stderr
    (seed / "taught").mkdir()
    assert "1/5 install" in bash(quickstart_with_stub, "--dir", str(tmp_path / "out")).stdout


# What teaches, with a process below it. It hears of its end, and `keeps` that process, or is `deaf`.
TEACHER = """
import os, signal, subprocess, sys
kind, mark = {kind!r}, {mark!r}
child = subprocess.Popen(["sleep", "600"])
def end(number, frame):
    if kind != "keeps":
        child.kill()
    open(mark + ".ended", "w").write(str(number))
    sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN if kind == "deaf" else end)
if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, end)
open(mark + ".draft", "w").write(f"{{os.getpid()}} {{child.pid}}")
os.rename(mark + ".draft", mark)
child.wait()
"""


@pytest.mark.parametrize(
    ("kind", "sent", "heard"),
    [
        ("ends", signal.SIGTERM, signal.SIGTERM),
        ("ends", signal.SIGHUP, signal.SIGTERM),
        ("ends", signal.SIGINT, signal.SIGINT),
        ("keeps", signal.SIGTERM, signal.SIGTERM),
        ("deaf", signal.SIGTERM, None),
    ],
)
def test_quickstart_ends_what_it_started_and_nothing_else(
    tmp_path: Path, quickstart_with_stub: str, kind: str, sent: signal.Signals, heard: signal.Signals | None
) -> None:
    """Ctrl-C reaches all processes of a terminal; other signals are sent to the script alone."""
    mark, teacher = tmp_path / "running", tmp_path / "teacher.py"
    teacher.write_text(TEACHER.format(kind=kind, mark=str(mark)))
    case = f'case "$*" in *--check) exit 0 ;; train.py*sft_loss*) exec "{sys.executable}" "{teacher}" ;; esac'
    add_interpreter(tmp_path, case)
    (tmp_path / "scripts" / "install.sh").touch()
    command = ["bash", quickstart_with_stub, "--dir", str(tmp_path / "out")]
    # Who ends has time for it, and for what never ends nobody waits long.
    limits = {"STOP_SECONDS": "1" if kind == "deaf" else "50", "LEFT_SECONDS": "50" if kind == "ends" else "1"}
    with (
        subprocess.Popen(["sleep", "600"]) as another,
        subprocess.Popen(
            command, env={**os.environ, **limits}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0,
            preexec_fn=hears_all_signals,
        ) as script,
    ):  # fmt: skip
        try:
            wait_until(mark.exists, 30)
            started = [psutil.Process(int(pid)) for pid in mark.read_text().split()]
            (os.killpg if sent is signal.SIGINT else os.kill)(script.pid, sent)
            assert script.wait(50) == -sent
            assert not any(map(runs, started))
            assert another.poll() is None
        finally:
            another.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    ended = Path(f"{mark}.ended")
    assert (int(ended.read_text()) if ended.exists() else None) == heard


def test_a_process_that_ended_has_no_start_time() -> None:
    """Also while nobody has asked how it ended."""
    program = f'source {ROOT}/scripts/lib/ray_node.sh; start_time "$1"'
    with subprocess.Popen(["sleep", "600"]) as process:
        assert bash("-c", program, "-", str(process.pid)).stdout.strip().isdigit()
        process.kill()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, 30)
        assert bash("-c", program, "-", str(process.pid)).stdout == ""


def hears_all_signals() -> None:
    """As in a terminal, whatever the tests were started with."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def test_quickstart_says_what_a_plan_needs(quickstart_with_stub: str) -> None:
    result = bash(quickstart_with_stub, "--dry-run")
    assert result.returncode == 2
    assert "--dry-run needs .venv/bin/python: first bash scripts/install.sh" in result.stderr


def test_the_test_script_says_what_it_would_run() -> None:
    result = bash("scripts/test.sh", "--dry-run", "tests/utils", "-k", "a b", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    install, run = result.stdout.splitlines()
    assert install == "bash scripts/install.sh"
    assert run.endswith(r"-m pytest -m not\ slow\ and\ not\ gpu\ and\ not\ learns tests/utils -k a\ b")
    tiers = {"--all": r"not\ gpu\ and\ not\ learns", "--examples": "learns"}
    for option, marks in tiers.items():
        whole = bash("scripts/test.sh", "--dry-run", option).stdout.splitlines()[1]
        assert whole.endswith(f"-m pytest -m {marks} -n 2 --dist loadfile --no-loadscope-reorder")


def test_the_installer_says_what_it_would_run(fresh_copy: Path) -> None:
    result = bash(str(fresh_copy), "--dry-run", PYTHON=sys.executable)
    assert result.returncode == 0, result.stderr
    torch = next(
        line for line in (ROOT / "requirements/cpu.txt").read_text().splitlines() if line.startswith("torch==")
    )
    pip = ".venv/bin/python -m pip install --no-deps"
    assert result.stdout.splitlines() == [
        f"{sys.executable} -m venv .venv", f"{pip} {torch}+cpu", f"{pip} -r requirements/cpu.txt",
        f"{pip} --target .venv/transformer-engine --upgrade -r requirements/transformer-engine.txt", f"{pip} -e .",
    ]  # fmt: skip
    assert not (fresh_copy.parents[1] / ".venv").exists()


def test_a_planned_installation_is_refused_like_a_real_one(fresh_copy: Path, other_python: str) -> None:
    assert bash(str(fresh_copy), "--dry-run", PYTHON=other_python).returncode == 2
    assert "unknown argument '--dry'" in bash(str(fresh_copy), "--dry").stderr


def test_pins_are_exact_and_unique() -> None:
    for file in ("requirements/cpu.txt", "requirements/gpu.txt", "requirements/transformer-engine.txt"):
        lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
        assert all(re.fullmatch(r"[A-Za-z0-9._\-\[\]]+==[A-Za-z0-9.+]+", line) for line in lines)
        names = [re.split(r"[\[=]", line)[0].lower().replace("_", "-").replace(".", "-") for line in lines]
        assert len(names) == len(set(names))


def test_gpu_pins_agree_with_the_proven_ones() -> None:
    def pins(file: str) -> dict[str, str]:
        lines = (ROOT / file).read_text().splitlines()
        found = (re.fullmatch(r"([A-Za-z0-9._\-]+)(?:\[.*\])?==(.*)", line) for line in lines)
        return {match[1].lower(): match[2] for match in found if match}

    cpu, gpu = pins("requirements/cpu.txt"), pins("requirements/gpu.txt")
    assert len(gpu) > 10
    assert {name: version for name, version in gpu.items() if cpu.get(name) != version} == {}


def test_transformer_engine_is_installed_in_the_range_that_megatron_core_declares() -> None:
    """Megatron-Core asks for it among the extras of its developers, so that an installation by name takes the newest."""
    declared = [Requirement(text) for text in importlib.metadata.requires("megatron-core") or ()]
    (wanted,) = {str(found.specifier) for found in declared if found.name == "transformer-engine"}
    text = (ROOT / "requirements/gpu.txt").read_text()
    written = [Requirement(found) for found in re.findall(r"transformer-engine\[pytorch\][^'\"\s]+", text)]
    assert [str(found.specifier) for found in written] == [wanted]
    (tested,) = map(Requirement, pin_lines((ROOT / "requirements/transformer-engine.txt").read_text()))
    assert tested.name == "transformer-engine" and SpecifierSet(wanted).contains(
        str(tested.specifier).removeprefix("==")
    )


def test_gpu_pins_go_together() -> None:
    """Each satisfies what the others ask of it, as far as they are installed here."""
    text = (ROOT / "requirements/gpu.txt").read_text()
    pins = {found.name.lower(): str(found.specifier).removeprefix("==") for found in map(Requirement, pin_lines(text))}
    wrong, asked = {}, 0
    for name in pins:
        for other in map(Requirement, importlib.metadata.requires(name) or ()):
            version = pins.get(other.name.lower())
            if version is not None and (other.marker is None or other.marker.evaluate({"extra": ""})):
                asked += 1
                if not other.specifier.contains(version, prereleases=True):
                    wrong[f"{name} asks for {other}"] = version
    assert wrong == {} and asked >= 10


def pin_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_image_has_what_a_run_needs() -> None:
    """Both loops, every package of the repository, and what trackers need."""
    copied = {word for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY ")
              for word in line.split()[1:-1]}  # fmt: skip
    needed = {path.name for path in ROOT.glob("*.py")} | {"slime", "slime_plugins", "scripts", "tools", "examples"}
    assert needed - copied == set()
    names = {Requirement(line).name for line in pin_lines((ROOT / "requirements/gpu.txt").read_text())}
    assert {"wandb", "tensorboard"} <= names


def test_the_command_of_a_quickstart_run_names_itself_for_the_last_lines_of_the_run(tmp_path: Path) -> None:
    """What `train.sh` tells train.py is what a person typed, in words that a shell takes again."""
    function = re.search(
        r"^write_train_script\(\) \{.*?^\}$", (ROOT / "scripts/quickstart.sh").read_text(), re.M | re.S
    )[0]
    run, python = tmp_path / "a run", tmp_path / "python"
    run.mkdir()
    python.write_text('#!/bin/sh\nprintf %s "$SLIME_START_COMMAND"\n')
    python.chmod(0o755)
    assert bash("-c", f"RUN_DIR='{run}' PYTHON_BIN='{python}'\n{function}\nwrite_train_script --lr 1").returncode == 0
    script = run / "train.sh"
    for words in ([], ["--num-rollout", "50", "a b'\n\té"]):
        told = bash(str(script), *words, LC_ALL="C").stdout
        assert shlex.split(told) == ["bash", str(script), *words]
