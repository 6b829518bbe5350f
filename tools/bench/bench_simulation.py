"""The seconds of a step: how far the plan at scale is from runs on this machine, and how much overlap gains in these runs.

    python tools/bench/bench_simulation.py outputs/simulation              # all runs, then the tables; about 4 minutes each
    python tools/bench/bench_simulation.py outputs/simulation --runs sync  # one of them, or those that are still missing
    python tools/bench/bench_simulation.py --of outputs/quickstart/seed-0/runs/NAME  # a run of train.py that is there

The model takes its times from the odd steps of the run `sync`. Its predictions are compared with the even steps of `sync`, and
with all steps of the other runs; the model does not know their lengths and draws from those of `sync` instead. The task is that
of the quick start, with answers of drawn lengths (`tools/bench/long_answers.py`). `decode` leaves the engines as they are and
has times of its own. In the other runs phases mostly wait: if they computed, overlapping phases would slow each other down on
shared cores. In runs with `even` in their names all answers have one length.

The second table compares runs that overlap with the synchronous run of the same answers. While rollout r is trained, rollout
r + 1 may be generated, so overlap can gain at most the shorter of the two phases of the synchronous run in every step.
"""

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from slime.utils.child_process import ChildProcess, describe_exit_status
from tools.report import read_run
from tools.simulate import resample
from tools.simulation.arrangements import ARRANGEMENTS, Split, Work, replay
from tools.simulation.measured import measured, step_seconds
from tools.tied import ROOT, tied

# Earlier steps pay for imports and compilations.
_FIRST = 1
_OVER_SAMPLING = 12
# A prediction is good if it differs by at most this share from what was measured.
BAR = 0.15
_SLOW = (
    "--custom-generate-function-path tools/bench/long_answers.py:slow_generate "
    "--custom-advantage-function-path tools/bench/long_answers.py:slow_advantages"
)
_EVEN = _SLOW.replace("slow_generate", "slow_even_generate")


@dataclass(frozen=True)
class Run:
    """A run beside its `name`: the driver, and the flags that make it so.

    Attributes:
        arrangement: the arrangement that the plan replays; None: the plan has no such arrangement.
        measured_by: the synchronous run with the same answers, from whose odd steps the times come.
    """

    driver: str
    flags: str
    arrangement: str | None = None
    measured_by: str = "sync"


_PARTIAL = f"--partial-rollout --over-sampling-batch-size {_OVER_SAMPLING}"
_NEVER_STOPS = (
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async "
    "--eval-function-path slime.rollout.sglang_rollout.generate_rollout --sglang-server-concurrency 16"
)
RUNS = {
    "decode": Run(
        "train.py", "--custom-generate-function-path tools/bench/long_answers.py:custom_generate", "sync", "decode"
    ),
    "sync": Run("train.py", _SLOW, "sync"),
    "partial": Run("train.py", f"{_SLOW} {_PARTIAL}", "partial"),
    "async": Run("train_async.py", _SLOW, "async"),
    "in_flight": Run("train_async.py", f"{_SLOW} --update-weights-in-flight", "in_flight"),
    "never_stops": Run("train_async.py", f"{_SLOW} {_NEVER_STOPS}"),
    "sync_even": Run("train.py", _EVEN, "sync", "sync_even"),
    "async_even": Run("train_async.py", _EVEN, "async", "sync_even"),
}


def start(name: str, directory: Path, rollouts: int, seconds: int) -> None:
    """Run it and leave its record in `directory`/`name`. If the record exists already, nothing runs."""
    run, target = RUNS[name], directory / name
    if _is_done(directory, name):
        return
    task = directory / "task"
    if not (task / "task.json").exists():
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task], check=True)
    command = [
        sys.executable,
        run.driver,
        "--hf-checkpoint",
        str(task / "model"),
        "--prompt-data",
        str(task / "train.jsonl"),
    ]
    command += shlex.split(
        "--model-args-from-hf --apply-chat-template --rm-type math --actor-num-gpus-per-node 1 --rollout-num-gpus 2 "
        "--rollout-num-gpus-per-engine 1 --sglang-max-running-requests 64 --rollout-batch-size 8 --n-samples-per-prompt 4 "
        f"--rollout-max-response-len 128 --lr 1e-5 --use-dynamic-batch-size --max-tokens-per-gpu 4096 --num-rollout {rollouts} "
        + run.flags
    )
    command += ["--save-debug-rollout-data", str(target / "rollout_{rollout_id}.pt")]
    target.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "SLIME_ACCELERATOR": "cpu", "TENSORBOARD_DIR": str(target / "events")}
    log = target / "log.txt"
    log.unlink(missing_ok=True)
    child = ChildProcess(name, tied(["env", "-C", ROOT, *command]), log, environment)
    child.start()
    try:
        status = child.wait(seconds)
    finally:
        child.terminate(60)
    if status is None:
        # The steps that it finished count.
        print(f"{name}: ended after {seconds} s")
    elif status != 0:
        sys.exit(f"{name}: {describe_exit_status(status)}, see {log}")
    (target / "done").touch()


