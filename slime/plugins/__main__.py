"""`python -m slime.plugins check FLAG PATH …`: call users' functions once and report the results."""

import argparse
import os
import sys

from slime.plugins import POINTS, check
from slime.utils.errors import UserError

_DESCRIPTION = """Call plug-ins with a realistic sample: say what they were given, what they returned, what it cost, and what
a run would object to. Every flag of a run may stand on the line; at least one of them names a function:
"""


def main() -> int:
    """The exit status: 0 when nothing was found, 1 when something was, 2 for a command that cannot be read."""
    listed = "\n".join(f"  {flag}\n      {point.call}" for flag, point in POINTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m slime.plugins",
        description=f"{_DESCRIPTION}\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["check"])
    parser.add_argument("--answer", action="append", help="what the engine answers; several: turn by turn")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds after which a call counts as hanging")
    given, words = parser.parse_known_args()
    try:
        findings = check(words, answers=given.answer, time_limit=given.time_limit)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n\n".join(finding.text() for finding in findings))
    return int(any(finding.problems for finding in findings))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # A function that hangs in a thread must not keep the command from ending.
    os._exit(status)
