"""How a run goes on: what its last lines tell a person, and the words with which `--max-restarts` starts it again.

A run that ended kept its newest checkpoint and lost what was trained since. The command that goes on from there is the command
that started the run, with `--load` set to the directory that was saved into, and without flags that were only about the first
start (`OF_THIS_START`). Flags in a script or a YAML file cannot be changed on the command line, so a note names those.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.arguments.flag import attribute_of, flag_of
from slime.arguments.origins import Origin
from slime.observability.run_record import REDACTED, mentions_secret, redacted
from slime.ray.driver import RunProgress
from slime.utils.checkpoint_directory import is_megatron_checkpoint, iteration_directory, latest_iteration
from slime.utils.errors import UserError

# Flags that say which parts of a checkpoint this start took, and how many values each has. The command that goes on drops them,
# because it takes everything (weights, optimizer, random generators, place in the data) from the newest checkpoint.
OF_THIS_START = {
    "--ckpt-step": 1, "--start-rollout-id": 1, "--finetune": 0, "--no-load-optim": 0, "--no-load-rng": 0,
    "--fresh-data-state": 0,
}  # fmt: skip


def closing_lines(
    args: argparse.Namespace, progress: RunProgress, command: Sequence[str], *, finished: bool
) -> list[str]:
    """What a person should know at the end of a run; empty for one that trains nothing.

    Args:
        progress: how far the loop has come, once it has begun.
        command: the words that started the run.
        finished: whether the run came to its end by itself.
    """
    if not args.has_trainer or progress.num_rollout == 0:
        return []
    done, start = progress.rollouts_done, progress.start_rollout_id
    if args.save is None:
        lost = f"; what {_rollouts(start, done - 1)} taught is lost" if done > start else ""
        return [f"kept: no checkpoint, since --save was not given{lost}"]
    kept, of_this_start = _kept(args, progress)
    if kept is None:
        again = f"start again: {_shown(command)}"
        return [f"kept: no checkpoint of this run{_why_none(args)}{_lost(start, done)}", again]
    line = f"kept: the checkpoint of rollout {kept} in {iteration_directory(args.save, kept)}"
    # If this start published nothing, the same words load the same checkpoint again, and nothing in them changes.
    line += _lost(kept + 1, done) if of_this_start else f", where this start began{_lost(start, done)}"
    values = {"--load": args.save} if of_this_start else {}
    if finished:
        values["--num-rollout"] = str(2 * progress.num_rollout)
        return [line, f"to train on, raise --num-rollout: {_continuing(command, args, values)}"]
    return [line, f"go on: {_continuing(command, args, values)}"]


def _kept(args: argparse.Namespace, progress: RunProgress) -> tuple[int | None, bool]:
    """(The iteration in `--save` to go on from, None if there is none; whether this run wrote it).

    An iteration that an earlier run wrote counts only if this one resumed from it.
    """
    if progress.rollout_saved is not None and is_megatron_checkpoint(args.save):
        newest = latest_iteration(args.save)
        if progress.start_rollout_id <= newest <= progress.rollout_saved:
            return newest, True
    return _resumed_from(args), False


def _resumed_from(args: argparse.Namespace) -> int | None:
    """The iteration in `--save` that this start resumed from; None where it did not."""
    source = args.initial_weights
    if source is None or not source.resume or Path(source.path).absolute() != Path(args.save).absolute():
        return None
    return latest_iteration(source.path) if source.step is None else source.step


def _why_none(args: argparse.Namespace) -> str:
    """Why this run has no checkpoint in `--save`, as the end of a sentence."""
    if args.save_interval is None:
        return ", since --save-interval was not given"
    if is_megatron_checkpoint(args.save):
        return f" yet (--save-interval {args.save_interval}); those in --save {args.save} are of an earlier one"
    return f" yet (--save-interval {args.save_interval})"


def _lost(first: int, done: int) -> str:
    """That the rollouts from `first` to before `done` are lost, as the end of a sentence; empty if there are none."""
    if done <= first:
        return ""
    return f"; {_rollouts(first, done - 1)} {'is' if first == done - 1 else 'are'} lost"


def _rollouts(first: int, last: int) -> str:
    return f"rollout {first}" if first == last else f"rollouts {first} to {last}"


def words_of_restart(args: argparse.Namespace, progress: RunProgress, words: Sequence[str]) -> list[str]:
    """The words that let a run go on from its newest checkpoint; the same words where it has none.

    Args:
        args: what the first start parsed from `words`.

    Raises:
        UserError: flags stand where no command line reaches them, so other words are not enough.
    """
    if not _kept(args, progress)[1]:
        return list(words)
    values = {"--load": args.save}
    if notes := _beside_the_words(words, args, values):
        raise UserError(f"--max-restarts: the run cannot start again by itself, only {' and '.join(notes)}")
    return _going_on(words, values, _changed(args, values))


def _continuing(command: Sequence[str], args: argparse.Namespace, values: Mapping[str, str]) -> str:
    """The command with `values`, followed by a comment on flags of this start that stand where no command line reaches them."""
    words = _going_on(command, values, _changed(args, values))
    return "    # ".join([_shown(words), *_beside_the_words(command, args, values)])


def _changed(args: argparse.Namespace, values: Mapping[str, str]) -> dict[str, str]:
    """Those of `values` that have to be typed: `--load` need not be if it is the same already."""
    return {flag: value for flag, value in values.items() if flag != "--load" or args.load != value}


def _beside_the_words(command: Sequence[str], args: argparse.Namespace, values: Mapping[str, str]) -> list[str]:
    """What a person has to change in files, beside the command, to go on with `values`: one note for flags of a script, one for
    lines of YAML files."""
    typed = {word.partition("=")[0] for word in command}
    flags = {flag_of(name) for name in args.typed_flags} if "--load" in values else set()
    elsewhere = [flag for flag in OF_THIS_START if flag in flags and flag not in typed]
    notes = [f"without {' '.join(elsewhere)}, which the script or its file of flags gives"] if elsewhere else []
    of_role = args.role_overrides.get("actor", {})
    in_yaml = [
        f"`{name}: {value}` in {args.megatron_config_path if name in of_role else args.custom_config_path}"
        for name, value in ((attribute_of(flag), value) for flag, value in _changed(args, values).items())
        if args.origins.get(name) is Origin.YAML
    ]
    if in_yaml:
        notes.append(f"with {' and '.join(in_yaml)}, which goes before the command line")
    return notes


def _going_on(command: Sequence[str], values: Mapping[str, str], changed: Mapping[str, str]) -> list[str]:
    """`command` with the values in `changed` in place of its own.

    If `values` has `--load`, flags that were only about this start (`OF_THIS_START`) are left out.
    """
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
    """The value `word` of the flag with the attribute `name`, redacted where it is a secret, or is JSON with secrets in it."""
    value: Any = word
    if word.lstrip().startswith("{"):
        try:
            value = json.loads(word)
        except ValueError:
            return REDACTED if mentions_secret(word) else word
    value = redacted({name: value})[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
