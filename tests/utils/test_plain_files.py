"""Values that JSON does not have come back as they were, and what is not plain goes where its encoder says."""

import json

import numpy as np
import pytest

from slime.utils.plain_files import decode_plain, encode_plain

VALUES = {
    "a tuple": (1, ("x", [2.5, None])),
    "a tuple in a list": [(1,), True],
    "keys that are no strings": {1: "a", (2, 3): {None: False}},
    "keys like ours": {"__tuple__": [1], "plain": {"__items__": 0}},
    "long lists": [list(range(1000)), ["é"] * 3],
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back_with_their_types(name):
    text = json.dumps(encode_plain(VALUES[name], "state", None))
    assert repr(decode_plain(json.loads(text), None)) == repr(VALUES[name])


def test_what_is_not_plain_is_named_by_its_place():
    met = []

    def other(value, where):
        met.append(where)
        return {"__set__": sorted(value)}

    value = {"a": [1, (2, {3})], 4: {"b": {5}}, "c": np.float64(0.5)}
    text = json.dumps(encode_plain(value, "state", other))
    assert met == ["state[0][1][1][1]", "state[1][1]['b']"]
    decoded = decode_plain(json.loads(text), lambda entry: set(entry["__set__"]))
    assert decoded == value and type(decoded["c"]) is float
