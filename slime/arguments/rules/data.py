"""Rules about data and files: prompts, evaluation sets, batches, files that must exist, checkpoints, dumps and exports.

A plan can do without the files, so under `--dry-run` the messages of `FILE_RULES` are notes.
"""

import argparse
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime.arguments.checkpoints import source_of_reference, source_of_teacher
from slime.arguments.config_files.eval_file import places_in
from slime.arguments.config_files.role_config import DIRECTORY, critic_args, critic_weights
from slime.arguments.derivation import FULLY_ASYNC, GRADING_FUNCTION, OWN, source_of_actor
from slime.arguments.flag import flag_of
from slime.arguments.groups import OWN_FLAGS
from slime.arguments.hf_config import no_directory
from slime.arguments.paths import PLUG_INS_OF_SETS, WRITTEN, missing_plug_ins, problem_of_plug_in
from slime.arguments.sizes import longest_sample, micro_batches_at_a_time, positions_of_model
from slime.arguments.violations import Rule, Violation, about, broken, refused, refused_each, warned, where
from slime.scheduling.dp_schedule import most_micro_batches
from slime.utils.checkpoint_directory import POINTER, is_iteration_in, is_megatron_checkpoint, require_backend
from slime.utils.data_files import parse_data_path, path_without_slice
from slime.utils.dataset import RowKeys, check_first_row
from slime.utils.errors import UserError
from slime.utils.filesystem import existing_files, existing_parent, holding, overlapping, unwritable
from slime.utils.image_rows import media_keys_problem
from slime.utils.plain_files import may_be_dump
from slime.utils.prompt_rows import SFT_FUNCTION

logger = logging.getLogger(__name__)

# The flags that say where weights come from. If one of them has a wrong value by itself, only that is reported.
_SOURCES = ("--load", "--ref-load", "--initial-megatron-checkpoint", "--hf-checkpoint", "--random-init", "--ckpt-step")


