"""The order in which trainer and engines give devices to each other: every turn from every state."""

import itertools

import pytest

from slime.scheduling.device_turns import ENGINES, TRAINER, Holds, IllegalTurn, Sides, Turn, steps_to

NOTHING, WEIGHTS, ALL = Holds
BOTH = Sides(True, True)


def after(holds: Sides, steps) -> Sides:
    found = {TRAINER: holds.trainer, ENGINES: holds.engines, **dict(steps)}
    return Sides(found[TRAINER], found[ENGINES])


def test_a_step_of_learning():
    """From the start of a run: the ranks hold all, engines sleep."""
    holds, told = Sides(ALL, NOTHING), []
    for turn in (Turn.PUSH, Turn.GENERATION, Turn.TRAINING, Turn.PUSH, Turn.GENERATION):
        steps = steps_to(turn, holds, BOTH)
        told.append(steps)
        holds = after(holds, steps)
    assert told == [
        [(TRAINER, WEIGHTS), (ENGINES, WEIGHTS)],
        [(TRAINER, NOTHING), (ENGINES, ALL)],
        [(ENGINES, NOTHING), (TRAINER, ALL)],
        [(TRAINER, WEIGHTS), (ENGINES, WEIGHTS)],
        [(TRAINER, NOTHING), (ENGINES, ALL)],
    ]


@pytest.mark.parametrize(("trainer", "engines"), [(True, False), (False, True), (False, False)])
def test_a_side_that_does_not_sleep_is_left_alone(trainer, engines):
    holds = Sides(ALL, NOTHING if engines else ALL)
    for turn in (Turn.PUSH, Turn.GENERATION, Turn.TRAINING, Turn.PUSH, Turn.GENERATION, Turn.PUSH, Turn.TRAINING):
        steps = steps_to(turn, holds, Sides(trainer, engines))
        assert {side for side, _ in steps} <= {
            side for side, sleeps in ((TRAINER, trainer), (ENGINES, engines)) if sleeps
        }
        holds = after(holds, steps)
        assert (trainer or holds.trainer is ALL) and (engines or holds.engines is ALL)


# What each turn needs at least of (trainer, engines).
NEEDS = {Turn.TRAINING: (ALL, NOTHING), Turn.PUSH: (WEIGHTS, WEIGHTS), Turn.GENERATION: (NOTHING, ALL)}


@pytest.mark.parametrize("turn", Turn)
@pytest.mark.parametrize(("trainer", "engines"), list(itertools.product(Holds, Holds)))
def test_every_turn_from_every_state(turn, trainer, engines):
    """Also from what an error in the middle of another turn left."""
    holds = Sides(trainer, engines)
    if turn is Turn.GENERATION and engines is NOTHING:
        with pytest.raises(IllegalTurn, match="push them first"):
            steps_to(turn, holds, BOTH)
        return
    steps = steps_to(turn, holds, BOTH)
    reached = after(holds, steps)
    needs_trainer, needs_engines = NEEDS[turn]
    assert reached.trainer >= needs_trainer and reached.engines >= needs_engines
    # Whoever works has the rest of the device: nobody else holds more than the turn needs.
    assert reached.trainer == needs_trainer
    assert reached.engines == max(needs_engines, engines if turn is Turn.PUSH else NOTHING)
    # Asked again, nothing happens.
    assert steps_to(turn, reached, BOTH) == []
    # Room is made before it is taken.
    before = {TRAINER: trainer, ENGINES: engines}
    assert [then > before[side] for side, then in steps] == sorted(then > before[side] for side, then in steps)


def test_a_push_beside_generation_leaves_the_engines_that_serve_alone():
    """An engine that took another's place gets the last weights while the others generate."""
    generating = Sides(NOTHING, ALL)
    steps = steps_to(Turn.PUSH, generating, BOTH)
    assert steps == [(TRAINER, WEIGHTS)]
    assert steps_to(Turn.GENERATION, after(generating, steps), BOTH) == [(TRAINER, NOTHING)]
