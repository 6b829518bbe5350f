"""Our GRPO steps beside those of TRL's `GRPOTrainer`: the same work on the same processor, taking turns in one run.

    python tools/bench/bench_peers.py                                      # 0.8 M and 19 M parameters, answers of 64 tokens
    python tools/bench/bench_peers.py --model 19M --lengths long-tailed    # log-normal: median 32, cap 256
    git worktree add ../before COMMIT && python tools/bench/bench_peers.py --beside ../before

A step generates 128 answers to 16 prompts and takes one optimizer step on them, from random weights, in float32. Both sides
generate answers of the same drawn lengths, so that they have the same work. TRL runs in an environment of its own
(--environment, made if it is missing), generates with transformers and uses all threads. Ours is `train.py` as users start it,
with real engines behind the router. The first step of each turn pays for one-time work and does not count; the median of all
others does. With --beside the trees of earlier commits take turns with this one instead of the peer, all with the interpreter
of this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.bench.bench_loop import read_scalars
from tools.bench.bench_start import environment_in
from tools.bench.learning_curves import markdown
from tools.bench.long_answers import answer_tokens
from tools.tied import ROOT, run_tied

# The newest release when this file was written. It works with the torch of our own pins.
PEER = "trl==1.16.0"
SHAPES = {
    "0.8M": "--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --head-dim 32",
    "19M": "--num-layers 6 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --num-key-value-heads 4",
}
PROMPTS, SAMPLES = 16, 8
# Kind of lengths → (tokens of the longest answer, function of `long_answers.py` that gives our answers these lengths).
LENGTHS = {"even": (64, "full_generate"), "long-tailed": (256, "custom_generate")}
PHASES = {"generate": "perf/rollout_time", "train": "perf/train_time", "push": "perf/update_weights_time"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", choices=LENGTHS, default="even")
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--engines", type=int, default=os.cpu_count())
    parser.add_argument(
        "--environment", type=Path, default=ROOT / "outputs/peer-environment", help="virtual environment of the peer"
    )
    parser.add_argument("--beside", type=Path, nargs="+", default=[], metavar="TREE", help="such as git worktrees")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.beside]
    for tree in trees:
        if not (tree / "train.py").is_file():
            parser.error(f"--beside {tree}: there is no train.py")
    python = None if trees else peer_python(options.environment)
    for name in options.model:
        with tempfile.TemporaryDirectory(prefix="bench-peers-") as directory:
            task = Path(directory) / "task"
            subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task, *SHAPES[name].split()], check=True)
            if python is None:
                compare_trees(name, [*trees, ROOT], task, options)
            else:
                compare(name, task, python, options)


def peer_python(environment: Path) -> Path:
    """The interpreter of `environment`, which is made, with the peer installed, if it is missing."""
    python = environment / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    pins = (ROOT / "requirements/cpu.txt").read_text().splitlines()
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    # If the peer is installed already this takes a moment.
    subprocess.run([python, "-m", "pip", "install", "--quiet", torch, PEER], check=True)
    return python


def compare_trees(name: str, trees: Sequence[Path], task: Path, options: argparse.Namespace) -> None:
    """Measure one model in all trees and print their times."""
    taken: dict[Path, dict[str, list[float]]] = {tree: {} for tree in trees}
    for turn in range(options.turns):
        for number, tree in enumerate(trees):
            add_steps(taken[tree], steps_of_ours(tree, task, task.parent / f"turn-{turn}-{number}", options))
    print(f"{name}, lengths {options.lengths}, medians of {len(taken[ROOT]['step'])} steps, seconds")
    rows = [[str(tree), *(f"{statistics.median(seconds):.2f}" for seconds in taken[tree].values())] for tree in trees]
    print(markdown(("Tree", *taken[ROOT]), rows), flush=True)


def compare(name: str, task: Path, python: Path, options: argparse.Namespace) -> None:
    """Measure one model and print its times."""
    lengths = lengths_of_steps(options.lengths, options.steps)
    theirs: list[float] = []
    ours: dict[str, list[float]] = {}
    for turn in range(options.turns):
        theirs += steps_of_peer(python, task, lengths, task.parent / f"peer-{turn}.log")[1:]
        add_steps(ours, steps_of_ours(ROOT, task, task.parent / f"turn-{turn}", options))
    tokens = sum(map(sum, lengths)) / len(lengths)
    print(f"{name}, {PROMPTS * SAMPLES} answers, {tokens:,.0f} tokens a step, lengths {options.lengths}")
    step, peer = statistics.median(ours["step"]), statistics.median(theirs)
    parts = ", ".join(f"{phase} {statistics.median(ours[phase]):.2f}" for phase in PHASES)
    print(f"  TRL   {peer:8.2f} s per step, of {len(theirs)}")
    print(f"  ours  {step:8.2f} s per step, of {len(ours['step'])}: {parts}")
    print(f"  ours is {step / peer:.2f} of TRL", flush=True)


def lengths_of_steps(kind: str, steps: int) -> list[list[int]]:
    """For every step, the number of tokens of each answer, in the order of samples."""
    longest, function = LENGTHS[kind]
    count = PROMPTS * SAMPLES
    drawn = [[answer_tokens(step * count + index, longest) for index in range(count)] for step in range(steps)]
    return drawn if function == "custom_generate" else [[longest] * count] * steps


def steps_of_peer(python: Path, task: Path, lengths: list[list[int]], log: Path) -> list[float]:
    """Run a turn of the peer. Returns the seconds of its steps."""
    drawn = task.parent / "lengths.json"
    drawn.write_text(json.dumps(lengths))
    command = [
        python, ROOT / "tools/bench/peer_trl.py", task / "model", task / "train.jsonl", "--lengths", drawn,
        "--samples-per-prompt", str(SAMPLES), "--threads", str(os.cpu_count()),
    ]  # fmt: skip
    # The peer prints one JSON list; warnings of its libraries stand around it.
    return json.loads([line for line in run_tied(command, log).splitlines() if line[:1] + line[-1:] == "[]"][-1])


def add_steps(taken: dict[str, list[float]], scalars: dict[str, dict[int, float]]) -> None:
    """Add the seconds of a turn of ours to `taken`, by phase, without those of its first step."""
    for phase, tag in {"step": "perf/step_time", **PHASES}.items():
        taken.setdefault(phase, []).extend(list(scalars[tag].values())[1:])


def steps_of_ours(tree: Path, task: Path, directory: Path, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Run a turn of the `train.py` of `tree`. Returns its scalars: metric → step → value."""
    longest, function = LENGTHS[options.lengths]
    command = [
        "env", "-C", tree, sys.executable, "train.py", "--hf-checkpoint", task / "model", "--model-args-from-hf",
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", str(options.engines), "--prompt-data", task / "train.jsonl",
        "--apply-chat-template", "--rm-type", "random", "--num-rollout", str(options.steps),
        "--rollout-batch-size", str(PROMPTS), "--n-samples-per-prompt", str(SAMPLES), "--num-steps-per-rollout", "1",
        "--rollout-max-response-len", str(longest), "--custom-generate-function-path",
        f"{tree / 'tools/bench/long_answers.py'}:{function}", "--lr", "1e-5", "--clip-grad", "1.0",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096", "--router-policy", "round_robin",
        "--train-env-vars", json.dumps({"OMP_NUM_THREADS": str(os.cpu_count())}),
    ]  # fmt: skip
    run_tied(command, directory.with_suffix(".log"), {**environment_in(tree), "TENSORBOARD_DIR": str(directory)})
    return read_scalars(directory)


if __name__ == "__main__":
    main()
