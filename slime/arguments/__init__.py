"""The command line: flags in groups, values derived from them, and the rules that they must satisfy.

`parse_args` is the whole way: words of the command line → YAML files → other names of one setting → shape from the Hugging
Face config → derived values → rules → initial weights. Words that are no values end it at once, because nothing can be
concluded from them; unknown flags and all other violations are reported in one message. Whatever these steps have to say
beside a refusal, warnings and remarks, is said once, when the flags are accepted.

What the declarations of flags say of values is checked here too: numbers within bounds, flags that lack another or change
nothing. Bounds are checked before anything is derived, because nothing follows from a size of 0. A number out of its bounds is
replaced by a harmless one, so that the other rules can be asked too; their violations about that flag are left out.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime.arguments.config_files.custom_config import apply_custom_config, overruled_values
from slime.arguments.config_files.role_config import apply_role_config, begin_critic, keep_critic, of_critic
from slime.arguments.derivation import derive, derive_critic, resolve_aliases
from slime.arguments.flag import attribute_of, flag_of
from slime.arguments.groups import BOUNDS, OWN_FLAGS
from slime.arguments.hf_config import apply_hf_config, read_hf_config, takes_shape_of_config
from slime.arguments.origins import Origin, recording
from slime.arguments.parser import ArgumentParser, build_parser, parse_known
from slime.arguments.paths import make_paths_absolute
from slime.arguments.rules.algorithm import OBJECTIVE_RULES, ROLLOUT_RULES, TRACKER_RULES, WEIGHT_RULES, routing_replay
from slime.arguments.rules.data import BATCH_RULES, CHECKPOINT_RULES, DATA_RULES, FILE_RULES
from slime.arguments.rules.megatron import EXTENSION_RULES, MEGATRON_RULES
from slime.arguments.rules.not_built import MODEL_NAME_RULES, NOT_BUILT_RULES
from slime.arguments.rules.serving import PLACEMENT_RULES, SERVING_RULES
from slime.arguments.server_flags import keep_names_equal
from slime.arguments.violations import (
    NOTED,
    Kind,
    Refusal,
    Rule,
    Violation,
    about,
    broken,
    of_kind,
    without_consequences,
)
from slime.models.shape_of_flags import padded_vocabulary
from slime.observability.logging_utils import said_when_it_ends
from slime.utils.errors import UserError

__all__ = ["build_parser", "parse_args", "validate_args"]

logger = logging.getLogger(__name__)

_NO_FLAGS = (
    "no flags were given. A run needs at least --hf-checkpoint, --prompt-data, --rollout-batch-size, --num-rollout, "
    "--actor-num-gpus-per-node and --rollout-num-gpus. `python train.py --help` lists all flags, --help-grep WORD those "
    "about a word; scripts/quickstart.sh is a complete example"
)


def parse_args(
    add_custom_arguments: Callable[[ArgumentParser], ArgumentParser] | None = None,
    *,
    argv: list[str] | None = None,
    asynchronous: bool = False,
) -> argparse.Namespace:
    """The checked arguments of a run.

    Args:
        add_custom_arguments: receives the parser, adds own flags, returns it.
        argv: words of the command line; None takes those of the process.
        asynchronous: the loop of `train_async.py` asks.

    Raises:
        UserError: one message with everything that is wrong with the words, or with all broken rules.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words:
        raise UserError(_NO_FLAGS)
    parser = build_parser(add_custom_arguments, program="train_async.py" if asynchronous else "train.py")
    parser.set_defaults(asynchronous=asynchronous)
    unknown: list[Violation] = []
    with said_when_it_ends(__name__):
        args = parse_known(parser, words, unknown)
        with recording(args, Origin.YAML):
            violations = [
                *about(apply_custom_config(args, parser), "--custom-config-path"),
                *about(apply_role_config(args, parser), "--megatron-config-path"),
            ]
        _settle(args, violations, unknown)
    return args


def validate_args(args: argparse.Namespace) -> None:
    """Derive values and check all rules, in place.

    Raises:
        UserError: one message with all broken rules.
    """
    with said_when_it_ends(__name__):
        _settle(args, [], [])


def _settle(args: argparse.Namespace, violations: list[Violation], unknown: list[Violation]) -> None:
    """Derive and check. `unknown`: violations about unknown flags, of which other violations may be the consequence."""
    with recording(args, Origin.DERIVED):
        violations += _derive_and_check(args)
    meant = {flag for violation in unknown for flag in violation.flags} - set(map(flag_of, args.typed_flags))
    violations = [*unknown, *without_consequences(violations, meant)]
    if violations:
        raise Refusal(violations)


def _derive_and_check(args: argparse.Namespace) -> list[Violation]:
    """The violations, after values were derived; if a plan is asked for, those that it only notes go to `args.plan_notes`."""
    violations, critic = _derived_and_asked(args, derive, RULES), begin_critic(args)
    if args.use_critic:
        with recording(critic, Origin.DERIVED):
            found = _derived_and_asked(critic, derive_critic, CRITIC_RULES)
        violations += [*of_critic(args, found, violations)]
    # Several rules may report the same missing file in the same words.
    first: dict[str, Violation] = {}
    for violation in violations:
        first.setdefault(violation.message, violation)
    noted = [message for message, violation in first.items() if args.dry_run and violation.kind in NOTED]
    violations = [violation for message, violation in first.items() if message not in noted]
    args.plan_notes = noted
    if not violations:
        for model in (args, critic):
            if model.vocab_size is not None:
                model.padded_vocab_size = padded_vocabulary(model)
        if args.use_critic:
            keep_critic(args, critic)
        keep_names_equal(args)
        # It is only a shorthand, which nothing may read in place of the flags that it stands for.
        vars(args).pop("offload", None)
        args.origins.pop("offload", None)
    return violations


