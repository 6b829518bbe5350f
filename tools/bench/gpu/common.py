"""The common parts of the measurements of one GPU: options, device, timing, the peaks of known GPUs, and the report.

Every measurement prints a table for people and, as the last line of its standard output, a record as JSON:

    {"name": …, "device": …, "torch": …, "tiny": …, "rows": [{…}, …], "notes": […], "target": …, "met": …}

The measurements need torch and megatron-core. They need no Ray, SGLang, Transformer Engine, Apex, checkpoint or network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.device import get_accelerator
from slime.utils.errors import UserError

if TYPE_CHECKING:
    from slime.utils.device import Accelerator

ROOT = Path(__file__).resolve().parents[3]
TERA = 1e12
# TFLOP/s of dense bfloat16 matrix products from NVIDIA's data sheets; where a sheet only has the figure with sparsity, half of
# it. They were written down from memory and not compared with the sheets again. Keys are the first words of the name that the
# driver gives; if two keys fit a name, the longer one counts.
PEAK_TFLOPS = {
    "NVIDIA A10": 125.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A100": 312.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.05,
    "NVIDIA H100": 989.5,  # SXM
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.5,
    "NVIDIA H200": 989.5,  # SXM
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200": 989.5,
    "NVIDIA B200": 2250.0,
}


@dataclass(frozen=True)
class Report:
    """The result of a measurement.

    Attributes:
        rows: figures by the name of their column, None for a missing figure. The table has the columns of all rows, in order.
        notes: sentences that a reader of the figures has to know.
        target: the aim, in words; `met`: whether it was reached, None if that is unknown.
        failed: the figures are wrong, or some of them are missing.
    """

    name: str
    rows: Sequence[dict[str, Any]]
    notes: Sequence[str] = field(default_factory=tuple)
    target: str | None = None
    met: bool | None = None
    failed: bool = False


def make_device_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options for the device and the size."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu shows that a script runs")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU computes in seconds; figures say nothing")
    return parser


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that all measurements have."""
    parser = make_device_parser(description)
    parser.add_argument("--record", type=Path, help="a file for the record, beside the last line of the output")
    return parser


def enter(device: str) -> Accelerator:
    """Make `device`, "cuda" or "cpu", the one that this process and its children compute on.

    Raises:
        UserError: there is no GPU.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU here. `--device cpu --tiny` runs the same code on the CPU, at a size that "
            "says nothing about a GPU"
        )
    os.environ["SLIME_ACCELERATOR"] = device
    # Without this variable our code would ask Ray for an address. A rank that is alone has no peers on other hosts, so any
    # other value can be replaced.
    os.environ["SLIME_HOST_IP"] = "127.0.0.1"
    # Processes that are started with `-m slime.…` find the package by this variable.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    get_accelerator.cache_clear()
    accelerator = get_accelerator()
    accelerator.set_device(0)
    return accelerator


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Makes this process the only rank of a run for the block: torch finds its store and its rank in the environment. At the
    end the process leaves its groups."""
    from slime.backends.megatron_utils import cpu_runtime, initialize
    from slime.utils.ports import service_host
    from slime.utils.process_groups import create_store

    host = service_host()
    store = create_store(host, timedelta(minutes=1))
    os.environ.update(
        MASTER_ADDR=host, MASTER_PORT=str(store.port), RANK="0", LOCAL_RANK="0", WORLD_SIZE="1",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    cpu_runtime.install()  # no effect where there is a GPU
    try:
        yield
    finally:
        initialize.destroy()


def run(measure: Callable[[argparse.Namespace], Report], parser: argparse.ArgumentParser) -> int:
    """Parse the command line, measure, and print the report. Returns the exit status."""
    options = parser.parse_args()
    try:
        enter(options.device)
        report = measure(options)
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    record = json.dumps(record_of(report, options))
    print(rendered(report))
    print(record, flush=True)
    if options.record is not None:
        options.record.write_text(f"{record}\n")
    return int(report.failed)


def record_of(report: Report, options: argparse.Namespace) -> dict[str, Any]:
    """The record, as plain values."""
    import torch

    device = {"device": get_accelerator().device_name(), "torch": torch.__version__, "tiny": options.tiny}
    found = {"rows": list(report.rows), "notes": list(report.notes), "target": report.target, "met": report.met}
    return {"name": report.name, **device, **found}


def rendered(report: Report) -> str:
    """The table, its notes, and whether the target was met, as plain text without a newline at its end."""
    columns = list(dict.fromkeys(name for row in report.rows for name in row))
    cells = [[_text(row.get(name)) for name in columns] for row in report.rows]
    widths = [max(len(text) for text in column) for column in zip(columns, *cells, strict=True)]
    # Words begin at the left, figures end at the right.
    columns_of = {name: [row.get(name) for row in report.rows] for name in columns}
    align = [
        str.rjust if any(type(value) in (int, float) for value in columns_of[name]) else str.ljust for name in columns
    ]
    lines = [
        "  ".join(place(text, width) for place, text, width in zip(align, row, widths, strict=True))
        for row in (columns, *cells)
    ]
    lines = [report.name, *(f"  {line.rstrip()}" for line in lines), *report.notes]
    if report.target is not None:
        outcome = {True: "reached", False: "MISSED", None: "not to be judged here"}[report.met]
        lines.append(f"target: {report.target}: {outcome}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def best_seconds(calls: dict[str, Callable[[], Any]], repeats: int, *, warm_ups: int = 1) -> dict[str, float]:
    """The shortest time of each call, in seconds. The repeats are interleaved, so that all meet the same state of the machine.

    The clock is read after the device has finished all its work.
    """
    accelerator = get_accelerator()
    best = dict.fromkeys(calls, float("inf"))
    for repeat in range(-warm_ups, repeats):
        for name, call in calls.items():
            accelerator.synchronize()
            started = time.perf_counter()
            call()
            accelerator.synchronize()
            seconds = time.perf_counter() - started
            best[name] = min(best[name], seconds) if repeat >= 0 else best[name]
    return best


def peak_tflops(device_name: str) -> float:
    """The peak of dense bfloat16 matrix products of a device, in TFLOP/s.

    Raises:
        UserError: the device is not in `PEAK_TFLOPS`, or it is a part of one (MIG).
    """
    words = re.split(r"[ -]+", device_name)
    fitting = [known for known in PEAK_TFLOPS if words[: known.count(" ") + 1] == known.split()]
    if not fitting or "MIG" in words:
        raise UserError(
            f"the peak of {device_name!r} is not known here: give --peak-tflops, the TFLOP/s of dense bfloat16 matrix products "
            f"in its data sheet. Known are {', '.join(PEAK_TFLOPS)}"
        )
    return PEAK_TFLOPS[max(fitting, key=len)]


def matrix_product_flops_per_second(size: int, repeats: int = 5) -> float:
    """FLOPs per second of the device in a product of two bfloat16 matrices of random numbers, `size` by `size`."""
    import torch

    device = get_accelerator().current_device()
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    out = torch.empty_like(left)
    seconds = best_seconds({"product": lambda: torch.mm(left, right, out=out)}, repeats, warm_ups=3)["product"]
    return 2 * size**3 / seconds
