"""What can be known of a machine: pins, processes of their own, clusters that do not answer."""

import resource
import socket
import subprocess
import sys

import pytest

from slime.doctor import facts
from tests.support.processes.waiting import runs, wait_until


def test_pins_are_read_beside_comments_and_extras():
    text = "# Pins\n#   torch==1.0  a comment\ntorch==2.13.0\nray[default]==2.60.0  # why\nPyYAML==6.0.3\nmath_verify==0.9.0\n"
    pins = {"torch": "2.13.0", "ray": "2.60.0", "pyyaml": "6.0.3", "math-verify": "0.9.0"}
    assert facts.read_pins(text) == pins


@pytest.mark.parametrize("on_gpus", [True, False])
def test_the_pins_hold_all_that_slime_needs(on_gpus):
    packages = facts.read_packages(on_gpus)
    assert packages.pins_file == f"requirements/{'gpu' if on_gpus else 'cpu'}.txt"
    # Torch brings one, and the images of engines the other.
    assert set(packages.required) - set(packages.pins) <= {"numpy", "pillow"}
    assert packages.installed["torch"] and set(packages.installed) >= set(packages.required)


def test_a_package_without_a_repository_compares_nothing(tmp_path):
    packages = facts.read_packages(False, tmp_path)
    assert (packages.pins_file, packages.pins) == (None, {})
    assert "torch" in packages.required


def test_metadata_that_is_broken_is_told_of_one_package(tmp_path, monkeypatch):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/cpu.txt").write_text("broken==1.0\nray==2.60.0\n")
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info/METADATA").write_bytes(b"\xff\xfe\x00")
    monkeypatch.syspath_prepend(tmp_path)
    packages = facts.read_packages(False, tmp_path)
    assert packages.installed["ray"] is not None
    assert packages.installed.get("broken") is None


def test_a_process_answers_with_its_last_line():
    answer = facts.ask('import json, sys; print("noise"); print(json.dumps({"words": sys.argv[1:]}))', 60, ["a", "b"])
    assert (answer.value, answer.problem, answer.timed_out) == ({"words": ["a", "b"]}, None, False)


def test_a_process_that_fails_is_told_by_its_error():
    answer = facts.ask('import sys; raise ImportError("libcuda.so.1: no such file\\nadvice of three lines")', 60)
    assert answer.problem == "ImportError: libcuda.so.1: no such file"
    assert "SIGSEGV" in facts.ask("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 60).problem


def test_a_process_that_hangs_is_ended_with_what_it_started(tmp_path):
    started = tmp_path / "started"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(started)!r}, "w").write(str(child.pid))
time.sleep(600)
"""
    for seconds in (3, 30):
        answer = facts.ask(code, seconds)
        assert answer.timed_out and answer.problem == f"no answer within {seconds} seconds"
        if started.exists() and started.read_text():
            break  # else the machine was too busy for it to come so far
    wait_until(lambda: not runs(int(started.read_text())), 30)


def test_packages_are_not_taken_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "psutil.py").write_text("raise RuntimeError('not the package')")
    monkeypatch.chdir(tmp_path)
    assert facts.ask("import psutil", 60).problem is None


def test_this_machine_can_be_read():
    machine = facts.read_machine()
    assert machine.cores >= 1 and 0 < machine.available <= machine.memory
    assert machine.processes is None or machine.processes > 0


def test_a_process_that_serves_may_open_as_many_files_as_the_raylet_that_starts_it(tmp_path):
    """Its limit is that of the shell where Ray was started. Nothing needs the soft one, which those who serve raise."""
    assert facts.read_machine().open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    (tmp_path / "raylet").symlink_to(sys.executable)
    command = f"ulimit -Sn 256; ulimit -Hn 4096; exec {tmp_path}/raylet -c 'import time; time.sleep(600)'"
    with subprocess.Popen(["sh", "-c", command]) as process:
        try:
            wait_until(lambda: facts.read_machine().open_files == 4096, 30)
        finally:
            process.kill()


def test_disks_are_told_once_with_all_that_lies_on_them(tmp_path):
    disks = facts.read_disks({"RAY_TMPDIR": str(tmp_path / "not/there"), "HF_HOME": str(tmp_path)})
    (disk,) = [disk for disk in disks if facts.RAY_SESSIONS in disk.uses]
    assert disk.uses["models of Hugging Face"] == str(tmp_path)
    assert disk.uses[facts.RAY_SESSIONS] == f"{tmp_path}/not/there/ray" and 0 < disk.free <= disk.total


def test_sessions_of_ray_lie_where_ray_puts_them(tmp_path, monkeypatch):
    from ray._common.utils import get_default_ray_temp_dir

    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    given = ({}, {"TMPDIR": str(tmp_path)}, {"TMPDIR": str(tmp_path), "RAY_TMPDIR": "/var/tmp"})
    for variables in given:
        with monkeypatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            told = [
                disk.uses[facts.RAY_SESSIONS] for disk in facts.read_disks(variables) if facts.RAY_SESSIONS in disk.uses
            ]
            assert told == [get_default_ray_temp_dir()]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("no port")
    assert facts.read_cluster({"TMPDIR": str(tmp_path)}, 1).address == "no port"


def test_listeners_have_their_process():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert facts.read_listeners()[server.getsockname()[1]].endswith(f"process {facts.os.getpid()}")


def test_no_cluster_is_named(tmp_path):
    assert facts.read_cluster({"RAY_TMPDIR": str(tmp_path)}, 1) is None
    found = facts.read_cluster({"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": "auto"}, 1)
    assert (found.source, found.listens) == ("RAY_ADDRESS", None)


def test_a_cluster_that_has_ended_is_found_by_its_file(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text(f"127.0.0.1:{port}\n")
    found = facts.read_cluster({"RAY_TMPDIR": str(tmp_path)}, 1)
    assert (found.address, found.listens) == (f"127.0.0.1:{port}", False)
    assert found.source == f"{tmp_path}/ray/ray_current_cluster"


def test_whoever_takes_connections_and_says_nothing_is_waited_for_no_longer_than_allowed(monkeypatch):
    monkeypatch.setattr(facts, "_CLUSTER", "import time; time.sleep(600)")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        found = facts.read_cluster({"RAY_ADDRESS": address}, 0.5)
    assert found.listens is True and found.answer.timed_out


def test_an_address_for_job_submissions_is_tried_and_shown_without_its_password():
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = facts.read_cluster({"RAY_ADDRESS": f"http://me:hunter2@127.0.0.1:{server.getsockname()[1]}"}, 1)
    assert found.listens is True and found.answer == facts.Answer() and "hunter2" not in found.address


def test_modules_are_looked_up_and_not_imported():
    assert facts.is_installed("json") and not facts.is_installed("no_such_module")
    assert not facts.is_installed("no_such_package.module")
    assert facts.is_installed("this") and "this" not in sys.modules
