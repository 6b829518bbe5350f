"""The command-line parser of all families of flags: no abbreviations, and all slips of a command line in one message.

An unknown flag is an error that names the nearest known ones; a retired one names its replacement. If there are no other slips,
the other words are parsed too, so that one message can also tell the rules that they break. If a flag is given again, by any of
its names, its last value counts, lists included, and one line says so; only flags that say so add up. One script serves runs
that only train, too: these accept the flags of engines and router, even if the packages of those are not installed.
"""

import argparse
import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from slime.arguments.config_files.custom_config import RESERVED
from slime.arguments.config_files.role_config import ACTOR
from slime.arguments.flag import as_typed
from slime.arguments.groups import OWN_GROUPS, add_megatron_flags, add_server_flags
from slime.arguments.groups.run_flags import SERVING
from slime.arguments.help_text import HelpFormatter, HelpGrepAction, print_page
from slime.arguments.origins import start_origins
from slime.arguments.surface import PACKAGES, load_surface, taken, warm_surfaces
from slime.arguments.unknown_flags import answer_to, overridden, why_unknown
from slime.arguments.violations import Kind, Refusal, Violation
from slime.observability.run_record import REDACTED, is_secret, redacted
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# Flags of these packages begin with a prefix of their own, so they are recognised where the package is not installed.
_PREFIXES = {"--sglang-": "sglang", "--router-": "router"}
_TRAIN_ONLY = {"--debug-train-only", "--load-debug-rollout-data"}

_FLAG = re.compile(r"--?[A-Za-z][\w.-]*")
# argparse's own pattern lacks the exponent: `--adam-eps -1e-8` would lose its value.
_NEGATIVE_NUMBER = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$|-inf$", re.IGNORECASE)


