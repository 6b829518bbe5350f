"""Gradients of plain float64 functions, to compare autograd with."""

import math
from collections.abc import Callable, Sequence

# The step of central differences, whose error is about step² plus 1e-16/step.
STEP = 1e-5


def numeric_gradient(function: Callable[[list[float]], float], point: Sequence[float]) -> list[float]:
    """Central differences of `function` at `point`, one number per coordinate."""
    gradient = []
    for coordinate in range(len(point)):
        sides = []
        for step in (STEP, -STEP):
            moved = [float(value) for value in point]
            moved[coordinate] += step
            sides.append(function(moved))
        gradient.append((sides[0] - sides[1]) / (2 * STEP))
    return gradient


def finite(values: Sequence[float]) -> bool:
    """Whether none of `values` is NaN or infinite."""
    return all(math.isfinite(value) for value in values)
