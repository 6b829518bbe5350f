"""Held-out accuracy of the quickstart over several seeds.

    python tools/bench/bench_learning.py --seeds 0 1 2 3 4

Runs `scripts/quickstart.sh` once per seed into a directory of its own and reads accuracy before and after from the event
files. The bar: below 0.6 before and above 0.85 after, for at least four of five seeds. Takes some minutes per seed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
BELOW, ABOVE = 0.6, 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--dir", default="outputs/bench-learning")
    options = parser.parse_args()
    print("| seed | before | after | seconds | bar |\n|---|---|---|---|---|")
    passed = 0
    for seed in options.seeds:
        seconds = run_quickstart(seed, options.dir)
        before, after = accuracies(ROOT / options.dir / f"seed-{seed}")
        good = before < BELOW and after > ABOVE
        passed += good
        print(f"| {seed} | {before:.3f} | {after:.3f} | {seconds:.0f} | {'met' if good else 'missed'} |", flush=True)
    print(f"{passed} of {len(options.seeds)} seeds")


def run_quickstart(seed: int, directory: str) -> float:
    started = time.perf_counter()
    command = ["bash", "scripts/quickstart.sh", "--seed", str(seed), "--dir", directory]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:])
    return time.perf_counter() - started


def accuracies(seed_directory: Path) -> tuple[float, float]:
    """First and last value of `eval/held_out` in the newest run below `seed_directory`."""
    newest = sorted((seed_directory / "runs").iterdir())[-1]
    events = EventAccumulator(str(newest / "tensorboard"))
    events.Reload()
    values = [
        event.tensor_proto.float_val[0] for event in sorted(events.Tensors("eval/held_out"), key=lambda e: e.step)
    ]
    return values[0], values[-1]


if __name__ == "__main__":
    main()
