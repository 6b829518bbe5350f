import argparse
import json
import sys

import pytest
import torch

from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from tools.bench.gpu import common
from tools.bench.gpu.common import Report, best_seconds, peak_tflops, rendered


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.5),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10", 125.0),
    ],
)
def test_peak_by_the_name_of_the_driver(name, tflops):
    assert peak_tflops(name) == tflops


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090", "cpu"])
def test_an_unknown_device_asks_for_its_peak(name):
    """The names begin like those of known ones; a slice of a GPU has not the peak of the whole."""
    with pytest.raises(UserError, match="--peak-tflops"):
        peak_tflops(name)


def test_a_table_and_its_record(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    report = Report(
        "name",
        [{"what": "one", "ms": 1234.5, "ok": True}, {"what": "other", "ms": None, "ok": None, "more": 12345}],
        ["a note"],
        "faster than light",
        False,
    )
    assert rendered(report).splitlines() == [
        "name",
        "  what      ms  ok     more",
        "  one    1,234  yes       -",
        "  other      -  -    12,345",
        "a note",
        "target: faster than light: MISSED",
    ]
    monkeypatch.setattr(common, "enter", lambda device: None)
    monkeypatch.setattr(sys, "argv", ["x", "--tiny", "--record", str(tmp_path / "record.json")])
    assert common.run(lambda options: report, common.make_parser("x")) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last) == json.loads((tmp_path / "record.json").read_text()) == {
        "name": "name", "device": "cpu", "torch": torch.__version__, "tiny": True, "rows": list(report.rows),
        "notes": ["a note"], "target": "faster than light", "met": False,
    }  # fmt: skip


def test_wrong_figures_are_told_by_the_exit_status(monkeypatch, capsys):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.setattr(common, "enter", lambda device: None)
    monkeypatch.setattr(sys, "argv", ["x"])
    assert common.run(lambda options: Report("x", [], failed=True), common.make_parser("x")) == 1


def test_without_a_gpu_the_way_to_try_it_is_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["tools/bench/gpu/mfu.py"])
    assert common.run(lambda options: pytest.fail("measured"), common.make_parser("x")) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mfu.py: ") and "sees no GPU" in said.err and "`--device cpu --tiny`" in said.err


def test_times_are_read_when_the_device_is_done(monkeypatch):
    """Repeats are interleaved, warm-ups do not count, and the shortest time does."""
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    asked, now = [], iter([0.0, 3.0, 10.0, 10.5, 20.0, 22.0, 30.0, 30.25, 40.0, 41.0, 50.0, 50.75])
    monkeypatch.setattr(get_accelerator(), "synchronize", lambda: asked.append("wait"), raising=False)
    monkeypatch.setattr(common.time, "perf_counter", lambda: asked.append("clock") or next(now))
    best = best_seconds({"slow": lambda: asked.append("slow"), "fast": lambda: asked.append("fast")}, 2)
    assert best == {"slow": 1.0, "fast": 0.25}
    assert next(now, None) is None
    assert asked == [
        word for _ in range(3) for call in ("slow", "fast") for word in ("wait", "clock", call, "wait", "clock")
    ]


def test_options_of_every_measurement():
    options = common.make_parser("x").parse_args([])
    assert options == argparse.Namespace(device="cuda", tiny=False, record=None)
