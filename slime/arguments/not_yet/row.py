"""One row of the tables of what is not built yet."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NotYet:
    """`args.{name}` has no effect yet; `name` may be a pattern such as `sglang_lora_*`.

    `works`: values that are fine (None and False always are).
    """

    name: str
    feature: str
    works: tuple[Any, ...] = ()
