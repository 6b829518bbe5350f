"""What the declarations of flags say of their values: numbers within their bounds, flags that change nothing.

Bounds are asked for before anything is derived: nothing follows from a size of 0. A number out of its bounds is replaced by
a harmless one, so that the other rules can be asked too; what they say about that flag is left out (`without_consequences`).
"""

import argparse
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

from slime.arguments.flag import flag_of
from slime.arguments.groups import BOUNDS, OWN_FLAGS

logger = logging.getLogger(__name__)

# What the number of data-parallel ranks follows from, which messages tell without these flags.
_OF_THE_LAYOUT = {
    "actor_num_nodes", "actor_num_gpus_per_node", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "context_parallel_size",
}  # fmt: skip
# What an unset --global-batch-size follows from.
_OF_THE_BATCH = {"rollout_batch_size", "n_samples_per_prompt", "num_steps_per_rollout"}


def replace_wrong_sizes(args: argparse.Namespace) -> dict[str, str]:
    """A message for every number out of its bounds, by attribute, and for the one size that has no default.

    Afterwards each of these attributes holds a number that nothing fails on.
    """
    wrong = {name: (message, value) for name, message, value in _wrong_sizes(args)}
    for name, (_, value) in wrong.items():
        setattr(args, name, value)
        args.typed_flags.discard(name)
    return {name: message for name, (message, _) in wrong.items()}


def without_consequences(messages: list[str], wrong: dict[str, str]) -> list[str]:
    """`messages` of the rules without those about the attributes in `wrong`: the rules saw another value."""
    silenced = [flag_of(name) for name in wrong]
    if not _OF_THE_LAYOUT.isdisjoint(wrong):
        silenced += ["data-parallel", "training ranks"]
    if not _OF_THE_BATCH.isdisjoint(wrong):
        silenced.append("--global-batch-size")
    return without_mention(messages, silenced)


def without_mention(messages: list[str], words: Iterable[str]) -> list[str]:
    """`messages` without those in which one of `words` stands; a flag does not stand in a longer one."""
    parts = "|".join(re.escape(word) for word in words)
    pattern = re.compile(rf"(?<![\w-])(?:{parts})(?![\w-])") if parts else None
    return [message for message in messages if pattern is None or not pattern.search(message)]


def _wrong_sizes(args: argparse.Namespace) -> Iterator[tuple[str, str, Any]]:
    """(attribute, message, harmless value)."""
    if args.rollout_batch_size is None:
        message = "--rollout-batch-size is needed: the number of prompts per rollout step, for example 32"
        yield "rollout_batch_size", message, 1
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name):
            problem = bounds.problem(number)
            if problem is not None:
                yield name, f"{flag_of(name)} {number}: {problem}", bounds.replacement


def _numbers(args: argparse.Namespace, name: str) -> list[Any]:
    """The numbers that a flag was given: some take several, of which each has the bounds."""
    value = getattr(args, name, None)
    return [number for number in (value if isinstance(value, list) else [value]) if number is not None]


def warn_of_unusual_values(args: argparse.Namespace) -> Iterator[str]:
    """Warns of numbers that can be meant and rarely are; yields nothing."""
    for name, bounds in BOUNDS.items():
        for number in _numbers(args, name) if bounds.unusual is not None and name in args.typed_flags else ():
            most, usual = bounds.unusual
            if number > most:
                logger.warning("%s %s: that is far above what is usual, %s", flag_of(name), number, usual)
    yield from ()


def warn_of_idle_flags(args: argparse.Namespace) -> Iterator[str]:
    """Warns of flags that are accepted and change nothing beside the others, once for each reason; yields nothing."""
    for name, flag in OWN_FLAGS.items():
        value = getattr(args, name, None)
        if name not in args.typed_flags or value is None or value is False:
            continue
        for idle in flag.idle:
            if (value != flag.default or idle.tells_default) and idle.when(args):
                logger.warning("%s: no effect %s", flag_of(name), idle.reason)
    yield from ()
