from types import SimpleNamespace

import pytest

from slime.arguments import planned_device
from slime.arguments.planned_device import gpu_memory_gib, plans_for_gpus


@pytest.mark.parametrize(
    "accelerator, typed, expected",
    [(None, None, True), ("cpu", None, False), ("cpu", 24.0, True), ("cuda", None, True)],
)
def test_a_plan_is_for_gpus_unless_the_run_says_cpu(monkeypatch, accelerator, typed, expected):
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    if accelerator is not None:
        monkeypatch.setenv("SLIME_ACCELERATOR", accelerator)
    assert plans_for_gpus(SimpleNamespace(dry_run_gpu_memory_gib=typed)) is expected


def test_memory_is_typed_detected_or_assumed(monkeypatch):
    untyped = SimpleNamespace(dry_run_gpu_memory_gib=None)
    assert gpu_memory_gib(SimpleNamespace(dry_run_gpu_memory_gib=24.0)) == (24.0, "--dry-run-gpu-memory-gib")
    monkeypatch.setattr(planned_device, "gpus_on_this_machine", lambda: 2)
    monkeypatch.setattr(planned_device, "_QUERY", ["printf", "81920\\n40960\\n"])
    assert gpu_memory_gib(untyped) == (40.0, "this machine's GPU")
    monkeypatch.setattr(planned_device, "_QUERY", ["false"])
    gib, source = gpu_memory_gib(untyped)
    assert gib == 80.0 and source.startswith("assumed")
    monkeypatch.setattr(planned_device, "gpus_on_this_machine", lambda: 0)
    assert gpu_memory_gib(untyped)[0] == 80.0
