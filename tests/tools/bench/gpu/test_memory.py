from types import SimpleNamespace

import pytest

from tools.bench.gpu import memory
from tools.bench.gpu.measured_rank import Case

MIB = 2**20


def test_the_peak_of_a_gpu_is_that_of_its_allocator(monkeypatch):
    """What was there before does not count, and every phase has a peak of its own."""
    state = {"now": 10, "peak": 900}
    accelerator = SimpleNamespace(
        memory_allocated=lambda: state["now"],
        peak_memory_allocated=lambda: state["peak"],
        reset_peak_memory=lambda: state.update(peak=state["now"]),
    )
    monkeypatch.setattr(memory, "get_accelerator", lambda: accelerator)

    def phase(peak, now):
        return lambda: state.update(peak=max(state["peak"], peak), now=now)

    rank = SimpleNamespace(phases=lambda: {"model": phase(70, 50), "step": phase(310, 60), "push": phase(80, 60)})
    assert memory._peaks(rank) == {"model": 60, "step": 300, "push": 70}


def test_figures_side_by_side():
    rows = list(memory.beside("x", {"data": 6 * MIB, "step": 8 * MIB}, {"step": 4 * MIB}, {"step": 10 * MIB}))
    assert rows[0] == {
        "shape": "x", "phase": "data", "measured": 6.0, "rehearsed": None, "planned": None, "of the rehearsal": None,
        "of the plan": None,
    }  # fmt: skip
    assert rows[1] == {
        "shape": "x", "phase": "step", "measured": 8.0, "rehearsed": 4.0, "planned": 10.0, "of the rehearsal": 2.0,
        "of the plan": pytest.approx(0.8),
    }  # fmt: skip


def test_plan_of_a_tiny_step(tmp_path):
    plan = memory.planned(Case("qwen3-0.6B", 2, 256, tiny=True).arguments(tmp_path), 2)
    # Of each parameter 6 bytes of weight and gradient, and 12 of the optimizer. A step has activations beside them, and a push
    # has buckets.
    parameters = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 512 * 64 + 64
    assert list(plan) == ["step", "push"] and min(plan.values()) > 18 * parameters
