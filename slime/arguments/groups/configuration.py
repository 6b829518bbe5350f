"""Flags about the flags."""

import argparse

TITLE = "configuration"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--custom-config-path",
        default=None,
        help="YAML file whose keys are merged into the arguments before anything is derived; it wins over the command line",
    )
