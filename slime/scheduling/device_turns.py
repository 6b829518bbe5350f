"""Who has the devices: training ranks and engines that share them take turns. The order of it, pure.

    GENERATION ──► TRAINING ──► PUSH ──► GENERATION
    engines: all        none        weights     all
    trainer: none       all         weights     none

Each arrow first takes from one side, then gives to the other: what both need never lies on a device at once. A step is

    generate → drain → engines sleep → trainer wakes → train (→ save) → trainer keeps its weights only → engines take room for
    weights → push → trainer sleeps → engines take room for caches → continue

A trainer that sleeps may also end (`--release-train`): then it holds nothing, and is there again when it holds something.
A side that does not sleep holds everything at all times. To ask for the turn that it is already is fine and does nothing.
Engines lose their weights when they sleep, so nothing leads from TRAINING to GENERATION but a push.
"""

from __future__ import annotations

import dataclasses
import enum


class Holds(enum.IntEnum):
    """What a side has of its memory on the devices."""

    NOTHING = 0
    # The trainer's: without optimizer and gradients. The engines': room for weights, without caches.
    WEIGHTS = 1
    ALL = 2


class Turn(enum.Enum):
    """What the devices are used for."""

    GENERATION = "generation"
    TRAINING = "training"
    PUSH = "a weight push"


TRAINER, ENGINES = "trainer", "engines"


class IllegalTurn(Exception):
    """A turn that cannot follow: the engines would generate with weights that they have not."""


@dataclasses.dataclass(frozen=True)
class Sides:
    """Something of both sides: what they hold, or whether they sleep."""

    trainer: Holds | bool
    engines: Holds | bool


def steps_to(turn: Turn, holds: Sides, sleeps: Sides) -> list[tuple[str, Holds]]:
    """What has to happen, in this order, so that the devices are there for `turn`: (side, what it then holds).

    Raises:
        IllegalTurn: engines that have slept would generate without a push.
    """
    wanted = {
        # An engine that has its caches keeps them: it may generate for others while one more gets weights.
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
