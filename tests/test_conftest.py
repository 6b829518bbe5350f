"""What a run of the tests says before the first of them, and which these are."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import slime.arguments
from slime.arguments import groups, parser
from tests.conftest import pytest_collection_modifyitems


def test_a_run_tells_the_vector_instructions_and_threads_that_it_has():
    """As `scripts/test.sh` starts it, which `.ci/run` calls. Every processor has those that are chosen here."""
    here = Path(__file__)
    command = [sys.executable, "-m", "pytest", str(here), "-k", "nothing_has_this_name"]
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    run = subprocess.run(command, cwd=here.parents[1], env=env, capture_output=True, text=True, timeout=120)
    lines = [line for line in run.stdout.splitlines() if line.startswith("numerics: ")]
    assert lines == ["numerics: CPU capability DEFAULT (ATEN_CPU_CAPABILITY), 2 thread(s) a process (OMP_NUM_THREADS)"]


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fixture_knows_the_cases_that_are_to_run(selected, request, number):
    cases = selected(test_a_fixture_knows_the_cases_that_are_to_run)
    names = [item.name for item in request.session.items]
    assert {"number": number} in cases
    assert [f"{request.node.originalname}[{case['number']}]" in names for case in cases] == [True] * len(cases)
    assert len(cases) == sum(name.startswith(request.node.originalname) for name in names)
    assert selected(order) == []


def order():
    """No test."""


def test_processes_that_share_the_files_begin_with_whole_runs(monkeypatch):
    counts = {
        "tests/agent/test_a.py": 2,
        "tests/e2e/test_b.py": 1,
        "tests/e2e/test_c.py": 2,
        "tests/utils/test_d.py": 3,
        "tests/utils/test_e.py": 1,
        "tests/utils/test_f.py": 2,
    }
    starting = {
        "tests/e2e/test_b.py": "subprocess",
        "tests/utils/test_e.py": "run_distributed",
        "tests/utils/test_f.py": "ray",
    }
    modules = {path: SimpleNamespace(**{starting[path]: None} if path in starting else {}) for path in counts}
    items = [
        SimpleNamespace(path=Path(path), number=i, module=modules[path])
        for path, count in counts.items()
        for i in range(count)
    ]

    def order():
        found = list(items)
        pytest_collection_modifyitems(found)
        return [(item.path.stem, item.number) for item in found]

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert order() == [(item.path.stem, item.number) for item in items]
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    files = [("test_b", 1), ("test_c", 2), ("test_f", 2), ("test_e", 1), ("test_d", 3), ("test_a", 2)]
    assert order() == [(name, number) for name, count in files for number in range(count)]


def test_tests_share_the_parser_of_a_program_and_nothing_that_it_gave():
    shared = slime.arguments.build_parser()
    args = shared.parse_args([])
    args.train_env_vars["A"] = "b"
    args.rollout_sample_hook_path.append("hooks.py:hook")
    assert slime.arguments.build_parser() is shared
    args = shared.parse_args([])
    assert args.train_env_vars == {} and args.rollout_sample_hook_path == []
    assert slime.arguments.build_parser(program="train_async.py").prog == "train_async.py"
    own = slime.arguments.build_parser(lambda given: given.add_argument("--mine") and given)
    assert own.parse_args(["--mine", "1"]).mine == "1" and not hasattr(shared.parse_args([]), "mine")


@pytest.mark.parametrize("place", [groups, parser])
def test_what_a_test_changes_of_the_flags_is_in_a_parser_of_its_own(place, monkeypatch):
    shared = slime.arguments.build_parser()
    monkeypatch.setattr(place, "load_surface", lambda name, ask=place.load_surface: ask(name))
    assert slime.arguments.build_parser() is not shared
    monkeypatch.undo()
    assert slime.arguments.build_parser() is shared
    monkeypatch.setattr(parser, "OWN_GROUPS", parser.OWN_GROUPS[:-1])
    assert len(slime.arguments.build_parser()._actions) < len(shared._actions)
