"""The last lines of a run: what was kept, what was lost since, and the command that goes on."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.arguments.checkpoints import is_megatron_checkpoint, iteration_directory, latest_iteration
from slime.arguments.flag import flag_of
from slime.observability.run_record import REDACTED, mentions_secret, redacted

# They say what this start took from where, and how many values they have; a start that goes on takes all of the newest
# checkpoint: weights, optimizer, generators, place in the data.
OF_THIS_START = {
    "--ckpt-step": 1, "--start-rollout-id": 1, "--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0,
    "--fresh-data-state": 0,
}  # fmt: skip


def closing_lines(args: argparse.Namespace, command: Sequence[str], *, finished: bool) -> list[str]:
    """What a person should know at the end of a run; empty for one that trains nothing.

    Args:
        args: `rollouts_done` is the number of rollouts that are finished, counted from rollout 0; None before the loop.
            `rollout_saved` is the last one of which this start has written a checkpoint, None before the first.
        command: the words that started the run.
        finished: whether the run came to its end by itself.
    """
    if not args.has_trainer or args.num_rollout == 0:
        return []
    done, start = getattr(args, "rollouts_done", None), args.start_rollout_id
    if args.save is None:
        lost = f"; what {_rollouts(start, done - 1)} taught is lost" if done is not None and done > start else ""
        return [f"kept: no checkpoint, since --save was not given{lost}"]
    kept, of_this_start = _kept(args)
    if kept is None:
        again = f"start again: {_shown(command)}"
        return [f"kept: no checkpoint of this run{_why_none(args)}{_lost(start, done)}", again]
    line = f"kept: the checkpoint of rollout {kept} in {iteration_directory(args.save, kept)}"
    # Where this start published nothing, the same words load the same checkpoint in the same way.
    line += _lost(kept + 1, done) if of_this_start else f", where this start began{_lost(start, done)}"
    values = {"--load": args.save} if of_this_start else {}
    if finished:
        values["--num-rollout"] = str(2 * args.num_rollout)
        return [line, f"to train on, raise --num-rollout: {_continuing(command, args, values)}"]
    return [line, f"go on: {_continuing(command, args, values)}"]


def _kept(args: argparse.Namespace) -> tuple[int | None, bool]:
    """The iteration in `--save` that goes on, and whether this start made it; an earlier one counts if it was resumed from."""
    if args.rollout_saved is not None and is_megatron_checkpoint(args.save):
        newest = latest_iteration(args.save)
        if args.start_rollout_id <= newest <= args.rollout_saved:
            return newest, True
    return _resumed_from(args), False


def _resumed_from(args: argparse.Namespace) -> int | None:
    """The iteration in `--save` that this start resumed from; None where it did not."""
    source = getattr(args, "initial_weights", None)
    if source is None or not source.resume or Path(source.path).absolute() != Path(args.save).absolute():
        return None
    return latest_iteration(source.path) if source.step is None else source.step


def _why_none(args: argparse.Namespace) -> str:
    if args.save_interval is None:
        return ", since --save-interval was not given"
    if is_megatron_checkpoint(args.save):
        return f" yet (--save-interval {args.save_interval}); those in --save {args.save} are of an earlier one"
    return f" yet (--save-interval {args.save_interval})"


def _lost(first: int, done: int | None) -> str:
    if done is None or done <= first:
        return ""
    return f"; {_rollouts(first, done - 1)} {'is' if first == done - 1 else 'are'} lost"


def _rollouts(first: int, last: int) -> str:
    return f"rollout {first}" if first == last else f"rollouts {first} to {last}"


def _continuing(command: Sequence[str], args: argparse.Namespace, values: Mapping[str, str]) -> str:
    """The command with `values`, and a word about flags of this start that stand where no command line reaches them."""
    typed = {word.partition("=")[0] for word in command}
    flags = {flag_of(name) for name in getattr(args, "typed_flags", ())} if "--load" in values else set()
    elsewhere = [flag for flag in OF_THIS_START if flag in flags and flag not in typed]
    note = f"    # without {' '.join(elsewhere)}, which the script or its file of flags gives" if elsewhere else ""
    return f"{_shown(_going_on(command, args, values))}{note}"


def _going_on(command: Sequence[str], args: argparse.Namespace, values: Mapping[str, str]) -> list[str]:
    """The words with `values` in the place of what they say, and, to load another checkpoint, without what held for the one
    of this start."""
    changed = {flag: value for flag, value in values.items() if flag != "--load" or args.load != value}
    dropped = {
        **(OF_THIS_START if "--load" in values else {}),
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
