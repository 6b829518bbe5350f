"""What is noted of the arguments of a user's function."""

import argparse

from slime.plugins.recorder import _shared_state


class SetsAnother:
    """As a call in another thread does at that moment."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __repr__(self) -> str:
        self.args.judge = "one for all"
        return "a judge"


def test_args_that_get_an_attribute_while_they_are_noted():
    args = argparse.Namespace(lr=1.0)
    args.loads, args.last = SetsAnother(args), 2
    assert _shared_state([args, "a sample"]) == {"lr": "1.0", "loads": "a judge", "last": "2"}