def compare(name: str, directory: Path, measured_by: Path, arrangement: str, running: int | None = None) -> str:
    """The table's line for the run in `directory`.

    measured_by: the directory of the run from whose odd steps the times come.
    running: requests that run at once on an engine, if the runs do not say.
    """
    found = measured([measured_by], lambda step: step >= _FIRST and step % 2, running)
    own = directory == measured_by
    steps = [
        seconds
        for step, seconds in step_seconds(read_run(directory).curves).items()
        if step >= _FIRST and not (own and step % 2)
    ]
    draw = resample(found.lengths)
    work = Work(
        lambda generator, prompts: draw(generator, prompts, found.shape.n_samples_per_prompt),
        found.shape.rollout_batch_size,
        found.prompt_tokens,
        over_sampling_batch_size=_OVER_SAMPLING,
    )
    (replayed,) = (each for each in ARRANGEMENTS if each.name == arrangement)
    shape = found.shape
    devices = shape.trainer_devices + shape.engines * shape.engine_devices
    split = Split(devices, shape.trainer_devices, shape.engines)
    predicted = replay(replayed, split, found.speeds, work, seed=0, rollouts=104, warm_up=4).step_seconds
    mean, spread = float(np.mean(steps)), float(np.std(steps) / np.sqrt(len(steps)))
    difference = predicted / mean - 1
    verdict = "met" if abs(difference) <= BAR else "missed"
    return f"| {name} | {len(steps)} | {predicted:.2f} | {mean:.2f} ± {spread:.2f} | {difference:+.1%} | {verdict} |"


def overlap(name: str, directory: Path, synchronous: Path) -> str:
    """The second table's line for a run that overlaps; `synchronous`: the run with the same answers that does not overlap.

    A step counts if both runs have finished it and its rollout was generated beside another step.
    """
    there, here = (read_run(run).curves for run in (synchronous, directory))
    rollout, train, step, overlapped = (
        there["perf/rollout_time"], there["perf/train_time"], there["perf/step_time"], here["perf/step_time"],
    )  # fmt: skip
    steps = [each for each in step if each > _FIRST and each in overlapped and each + 1 in rollout]
    apart, beside = (float(np.mean([times[each] for each in steps])) for times in (step, overlapped))
    allowed = float(np.mean([min(rollout[each + 1], train[each]) for each in steps]))
    gained = apart - beside
    return f"| {name} | {len(steps)} | {apart:.2f} | {beside:.2f} | {allowed:.2f} | {gained:.2f} | {gained / allowed:.0%} |"


def processor() -> str:
    """The model of the processor, and the number of cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown processor'}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="for task, records and logs; runs that are there are kept"
    )
    parser.add_argument("--runs", metavar="NAME", nargs="+", choices=RUNS, default=list(RUNS), help="default: all")
    parser.add_argument(
        "--of", action="store_true", help="DIR is a finished run of train.py: compare that one with itself"
    )
    parser.add_argument(
        "--max-running-requests",
        metavar="N",
        type=int,
        default=64,
        help="of an engine, with --of a run without --sglang-max-running-requests (default 64, as without a GPU)",
    )
    parser.add_argument("--rollouts", metavar="N", type=int, default=24)
    parser.add_argument(
        "--seconds", metavar="N", type=int, default=900, help="after which a run is ended (default 900)"
    )
    options = parser.parse_args()
    directory = options.directory.resolve()
    for name in () if options.of else options.runs:
        start(name, directory, options.rollouts, options.seconds)
    print(f"seconds of a step, {processor()}\n")
    print(f"| Run | Steps | Predicted | Measured | Difference | Within {BAR:.0%} |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    if options.of:
        print(compare(directory.name, directory, directory, "sync", options.max_running_requests))
        return
    done = {
        name: run for name, run in RUNS.items() if _is_done(directory, name) and _is_done(directory, run.measured_by)
    }
    for name, run in done.items():
        if run.arrangement:
            print(compare(name, directory / name, directory / run.measured_by, run.arrangement))
    print("\n| Run | Steps | Synchronous | Overlapped | Allowed gain | Gain | Share |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name, run in done.items():
        if run.driver == "train_async.py":
            print(overlap(name, directory / name, directory / run.measured_by))


def _is_done(directory: Path, name: str) -> bool:
    return (directory / name / "done").exists()


if __name__ == "__main__":
    main()
