"""What a run of the tests says about the machine that it ran on, as a number that rounds otherwise there has a place to begin;
which files it begins with; and which cases fixtures of whole modules are for."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_report_header() -> str:
    import torch

    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return (
        f"numerics: CPU capability {capability} (ATEN_CPU_CAPABILITY), {threads} thread(s) a process (OMP_NUM_THREADS)"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the files, whole runs come first: they are few and long, and one that is left for the end keeps a
    process busy alone. Then the files with many tests. `scripts/test.sh` keeps pytest-xdist from an order of its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests_of = Counter(item.path for item in items)
        items.sort(key=lambda item: ("e2e" not in item.path.parts, -tests_of[item.path]))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests and what their files import are a million objects that stay to the end: no collection of garbage looks through
    them, neither while they are made nor when a test asks for one."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> Callable[[Callable], list[dict[str, Any]]]:
    """The parameters of those cases of a test that are to run. What a fixture makes for all cases at once it makes for these
    alone: a slow one costs nothing where slow ones are left out."""

    def cases(test: Callable) -> list[dict[str, Any]]:
        items = (item for item in request.session.items if getattr(item, "function", None) is test)
        return [item.callspec.params for item in items]

    return cases


@pytest.fixture
def log_of_a_run() -> Iterator[None]:
    """For tests that start a run in this process: its handlers go with it, for they write to what is closed afterwards."""
    before, level = logging.root.handlers[:], logging.root.level
    yield
    for handler in [handler for handler in logging.root.handlers if handler not in before]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)
