"""All measurements of one GPU, one after the other, each in a process of its own. If one fails, the others still run.

    python tools/bench/gpu/all.py --out DIR [--rehearsed rehearsed.json]
    python tools/bench/gpu/all.py --out DIR --device cpu --tiny

For every measurement DIR gets its output (NAME.txt) and its record (NAME.json). all.json has all records by name, and for a
measurement without a record the reason. The exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from slime.utils.child_process import ChildProcess, describe_exit_status
from slime.utils.errors import UserError
from tools.bench.gpu.common import Report, enter, make_device_parser, rendered
from tools.tied import tied

# Measurements that may find wrong results come before those that may find slow ones.
MEASUREMENTS = ("grid", "families", "kernels", "mfu", "waits", "memory", "buckets", "handles", "asleep")
REHEARSED = ("waits", "memory")


def main() -> int:
    parser = make_device_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS)
    parser.add_argument("--rehearsed", type=Path, help=f"for {' and '.join(REHEARSED)}")
    parser.add_argument("--peak-tflops", type=float, help="for mfu, where the device is not known")
    parser.add_argument("--seconds", type=float, default=900.0, help="that one measurement may take")
    options = parser.parse_args()
    try:
        enter(options.device)
    except UserError as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    ends = {}
    for name in options.only:
        script = Path(__file__).with_name(f"{name}.py")
        ends[name] = measure(
            name, [sys.executable, "-W", "ignore", str(script), *words_of(name, options)], options.out, options.seconds
        )
        print(f"{name}: {ends[name] or 'measured'}", flush=True)
    return tell(ends, options.out)


def words_of(name: str, options: argparse.Namespace) -> list[str]:
    """The command-line options of one measurement."""
    words = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    if name in REHEARSED and options.rehearsed is not None:
        words += ["--rehearsed", str(options.rehearsed)]
    if name == "mfu" and options.peak_tflops is not None:
        words += ["--peak-tflops", str(options.peak_tflops)]
    return words


def measure(name: str, command: Sequence[str], out: Path, seconds: float) -> str | None:
    """Run one measurement, which leaves its output and its record in `out`. Returns the failure; None: there was none."""
    said, record = out / f"{name}.txt", out / f"{name}.json"
    for file in (said, record):
        file.unlink(missing_ok=True)
    child = ChildProcess(name, tied([*command, "--record", str(record)]), said)
    child.start()
    try:
        status = child.wait(seconds)
    finally:
        child.terminate()
    if status is None:
        return f"it did not end within {seconds:g} s (--seconds); {child.describe_log(5)}"
    return None if status == 0 else f"{describe_exit_status(status)}; {child.describe_log(5)}"


def tell(ends: dict[str, str | None], out: Path) -> int:
    """Write all.json; print all tables and the names of measurements that failed. Returns the exit status."""
    gathered: dict[str, Any] = {}
    for name, failure in ends.items():
        file = out / f"{name}.json"
        record = json.loads(file.read_text()) if file.is_file() else None
        gathered[name] = {"failure": failure, "record": record}
        if record is not None:
            print(f"\n{rendered(Report(name, *(record[part] for part in ('rows', 'notes', 'target', 'met'))))}")
    (out / "all.json").write_text(json.dumps(gathered, indent=1))
    failed = [name for name, failure in ends.items() if failure is not None]
    print(f"\n{len(ends) - len(failed)} of {len(ends)} measured; {out / 'all.json'} has the records")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