class StoreAction(argparse._StoreAction):
    """argparse's own action that also tells the parser, so that no value replaces another one silently."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if isinstance(parser, ArgumentParser):
            parser.note_given(self.dest, option_string or "", values)
        super().__call__(parser, namespace, values, option_string)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with errors raised as `UserError`, so that the caller decides how the process ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = _NEGATIVE_NUMBER
        # Messages about values while `parse` runs; outside of it the first one is raised.
        self._problems: list[str] | None = None
        self._without_value: argparse.Action | None = None
        # Attribute -> the spellings and values that the words give it, in their order.
        self._given: dict[str, list[tuple[str, Any]]] = {}
        for name in (None, "store"):
            self.register("action", name, StoreAction)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def print_help(self, file: Any = None) -> None:
        print_page(self.format_help(), file)

    def parse_what_is_known(self, words: Sequence[str]) -> tuple[argparse.Namespace, list[Violation]]:
        """The arguments without unknown and retired flags, and one violation for each of those.

        Raises:
            UserError: wrong values, stray words, missing flags; with the messages about unknown flags.
        """
        known_words, flags = _split(_with_searched_word(words), self._option_string_actions)
        unknown_flags = [self._describe_unknown(flag) for flag in flags]
        self._problems = []
        self._given = {}
        try:
            args, stray = self.parse_known_args(self._without_values_of_switches(known_words))
            if stray:
                self._problems += self._describe_stray(known_words) or [_unexpected(stray[0], "")]
        except UserError as error:
            self._problems.append(str(error))
        problems, self._problems = self._problems, None
        if problems:
            raise UserError("\n".join([*(violation.message for violation in unknown_flags), *problems]))
        return args, unknown_flags

    def note_given(self, dest: str, option: str, value: Any) -> None:
        """Remember that `option` gave the attribute `dest` this value."""
        self._given.setdefault(dest, []).append((option, value))

    def replacements(self) -> list[str]:
        """One line for every flag of the words parsed last whose last value replaced another one."""
        return [
            _replacement(dest, given)
            for dest, given in self._given.items()
            if any(not _same(value, given[-1][1]) for _, value in given[:-1])
        ]

    def _without_values_of_switches(self, words: list[str]) -> list[str]:
        """`words` without those that give a value to a flag that takes none; each of these becomes a problem."""
        kept = []
        for word in words:
            action = self._option_string_actions.get(_name(word))
            if action is None or action.nargs != 0 or word == _name(word):
                kept.append(word)
                if action is not None and action.nargs == 0:
                    two_sided = isinstance(action, argparse.BooleanOptionalAction)
                    self.note_given(action.dest, word, not word.startswith("--no-") if two_sided else action.const)
                continue
            off = f"--no-{word.removeprefix('--').split('=')[0]}"
            other = f"{off} turns it off" if off in self._option_string_actions else "leave it out to keep it off"
            self._problems.append(f"{word}: the flag takes no value; {_name(word)} alone turns it on, {other}")
        return kept

    def _describe_stray(self, words: list[str]) -> list[str]:
        """A message for the first superfluous word behind each flag."""
        stray: dict[int, str] = {}
        flag, place, room = "", -1, 0.0
        for position, word in enumerate(words):
            action = self._option_string_actions.get(_name(word))
            if action is not None:
                flag, place, room = _name(word), position, 0 if "=" in word else _most_values(action)
            elif room > 0:
                room -= 1
            elif (name := overridden(word)) is not None:
                stray[position] = self._describe_override(word, name)
            else:
                stray.setdefault(place, _unexpected(word, flag))
        return list(stray.values())

    def _describe_override(self, word: str, name: str) -> str:
        """The words to type in place of `trainer.nnodes=2`."""
        shown_word = f"{name}={REDACTED}" if is_secret(name) else word
        answer = answer_to(name, self._option_string_actions)
        if answer is not None:
            return answer.at(f"unexpected word {shown_word!r}").message
        last = name.rpartition(".")[2].replace("_", "-")
        hint = f"flags are written `--name value` here; `python {self.prog} --help-grep {last}` looks for one"
        return f"unexpected word {shown_word!r}: {hint}"

    def _describe_unknown(self, flag: str) -> Violation:
        reason = why_unknown(flag.replace("_", "-"))
        if reason is not None:
            return dataclasses.replace(reason, message=f"{flag} {reason.message}")
        answer = answer_to(flag, self._option_string_actions)
        if answer is not None:
            return answer.at(f"unknown flag {flag}")
        # Without the dashes, which all flags have in common: `--foo` is not much like `--fp8`.
        names = {known.removeprefix("--"): known for known in self._option_string_actions if known.startswith("--")}
        near = difflib.get_close_matches(flag.lstrip("-").replace("_", "-"), names, n=3, cutoff=0.6)
        nearest = [names[name] for name in near]
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"see `python {self.prog} --help` for all flags"
        package = next((package for prefix, package in _PREFIXES.items() if flag.startswith(prefix)), None)
        if package is not None and load_surface(package) is None:
            hint = f"it may be a flag of {PACKAGES[package].distribution}, which is not installed"
        return Violation(tuple(nearest), f"unknown flag {flag}: {hint}", Kind.UNKNOWN)

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError as error:
            self._note(action, error)
            self._without_value = action
            return 0

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse leaves out an action whose value is SUPPRESS.
        if self._without_value is action:
            self._without_value = None
            return argparse.SUPPRESS
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            self._note(action, error)
            return argparse.SUPPRESS

    def _note(self, action: argparse.Action, error: argparse.ArgumentError) -> None:
        if self._problems is None:
            raise error
        self._problems.append(f"{'/'.join(action.option_strings)}: {error.message}")


def build_parser(
    add_custom_arguments: Callable[[ArgumentParser], ArgumentParser] | None = None, *, program: str = "train.py"
) -> ArgumentParser:
    """The parser of all flags. `add_custom_arguments` gets the parser, adds flags and returns it.

    `program`: the file that the help names.

    Raises:
        UserError: an installed package cannot tell its flags.
    """
    parser = ArgumentParser(
        prog=program,
        usage=f"python {program} [FLAGS ...]",
        description="Reinforcement-learning post-training of language models.",
        epilog="--help-grep WORD shows only the flags whose name or text has a word that begins so.",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser._optionals.title = "help"
    parser.add_argument(
        "--help-grep",
        action=HelpGrepAction,
        help="show only the flags whose name or text has a word that begins so, or one whole flag (--lr), and exit",
    )
    warm_surfaces()
    for group in OWN_GROUPS:
        group.add_to(parser)
    add_megatron_flags(parser)
    SERVING.add_to(parser)
    add_server_flags(parser)
    # A run's arguments are those of its actor; the critic's are made of them.
    parser.set_defaults(role=ACTOR)
    if add_custom_arguments is None:
        return parser
    known = taken(parser).dests
    try:
        extended = add_custom_arguments(parser)
    except argparse.ArgumentError as error:
        raise UserError(f"add_custom_arguments defines a flag that exists: {error}; give it another name") from None
    if not isinstance(extended, ArgumentParser):
        raise UserError(
            f"add_custom_arguments returned {extended!r}; end it with `return parser`, the parser that it was given"
        )
    if overwritten := sorted((taken(extended).dests - known) & RESERVED):
        raise UserError(
            f"add_custom_arguments defines {', '.join(overwritten)}, which the run itself sets; give another name"
        )
    return extended


def parse_known(
    parser: ArgumentParser, argv: Sequence[str], unknown: list[Violation] | None = None
) -> argparse.Namespace:
    """Parse `argv`; `args.typed_flags` and `args.origins` tell afterwards what was typed.

    Args:
        unknown: gets the unknown flags where nothing else is wrong with the words; without it they are an error.

    Raises:
        UserError: one message with everything that is wrong with the words.
    """
    args, found = parser.parse_what_is_known(_without_ignored(parser, argv))
    if found and unknown is None:
        raise Refusal(found)
    if unknown is not None:
        unknown += found
    for line in parser.replacements():
        logger.info("%s", line)
    actions = parser._option_string_actions
    start_origins(args, {actions[name].dest for name in map(_name, argv) if name in actions})
    return args


def _without_ignored(parser: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """`argv`, for a run that only trains without the flags of packages that are not installed."""
    absent = tuple(prefix for prefix, package in _PREFIXES.items() if load_surface(package) is None)
    if not absent or _TRAIN_ONLY.isdisjoint(_name(word) for word in argv):
        return list(argv)
    return _split(argv, parser._option_string_actions, ignored=absent)[0]


def _split(
    words: Sequence[str], known: dict[str, argparse.Action], ignored: tuple[str, ...] | None = None
) -> tuple[list[str], list[str]]:
    """The words without unknown flags and their values, and the names of those flags.

    With `ignored`, only unknown flags that begin with one of these prefixes are taken out.
    """
    kept: list[str] = []
    unknown: dict[str, None] = {}
    taking_out = False
    for word in words:
        name = _name(word)
        if name in known or (_FLAG.fullmatch(name) is not None and not _NEGATIVE_NUMBER.match(word)):
            taking_out = name not in known and (ignored is None or name.startswith(ignored))
            if taking_out:
                unknown[name] = None
        if not taking_out:
            kept.append(word)
    return kept, list(unknown)


def _name(word: str) -> str:
    return word.split("=", 1)[0]


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same; nan is the same as nan."""
    return one == other or repr(one) == repr(other)


