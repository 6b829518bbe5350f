"""What a run would do, and what would end it, found before anything is started, loaded or written.

`--dry-run` makes a plan from the flags alone: `make_plan` returns its values, `render` makes text of them, and `show_plan`,
which the driver calls, prints the text and writes the JSON if asked for.

A run checks a few things after its arguments and before Ray starts: rows of data files, the chat template, the memory of the
machine, and whether anything is left to do. It would find these problems anyway, but only after the 10 to 20 seconds that its
processes take to start. Rows are read for a few seconds at most; the data source reads the rest when it loads them.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime.arguments.config_files.eval_file import places_in
from slime.arguments.hf_config import read_hf_config
from slime.arguments.megatron.values import pipeline_stages
from slime.arguments.parser import build_parser
from slime.arguments.rules.data import SFT_FUNCTION, OwnFile, names_reward, own_files
from slime.arguments.sizes import layout_of, plans_for_gpus
from slime.estimates.layout import ParallelLayout
from slime.estimates.shape import ModelShape
from slime.models.families import model_args_from_hf
from slime.plan.batch import plan_batch, plan_parameters
from slime.plan.memory import (
    HostShare,
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
from slime.utils.checkpoint_directory import METADATA, POINTER, iteration_directory, latest_iteration
from slime.utils.data_files import estimated_rows
from slime.utils.dataset import scan_rows
from slime.utils.device import gpus_on_this_machine
from slime.utils.errors import UserError
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.filesystem import write_json_atomically
from slime.utils.processing_utils import lacks_chat_template, load_processor, no_chat_template, no_processor
from slime.utils.reward_types import needs_label
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

__all__ = [
    "Plan", "check_before_start", "files_of_the_run", "make_plan", "nothing_left", "place_of_images", "plan_as_json", "render",
    "require_memory_of_machine", "show_plan",
]  # fmt: skip

SCAN_SECONDS = 5.0


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
    warnings += tuple(_late_evaluations(args))
    placement = plan_placement(args, layout, engine_parts(args, layout_of(args).first_rollout_gpu))
    warnings += tuple(spread_engines(placement))
    return Plan(
        model=_model_name(args, hf_config),
        device="GPU" if plans_for_gpus(args) else "CPU",
        precision=args.params_dtype_name,
        placement=placement,
        layout=_layout(args, layout, shape),
        batch=batch,
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
    """Refuse a run on this machine alone whose processes need more memory than it has; on GPUs, warn of it.

    Raises:
        UserError: the memory is not enough (the message has both numbers and a way out), or the plan cannot be made.
    """
    hf_config = _hf_config(args)
    shape = shape_of(_with_shape(args, hf_config))
    layout = parallel_layout(args) if args.has_trainer else None
    memory = None
    if shape is not None:
        memory, _, _ = plan_memory(args, shape, layout, plan_batch(args, layout).micro_batches, hf_config)
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


def _late_evaluations(args: argparse.Namespace) -> Iterator[str]:
    """A warning if evaluations measure weights that are older than their place on the step axis says."""
    every, interval = args.eval_interval, args.update_weights_interval
    if args.asynchronous and args.has_trainer and args.has_engines and every is not None and every % interval:
        yield (
            f"--eval-interval {every} is no multiple of --update-weights-interval {interval}: an evaluation after a rollout "
            "without a push measures the weights of the push before it, which fewer rollouts trained than its eval/step says; "
            f"give a multiple of {interval}"
        )


def check_before_start(args: argparse.Namespace, scan_seconds: float = SCAN_SECONDS) -> None:
    """Check the data, the tokenizer and, if there are images, the processor. Warn of evaluations that come too late.

    Raises:
        UserError: one message with everything that would end the run later.
    """
    for warning in _late_evaluations(args):
        logger.warning("%s", warning)
    problems = [*_checkpoint_problems(args), *_template_problems(args), *_processor_problems(args)]
    problems += _row_problems(args, time.monotonic() + scan_seconds)
    if problems:
        raise UserError("\n".join(problems))


def nothing_left(args: argparse.Namespace) -> str | None:
    """Why a run with these checked arguments would do nothing; None if it would do something, or if only its data can tell."""
    total = args.num_rollout
    if not total:
        return None  # with epochs only the data set knows, and 0 asks for nothing but an evaluation
    start, source = args.start_rollout_id, args.initial_weights
    if start is not None:
        return (
            None
            if start < total
            else f"nothing left to do: --start-rollout-id {start} is not below --num-rollout {total}"
        )
    if source is None or not source.resume:
        return None
    start = 1 + (latest_iteration(source.path) if source.step is None else source.step)
    if start < total:
        return None
    return (
        f"nothing left to do: {start} rollouts are done in --load {source.path}, --num-rollout is {total}; a larger "
        "--num-rollout goes on from there"
    )


def _checkpoint_problems(args: argparse.Namespace) -> Iterator[str]:
    source = args.initial_weights
    if source is None or source.kind != "megatron":
        return
    directory = iteration_directory(source.path, latest_iteration(source.path) if source.step is None else source.step)
    if (directory / METADATA).is_file():
        return
    what = "is no whole checkpoint" if directory.is_dir() else "does not exist"
    if source.step is None:
        yield f"{directory} {what}, although {Path(source.path) / POINTER} names it; name a whole one there, or start elsewhere"
    else:
        yield f"{directory} {what}; ask for another step, or start elsewhere"


def _template_problems(args: argparse.Namespace) -> Iterator[str]:
    if args.hf_checkpoint is None or not lacks_chat_template(args.hf_checkpoint):
        return
    files = list(files_of_the_run(args))
    if args.prompt_data and args.rollout_function_path == SFT_FUNCTION and args.load_debug_rollout_data is None:
        yield no_chat_template("supervised fine-tuning renders chats", args.hf_checkpoint)
    elif any(file.in_template for file in files):
        yield no_chat_template("--apply-chat-template is given", args.hf_checkpoint)


def _processor_problems(args: argparse.Namespace) -> Iterator[str]:
    """Why prompts with images cannot be encoded. Files that a user's generate function encodes are not checked."""
    seeing = [file for file in files_of_the_run(args) if file.keys.images and file.prompts != "any"]
    if not seeing or args.hf_checkpoint is None:
        return
    try:
        if load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code) is None:
            sets = [one for one in args.eval_datasets if one.path == seeing[0].path and one.multimodal_keys]
            in_set = seeing[0].flag != "--prompt-data"
            yield no_processor(args.hf_checkpoint, place_of_images(args, sets[0]) if in_set else "--multimodal-keys")
    except UserError as error:
        yield str(error)