@dataclass(frozen=True)
class OwnFile:
    """A data file that our own code reads.

    Attributes:
        flag: the origin of the path: a flag or `file:line: key`.
        reward: built-in type for rows that name none; empty: every row has to name one; None: a function of the user's grades.
        in_template: prompts are rendered with the chat template when the file is read.
        prompts: "messages": prompts must be lists of messages; "renderable": a prompt that is such a list must be renderable,
            because generation renders it; "any": nothing is required.
    """

    path: str
    flag: str
    keys: RowKeys
    reward: str | None = None
    in_template: bool = False
    prompts: Literal["messages", "renderable", "any"] = "any"

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of the path and of the fields, without those that come from a file."""
        return tuple(place for place in (self.flag, *self.keys.flags) if place.startswith("--"))


def own_files(args: argparse.Namespace) -> Iterator[OwnFile]:
    """All data files that our own code reads. Plug-ins may read their files in any way, so these are left out."""
    if args.prompt_data and args.data_source_path.startswith(OWN):
        kinds = {SFT_FUNCTION: "messages", GRADING_FUNCTION: "renderable"}
        own_way = args.custom_generate_function_path is not None
        fields = (args.input_key, args.label_key, args.tool_key, args.metadata_key)
        for path in [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data:
            yield OwnFile(
                path,
                "--prompt-data",
                RowKeys(*fields, images=(args.multimodal_keys or {}).get("image")),
                reward=_built_in_reward(args, args.rollout_function_path),
                in_template=args.apply_chat_template,
                prompts="any" if own_way else kinds.get(args.rollout_function_path, "any"),
            )
    if args.eval_function_path.startswith(OWN):
        place = places_in(args.eval_config if args.eval_datasets else None)
        for dataset in args.eval_datasets:
            in_file = place(dataset.name, "path")
            rm_type = dataset.rm_type or dataset.metadata_overrides.get("rm_type")
            own = dataset.custom_generate_function_path or dataset.custom_rm_path
            generate = dataset.custom_generate_function_path or args.custom_generate_function_path
            flags = tuple(_key_of_set(args, place(dataset.name, key), key) for key in ("input_key", "label_key"))
            fields = (dataset.input_key, dataset.label_key, dataset.tool_key, dataset.metadata_key)
            yield OwnFile(
                dataset.path,
                "--eval-prompt-data" if in_file is None else f"{in_file}: path",
                RowKeys(*fields, flags, images=(dataset.multimodal_keys or {}).get("image")),
                reward=None if own else _built_in_reward(args, args.eval_function_path, rm_type),
                in_template=bool(dataset.apply_chat_template),
                prompts="any" if generate or args.eval_function_path != GRADING_FUNCTION else "renderable",
            )


def plug_ins_of_sets(args: argparse.Namespace) -> Iterator[Violation]:
    """What `missing_plug_ins` tells about flags, for the functions that evaluation sets have in their places."""
    place = places_in(args.eval_config if args.eval_datasets else None)
    for key in PLUG_INS_OF_SETS:
        # Several sets may have the function of the defaults.
        found = {place(one.name, key): vars(one)[key] for one in args.eval_datasets if vars(one)[key]}
        for line, path in found.items():
            problem = problem_of_plug_in(args, key, path, key)
            yield from (told.at(line) for told in about([problem] if problem is not None else [], "--eval-config"))


def _key_of_set(args: argparse.Namespace, in_file: str | None, key: str) -> str:
    if in_file is not None:
        return f"{key}, {in_file}"
    return flag_of(f"eval_{key}" if vars(args)[f"eval_{key}"] is not None else key)


def _built_in_reward(args: argparse.Namespace, function: str, rm_type: str | None = None) -> str | None:
    own = (args.custom_rm_path, args.custom_generate_function_path)
    is_ours = args.has_engines and function == GRADING_FUNCTION and not any(own)
    return rm_type or args.rm_type or "" if is_ours else None


def names_reward(metadata: object) -> bool:
    """Whether the metadata of a row names the reward type of its responses."""
    return isinstance(metadata, dict) and bool(metadata.get("rm_type"))


def first_rows(args: argparse.Namespace) -> Iterator[Violation]:
    """The first row of every existing file must have the fields that the flags name, and a reward must be known for it."""
    for file in own_files(args):
        if not os.path.isfile(path_without_slice(file.path)):
            continue
        try:
            row = check_first_row(file.path, file.keys, file.flag)
        except UserError as error:
            yield from about([error], *file.flags)
            continue
        if row is not None and file.reward == "" and not names_reward(row.get(file.keys.metadata)):
            template = (
                "{file}: nothing says how responses are graded: the first row has no `rm_type` in its {key}; give {--rm-type} "
                "(math, for example) or {--custom-rm-path}"
            )
            yield broken(args, template, *file.flags, file=f"{file.flag} {file.path}", key=repr(file.keys.metadata))


def over_long_samples(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns of samples above the token budget; yields nothing. A plan has this among its own warnings."""
    # If no flag limits the length of a sample, the model and the engines do.
    longest = longest_sample(args) or args.sglang_context_length or positions_of_model(args)
    budget = (args.max_tokens_per_gpu or 0) * args.context_parallel_size
    if args.use_dynamic_batch_size and not args.dry_run and longest is not None and longest > budget > 0:
        logger.warning(
            "the longest allowed sample has %d tokens, more than --max-tokens-per-gpu %d x --context-parallel-size %d = "
            "%d: it makes a micro-batch of its own that needs more memory than the others",
            longest, args.max_tokens_per_gpu, args.context_parallel_size, budget,
        )  # fmt: skip
    yield from ()


