"""Which side has the devices: training ranks and engines that share them take turns. Here the order of that is data.

    GENERATION ──► TRAINING ──► PUSH ──► GENERATION
    engines: all        none        weights     all
    trainer: none       all         weights     none

Each arrow first takes memory from one side, then gives it to the other: what both need is never on a device at once. A step is

    generate → drain → engines sleep → trainer wakes → train (→ save) → trainer keeps its weights only → engines take room for
    weights → push → trainer sleeps → engines take room for caches → continue

With `--release-train` a trainer ends where it would sleep: it then holds nothing, and is started again when it shall hold
something. A side that never sleeps holds everything at all times. Asking for the present turn again is allowed and does
nothing. Engines lose their weights when they sleep, so only a push leads from TRAINING to GENERATION.
"""

from __future__ import annotations

import dataclasses
import enum


class Holds(enum.IntEnum):
    """How much of its memory a side has on the devices."""

    NOTHING = 0
    # A trainer then has neither optimizer nor gradients. Engines have room for weights, but no caches.
    WEIGHTS = 1
    ALL = 2


class Turn(enum.Enum):
    """What the devices are used for."""

    GENERATION = "generation"
    TRAINING = "training"
    PUSH = "a weight push"


TRAINER, ENGINES = "trainer", "engines"


class IllegalTurn(Exception):
    """A turn that cannot follow: the engines would generate without having weights."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """One value for each side: what it holds, or whether it is one that sleeps."""

    trainer: Holds | bool
    engines: Holds | bool


def steps_to(turn: Turn, holds: Sides, sleeps: Sides) -> list[tuple[str, Holds]]:
    """The changes, in order, that make the devices free for `turn`: (side, what it then holds).

    `holds`: what each side holds now. `sleeps`: whether each side gives its memory away between its turns.

    Raises:
        IllegalTurn: engines that have slept would generate without a push.
    """
    wanted = {
        # Engines that have their caches keep them: they may generate while another engine, which joins, gets its weights.
        Turn.PUSH: Sides(Holds.WEIGHTS, max(Holds.WEIGHTS, holds.engines)),
        Turn.TRAINING: Sides(Holds.ALL, Holds.NOTHING),
        Turn.GENERATION: Sides(Holds.NOTHING, Holds.ALL),
    }[turn]
    pairs = [(TRAINER, holds.trainer, wanted.trainer), (ENGINES, holds.engines, wanted.engines)]
    sleeping = {TRAINER: sleeps.trainer, ENGINES: sleeps.engines}
    changes = [(side, now, then) for side, now, then in pairs if sleeping[side] and now is not then]
    if turn is Turn.GENERATION and any(side == ENGINES and now is Holds.NOTHING for side, now, _ in changes):
        raise IllegalTurn("the engines have slept and have no weights: push them first")
    shrinking_first = sorted(changes, key=lambda change: change[2] > change[1])
    return [(side, then) for side, _, then in shrinking_first]
