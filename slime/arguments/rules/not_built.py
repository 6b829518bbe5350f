"""What a run cannot do yet because of the value of a flag, or of several; single flags have rows in `not_yet`.

A run is refused; `--dry-run` plans it and notes it.
"""

import argparse
from collections.abc import Iterator

from slime.arguments.layout import layout_of
from slime.arguments.rules import Rule


def loop(args: argparse.Namespace) -> Iterator[str]:
    if args.asynchronous:
        yield "the asynchronous loop is not built yet; run train.py (train_async.py --dry-run plans with it)"


def kept_sets(args: argparse.Namespace) -> Iterator[str]:
    if not (args.has_trainer and args.has_engines and args.loss_type == "policy_loss"):
        return
    cut = {"--rollout-top-p": (args.rollout_top_p, 1.0), "--rollout-top-k": (args.rollout_top_k, -1)}
    for flag, (value, off) in cut.items():
        if value != off:
            yield (
                f"{flag} {value}: the trainer's log-probs are those of the full distribution, and replay of the kept set is "
                f"not built yet; give {off} ({flag.replace('rollout', 'eval')} is free)"
            )


def engines(args: argparse.Namespace) -> Iterator[str]:
    if args.has_engines and args.rollout_num_gpus == 0 and not args.rollout_external:
        yield (
            "--rollout-num-gpus 0: give the number of GPUs for the engines, or --debug-train-only; a run of routers alone is "
            "not built yet"
        )
    if args.rollout_num_gpus_per_engine > args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine} is above --num-gpus-per-node "
            f"{args.num_gpus_per_node}: engines over several nodes are not built yet; an engine must fit on one node"
        )
    else:
        yield from _split_engines(args)


def _split_engines(args: argparse.Namespace) -> Iterator[str]:
    """The first engine whose GPUs lie on two nodes; GPUs are counted as `layout` does."""
    if getattr(args, "sglang_config", None) is not None or not args.rollout_num_gpus:
        return
    layout = layout_of(args)
    total, first, per_node = layout.rollout_gpus, layout.first_rollout_gpu, args.num_gpus_per_node
    each = args.rollout_num_gpus_per_engine
    start = _first_split(total, first, each, per_node)
    if start is None:
        return
    fitting = [n for n in range(1, each) if total % n == 0 and _first_split(total, first, n, per_node) is None]
    yield (
        f"--rollout-num-gpus-per-engine {each}: an engine would have the GPUs {start} to {start + each - 1} of the run, which "
        f"lie on two nodes (--num-gpus-per-node {per_node}"
        + (f", training takes the first {first}" if first else "")
        + "): engines over several nodes are not built yet; give --rollout-num-gpus-per-engine "
        + " or ".join(map(str, fitting[-2:]))
    )


def _first_split(total: int, first: int, each: int, per_node: int) -> int | None:
    starts = range(first, first + total - each + 1, each)
    return next((start for start in starts if start // per_node != (start + each - 1) // per_node), None)


def layers(args: argparse.Namespace) -> Iterator[str]:
    if not args.has_trainer or args.num_layers is None:
        return
    built = {
        "--swiglu": args.swiglu,
        "--disable-bias-linear": not args.add_bias_linear,
        "--normalization RMSNorm": args.normalization == "RMSNorm",
    }
    lacking = [flag for flag, given in built.items() if not given]
    if lacking:
        yield (
            f"only models with gated SiLU, RMSNorm and no linear biases are built: give {' '.join(lacking)}, or "
            "--model-args-from-hf with --hf-checkpoint"
        )


NOT_BUILT_RULES: tuple[Rule, ...] = (loop, kept_sets, engines, layers)
