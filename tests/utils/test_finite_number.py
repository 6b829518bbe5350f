from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from slime.utils.finite_number import finite_number


@pytest.mark.parametrize(
    "value",
    [2, 2.0, Fraction(2), np.float16(2), np.int8(2), np.array(2), torch.tensor(2), torch.tensor(2.0).bfloat16()],
)
def test_numbers(value):
    result = finite_number(value)
    assert result == 2.0 and type(result) is float


def test_booleans_are_zero_and_one():
    assert [finite_number(value) for value in (True, np.bool_(False))] == [1.0, 0.0]


@pytest.mark.parametrize(
    "value",
    [
        None,
        "2",
        b"2",
        [2],
        {},
        2j,
        Decimal(2),
        float("nan"),
        float("-inf"),
        10**400,
        np.ones(1),
        torch.ones(1),
        object(),
    ],
)
def test_everything_else_is_none(value):
    assert finite_number(value) is None
