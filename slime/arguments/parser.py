"""The command-line parser: no abbreviations, and an unknown flag is an error that names the nearest known ones."""

import argparse
import difflib
from collections.abc import Callable
from typing import NoReturn

from slime.arguments.groups import (
    algorithm,
    cluster,
    data,
    evaluation,
    logging,
    megatron,
    network,
    reward,
    rollout,
    sglang,
)
from slime.arguments.origins import start_origins
from slime.utils.errors import UserError

# In the order in which `--help` shows them.
GROUPS = (cluster, rollout, data, evaluation, algorithm, reward, logging, network, megatron, sglang)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with errors raised as `UserError`, so that the caller decides how the process ends."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def known_flags(self) -> list[str]:
        """Every `--flag` spelling that this parser accepts."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]


def build_parser(add_custom_arguments: Callable[[ArgumentParser], ArgumentParser] | None = None) -> ArgumentParser:
    """The parser of all flags. `add_custom_arguments` gets the parser, adds flags and returns it."""
    parser = ArgumentParser(
        prog="train.py",
        description="Reinforcement-learning post-training of language models.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for group in GROUPS:
        group.add_arguments(parser.add_argument_group(group.TITLE))
    if add_custom_arguments is not None:
        parser = add_custom_arguments(parser)
    return parser


def parse_known(parser: ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`; `args.typed_flags` and `args.origins` tell afterwards what was typed.

    Raises:
        UserError: an unknown flag (with the nearest known names), a value of the wrong type, a stray word.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError("\n".join(_describe_unknown(word, parser.known_flags()) for word in _unknown_flags(unknown)))
    start_origins(args, _typed_destinations(parser, argv))
    return args


def _unknown_flags(words: list[str]) -> list[str]:
    flags = [word.split("=", 1)[0] for word in words if word.startswith("--")]
    return flags or [words[0]]


def _describe_unknown(word: str, known: list[str]) -> str:
    if not word.startswith("--"):
        return f"unexpected word {word!r} on the command line: no flag before it takes another value"
    nearest = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(nearest)}?" if nearest else "see `python train.py --help` for all flags"
    return f"unknown flag {word}: {hint}"


def _typed_destinations(parser: ArgumentParser, argv: list[str]) -> set[str]:
    words = {word.split("=", 1)[0] for word in argv}
    return {action.dest for action in parser._actions if words.intersection(action.option_strings)}