def _replacement(dest: str, given: list[tuple[str, Any]]) -> str:
    """`--lr 2.0 holds, not 1.0, which stands before it`: `given` are spellings and values, the last one counts."""

    def typed(option: str, value: Any) -> str:
        words = "" if isinstance(value, bool) else as_typed(redacted({dest: value})[dest])
        return f"{option} {words}".strip()

    *earlier, (option, last) = given
    others = [(name, value) for name, value in earlier if not _same(value, last)]
    texts = dict.fromkeys(typed(name, value).removeprefix(f"{option} ") for name, value in others)
    stand = "stands" if len(texts) == 1 else "stand"
    switch = isinstance(last, bool)
    names = ": two names of one flag" if not switch and any(name != option for name, _ in others) else ""
    return f"{typed(option, last)} holds, not {' and '.join(texts)}, which {stand} before it{names}"


def _most_values(action: argparse.Action) -> float:
    """The most words that the flag takes."""
    if isinstance(action.nargs, int):
        return action.nargs
    return 1 if action.nargs in (None, argparse.OPTIONAL) else math.inf


def _unexpected(word: str, flag: str) -> str:
    shown_word = REDACTED if is_secret(flag) else repr(word)
    why = f"{flag} takes no such value" if flag else "no flag stands before it"
    return f"unexpected word {shown_word}: {'its dash is no hyphen' if word.startswith(tuple('–—−')) else why}"


def _with_searched_word(words: Sequence[str]) -> list[str]:
    """`words` with `--help-grep` and its word joined, since that word may look like a flag."""
    joined = list(words)
    if "--help-grep" in joined[:-1]:
        at = joined.index("--help-grep")
        joined[at : at + 2] = [f"--help-grep={joined[at + 1]}"]
    return joined