def micro_batches(args: argparse.Namespace) -> Iterator[Violation]:
    """All data-parallel ranks take equally many micro-batches in every step, and each micro-batch has at least one sample."""
    ranks, group, batch = args.data_parallel_size, micro_batches_at_a_time(args), args.global_batch_size
    counted, multiple, found = "{data_parallel_size} data-parallel ranks", ranks * group, None
    if group > 1:
        counted += " x {group} micro-batches that a virtual pipeline takes at a time"
    numbers = {"group": group, "least": multiple, "fewer": batch - batch % multiple}
    if not args.use_dynamic_batch_size and batch % (multiple * args.micro_batch_size):
        way_out = "change one" if batch < multiple else "change one, or give {--use-dynamic-batch-size}"
        template = f"{{--global-batch-size=}} is no multiple of {{--micro-batch-size=}} x {counted}; {way_out}"
        yield broken(args, template, **numbers)
    elif args.use_dynamic_batch_size and batch < multiple:
        way_out = "and each of them needs a sample; give {least}, or fewer ranks"
        found = broken(args, f"{{--global-batch-size=}} is below {counted}, {way_out}", **numbers)
        remark, is_certain = "Only rollouts that fan out can fill such a step", True
    elif args.use_dynamic_batch_size and args.max_tokens_per_gpu:
        longest, budget = longest_sample(args), args.max_tokens_per_gpu * args.context_parallel_size
        packing, most = "flops" if args.balance_by_flops else args.packing, batch
        if longest is not None:
            most = most_micro_batches(packing, budget, batch, longest + (args.rollout_max_prompt_len is None))
        template = (
            f"{{--global-batch-size=}} is no multiple of {counted}: a step whose samples make more than {{fewer}} micro-"
            "batches could not be dealt to them; give {fewer} or {more}, or a larger {--max-tokens-per-gpu}"
        )
        if most > numbers["fewer"]:
            found = broken(args, template, **numbers, more=numbers["fewer"] + multiple)
        remark, is_certain = "Such a step ends the run", longest is not None
    if found is not None and is_certain and not _may_fan_out(args):
        yield found
    elif found is not None:
        logger.warning("%s. %s", found.message, remark)


def _may_fan_out(args: argparse.Namespace) -> bool:
    """Whether one rollout may become several samples, as functions and dumps of the user's can do."""
    names = ("custom_generate_function_path", "custom_convert_samples_to_train_data_path", "load_debug_rollout_data")
    own = args.rollout_function_path.startswith((GRADING_FUNCTION, SFT_FUNCTION, FULLY_ASYNC))
    return not (own and args.data_source_path.startswith(OWN)) or any(vars(args)[name] for name in names)


def media(args: argparse.Namespace) -> Iterator[Violation]:
    if (problem := media_keys_problem(args.multimodal_keys or {})) is not None:
        yield broken(args, "{--multimodal-keys=}: {problem}", problem=problem)


def hf_checkpoint(args: argparse.Namespace) -> Iterator[Violation]:
    if args.hf_checkpoint is not None and not Path(args.hf_checkpoint).is_dir():
        yield from about([no_directory("--hf-checkpoint", args.hf_checkpoint)], "--hf-checkpoint")


def data_files(args: argparse.Namespace) -> Iterator[Violation]:
    for file in own_files(args):
        if not os.path.isfile(path_without_slice(file.path)):
            try:
                parse_data_path(file.path, file.flag)
            except UserError as error:
                yield from about([error], *file.flags)


def rollout_dumps(args: argparse.Namespace) -> Iterator[Violation]:
    """The first dump must exist before anything starts. With a resume its number is known only later."""
    template, first = args.load_debug_rollout_data, args.start_rollout_id or 0
    if template is None:
        return
    try:
        path = template.format(rollout_id=first)
    except (KeyError, IndexError, ValueError):
        return  # the rule `templates` reports it
    known = existing_files(template)
    if not os.path.isfile(path) and not (known and args.load is not None):
        there = f"there is {known[0]} … {known[-1]}; give --start-rollout-id" if known else "give the path of a dump"
        template = "{--load-debug-rollout-data=}: {path} does not exist; {there}"
        yield broken(args, template, "--start-rollout-id", path=path, there=there)
    elif args.num_rollout != 0 and args.load is None and not may_be_dump(Path(path)):
        yield broken(args, "{--load-debug-rollout-data=}: {path} is no readable rollout dump; give one", path=path)


def other_models(args: argparse.Namespace) -> Iterator[Violation]:
    """Reference and teacher must be checkpoints that hold the iteration of their flag."""
    models = [(source_of_reference, args.ref_load, "--ref-load", "--ref-ckpt-step")]
    if args.use_opd and args.opd_type == "megatron":
        models.append((source_of_teacher, args.opd_teacher_load, "--opd-teacher-load", "--opd-teacher-ckpt-step"))
    for source, path, *flags in models:
        try:
            if (found := source(args) if path is not None else None) is not None:
                require_backend(args.train_backend, found.kind, found.path, found.step)
        except UserError as error:
            yield from about([error], *flags)


