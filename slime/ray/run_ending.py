"""The last lines of a run: what was kept, what was lost since, and the command that goes on."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from slime.arguments.checkpoints import is_megatron_checkpoint, iteration_directory, latest_iteration
from slime.observability.run_record import REDACTED, mentions_secret, redacted

# They say where this start began; a start that goes on begins at the newest checkpoint.
_OF_THIS_START = {"--ckpt-step": 1, "--start-rollout-id": 1, "--finetune": 0}


def closing_lines(args: argparse.Namespace, command: Sequence[str], *, finished: bool) -> list[str]:
    """What a person should know at the end of a run; empty for one that trains nothing.

    Args:
        args: `rollouts_done` is the number of rollouts that are finished, counted from rollout 0; None before the start of
            the first.
        command: the words that started the run.
        finished: whether the run came to its end by itself.
    """
    if not args.has_trainer or args.num_rollout == 0:
        return []
    done = getattr(args, "rollouts_done", None)
    if args.save is None:
        lost = "" if done is None else f"; what rollouts {args.start_rollout_id} to {done - 1} taught is lost"
        return [f"kept: no checkpoint, since --save was not given{lost}"]
    if not is_megatron_checkpoint(args.save):
        lost = "" if done is None else f"; {_rollouts(args.start_rollout_id, done - 1)} lost"
        return [
            f"kept: no checkpoint yet (--save-interval {args.save_interval}){lost}",
            f"start again: {_shown(command)}",
        ]
    kept = latest_iteration(args.save)
    lost = "" if done is None or done - 1 <= kept else f"; {_rollouts(kept + 1, done - 1)} lost"
    line = f"kept: the checkpoint of rollout {kept} in {iteration_directory(args.save, kept)}{lost}"
    if finished:
        more = {"--load": args.save, "--num-rollout": str(2 * args.num_rollout)}
        return [line, f"to train on, raise --num-rollout: {_shown(_going_on(command, args, more))}"]
    return [line, f"go on: {_shown(_going_on(command, args, {'--load': args.save}))}"]


def _rollouts(first: int, last: int) -> str:
    return f"rollout {first} is" if first == last else f"rollouts {first} to {last} are"


def _going_on(command: Sequence[str], args: argparse.Namespace, values: Mapping[str, str]) -> list[str]:
    """The words with `values` in the place of what they say, and without what holds for this start only."""
    changed = {flag: value for flag, value in values.items() if flag != "--load" or args.load != value}
    dropped = {
        **_OF_THIS_START,
        **dict.fromkeys(changed, 1),
        **({"--num-epoch": 1} if "--num-rollout" in changed else {}),
    }
    words: list[str] = []
    position = 0
    while position < len(command):
        flag, joined, _ = command[position].partition("=")
        if flag in dropped:
            position += 1 if joined else 1 + dropped[flag]
            continue
        words.append(command[position])
        position += 1
    return [*words, *(word for pair in changed.items() for word in pair)]


def _shown(command: Sequence[str]) -> str:
    """The words as a shell takes them, without secrets."""
    words: list[str] = []
    name = ""
    for word in command:
        flag, joined, value = word.partition("=")
        if not word.startswith("--"):
            words.append(_without_secrets(name, word))
            continue
        name = flag.lstrip("-").replace("-", "_")
        words.append(f"{flag}={_without_secrets(name, value)}" if joined else word)
    text = shlex.join(words)
    return f"{text}    # with what is redacted put back in" if REDACTED in text else text


def _without_secrets(name: str, word: str) -> str:
    value: Any = word
    if word.lstrip().startswith("{"):
        try:
            value = json.loads(word)
        except ValueError:
            return REDACTED if mentions_secret(word) else word
    value = redacted({name: value})[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
