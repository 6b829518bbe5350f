"""The command line: flags in groups, values derived from them, and the rules that they must satisfy.

`parse_args` is the whole way: parse → shape from the Hugging Face config → derive → validate → initial weights. All
violations are reported in one message.
"""

import argparse
import sys
from collections.abc import Callable

from slime.arguments.checkpoints import latest_iteration, resolve_initial_weights
from slime.arguments.derivation import derive
from slime.arguments.hf_config import apply_hf_config, read_hf_config
from slime.arguments.not_yet import not_yet_violations
from slime.arguments.origins import Origin, recording
from slime.arguments.parser import ArgumentParser, build_parser, parse_known
from slime.arguments.paths import make_paths_absolute
from slime.arguments.validation import positive_sizes, violations_of
from slime.utils.errors import UserError

__all__ = ["build_parser", "parse_args", "validate_args"]


def parse_args(
    add_custom_arguments: Callable[[ArgumentParser], ArgumentParser] | None = None,
    *,
    argv: list[str] | None = None,
) -> argparse.Namespace:
    """The checked arguments of a run.

    Args:
        add_custom_arguments: receives the parser, adds own flags, returns it.
        argv: words of the command line; None takes those of the process.

    Raises:
        UserError: unknown flags, or one message with all broken rules.
    """
    parser = build_parser(add_custom_arguments)
    args = parse_known(parser, sys.argv[1:] if argv is None else argv)
    validate_args(args)
    return args


def validate_args(args: argparse.Namespace) -> None:
    """Derive values and check all rules, in place.

    Raises:
        UserError: one message with all broken rules.
    """
    with recording(args, Origin.DERIVED):
        violations = _derive_and_check(args)
    if violations:
        raise UserError("\n".join(violations))


def _derive_and_check(args: argparse.Namespace) -> list[str]:
    make_paths_absolute(args)
    if args.prompt_data is not None and len(args.prompt_data) == 1:
        args.prompt_data = args.prompt_data[0]
    violations = list(positive_sizes(args))
    if violations:
        return violations  # nothing can be derived from them
    if args.hf_checkpoint is not None:
        violations += _apply_shape(args)
    # The longest sequence that the model's position table (RoPE has none, but Megatron asks) must cover.
    args.seq_length = args.max_position_embeddings
    violations += derive(args)
    violations += violations_of(args)
    violations += not_yet_violations(args)
    if not violations and args.has_trainer:
        violations += _resolve_weights(args)
    if not violations:
        _finish_shape(args)
    return violations


def _apply_shape(args: argparse.Namespace) -> list[str]:
    try:
        config = read_hf_config(args.hf_checkpoint)
        # Without training ranks nothing is built from the shape flags, so nothing is compared.
        with recording(args, Origin.HF_CONFIG):
            return [] if args.debug_rollout_only else apply_hf_config(args, config)
    except UserError as error:
        return [str(error)]


def _resolve_weights(args: argparse.Namespace) -> list[str]:
    try:
        args.initial_weights = resolve_initial_weights(args)
        if args.initial_weights.resume and args.initial_weights.step is None:
            latest_iteration(args.initial_weights.path)
    except UserError as error:
        return [str(error)]
    if not args.initial_weights.resume:
        args.no_load_optim = args.no_load_rng = args.finetune = True
        if args.start_rollout_id is None:
            args.start_rollout_id = 0
    return []


def _finish_shape(args: argparse.Namespace) -> None:
    if args.vocab_size is not None and args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
