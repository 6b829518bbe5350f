"""On how many nodes the GPUs of an engine lie, and how many on each."""

import pytest

from slime.scheduling.served_models import node_parts


@pytest.mark.parametrize(
    ("first", "size", "gpus_per_node", "parts"),
    [
        (0, 8, 8, [8]),
        (4, 4, 8, [4]),
        # Behind a trainer of half a node.
        (4, 8, 8, [4, 4]),
        (12, 8, 8, [4, 4]),
        (8, 16, 8, [8, 8]),
        (2, 12, 8, [6, 6]),
        # No server has parts like these.
        (4, 16, 8, [4, 8, 4]),
        (7, 4, 8, [1, 3]),
        (1, 2, 1, [1, 1]),
    ],
)
def test_gpus_are_counted_node_by_node(first, size, gpus_per_node, parts):
    assert node_parts(first, size, gpus_per_node) == parts
