"""What a run would do, found before anything is started, loaded or written.

`--dry-run` makes a plan from the flags alone: `make_plan` returns its values, `render` makes text of them, and `show_plan`,
which the driver calls, prints the text and writes the JSON if asked for. What would end the run is told by
`slime.plan.before_start`.
"""

import argparse
import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.arguments.hf_config import read_hf_config
from slime.arguments.megatron.values import pipeline_stages
from slime.arguments.parser import build_parser
from slime.arguments.sizes import layout_of, plans_for_gpus
from slime.estimates.layout import ParallelLayout
from slime.estimates.shape import ModelShape
from slime.models.families import model_args_from_hf
from slime.plan.batch import plan_batch, plan_overlap, plan_parameters
from slime.plan.before_start import late_evaluations, other_dtypes, other_tokenizers, pushes_without_a_taker
from slime.plan.memory import (
    HostShare,
    cache_warnings,
    host_memory_problem,
    host_shares,
    machine_memory,
    over_long_warning,
    plan_memory,
    require_host_memory,
)
from slime.plan.placement import engine_parts, plan_placement, plan_sync, spread_engines, starts_engines, unknown_format
from slime.plan.setup import missing_shape_flags, parallel_layout, shape_of
from slime.plan.structure import BatchPlan, LayoutPlan, MemoryPlan, Plan
from slime.plan.text import custom_values, plan_values, render
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import UserError
from slime.utils.filesystem import write_json_atomically

logger = logging.getLogger(__name__)

__all__ = ["Plan", "make_plan", "plan_as_json", "render", "require_memory_of_machine", "show_plan"]


def make_plan(args: argparse.Namespace, parser: argparse.ArgumentParser | None = None) -> Plan:
    """The plan of a checked run.

    Args:
        parser: the one that parsed `args`, which knows the defaults; None: slime's own.

    Raises:
        UserError: parallel sizes, layers or engines that do not divide.
    """
    hf_config = _hf_config(args)
    described = _with_shape(args, hf_config)
    shape = shape_of(described)
    layout = parallel_layout(args) if args.has_trainer else None
    batch = plan_batch(args, layout)
    memory, warnings, notes = None, (), tuple(args.plan_notes)
    if batch.object_store and args.multimodal_keys:
        notes += (
            "what a processor makes of images is not in the size of the train batch: no flag tells how large it is",
        )
    if shape is not None:
        memory, warnings, memory_notes = plan_memory(args, shape, layout, batch.micro_batches, hf_config)
        notes += (*memory_notes, *_notes(args, hf_config))
    if not plans_for_gpus(args):
        # All processes of a run without GPUs share the memory of one machine, which is taken to be like this one.
        problem = host_memory_problem(_host_shares(args, memory, layout, on_gpus=False), machine_memory())
        warnings += (problem,) if problem is not None else ()
    if memory is None or memory.training is None:
        warnings += tuple(_over_long(batch, layout))
    warnings += (*late_evaluations(args), *other_dtypes(args, hf_config or {}), *pushes_without_a_taker(args))
    warnings += tuple(other_tokenizers(args))
    placement = plan_placement(args, layout, engine_parts(args, layout_of(args).first_rollout_gpu))
    warnings += tuple(spread_engines(placement))
    return Plan(
        model=_model_name(args, hf_config),
        device="GPU" if plans_for_gpus(args) else "CPU",
        precision=args.params_dtype_name,
        placement=placement,
        layout=_layout(args, layout, shape),
        batch=batch,
        overlap=plan_overlap(args),
        parameters=plan_parameters(args, shape, layout) if shape is not None else None,
        memory=memory,
        sync=plan_sync(args, shape, hf_config, layout) if shape is not None else None,
        values=plan_values(args, parser or build_parser()),
        custom_values=custom_values(args),
        missing=missing_shape_flags(described),
        warnings=warnings,
        notes=tuple(dict.fromkeys(notes)),
    )


def require_memory_of_machine(args: argparse.Namespace) -> None:
    """Refuse a run on this machine alone whose processes need more memory than it has; on GPUs, warn of it. Warn of engines
    whose caches have no room for a sample.

    Raises:
        UserError: the memory is not enough (the message has both numbers and a way out), or the plan cannot be made.
    """
    hf_config = _hf_config(args)
    shape = shape_of(_with_shape(args, hf_config))
    layout = parallel_layout(args) if args.has_trainer else None
    memory = None
    if shape is not None:
        memory, _, _ = plan_memory(args, shape, layout, plan_batch(args, layout).micro_batches, hf_config)
        for warning in cache_warnings(args, shape, hf_config, memory.gpu_memory):
            logger.warning("%s", warning)
    on_gpus = plans_for_gpus(args)
    require_host_memory(_host_shares(args, memory, layout, on_gpus=on_gpus), on_gpus=on_gpus)


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan in JSON's types: objects, lists, numbers, strings."""
    return json.loads(json.dumps(dataclasses.asdict(plan)))


