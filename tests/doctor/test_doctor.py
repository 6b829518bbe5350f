"""The command: every check is told, also of a broken installation; its exit status; no secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime import doctor
from slime.doctor.findings import OK, WARNING, WRONG, Finding
from slime.utils import device

ROOT = Path(__file__).parents[2]
TITLES = [
    "versions", "devices", "imports", "machine", "disks", "ports", "Ray", "optional packages", "environment",
]  # fmt: skip


def with_checks(monkeypatch, **checks):
    monkeypatch.setattr(doctor, "checks", lambda variables, time_limit: checks)


def test_the_status_says_whether_something_is_wrong(monkeypatch, capsys):
    with_checks(monkeypatch, one=lambda: [Finding(OK, "fine"), Finding(WARNING, "hm", "look")])
    assert doctor.main([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "one", "  ok      fine", "  warning hm", "          -> look", "0 wrong, 1 warnings, 1 ok",
    ]  # fmt: skip
    with_checks(monkeypatch, one=lambda: [Finding(WRONG, "no", "mend it")], two=lambda: [Finding(OK, "fine")])
    assert doctor.main([]) == 1


def test_a_check_that_fails_is_a_finding_and_the_others_go_on(monkeypatch, capsys):
    def breaks():
        yield Finding(OK, "before")
        raise ModuleNotFoundError("No module named 'psutil'")

    with_checks(monkeypatch, one=breaks, two=lambda: [Finding(OK, "after")])
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert "before" in told and "after" in told
    assert "warning this could not be looked at: ModuleNotFoundError: No module named 'psutil'" in told


def test_json_is_the_only_line(monkeypatch, capsys):
    with_checks(monkeypatch, one=lambda: [Finding(WRONG, "no", "mend it")])
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"one": [{"level": "wrong", "text": "no", "remedy": "mend it"}]}


@pytest.mark.parametrize(
    "name, value", [("OMP_NUM_THREADS", "many"), ("SLIME_ACCELERATOR", "tpu"), ("SLIME_HOST_IP", "203.0.113.7")]
)
def test_values_that_a_run_refuses(monkeypatch, name, value):
    # This process may know its device already.
    monkeypatch.setattr(device, "get_accelerator", device.get_accelerator.__wrapped__)
    for other in ("OMP_NUM_THREADS", "SLIME_ACCELERATOR", "SLIME_HOST_IP"):
        monkeypatch.delenv(other, raising=False)
    assert doctor.refused_values() == []
    monkeypatch.setenv(name, value)
    (problem,) = doctor.refused_values()
    assert value in problem


def run(*words: str, python: tuple[str, ...] = (), **variables: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLIME_"))}
    return subprocess.run(
        [sys.executable, *python, "-m", "slime.doctor", *words], cwd=ROOT, env={**environment, **variables},
        capture_output=True, text=True, timeout=540,
    )  # fmt: skip


def test_the_doctor_itself_needs_no_package(tmp_path):
    """-S: without the packages of the environment, as the Python of the system. No import has time enough to succeed."""
    variables = {"SLIME_DEBUGG": "1", "WANDB_API_KEY": "f00dbeef", "RAY_TMPDIR": str(tmp_path)}
    done = run("--time-limit", "0.05", python=("-S",), **variables)
    assert done.stderr == "" and done.returncode == 1
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")][:-1] == TITLES
    assert "not installed, and slime needs it: aiohttp" in done.stdout
    assert "did you mean SLIME_DEBUG?" in done.stdout
    assert "WANDB_API_KEY set" in done.stdout and "f00dbeef" not in done.stdout


@pytest.mark.slow
def test_this_installation(tmp_path):
    done = run("--json", RAY_TMPDIR=str(tmp_path), SLIME_ACCELERATOR="cpu")
    told = json.loads(done.stdout)
    assert list(told) == TITLES and done.stderr == ""
    assert done.returncode == any(finding["level"] == WRONG for listed in told.values() for finding in listed)
    assert [finding["level"] for finding in told["imports"]] == [OK] * 4
    assert WRONG not in {finding["level"] for title in ("versions", "devices") for finding in told[title]}
    assert "No module named" not in done.stdout and "could not be looked at" not in done.stdout


def test_a_python_that_is_too_old_is_the_only_finding(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18, "final", 0))
    ((title, check),) = doctor.checks({}, 1.0).items()
    assert (title, [finding.level for finding in check()]) == ("versions", [WRONG])
