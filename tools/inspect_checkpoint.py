#!/usr/bin/env python3
"""Describe a checkpoint: one of a run (the directory, or one of its iterations) or a Hugging Face directory.

    python tools/inspect_checkpoint.py RUN/checkpoints
    python tools/inspect_checkpoint.py RUN/checkpoints --hf-checkpoint MODEL ${MODEL_ARGS[@]}
    python tools/inspect_checkpoint.py RUN/checkpoints --write-checksums
    python tools/inspect_checkpoint.py RUN/checkpoints --check-checksums

With --hf-checkpoint, the tool also says whether the checkpoint fits that model; give model flags if config.json does not
describe it completely. Missing or truncated files are always found. --write-checksums writes checksums of all files to
checksums.json, and --check-checksums compares with them. The exit status is 1 if something does not fit, and 2 if the
checkpoint is incomplete or has no checksums.json to compare with.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import require_checkpoint, require_directory, run_tool


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, help="the checkpoint")
    parser.add_argument("--hf-checkpoint", type=Path, help="the model that it is to fit")
    sums = parser.add_mutually_exclusive_group()
    sums.add_argument("--write-checksums", action="store_true", help="note the content of all files")
    sums.add_argument("--check-checksums", action="store_true", help="compare it with the note")
    args, flags = parser.parse_known_args(words)
    if flags and args.hf_checkpoint is None:
        parser.error(f"{flags[0]}: model flags need --hf-checkpoint")
    from tools.conversion import inspection

    wrong: list[str] = []
    require_directory("DIRECTORY", args.directory)
    if args.hf_checkpoint is not None:
        require_checkpoint("--hf-checkpoint", args.hf_checkpoint)
    for line in inspection.describe(args.directory):
        print(line)
    if args.hf_checkpoint is not None:
        wrong += inspection.misfits(args.directory, args.hf_checkpoint, flags)
        if not wrong:
            print(f"it fits the model of {args.hf_checkpoint}")
    if args.write_checksums:
        print(f"{inspection.write_checksums(args.directory)} files noted in {args.directory / inspection.CHECKSUMS}")
    if args.check_checksums:
        wrong += inspection.check_checksums(args.directory)
        print("the files are those that were noted" if not wrong else f"{len(wrong)} differences")
    for line in wrong:
        print(line)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    run_tool(main)