def show_plan(args: argparse.Namespace, parser: argparse.ArgumentParser | None = None) -> None:
    """Print the plan; with `--dry-run-json FILE` write it there too. FILE `-` prints the JSON instead of the text.

    `parser`: as in `make_plan`.

    Raises:
        UserError: FILE cannot be written; nothing is printed then.
    """
    plan = make_plan(args, parser)
    file = args.dry_run_json
    if file == "-":
        print(json.dumps(plan_as_json(plan), indent=2))
        return
    if file is not None:
        _write(file, plan)
    print(render(plan))


def _over_long(batch: BatchPlan, layout: ParallelLayout | None) -> Iterator[str]:
    """The warning of samples above the token budget, for a plan whose memory part has no numbers to give it with."""
    budget, longest = batch.token_budget, batch.longest_sample
    if layout is not None and budget is not None and longest is not None and longest > budget:
        yield over_long_warning(longest, budget // layout.context, layout.context)


def _write(file: str, plan: Plan) -> None:
    try:
        write_json_atomically(file, plan_as_json(plan))
    except OSError as error:
        raise UserError(
            f"--dry-run-json {file} cannot be written: {error.strerror or error}; give a path that can, such as "
            "/tmp/plan.json, or - for the standard output"
        ) from None


def _hf_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The config of --hf-checkpoint; None when it cannot be read, which validation has noted."""
    if args.hf_checkpoint is None:
        return None
    try:
        return read_hf_config(args.hf_checkpoint)
    except UserError:
        return None


def _with_shape(args: argparse.Namespace, hf_config: dict[str, Any] | None) -> argparse.Namespace:
    """`args`. Without training ranks no flags describe the model; then a copy with the shape that its config has."""
    if args.has_trainer or hf_config is None:
        return args
    try:
        derived = model_args_from_hf(hf_config)
    except UserError:
        return args
    unset = {name: value for name, value in derived.items() if name not in args.typed_flags}
    return argparse.Namespace(**{**vars(args), **unset})


def _model_name(args: argparse.Namespace, hf_config: dict[str, Any] | None) -> str:
    architecture = ((hf_config or {}).get("architectures") or [None])[0]
    directory = Path(args.hf_checkpoint).name if args.hf_checkpoint else None
    if directory and architecture:
        return f"{directory} ({architecture})"
    return directory or args.model_name or "the model of the flags"


def _host_shares(
    args: argparse.Namespace, memory: MemoryPlan | None, layout: ParallelLayout | None, *, on_gpus: bool
) -> tuple[HostShare, ...]:
    ranks = layout.world_size if layout is not None else 0
    return host_shares(args, memory, ranks, engine_parts(args, 0), on_gpus=on_gpus)


def _layout(args: argparse.Namespace, layout: ParallelLayout | None, shape: ModelShape | None) -> LayoutPlan | None:
    if layout is None:
        return None
    layers = None
    if shape is not None:
        layers = tuple(len(stage.layers) for stage in pipeline_stages(args))
    return LayoutPlan(
        tensor=layout.tensor,
        context=layout.context,
        expert=layout.expert,
        expert_tensor=layout.expert_tensor,
        data=layout.data,
        pipeline=layout.pipeline,
        virtual_pipeline=layout.virtual_pipeline,
        sequence_parallel=layout.sequence_parallel,
        layers=layers,
    )


def _notes(args: argparse.Namespace, hf_config: dict[str, Any] | None) -> Iterator[str]:
    """Sentences that say what the plan assumed."""
    if starts_engines(args) and hf_config is None:
        yield (
            "the config.json of --hf-checkpoint was not read: engine weights and the weight sync are planned as if the "
            "checkpoint were not quantised"
        )
    form = unknown_format(args, hf_config) if args.has_engines else None
    if form is not None:
        yield (
            f"the format of the quantised checkpoint, {form}, is not known: engine weights and the weight sync are planned as "
            "if it were not quantised"
        )
    if args.only_train_params_name_list or args.freeze_params_name_list:
        yield (
            "all parameters that the flags freeze are planned as trained: their gradients and optimizer state are not taken off"
        )
    typed = {"bf16", "fp16"} & args.typed_flags
    if plans_for_gpus(args) and not typed and gpus_on_this_machine() == 0:
        yield "no dtype was typed: planned for bfloat16, as on GPUs; on this machine, without one, a run would use float32"
