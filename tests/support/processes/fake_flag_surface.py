"""A fake describer of a package's flags: a child process of a test that prints two flags, or fails on request.

`FAKE_FLAG_SURFACE_CALLS` names a file that gets a line for every run, `FAKE_FLAG_SURFACE_FAILS` makes it fail, and
`FAKE_FLAG_SURFACE_MEETS` names a directory in which it waits for another run.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from slime.arguments.surface import FlagSpec

SPECS = (
    FlagSpec(("--fake-size", "--fs"), "fake_size", type="int", default=3, help="in GiB, 100 % of it"),
    FlagSpec(("--fake-mode",), "fake_mode", choices=("fast", "slow"), metadata={"field": "mode"}),
)


def _wait_for_another(directory: Path) -> None:
    (directory / str(os.getpid())).touch()
    deadline = time.monotonic() + 120
    while len(list(directory.iterdir())) < 2:
        if time.monotonic() > deadline:
            sys.exit("nobody came")
        time.sleep(0.01)


def main() -> None:
    calls = os.environ.get("FAKE_FLAG_SURFACE_CALLS")
    if calls:
        with open(calls, "a") as file:
            file.write("run\n")
    if "FAKE_FLAG_SURFACE_MEETS" in os.environ:
        _wait_for_another(Path(os.environ["FAKE_FLAG_SURFACE_MEETS"]))
    if "FAKE_FLAG_SURFACE_FAILS" in os.environ:
        raise RuntimeError("the fake package does not import")
    print("a library greets")
    print(json.dumps([dataclasses.asdict(spec) for spec in SPECS]))


if __name__ == "__main__":
    main()