def place_of_images(args: argparse.Namespace, dataset: EvalDatasetConfig) -> str:
    """The place that names the image field of an evaluation set, `file:line: multimodal_keys` or the flag, and the set."""
    in_file = places_in(args.eval_config)(dataset.name, "multimodal_keys")
    key = "--multimodal-keys" if in_file is None else f"{in_file}: multimodal_keys"
    return f"{key} (evaluation set {dataset.name})"


def files_of_the_run(args: argparse.Namespace) -> Iterator[OwnFile]:
    """The files that are read when the run starts."""
    for file in own_files(args):
        trains = file.flag == "--prompt-data"
        if args.load_debug_rollout_data is None if trains else args.has_engines and args.eval_interval is not None:
            yield file


def _row_problems(args: argparse.Namespace, deadline: float) -> Iterator[str]:
    if args.allow_bad_rows:
        return  # bad rows are skipped then; the reader counts them
    from tqdm import tqdm

    no_template = args.hf_checkpoint is not None and lacks_chat_template(args.hf_checkpoint)
    may_label = bool(args.rollout_sample_hook_path or args.buffer_filter_path)
    for file in files_of_the_run(args):

        def objection(sample: Sample, file: OwnFile = file) -> str | None:
            tokenizer = args.hf_checkpoint if no_template else None
            return _objection(sample, file, tokenizer, may_label=may_label)

        total = estimated_rows(file.path) if sys.stderr.isatty() else None
        name = os.path.basename(file.path)
        # There is no bar if the output is no terminal, nor for a file that is read in less than half a second.
        with tqdm(desc=f"checking {name}", total=total, unit="row", leave=False, disable=None, delay=0.5) as bar:
            scan = scan_rows(
                file.path,
                file.keys,
                flag=file.flag,
                objection=objection,
                deadline=deadline,
                advance=bar.update,
            )
        yield from scan.problems
        if not scan.finished and not scan.problems and not scan.rows:
            logger.info("%s: its rows are read while the run starts", file.path)
        elif not scan.finished and not scan.problems:
            logger.info(
                "%s: the first %d rows can be used; the others are read while the run starts", file.path, scan.rows
            )


def _objection(sample: Sample, file: OwnFile, without_template: str | None, *, may_label: bool) -> str | None:
    """Why a row would end the run later although it can be read; None if it would not.

    `without_template`: the path of the tokenizer if it has no chat template, else None. `may_label`: a function of the user's
    sees samples before they are graded, and may give them labels.
    """
    chat = not isinstance(sample.prompt, str)
    if file.prompts == "messages" and not chat:
        return (
            "the prompt is text, and supervised fine-tuning needs a list of messages; name that field with --input-key"
        )
    if file.prompts == "renderable" and chat and not file.in_template and without_template is not None:
        return no_chat_template("the prompt is a list of messages", without_template)
    if file.reward == "" and not names_reward(sample.metadata):
        return f"nothing says how responses are graded: no `rm_type` in {file.keys.metadata!r}; give --rm-type"
    # Which of the two holds where both are named is not asked here.
    rewards = [str(name) for name in (sample.metadata.get("rm_type"), file.reward) if name]
    is_graded = file.reward is not None and bool(rewards) and not may_label
    if is_graded and sample.label in (None, "") and all(map(needs_label, rewards)):
        return f"there is no label, which the reward {rewards[0]} needs; {file.keys.flags[1]} names its field"
    return None
