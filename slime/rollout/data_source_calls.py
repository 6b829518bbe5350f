"""How the framework calls a data source, be it ours or a user's: checked, and with errors that name flag and class.

A source may hand out groups, or prompts of which `n_samples_per_prompt` numbered copies are made here.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from slime.rollout.user_functions import accepted_keywords
from slime.utils.errors import UserError
from slime.utils.types import Sample
from slime.utils.user_code import calling_user_code

FLAG = "--data-source-path"

# Groups made of plain prompts are numbered rollout · this + position, so that numbers of a resumed run are new as well.
_NUMBERS_PER_ROLLOUT = 2**20
_DEFAULT_LOOP = "slime.rollout.sglang_rollout.generate_rollout"


def calling_source(args: Any, source: Any, method: str, subject: str) -> contextlib.AbstractContextManager[None]:
    """`calling_user_code` for a method that a user wrote; nothing for our own, whose errors speak for themselves.

    `source`: the source, or its class or factory for the constructor.
    """
    function = getattr(source if isinstance(source, type) else type(source), method, None)
    if (getattr(function, "__module__", None) or "").startswith("slime."):
        return contextlib.nullcontext()
    return calling_user_code(FLAG, args.data_source_path, f"{method}, {subject}")


def has_method(source: Any, name: str) -> bool:
    """Whether `source` offers the method `name`."""
    return callable(getattr(source, name, None))


def check_methods(args: Any, source: Any) -> None:
    """Raise UserError, naming flag, class and methods, when `source` lacks what this run will call."""
    missing = [] if has_method(source, "get_samples") else ["get_samples(num_samples)"]
    if _groups_come_back(args) and not has_method(source, "add_samples"):
        missing.append("add_samples(groups), which the default rollout function gives unused prompts back by")
    pairs = (("state_dict", "load_state_dict"), ("save", "load"))
    if args.save and not any(all(has_method(source, name) for name in pair) for pair in pairs):
        missing.append("state_dict() and load_state_dict(state), or save(rollout_id) and load(rollout_id), for --save")
    if missing:
        raise UserError(f"{FLAG} {args.data_source_path}: {type(source).__name__} has no {'; no '.join(missing)}")


def prompts_per_epoch(args: Any, source: Any) -> int | None:
    """The length of `source`, or None when it has none and the run does not count in epochs.

    Raises:
        UserError: the run counts in epochs and the source has no length, or its `__len__` raised.
    """
    if not hasattr(source, "__len__"):
        if args.num_rollout is None:
            raise UserError(
                f"{FLAG} {args.data_source_path}: {type(source).__name__} has no __len__; give --num-rollout in place "
                "of --num-epoch"
            )
        return None
    with calling_source(args, source, "__len__", "start of the run"):
        return len(source)


def draw_groups(args: Any, source: Any, num_samples: int, rollout_id: int, drawn: int = 0) -> list[list[Any]]:
    """The next groups of `source`; what it gives as single prompts is copied `n_samples_per_prompt` times.

    `drawn`: how many entries were drawn for this rollout before; numbers the groups that are made here.

    Raises:
        UserError: the source raised, or returned something else than a list of groups or prompts.
    """
    with calling_source(args, source, "get_samples", f"rollout {rollout_id}"):
        keywords = accepted_keywords(source.get_samples, {"rollout_id": rollout_id})
        entries = source.get_samples(num_samples, **keywords)
    if not isinstance(entries, list | tuple):
        raise UserError(
            f"{FLAG} {args.data_source_path}: get_samples returned {type(entries).__name__}; expected a list of groups "
            "of Samples, or of prompts"
        )
    first = rollout_id * _NUMBERS_PER_ROLLOUT + drawn
    return [_as_group(args, entry, first + position) for position, entry in enumerate(entries)]


def give_back(args: Any, source: Any, groups: list[list[Any]], rollout_id: int) -> None:
    """Hand `groups` to the source's `add_samples`.

    Raises:
        UserError: the source raised, or has no such method.
    """
    if not has_method(source, "add_samples"):
        raise UserError(
            f"{FLAG} {args.data_source_path}: {type(source).__name__} has no add_samples(groups), but rollout "
            f"{rollout_id} has {len(groups)} unfinished groups to give back"
        )
    with calling_source(args, source, "add_samples", f"rollout {rollout_id}"):
        source.add_samples(groups)


def _groups_come_back(args: Any) -> bool:
    if args.rollout_function_path != _DEFAULT_LOOP:
        return False
    # What a filter drops is replaced one for one, so only the first draw can bring more than the step needs.
    return args.over_sampling_batch_size > args.rollout_batch_size


def _as_group(args: Any, entry: Any, number: int) -> list[Any]:
    is_chat = isinstance(entry, list) and bool(entry) and all(isinstance(message, dict) for message in entry)
    if isinstance(entry, str) or is_chat:
        entry = Sample(prompt=entry)
    if not isinstance(entry, Sample):
        return entry
    size = args.n_samples_per_prompt
    group = [copy.deepcopy(entry) for _ in range(size)]
    for position, sample in enumerate(group):
        sample.group_index = number
        sample.index = number * size + position
    return group
