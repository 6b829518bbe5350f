#!/usr/bin/env python3
"""tools/convert_torch_dist_to_hf.py, with the numbers of workers that other programs have.

    python tools/convert_torch_dist_to_hf_parallel.py --input-dir RUN/checkpoints --output-dir OUT --origin-hf-dir MODEL

Each process reads, converts and writes, so there are as many as the larger of the two numbers, and no more than processors.
All other options are those of tools/convert_torch_dist_to_hf.py.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

from tools.convert_torch_dist_to_hf import main as convert


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load-max-workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--save-max-workers", type=int, default=16, help="processes (default: %(default)s)")
    args, others = parser.parse_known_args(words)
    workers = min(max(args.load_max_workers, args.save_max_workers), os.cpu_count() or 1)
    convert([*others, "--max-workers", str(workers)])


if __name__ == "__main__":
    main()
