"""The rules that a run's arguments must satisfy. Every rule yields messages; all of them are reported together.

A message names the flags, the values, and a value that would work.
"""

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from slime.arguments.checkpoints import source_of_reference
from slime.arguments.plug_ins import flag_of, missing_files
from slime.utils.data import check_first_row
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

Rule = Callable[[argparse.Namespace], Iterator[str]]

# Where the data sources and evaluation functions live whose way of reading files is known.
_OWN = "slime.rollout."


def violations_of(args: argparse.Namespace) -> list[str]:
    """Messages of all broken rules, in the order of the rules."""
    return [message for rule in RULES for message in rule(args)]


def positive_sizes(args: argparse.Namespace) -> Iterator[str]:
    names = (
        "actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus_per_engine", "num_gpus_per_node",
        "tensor_model_parallel_size", "rollout_batch_size", "n_samples_per_prompt", "micro_batch_size",
        "data_pad_size_multiplier", "update_weight_buffer_size", "sglang_server_concurrency", "rm_concurrency",
        "n_samples_per_eval_prompt",
    )  # fmt: skip
    optional = (
        "global_batch_size", "num_steps_per_rollout", "max_tokens_per_gpu", "rollout_max_response_len",
        "rollout_max_prompt_len", "rollout_max_context_len", "save_interval", "eval_interval", "num_epoch", "keep_last",
        "over_sampling_batch_size",
    )  # fmt: skip
    for name in (*names, *optional):
        value = getattr(args, name)
        if value is not None and value < 1:
            yield f"{flag_of(name)} {value}: it must be at least 1"


def modes(args: argparse.Namespace) -> Iterator[str]:
    if args.debug_rollout_only and args.debug_train_only:
        other = "--load-debug-rollout-data implies --debug-train-only" if args.load_debug_rollout_data else ""
        yield f"--debug-rollout-only and --debug-train-only exclude each other; drop one. {other}".strip()
    if args.has_engines and not args.rollout_num_gpus:
        yield f"--rollout-num-gpus {args.rollout_num_gpus}: give the number of GPUs for the engines, or --debug-train-only"
    if args.has_engines and args.hf_checkpoint is None:
        yield "--hf-checkpoint is needed: the engines load their config and tokenizer from it"


def engine_sizes(args: argparse.Namespace) -> Iterator[str]:
    total, each = args.rollout_num_gpus or 0, args.rollout_num_gpus_per_engine
    if each >= 1 and total % each:
        yield f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {each}"
    if each > args.num_gpus_per_node:
        yield (
            f"--rollout-num-gpus-per-engine {each} is above --num-gpus-per-node {args.num_gpus_per_node}: an engine must "
            "fit on one node"
        )


def rollout_count(args: argparse.Namespace) -> Iterator[str]:
    if args.num_rollout is None and args.num_epoch is None:
        yield "give --num-rollout (rollout steps) or --num-epoch (passes over the data)"
    if args.num_rollout is not None and args.num_rollout < 0:
        yield f"--num-rollout {args.num_rollout}: it must not be negative"
    if args.num_rollout is None and args.load_debug_rollout_data is not None:
        yield "--load-debug-rollout-data needs --num-rollout: a dump does not tell how many there are"
    if args.num_rollout is None and args.num_epoch is not None and not args.rollout_global_dataset:
        yield "--num-epoch needs the built-in data set; give --num-rollout with --disable-rollout-global-dataset"
    if args.over_sampling_batch_size < args.rollout_batch_size:
        yield (
            f"--over-sampling-batch-size {args.over_sampling_batch_size} must be at least --rollout-batch-size "
            f"{args.rollout_batch_size}"
        )