def initial_weights(args: argparse.Namespace) -> Iterator[Violation]:
    """The initial weights must come from somewhere. Those of the critic are checked if the actor's are known."""
    if not args.has_trainer:
        return
    try:
        if args.initial_weights is None:
            source_of_actor(args)
        elif args.use_critic and args.critic_initial_weights is None:
            critic_weights(args)
    except UserError as error:
        yield from about([error], *_SOURCES)


def writable_places(args: argparse.Namespace) -> Iterator[Violation]:
    """Places that the run writes to must be writable: otherwise it would fail after hours."""
    for name in WRITTEN:
        path = vars(args)[name]
        # Paths that are derived from --dump-details are reported under that flag.
        if path is None or name not in args.typed_flags:
            continue
        there = existing_parent(path)
        if there == Path(path) and there.is_file() and name.startswith(("save_debug_", "ci_save_")):
            continue  # a dump without a placeholder, which the run overwrites
        reason = unwritable(there)
        if reason is not None:
            template = "{0=}: {there} {reason}; give a place where you may write"
            yield broken(args, template, flag_of(name), there=there, reason=reason)


def _saves(args: argparse.Namespace) -> bool:
    return args.save is not None and args.has_trainer and args.num_rollout != 0


def saved_among_others(args: argparse.Namespace) -> Iterator[Violation]:
    """Warns if `--save` holds checkpoints of another run, between which this run would write its own; yields nothing."""
    if not _saves(args) or args.save_interval is None:
        return
    source, save = args.initial_weights, Path(args.save).absolute()
    resumes = source is not None and source.resume and Path(source.path).absolute() == save
    if is_megatron_checkpoint(save) and not resumes:
        logger.warning(
            "--save %s holds the checkpoint of rollout %s, and this run does not go on from it: it writes its own among those "
            "of the earlier run; give --load %s to go on, or another --save",
            args.save, (save / POINTER).read_text(errors="replace").strip(), args.save,
        )  # fmt: skip
    yield from ()


def templates(args: argparse.Namespace) -> Iterator[Violation]:
    for name, flag in OWN_FLAGS.items():
        template = vars(args)[name] if flag.placeholders else None
        if template is None:
            continue
        more = ""
        try:
            template.format(**dict.fromkeys(flag.placeholders, 0))
            continue
        except KeyError as error:
            problem = f"nothing fills in {{{error.args[0]}}}"
        except (IndexError, ValueError, AttributeError) as error:
            problem, more = str(error), ", and {{ stands for one brace"
        known = [f"{{{placeholder}}}" for placeholder in flag.placeholders]
        only = f"only {' '.join(known)} {'is' if len(known) == 1 else 'are'} filled in{more}"
        yield broken(args, "{0=}: {problem}; {only}", flag_of(name), problem=problem, only=only)


