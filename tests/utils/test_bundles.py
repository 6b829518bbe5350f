"""Where Ray has put a bundle, and where when its node was lost."""

import pytest

from slime.utils.bundles import are_consecutive


@pytest.mark.parametrize(
    ("devices", "holds"),
    [
        ([("a", 3)], True), ([("a", 3), ("a", 4), ("a", 5)], True), ([("a", 3), ("a", 5)], False),
        ([("a", 4), ("a", 3)], False), ([("a", 3), ("b", 4)], False),
    ],
)  # fmt: skip
def test_devices_of_one_server_follow_each_other_on_one_node(devices, holds):
    assert are_consecutive(devices) is holds
