#!/usr/bin/env python3
"""Write the command line of Megatron-LM into a file, with which the tests compare our Megatron flags.

    pip download --no-deps --only-binary :all: --python-version 3.12 megatron-core==0.17.1 && unzip -d unpacked *.whl
    python tools/make_megatron_flags_fixture.py unpacked

megatron-core contains that parser (`megatron.training`) since 0.17.1. Its wheels require a newer Python than this project does,
but an unpacked wheel works with ours, because the tool only builds the parser. The file has spellings, attributes, types and
defaults, but no help texts. Equal input gives equal bytes.
"""

import argparse
import enum
import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "tests" / "arguments" / "data" / "megatron_lm_flags.json"
PARSER = Path("megatron") / "training" / "arguments.py"

# Names of argparse's action classes.
ACTIONS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "BooleanOptionalAction": "bool",
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="an unpacked megatron-core wheel, or a site-packages directory")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the file to write (default: that of the tests)")
    args = parser.parse_args(argv)
    if not (args.directory / PARSER).is_file():
        print(
            f"{args.directory} holds no {PARSER}: megatron-core brings it from 0.17.1 on; give the directory of such an "
            "unpacked wheel",
            file=sys.stderr,
        )
        return 2
    version, flags = describe(args.directory)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(flag, sort_keys=True) for flag in flags)
    args.output.write_text(f'{{"version": {json.dumps(version)}, "flags": [\n{rows}\n]}}\n')
    print(f"{len(flags)} flags of megatron-core {version} -> {args.output}")
    return 0


def describe(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns (version of the megatron-core in `directory`, its flags sorted by spelling)."""
    sys.path[:0] = [str(directory.resolve()), str(ROOT)]
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.package_info import __version__
        from megatron.training.arguments import add_megatron_arguments

        actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
    return __version__, sorted(
        (_row(action) for action in actions if action.dest != "help"), key=lambda row: row["flags"]
    )


def _row(action: argparse.Action) -> dict[str, Any]:
    return {
        "flags": action.option_strings,
        "dest": action.dest,
        "action": ACTIONS.get(type(action).__name__, type(action).__name__),
        "type": None if action.type is None else getattr(action.type, "__name__", str(action.type)),
        "nargs": None if action.nargs == 0 else action.nargs,
        "choices": None if action.choices is None else [_plain(choice) for choice in action.choices],
        "default": _plain(action.default),
    }


def _plain(value: Any) -> Any:
    """A default or choice as JSON: enum members by name, values that JSON lacks as text."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else str(value)


if __name__ == "__main__":
    sys.exit(main())
