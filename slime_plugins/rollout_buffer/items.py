"""Items: the trajectories that generators send, and that the service hands on in groups."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

# `{uid, instance_id, messages, reward, extra_info}` in plain JSON values; further keys stay as they are.
Item: TypeAlias = dict[str, Any]

_FIELDS = "uid, instance_id, messages, reward, extra_info"


class ItemError(ValueError):
    """An item, or a group of items, is wrong; the message says what is expected."""


def checked_item(value: Any) -> Item:
    """`value` as an item, with ids as text and at least an empty object as `extra_info`.

    Args:
        value: `uid` names the trajectory and is never used again, so that an item that is sent twice is kept once;
            `instance_id` is that of its prompt; `messages` is the chat; `reward` is a finite number, an object with finite
            numbers, or null for a trajectory that failed.

    Raises:
        ItemError: a field is missing or of another kind.
    """
    if not isinstance(value, dict):
        raise ItemError(f"an item is an object with {_FIELDS}, not {type(value).__name__}")
    item = {**value, "extra_info": value.get("extra_info") or {}}
    for name in ("uid", "instance_id"):
        found = value.get(name)
        if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
            raise ItemError(f"`{name}` of an item is {found!r}; expected a text or an integer")
        item[name] = str(found)
    where = f"item {item['uid']} of instance {item['instance_id']}"
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ItemError(f"{where}: `messages` is {_short(messages)}; expected a list of chat messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ItemError(f"{where}: message {number} is {_short(message)}; expected an object with a `role`")
    if "reward" not in value:
        raise ItemError(f"{where}: `reward` is missing; send null for a trajectory that came to nothing")
    if not _is_reward(value["reward"]):
        raise ItemError(
            f"{where}: `reward` is {_short(value['reward'])}; expected a finite number, an object with such numbers, or null"
        )
    if not isinstance(item["extra_info"], dict):
        raise ItemError(f"{where}: `extra_info` is {_short(item['extra_info'])}; expected an object")
    return item


def has_answer(item: Item) -> bool:
    """Whether the item can be trained on: it has a reward, and the assistant has said something."""
    return item["reward"] is not None and any(message["role"] == "assistant" for message in item["messages"])


def _is_reward(value: Any) -> bool:
    if isinstance(value, dict):
        # Numbers may stand beside texts that explain them.
        numbers = [entry for entry in value.values() if isinstance(entry, int | float)]
        return bool(numbers) and all(map(math.isfinite, numbers))
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
