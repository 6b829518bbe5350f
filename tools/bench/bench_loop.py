"""The framework's own cost: overhead per step, seconds to the first sample, memory of the whole process tree.

    python tools/bench/bench_loop.py            # one engine, one rank
    python tools/bench/bench_loop.py --engines 2 --rollouts 12

Runs `train.py` on the toy task and measures it from outside. Overhead of a step = its wall time minus generation,
training and weight transfer. Memory is proportional (PSS), so shared pages count once.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
import psutil
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.utils.child_process import ChildProcess
from tools.tied import ROOT, tied

PHASES = ("perf/rollout_time", "perf/train_time", "perf/update_weights_time", "perf/save_model_time")
MARK = "SLIME_BENCH_RUN"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-loop-") as directory:
        task, events = Path(directory) / "task", Path(directory) / "events"
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task], check=True)
        output, peak = run(train_command(task, options), events, Path(directory) / "train.log")
        report(output, read_scalars(events), peak)


def train_command(task: Path, options: argparse.Namespace) -> list[str]:
    return [
        sys.executable, str(ROOT / "train.py"), "--hf-checkpoint", str(task / "model"), "--model-args-from-hf",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", str(options.engines), "--prompt-data",
        str(task / "train.jsonl"), "--apply-chat-template", "--rm-type", "math", "--num-rollout", str(options.rollouts),
        "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "32", "--lr", "1e-4",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
    ]  # fmt: skip


def run(command: list[str], events: Path, log: Path) -> tuple[str, float]:
    """Run the command with its output in `log`. Returns the output, and the peak PSS of all its processes in GiB."""
    run_id = uuid.uuid4().hex
    environment = {**os.environ, "TENSORBOARD_DIR": str(events), MARK: run_id}
    peak = 0.0
    process = ChildProcess("train.py", tied(command), log, environment)
    process.start()
    try:
        while process.poll() is None:
            peak = max(peak, proportional_memory(run_id))
            time.sleep(2.0)  # sampling interval of the memory
    finally:
        status = process.terminate()
    text = log.read_text(errors="replace")
    if status != 0:
        sys.exit(text[-3000:])
    return text, peak / 2**30


def proportional_memory(run_id: str) -> float:
    """The sum of the PSS of all processes that carry the run's mark, in bytes."""
    total = 0.0
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == run_id:
                total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def read_events(directory: Path) -> EventAccumulator:
    """All values in the event files of a directory. Without `{TENSORS: 0}` the reader keeps a random ten of each metric."""
    accumulator = EventAccumulator(str(directory), size_guidance={TENSORS: 0})
    accumulator.Reload()
    return accumulator


def read_scalars(directory: Path) -> dict[str, dict[int, float]]:
    accumulator = read_events(directory)
    return {
        tag: {event.step: event.tensor_proto.float_val[0] for event in accumulator.Tensors(tag)}
        for tag in accumulator.Tags()["tensors"]
    }


def report(output: str, scalars: dict[str, dict[int, float]], peak: float) -> None:
    steps = scalars["perf/step_time"]
    # The first step pays for imports and allocations, and is left out.
    overheads = [
        1.0 - sum(scalars.get(name, {}).get(step, 0.0) for name in PHASES) / seconds
        for step, seconds in steps.items()
        if step > 0
    ]
    start = re.search(r"first sample .*", output)
    print(start.group(0) if start else "no start-up line found")
    print(f"overhead per step: median {np.median(overheads):.1%}, worst {max(overheads):.1%} of {len(overheads)} steps")
    print(f"median step: {np.median(list(steps.values())[1:]):.2f} s")
    print(f"memory of all processes, peak PSS: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
