"""What a run of the tests says about the machine that it ran on: a number that rounds otherwise there has a place to begin."""

import logging
from collections.abc import Iterator

import pytest


def pytest_report_header() -> str:
    import torch

    capability, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    return (
        f"numerics: CPU capability {capability} (ATEN_CPU_CAPABILITY), {threads} thread(s) a process (OMP_NUM_THREADS)"
    )


@pytest.fixture
def log_of_a_run() -> Iterator[None]:
    """For tests that start a run in this process: its handlers go with it, for they write to what is closed afterwards."""
    before, level = logging.root.handlers[:], logging.root.level
    yield
    for handler in [handler for handler in logging.root.handlers if handler not in before]:
        logging.root.removeHandler(handler)
    logging.root.setLevel(level)