def _derived_and_asked(
    args: argparse.Namespace, derive: Callable[[argparse.Namespace], list[Violation]], rules: tuple[Rule, ...]
) -> list[Violation]:
    """Derive the values of a model's arguments, in place, and ask the rules about them."""
    wrong = make_paths_absolute(args)
    if args.prompt_data is not None and len(args.prompt_data) == 1:
        args.prompt_data = args.prompt_data[0]
    violations = resolve_aliases(args)
    wrong |= replace_wrong_sizes(args)
    if args.hf_checkpoint is not None:
        violations += _apply_shape(args)
    violations += derive(args)
    violations += [violation for rule in rules for violation in rule(args)]
    return [*wrong.values(), *without_consequences(violations, set(map(flag_of, wrong)))]


def _apply_shape(args: argparse.Namespace) -> list[Violation]:
    if args.dry_run and not takes_shape_of_config(args) and not Path(args.hf_checkpoint).is_dir():
        return []  # the typed flags say all that a plan needs; that the directory is missing is noted
    try:
        config = read_hf_config(args.hf_checkpoint)
        # Without training ranks nothing is built from the shape flags, so nothing is compared.
        with recording(args, Origin.HF_CONFIG):
            return [] if args.debug_rollout_only else apply_hf_config(args, config)
    except UserError as error:
        return [*about([error], "--hf-checkpoint")]


def replace_wrong_sizes(args: argparse.Namespace) -> dict[str, Violation]:
    """A violation for every number out of its bounds, by attribute, and for the one size that has no default.

    Afterwards each of these attributes holds a number that nothing fails on.
    """
    wrong: dict[str, Violation] = {}
    if args.rollout_batch_size is None:
        template = "{--rollout-batch-size} is needed: the number of prompts per rollout step, for example 32"
        wrong["rollout_batch_size"] = broken(args, template, kind=Kind.OUT_OF_BOUNDS)
        args.rollout_batch_size = 1
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name):
            problem = bounds.problem(number)
            if problem is not None:
                wrong[name] = Violation((flag_of(name),), f"{flag_of(name)} {number}: {problem}", Kind.OUT_OF_BOUNDS)
                setattr(args, name, bounds.replacement)
                args.typed_flags.discard(name)
    return wrong


def _numbers(args: argparse.Namespace, name: str) -> list[Any]:
    """The numbers that a flag was given; if it takes several, the bounds hold for each."""
    value = vars(args)[name]
    return [number for number in (value if isinstance(value, list) else [value]) if number is not None]


def warn_of_unusual_values(args: argparse.Namespace) -> Iterator[Violation]:
    """Warn of numbers that are possible but rarely meant; yields nothing."""
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name) if bounds.unusual is not None and name in args.typed_flags else ():
            most, usual = bounds.unusual
            if number > most:
                logger.warning("%s %s: that is far above what is usual, %s", flag_of(name), number, usual)
    yield from ()


def missing_needs(args: argparse.Namespace) -> Iterator[Violation]:
    """A violation for every flag that was typed without the one that it needs.

    What follows from another flag is that flag's affair: `--release-train` needs `--save` by itself.
    """
    for name, flag in OWN_FLAGS.items():
        if flag.needs is None or name not in args.typed_flags or vars(args)[name] is None or vars(args)[name] is False:
            continue
        violation = broken(args, "{0=} needs " + flag.needs, flag_of(name))
        if not vars(args)[attribute_of(violation.flags[1])]:
            yield violation


def warn_of_idle_flags(args: argparse.Namespace) -> Iterator[Violation]:
    """Warn of flags that are accepted but change nothing beside the others, once for each reason; yields nothing."""
    for name, flag in OWN_FLAGS.items():
        for idle in flag.idle if name in args.typed_flags else ():
            value = vars(args)[name]
            if value is None or (value is False and flag.default is not True):
                continue
            if (value != flag.default or idle.tells_default) and idle.when(args):
                logger.warning("%s: no effect %s", flag.names[0], idle.reason)
    yield from ()


# Our own rules, then those of Megatron, then those of the engines.
RULES: tuple[Rule, ...] = (
    *PLACEMENT_RULES, *BATCH_RULES, *ROLLOUT_RULES, *OBJECTIVE_RULES, routing_replay, *DATA_RULES, missing_needs,
    *CHECKPOINT_RULES, *WEIGHT_RULES, *MODEL_NAME_RULES, warn_of_idle_flags, warn_of_unusual_values, overruled_values,
    *TRACKER_RULES, *MEGATRON_RULES, *SERVING_RULES,
    *of_kind(Kind.MISSING, *FILE_RULES, *EXTENSION_RULES), *of_kind(Kind.NOT_BUILT, *NOT_BUILT_RULES),
)  # fmt: skip
# The rules about flags that a critic may have for itself.
CRITIC_RULES: tuple[Rule, ...] = (
    *BATCH_RULES, missing_needs, *WEIGHT_RULES, *MODEL_NAME_RULES, *MEGATRON_RULES,
    *of_kind(Kind.MISSING, *FILE_RULES, *EXTENSION_RULES), *of_kind(Kind.NOT_BUILT, *NOT_BUILT_RULES),
)  # fmt: skip
