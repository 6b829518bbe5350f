"""Programs of a model: how they are found, what they can do, and what hostile ones cannot."""

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from examples.retool import toy_task
from examples.retool.retool import generate, program_of
from examples.retool.sandbox import Limits, run_python
from slime.agent.limited import ARCHITECTURES, filter_program
from slime.agent.sandbox import LIMITED, require_namespaces
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.toy_rows import toy_rows
from tests.support.processes.spoken import spoken
from tests.support.processes.waiting import wait_until


def ran(program, seconds=20.0):
    return asyncio.run(run_python(program, Limits(seconds=seconds)))


@pytest.mark.parametrize(
    ("said", "program"),
    [
        ("so <code>print(1)</code><|im_end|>", "print(1)"),
        ("<code>a</code> or <code>b\nc</code>", "b\nc"),
        ("<code>\n```python\nprint(2)\n```\n</code>", "print(2)\n"),
        ("<code>print(", None),
        ("\\boxed{1}", None),
    ],
)
def test_the_last_program_of_a_turn_is_run(said, program):
    assert program_of(said) == program


@pytest.mark.parametrize("said", ["<code>" * 20_000, "<code>a</code>" + "<code>" * 20_000])
def test_a_model_that_repeats_itself_holds_nobody_up(said):
    started = time.process_time()
    assert program_of(said) == ("a" if "a" in said else None)
    assert time.process_time() - started < 5


def test_a_program_computes_with_the_standard_library_and_threads():
    program = """
import fractions, itertools, math, threading
found = []
thread = threading.Thread(target=lambda: found.append(math.comb(5, 2)))
thread.start()
thread.join()
print(fractions.Fraction(1, 3) + 1, found)
"""
    assert ran(program) == "4/3 [10]"


def test_an_error_is_told_without_lines_that_are_not_the_programs():
    text = ran("print('so far')\n1/0")
    assert text.startswith("so far") and text.endswith("ZeroDivisionError: division by zero")
    assert "limited.py" not in text
    assert "SyntaxError" in ran("print(")


def test_it_sees_an_empty_directory_no_environment_and_no_other_process(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    processes = "[name for name in os.listdir('/proc') if name.isdigit()]"
    assert ran(f"import os; print(os.listdir(), 'SECRET_OF_THE_RUN' in os.environ, {processes})") == "[] False ['1']"


def test_its_directory_is_gone_behind_it():
    directory = ran("import os; open('left', 'w').write('x'); print(os.getcwd())")
    assert directory.startswith("/") and not Path(directory).exists()


HOSTILE = {
    "a fork bomb": ("import os\nwhile True: os.fork()", "PermissionError"),
    "another program": ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
    "another program in its place": ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
    "memory": ("x = bytearray(10**10)", "MemoryError"),
    "a large file": ("open('x', 'wb').write(bytes(2**22))", "OSError"),
    "the network": ("import socket\nsocket.create_connection(('127.0.0.1', 1), 1)", "PermissionError"),
    "a namespace of its own": ("import ctypes, os\nprint(ctypes.CDLL(None, use_errno=True).unshare(0x10000000))", "-1"),
    "a session of its own": ("import os\nos.setsid()", "PermissionError"),
    "others' processes": (
        "import os, signal\nos.kill(os.getppid() or 4_000_000, signal.SIGKILL)",
        "ProcessLookupError",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_program_must_not_do_fails(name):
    program, told = HOSTILE[name]
    assert told in ran(program)


@pytest.mark.parametrize(
    "program",
    [
        "print(open({0!r}).read())",
        "open({0!r}, 'a')",
        "os.remove({0!r})",
        "os.truncate({0!r}, 0)",
        "os.chmod({0!r}, 0)",
    ],
)
def test_files_of_the_user_are_out_of_reach(tmp_path, program):
    file = tmp_path / "secret"
    file.write_text("x")
    assert "PermissionError" in ran("import os\n" + program.format(str(file)))
    assert file.read_text() == "x"


@pytest.mark.parametrize(
    "program",
    [
        "import time\ntime.sleep(1000)",
        pytest.param("while True: pass", marks=pytest.mark.slow),
        "import os, signal\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\nos.close(1)\nos.close(2)\nwhile 1: pass",
    ],
)
def test_a_program_without_end_is_ended_with_all_that_it_is(program, tmp_path, monkeypatch):
    # The directory of a program stands in its command line. Other tests run others meanwhile.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = time.monotonic()
    assert ran(program, seconds=1.5).endswith("[out of time]")
    assert time.monotonic() - before < 30

    def left():
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [line for line in found.splitlines() if str(LIMITED) in line and str(tmp_path) in line]

    # What has been killed may take a moment.
    wait_until(lambda: left() == [])


def test_megabytes_of_output_are_cut():
    assert len(ran("while True: print('x' * 10_000)")) < 3000
    assert ran("print('y' * 5000)") == "y" * 2048 + "[cut]".rjust(6, "\n")


def test_a_filter_is_there_for_each_architecture():
    for architecture, numbers in ARCHITECTURES.items():
        program = filter_program(architecture)
        assert len(program) % 8 == 0 and len(program) // 8 == 13 + 2 * len(numbers["denied"])


def test_a_machine_without_namespaces_refuses_by_name(tmp_path, monkeypatch):
    require_namespaces.cache_clear()
    refusing = tmp_path / "unshare"
    refusing.write_text("#!/bin/sh\necho 'unshare failed: Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(UserError, match="Operation not permitted"):
        ran("print(1)")
    require_namespaces.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="unshare"):
        ran("print(1)")
    require_namespaces.cache_clear()


@pytest.mark.usefixtures("fresh_state")
def test_the_output_is_a_reply_that_is_not_trained_and_a_turn_ends_at_its_mark(checkpoint):
    said = ["<code>print(6*7)</code>", "\\boxed{42}"]
    sample = Sample(index=0, prompt=[{"role": "user", "content": "6*7?"}])
    answer, requests = spoken(checkpoint, generate, sample, said, max_turns=4)
    assert requests[0]["sampling_params"]["stop"] == ["</code>"]
    assert "42" in answer.response.removeprefix(said[0]).removesuffix(said[1])
    assert sum(answer.loss_mask) == sum(map(len, said))


def test_demonstrations_show_what_their_programs_print_and_a_third_of_them_end_right(tmp_path):
    task = toy_rows(tmp_path, toy_task)
    labels = []
    for row in task["sft"]:
        question, *turns = [message["content"] for message in row["messages"]]
        if len(turns) == 3:
            # These programs are ours: a product, and a sum perhaps.
            assert turns[1] == str(eval(program_of(turns[0]).removeprefix("print")))
        labels.append(turns[-1] == f"\\boxed{{{eval(question.removeprefix('What is ').rstrip('?'))}}}")
    assert 0.25 < sum(labels) / len(labels) < 0.4
