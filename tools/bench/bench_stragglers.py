"""The cost of the longest answers of a step: idle slots of an engine, with and without over-sampling and partial rollouts.

    python tools/bench/bench_stragglers.py [--steps 6] [--groups 16] [--longest 512] [--picture FILE.svg]

A real engine serves the toy model behind a real router, and our loop drives it: data source, default rollout function, abort.
Answers have the log-normal lengths of `tools/bench/long_answers.py`, whose median is an eighth of the longest, and a sample has
the same length in every way. The engine has one slot for each answer of a step. A way that asks for more groups than it keeps
fills the slots of finished answers with others until it has enough groups. `idle` is the share of slots times seconds in which
a slot had nothing to do; `thrown away` is the share of generated tokens that entered no step. An engine is faster with fewer
requests in its batch, so the share of idle slots is larger than that of lost time; tokens per second show the lost time.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slime.arguments import parse_args
from slime.rollout.base_types import leaves
from slime.rollout.generate_state import GenerateState
from slime.rollout.sglang_rollout import generate_rollout
from slime.serving.model_routers import start_router
from slime.serving.router import Worker
from slime.utils import async_utils
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta
from slime.utils.run_values import with_run_values
from slime.utils.types import Sample
from tests.support.models.rollout_args import CountingDataSource
from tools.bench.bench_generation import server
from tools.bench.long_answers import WRITTEN, Written
from tools.serve_on_cpu import SERVE
from tools.tied import ROOT

SAMPLES_PER_PROMPT = 4
WAYS = {
    "all of a step": (1.0, []),
    "half as many groups more": (1.5, []),
    "and partial rollouts": (1.5, ["--partial-rollout", "--keep-surplus-groups"]),
}


@contextlib.contextmanager
def stepping(
    engine: str, task: Path, way: tuple[float, list[str]], options: argparse.Namespace
) -> Iterator[argparse.Namespace]:
    """Yields the arguments of steps against the engine, behind a router that lives as long as the block."""
    over_sampling, flags = way
    args = parse_args(argv=[
        "--hf-checkpoint", str(task / "model"), "--model-args-from-hf", "--prompt-data", str(task / "train.jsonl"),
        "--rm-type", "random", "--num-rollout", str(options.steps), "--rollout-batch-size", str(options.groups),
        "--over-sampling-batch-size", str(round(options.groups * over_sampling)),
        "--n-samples-per-prompt", str(SAMPLES_PER_PROMPT), "--rollout-max-response-len", str(options.longest),
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--custom-generate-function-path", "tools.bench.long_answers.noted_generate", *flags,
    ])  # fmt: skip
    router = start_router(args, Path(tempfile.mkdtemp(dir=task.parent)))
    try:
        router.wait_ready(120)
        router.add_workers([Worker(engine)], 120)
        address = {"sglang_router_ip": router.ip, "sglang_router_port": router.port}
        models = {"sglang_model_routers": {"default": (router.ip, router.port)}}
        args = with_run_values(args, rollout_num_engines=1, **address, **models)
        SingletonMeta.clear_instances()
        # The tokenizer is loaded and modules are imported before the clock starts.
        GenerateState(args).prompt_ids(Sample(prompt="a prompt"))
        WRITTEN.clear()
        yield args
    finally:
        async_utils.run(close_http_client())
        router.shutdown()
        SingletonMeta.clear_instances()


def occupancy(written: list[Written], slots: int, started: float) -> list[tuple[float, int]]:
    """Returns (seconds since the start, slots in use from then on), in the order of time."""
    changes = sorted([(one.began, 1) for one in written] + [(one.ended, -1) for one in written])
    curve, waiting_or_written = [(0.0, 0)], 0
    for at, change in changes:
        waiting_or_written += change
        curve.append((at - started, min(slots, waiting_or_written)))
    return curve


def idle_share(curve: list[tuple[float, int]], slots: int) -> float:
    """The idle share of slots times seconds, from the first answer to the end of the last."""
    busy = sum(count * (end - at) for (at, count), (end, _) in zip(curve, curve[1:], strict=False))
    return 1 - busy / (slots * (curve[-1][0] - curve[1][0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16, help="of a step")
    parser.add_argument("--longest", type=int, default=512, help="tokens of an answer; the median is an eighth")
    parser.add_argument("--picture", type=Path, help="file for the slots in use over time (.svg)")
    options = parser.parse_args()
    slots = options.groups * SAMPLES_PER_PROMPT
    curves = {}
    with tempfile.TemporaryDirectory(prefix="bench-stragglers-") as directory, contextlib.ExitStack() as servers:
        task = Path(directory) / "task"
        subprocess.run([sys.executable, ROOT / "tools/make_toy_task.py", task], check=True, stdout=sys.stderr)
        of_server = argparse.Namespace(answers=slots, threads=1)
        engine = servers.enter_context(server(SERVE, task / "model", of_server))
        print(f"{'':28}  s per step   tokens/s   idle   thrown away")
        for name, way in WAYS.items():
            with stepping(engine, task, way, options) as args:
                source, trained, started = CountingDataSource(SAMPLES_PER_PROMPT), 0, time.time()
                for rollout_id in range(options.steps):
                    groups = generate_rollout(args, rollout_id, source).samples
                    trained += sum(sample.response_length for sample in leaves(groups))
                seconds = time.time() - started
                kept = sum(sample.response_length for group in source.returned for sample in leaves(group))
                generated = sum(one.tokens for one in WRITTEN)
                curves[name] = occupancy(WRITTEN, slots, started)
                print(
                    f"{name:28}  {seconds / options.steps:10.2f}  {trained / seconds:9.0f}  "
                    f"{idle_share(curves[name], slots):5.0%}  {max(0.0, 1 - (trained + kept) / generated):12.0%}",
                    flush=True,
                )
    if options.picture:
        options.picture.write_text(picture(curves, slots))


def picture(curves: dict[str, list[tuple[float, int]]], slots: int) -> str:
    """An SVG of the slots in use over time, with a panel for each way on one axis of time."""
    width, height, gap = 640, 90, 34
    longest = max(curve[-1][0] for curve in curves.values())
    parts = []
    for number, (name, curve) in enumerate(curves.items()):
        top = number * (height + gap) + 20
        path, level, drawn = f"M0 {top + height}", 0, 0.0
        for at, count in curve:
            x = at / longest * width
            if x - drawn < 0.7:  # steps this near would be invisible, and only the last one is drawn
                level = count
                continue
            drawn = x
            path += (
                f" L{x:.1f} {top + height * (1 - level / slots):.1f} L{x:.1f} {top + height * (1 - count / slots):.1f}"
            )
            level = count
        parts += [
            f'<text x="0" y="{top - 6}" font-size="12">{name}: slots in use over {curve[-1][0]:.0f} s</text>',
            f'<rect x="0" y="{top}" width="{width}" height="{height}" fill="none" stroke="#ccc"/>',
            f'<path d="{path} L{curve[-1][0] / longest * width:.1f} {top + height} Z" fill="#4878d0" fill-opacity="0.6"/>',
        ]
    total = len(curves) * (height + gap) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-5 0 {width + 10} {total}" font-family="sans-serif">'
    return head + '<rect x="-5" width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"


if __name__ == "__main__":
    main()