def sampling(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_temperature <= 0:
        yield (
            f"--rollout-temperature {args.rollout_temperature}: training needs a value above 0 (1.0 is usual); "
            "--eval-temperature may be 0"
        )
    cut = {"--rollout-top-p": (args.rollout_top_p, 1.0), "--rollout-top-k": (args.rollout_top_k, -1)}
    for flag, (value, off) in cut.items():
        if value != off and args.has_trainer and args.has_engines and args.loss_type == "policy_loss":
            yield (
                f"{flag} {value}: the trainer's log-probs are those of the full distribution; give {off} "
                f"({flag.replace('rollout', 'eval')} is free)"
            )
    if args.eval_temperature is not None and args.eval_temperature < 0:
        yield f"--eval-temperature {args.eval_temperature}: it must not be negative"


def lengths(args: argparse.Namespace) -> Iterator[str]:
    context = args.rollout_max_context_len
    if context is not None and args.rollout_max_prompt_len is not None and args.rollout_max_prompt_len >= context:
        yield (
            f"--rollout-max-prompt-len {args.rollout_max_prompt_len} must be below --rollout-max-context-len {context}, "
            f"at most {context - 1}"
        )
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops needs --use-dynamic-batch-size"
    if args.max_tokens_per_gpu is not None and context is not None and context > args.max_tokens_per_gpu:
        logger.warning(
            "the longest allowed sample (--rollout-max-context-len %d) is above --max-tokens-per-gpu %d: such a sample "
            "makes a micro-batch of its own that needs more memory than the others", context, args.max_tokens_per_gpu,
        )  # fmt: skip
    if args.seq_length is not None and context is not None and context > args.seq_length:
        yield f"--rollout-max-context-len {context} is above the model's --max-position-embeddings {args.seq_length}"


def static_batches(args: argparse.Namespace) -> Iterator[str]:
    unit = args.micro_batch_size * args.data_parallel_size
    if args.has_trainer and not args.use_dynamic_batch_size and args.global_batch_size % unit:
        yield (
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size {args.micro_batch_size} x "
            f"{args.data_parallel_size} data-parallel ranks; change one, or give --use-dynamic-batch-size"
        )


def model_shape(args: argparse.Namespace) -> Iterator[str]:
    if not args.has_trainer:
        return
    needed = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    missing = [flag_of(name) for name in needed if getattr(args, name) is None]
    if missing and args.model_args_from_hf and args.hf_checkpoint is not None:
        return  # the config could not be read, and that was said
    if missing:
        yield f"the model's shape is not known: give {', '.join(missing)}, or --model-args-from-hf with --hf-checkpoint"
        return
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        value = getattr(args, name)
        if value is not None and value % args.tensor_model_parallel_size:
            yield f"--tensor-model-parallel-size {args.tensor_model_parallel_size} does not divide {flag_of(name)} {value}"
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1"
    if not (args.swiglu and args.disable_bias_linear):
        yield "only gated-SiLU models without linear biases are built: give --swiglu --disable-bias-linear"
    if args.bf16 and args.fp16:
        yield "--bf16 and --fp16 exclude each other"


def checkpoints(args: argparse.Namespace) -> Iterator[str]:
    for name in ("save_interval", "keep_last", "save_hf"):
        if getattr(args, name) is not None and args.save is None:
            yield f"{flag_of(name)} needs --save"
    if args.save_hf is not None and args.hf_checkpoint is not None:
        if Path(args.save_hf).absolute() == Path(args.hf_checkpoint).absolute():
            yield f"--save-hf {args.save_hf} would overwrite --hf-checkpoint; give another directory"


def templates(args: argparse.Namespace) -> Iterator[str]:
    known = {
        "save_hf": "{rollout_id}",
        "save_debug_rollout_data": "{rollout_id}",
        "save_debug_train_data": "{rollout_id} {rank}",
    }
    for name, placeholders in known.items():
        template = getattr(args, name)
        if template is None:
            continue
        try:
            template.format(**{word.strip("{}"): 0 for word in placeholders.split()})
        except (KeyError, IndexError, ValueError) as error:
            yield f"{flag_of(name)} {template}: {error!r}; only {placeholders} is filled in"
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        yield "--save-debug-rollout-data and --save-debug-train-data name the same file"
    if args.save_hf is not None and args.hf_checkpoint is None:
        yield "--save-hf needs --hf-checkpoint: config and tokenizer are copied from it"


def objective(args: argparse.Namespace) -> Iterator[str]:
    if args.loss_type == "custom_loss" and args.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c}: it must be above 1 (3.0 is usual)"
    if args.use_kl_loss and args.ref_load is None:
        yield "--use-kl-loss needs --ref-load, the reference checkpoint"
    elif args.ref_load is not None:
        try:
            source_of_reference(args)
        except UserError as error:
            yield str(error)
    if args.n_samples_per_prompt == 1 and args.rewards_normalization and args.loss_type == "policy_loss":
        logger.warning(
            "--n-samples-per-prompt 1 with rewards normalisation: every group has one member, so all advantages are zero"
        )


def data_files(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_global_dataset and not args.prompt_data and args.load_debug_rollout_data is None:
        yield "--prompt-data is needed (or --disable-rollout-global-dataset with an own data source)"
    # Own data sources and evaluation functions may read their files in their own way.
    if args.prompt_data and args.data_source_path.startswith(_OWN):
        for path in [args.prompt_data] if isinstance(args.prompt_data, str) else args.prompt_data:
            yield from _row_problem(path, args.input_key, args.label_key, "--prompt-data")
    if args.eval_function_path.startswith(_OWN):
        for dataset in args.eval_datasets:
            yield from _row_problem(dataset.path, dataset.input_key, dataset.label_key, "--eval-prompt-data")
    if args.eval_interval is not None and not args.eval_datasets:
        yield "--eval-interval needs --eval-prompt-data"


def _row_problem(path: str, prompt_key: str | None, label_key: str | None, flag: str) -> Iterator[str]:
    try:
        check_first_row(path, prompt_key=prompt_key, label_key=label_key, flag=flag)
    except UserError as error:
        yield str(error)


def rewards(args: argparse.Namespace) -> Iterator[str]:
    url = args.rm_url
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"--rm-url {url}: it must start with http:// or https://"
    if (args.sglang_router_ip is None) != (args.sglang_router_port is None):
        yield "--sglang-router-ip and --sglang-router-port belong together"
    fraction = args.load_debug_rollout_data_subsample
    if fraction is not None and not 0 < fraction <= 1:
        yield f"--load-debug-rollout-data-subsample {fraction}: it must be above 0 and at most 1"


RULES: tuple[Rule, ...] = (
    modes, engine_sizes, rollout_count, sampling, lengths, static_batches, model_shape, checkpoints,
    templates, objective, data_files, rewards, missing_files,
)  # fmt: skip
