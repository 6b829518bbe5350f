"""What a run cannot do yet because of the value of a flag, or of several; single flags have rows in `not_yet`.

A run is refused; `--dry-run` plans it and notes it.
"""

import argparse
from collections.abc import Iterator

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.not_yet import OWN_ROWS
from slime.arguments.paths import MANAGER_PLUG_INS
from slime.arguments.rules import Rule
from slime.arguments.rules.rollout import reward_types
from slime.arguments.sizes import layout_of
from slime.models.families import FAMILY_NAMES, TRAINED_MODEL_TYPES, family_name
from slime.utils.reward_types import is_planned_reward_type, known_reward_types


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
                f"{flag} {value}: the trainer's log-probs must be those among the tokens that sampling kept, and asking the "
                f"engines for these is not built yet; give {off} ({flag.replace('rollout', 'eval')} is free)"
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


def prediction_layers(args: argparse.Namespace) -> Iterator[str]:
    if not args.has_trainer:
        return
    if args.mtp_num_layers and args.num_experts:
        yield (
            f"--mtp-num-layers {args.mtp_num_layers} with --num-experts {args.num_experts}: prediction layers of models with "
            "experts are not built yet; leave --mtp-num-layers out"
        )
    layout = args.pipeline_model_parallel_layout
    if layout is not None and "m" in layout:
        yield (
            f"--pipeline-model-parallel-layout {layout}: m, another place for prediction layers than the last stage, is not "
            "built yet; leave m out"
        )


def rewards(args: argparse.Namespace) -> Iterator[str]:
    planned = [f"{where} {name}" for where, name in reward_types(args) if is_planned_reward_type(name)]
    for words in planned:
        yield f"{words}: this reward is not built yet; {known_reward_types()} are, and --custom-rm-path takes one of yours"
    users = not args.typed_flags.isdisjoint(MANAGER_PLUG_INS) or any(data.custom_rm_path for data in args.eval_datasets)
    if args.rm_url is not None and not users and not args.use_opd and not planned:
        yield (
            f"--rm-url {args.rm_url}: rewards over HTTP (--rm-type remote_rm) are not built yet, and no function of yours is "
            "there to use the address; give --custom-rm-path, or drop the flag"
        )


def media_of_evaluation(args: argparse.Namespace) -> Iterator[str]:
    """The flag has a row of its own."""
    if not any(row.name == "multimodal_keys" for row in OWN_ROWS):
        return
    place = places_in(args.eval_config if args.eval_datasets else None)
    for dataset in args.eval_datasets:
        where = place(dataset.name, "multimodal_keys")
        if where is not None:
            yield f"{where}: multimodal_keys: a data set with images, video or audio is not built yet; drop the line"


def known_family(args: argparse.Namespace) -> Iterator[str]:
    if args.model_name is not None and args.has_trainer and family_name(args.model_name) is None:
        yield f"--model-name {args.model_name}: no such family; give one of {', '.join(sorted(FAMILY_NAMES))}, or drop the flag"


def built_family(args: argparse.Namespace) -> Iterator[str]:
    if args.model_name is None or not args.has_trainer:
        return
    family = family_name(args.model_name)
    if family is not None and family not in {name.replace("_", "") for name in TRAINED_MODEL_TYPES}:
        yield (
            f"--model-name {args.model_name}: the conversion of {family} is not built yet; {' or '.join(TRAINED_MODEL_TYPES)} "
            "can be trained (--dry-run plans with it)"
        )


NOT_BUILT_RULES: tuple[Rule, ...] = (
    loop, kept_sets, engines, layers, prediction_layers, rewards, media_of_evaluation, built_family,
)  # fmt: skip
MODEL_NAME_RULES: tuple[Rule, ...] = (known_family,)
