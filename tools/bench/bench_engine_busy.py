"""The share of the generation phase in which engines compute (processor seconds of their schedulers over seconds of the phase),
the length of the phase, and what other processes of the run take of the processor meanwhile.

    python tools/bench/bench_engine_busy.py                    # 0.8 M and 19 M parameters, an engine per core
    python tools/bench/bench_engine_busy.py --model 19M --lengths long-tailed

`train.py`, started as users start it, generates 128 answers to 16 prompts in each rollout and trains nothing. On a machine that
others use too, an engine that waits for a core looks idle. The first rollout is told apart. Bar: 0.9.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.bench_loop import MARK, read_events
from tools.bench.bench_peers import LENGTHS, PROMPTS, SAMPLES, SHAPES
from tools.tied import ROOT, run_tied

INTERVAL_S = 0.05
# Processes of a run, and what their command lines hold; whatever else carries its mark is among the "others".
KINDS = {
    "schedulers": "sglang::scheduler", "detokenizers": "sglang::detokenizer", "servers": "sglang_utils.server_process",
    "router": "router_process", "manager": "ray::RolloutManager", "others": "",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", choices=LENGTHS, default="even")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--engines", type=int, default=os.cpu_count())
    options = parser.parse_args()
    for name in options.model:
        with tempfile.TemporaryDirectory(prefix="bench-busy-") as directory:
            measure(name, Path(directory), options)


def measure(name: str, directory: Path, options: argparse.Namespace) -> None:
    """Measure one model and print its line."""
    task, events = directory / "task", directory / "events"
    subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task, *SHAPES[name].split()], check=True)
    longest, function = LENGTHS[options.lengths]
    command = [
        sys.executable, ROOT / "train.py", "--debug-rollout-only", "--hf-checkpoint", task / "model", "--model-args-from-hf",
        "--rollout-num-gpus", str(options.engines), "--prompt-data", task / "train.jsonl", "--apply-chat-template",
        "--rm-type", "random", "--num-rollout", str(options.rollouts), "--rollout-batch-size", str(PROMPTS),
        "--n-samples-per-prompt", str(SAMPLES), "--rollout-max-response-len", str(longest),
        "--custom-generate-function-path", f"{ROOT / 'tools/bench/long_answers.py'}:{function}",
        "--router-policy", "round_robin",
    ]  # fmt: skip
    watch = Watch()
    environment = {**os.environ, "TENSORBOARD_DIR": str(events), "SLIME_ACCELERATOR": "cpu", MARK: watch.mark}
    run_tied(command, directory / "train.log", environment)
    seconds = watch.stop()
    first, *told = phases(events)
    shares = [share_of(phase, seconds["schedulers"]) for phase in told]
    took = statistics.median(end - begin for begin, end in told)
    lowest, highest = (statistics.median(pick(share) for share in shares) for pick in (min, max))
    mean = statistics.median(statistics.fmean(share) for share in shares)
    print(
        f"{name}, {options.lengths}, {options.engines} engine(s): busy {mean:.2f} of {len(shares)} phases of {took:.2f} s "
        f"(medians; the engine with the least {lowest:.2f}, with the most {highest:.2f}), the first one of "
        f"{first[1] - first[0]:.2f} s"
    )
    taken = {
        kind: statistics.median(sum(share_of(phase, read)) * (phase[1] - phase[0]) for phase in told)
        for kind, read in seconds.items()
    }
    print(
        "  seconds of the processor in a phase:", ", ".join(f"{kind} {taken[kind]:.2f}" for kind in KINDS), flush=True
    )


class Watch:
    """Reads the processor seconds of the processes of the run that carries its mark, until it is stopped."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._read: dict[int, list[tuple[float, float]]] = {}
        self._kinds: dict[int, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, list[np.ndarray]]:
        """Stop reading. Returns for each kind an array [n, 2] of each process: (time, its processor seconds so far)."""
        self._stopped.set()
        self._thread.join(60)
        return {
            kind: [np.array(read) for pid, read in self._read.items() if self._kinds[pid] == kind] for kind in KINDS
        }

    def _watch(self) -> None:
        found: dict[int, psutil.Process] = {}
        looked = 0.0
        while not self._stopped.wait(INTERVAL_S):
            # Looking through all processes takes much longer than reading a few, so it happens less often.
            if time.monotonic() - looked > 2:
                found, looked = self._processes(), time.monotonic()
            for pid, process in found.items():
                try:
                    times = process.cpu_times()
                except psutil.NoSuchProcess:
                    continue
                self._read.setdefault(pid, []).append((time.time(), times.user + times.system))

    def _processes(self) -> dict[int, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    command = " ".join(process.cmdline())
                    found[process.pid] = process
                    # A process gets its title when it has begun.
                    self._kinds[process.pid] = next(kind for kind, words in KINDS.items() if words in command)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found


def phases(events: Path) -> list[tuple[float, float]]:
    """Begin and end of the generation of each rollout, as `time.time`."""
    told = read_events(events).Tensors("perf/rollout_time")
    return [(event.wall_time - event.tensor_proto.float_val[0], event.wall_time) for event in told]


def share_of(phase: tuple[float, float], seconds: list[np.ndarray]) -> list[float]:
    """For each scheduler, the share of the phase in which it had a core."""
    begin, end = phase
    return [float(np.diff(np.interp(phase, read[:, 0], read[:, 1]))[0]) / (end - begin) for read in seconds]


if __name__ == "__main__":
    main()
