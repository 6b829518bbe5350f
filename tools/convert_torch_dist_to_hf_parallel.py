#!/usr/bin/env python3
"""tools/convert_torch_dist_to_hf.py, with the worker options of other programs.

    python tools/convert_torch_dist_to_hf_parallel.py --input-dir RUN/checkpoints --output-dir OUT --origin-hf-dir MODEL

Each process reads, converts and writes. So the tool starts as many as the larger of the two numbers, but no more than there are
processors. All other options are those of tools/convert_torch_dist_to_hf.py.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import run_tool
from tools.convert_torch_dist_to_hf import convert, parser_without_workers


def main(words: list[str] | None = None) -> None:
    parser = parser_without_workers(__doc__)
    parser.add_argument("--load-max-workers", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--save-max-workers", type=int, default=16, help="processes (default: %(default)s)")
    args = parser.parse_args(words)
    convert(args, min(max(args.load_max_workers, args.save_max_workers), os.cpu_count() or 1))


if __name__ == "__main__":
    run_tool(main)
