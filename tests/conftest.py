"""What a run of the tests says about the machine that it ran on, as a number that rounds otherwise there has a place to begin;
which files it begins with; which cases fixtures of whole modules are for; and the parsers that its tests share."""

import copy
import gc
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

# What a test file imports that starts processes.
_STARTING = frozenset({"ray", "rehearse_rank", "run_distributed", "subprocess"})


def pytest_report_header() -> str:
    import torch

    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return (
        f"numerics: CPU capability {capability} (ATEN_CPU_CAPABILITY), {threads} thread(s) a process (OMP_NUM_THREADS)"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where processes share the files, whole runs come first: they are few and long, and one that is left for the end keeps a
    process busy alone. Then the files whose tests start processes, of which a single one may take many seconds, and then the
    others; of either those with many tests first. `scripts/test.sh` keeps pytest-xdist from an order of its own."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        tests_of = Counter(item.path for item in items)
        items.sort(
            key=lambda item: (
                "e2e" not in item.path.parts,
                _STARTING.isdisjoint(vars(item.module)),
                -tests_of[item.path],
            )
        )


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


@pytest.fixture(scope="session", autouse=True)
def kept_parsers() -> Iterator[None]:
    """Have `parse_args` build the parser of a program once: to build it takes longer than to parse the words and ask all rules.

    A parser keeps nothing of what it has parsed. Where a test puts others in place of what the flags are read from, or has
    flags of its own, a parser is built for it.
    """
    import slime.arguments
    from slime.arguments import groups, parser

    build, kept = slime.arguments.build_parser, {}

    def kept_or_built(add_custom_arguments: Any = None, *, program: str = "train.py") -> parser.ArgumentParser:
        if add_custom_arguments is not None:
            return build(add_custom_arguments, program=program)
        key = program, parser.load_surface, groups.load_surface, id(parser.OWN_GROUPS)
        if key not in kept:
            built = build(program=program)
            lent = [action for action in built._actions if isinstance(action.default, list | dict)]
            # The groups are kept so that nothing else gets their id.
            kept[key] = built, [(action, copy.deepcopy(action.default)) for action in lent], parser.OWN_GROUPS
        built, defaults, _ = kept[key]
        # The arguments of a run hold the defaults themselves, and may change them.
        for action, default in defaults:
            action.default = copy.deepcopy(default)
        return built

    with mock.patch.object(slime.arguments, "build_parser", kept_or_built):
        yield


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """What a test that starts a run in this process has set of the log goes with it: its level would give later tests lines
    that they do not expect, and its handlers write to what is closed by then."""
    before, level = logging.root.handlers[:], logging.root.level
    yield
    for handler in [handler for handler in logging.root.handlers if handler not in before]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)