BATCH_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.num_rollout is None and args.num_epoch is None,
        "give {--num-rollout} (rollout steps) or {--num-epoch} (passes over the data)"),
    warned(lambda args: args.num_rollout is not None and args.num_epoch is not None,
        "{--num-epoch=} is ignored: {--num-rollout=} is given"),
    warned(lambda args: "num_rollout" in args.typed_flags and not (args.num_rollout or args.has_engines and args.eval_interval),
        "{--num-rollout=} trains nothing, and evaluates only where there are engines and {--eval-interval} is given"),
    refused(lambda args: args.num_rollout is None and args.load_debug_rollout_data is not None,
        "{--load-debug-rollout-data} needs {--num-rollout}: the number of rollouts does not follow from a dump"),
    refused(lambda args: args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset,
        "{--num-epoch=} needs the built-in data set; give {--num-rollout} with {--disable-rollout-global-dataset}"),
    refused(lambda args: args.over_sampling_batch_size < args.rollout_batch_size,
        "{--over-sampling-batch-size=} must be at least {--rollout-batch-size=}"),
    *where(lambda args: args.has_trainer and args.num_rollout != 0, micro_batches), over_long_samples,
)  # fmt: skip
DATA_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.rollout_global_dataset and not args.prompt_data and args.load_debug_rollout_data is None,
        "{--prompt-data} is needed (or {--disable-rollout-global-dataset} with an own data source)"),
    # Sets that were given but could not be read are reported elsewhere.
    refused(lambda args: args.eval_interval is not None and not args.eval_prompt_data and args.eval_config is None,
        "{--eval-interval=} needs data sets: give {--eval-prompt-data} name path, or {--eval-config}"),
    refused(lambda args: args.apply_chat_template and args.rollout_function_path == SFT_FUNCTION and args.prompt_data,
        "{--apply-chat-template}: supervised fine-tuning takes lists of messages and renders them itself, to know which "
        "tokens the assistant wrote; drop it"),
    media, first_rows,
)  # fmt: skip
FILE_RULES: tuple[Rule, ...] = (
    hf_checkpoint, data_files, rollout_dumps, other_models, initial_weights, missing_plug_ins, plug_ins_of_sets,
    writable_places,
)  # fmt: skip
CHECKPOINT_RULES: tuple[Rule, ...] = (
    refused(lambda args: args.save_hf is not None and args.hf_checkpoint is None,
        "{--save-hf} needs {--hf-checkpoint}: config and tokenizer are copied from it"),
    refused(lambda args: args.save_hf is not None and overlapping(args.save_hf, args.hf_checkpoint),
        "{--save-hf=} would overwrite {--hf-checkpoint}; give another directory"),
    refused(lambda args: _saves(args) and args.train_backend == "fsdp" and overlapping(f"{args.save}/iter", args.hf_checkpoint),
        "{--save=} lies in {--hf-checkpoint=}, and {--train-backend=} writes models there; give another directory"),
    refused(lambda args: _saves(args) and holding(args.save_hf, args.save),
        "{--save-hf=} holds {--save=}, and all of it is replaced at every save; give a directory beside or in {--save}"),
    refused(lambda args: _saves(args) and args.keep_last is not None and is_iteration_in(args.save, args.hf_checkpoint),
        "{--keep-last=} would delete {--hf-checkpoint=}, one of the checkpoints in {--save}; copy that to another place"),
    warned(lambda args: _saves(args) and args.save_interval is None,
        "{--save=} without --save-interval: no checkpoint is written; give --save-interval N, which also writes one after the "
        "last rollout"),
    warned(lambda args: _saves(args) and "/runtime_resources/working_dir_files/" in args.save,
        "{--save=}: that is in Ray's copy of the directory of a submitted job, which other nodes do not see, and which Ray "
        "deletes after the job; give an absolute path on a disk that all nodes share"),
    refused(lambda args: args.max_restarts > 0 and not (_saves(args) and args.save_interval is not None),
        "{--max-restarts=}: a run starts again from its checkpoints; train with {--save} and {--save-interval}, or drop it"),
    saved_among_others,
    templates,
    warned(lambda args: args.save_debug_rollout_data is not None and "{" not in args.save_debug_rollout_data,
        "{--save-debug-rollout-data=}: every rollout writes over the one before; put {{rollout_id}} into the name to keep "
        "them"),
    refused(lambda args: args.save_debug_rollout_data is not None
            and args.save_debug_rollout_data == args.save_debug_train_data,
        "{--save-debug-rollout-data} and {--save-debug-train-data} name the same file {save_debug_rollout_data}; give two, or "
        "{--dump-details} DIRECTORY"),
    refused_each(("ci_save_grad_norm", "ci_load_grad_norm"), lambda args, value: value is not None and not all(
        f"{{{name}}}" in value for name in ("rollout_id", "step_id", *["role"] * args.use_critic)),
        "{0=}: several steps would have one file; put {{rollout_id}} and {{step_id}} into it, with a critic also {{role}}"),
    refused(lambda args: args.load_debug_rollout_data_subsample is not None
            and not 0 < args.load_debug_rollout_data_subsample <= 1,
        "{--load-debug-rollout-data-subsample=}: it must be above 0 and at most 1"),
    refused(lambda args: args.use_critic and args.save is not None and critic_args(args).save == args.save,
        "{megatron_config_path}, role critic: save {save}: the actor's checkpoints go there; drop it, and those of the critic "
        f"go to {{save}}/{DIRECTORY}"),
)  # fmt: skip
