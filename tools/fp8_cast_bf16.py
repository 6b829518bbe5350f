#!/usr/bin/env python3
"""Make a plain checkpoint, in the 16-bit dtype of its config, of an FP8 checkpoint, or of one packed to INT4 by
compressed-tensors.

    python tools/fp8_cast_bf16.py --input-fp8-hf-path MODEL-FP8 --output-bf16-hf-path MODEL

The weights have the values with which engines compute. A run does not need this tool: it can start from quantised checkpoints.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import require_checkpoint, run_tool
from tools.conversion.hugging_face import add_options, dequantise_checkpoint
from tools.conversion.units import start_server


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="where the new one goes")
    add_options(parser)
    args = parser.parse_args(words)
    require_checkpoint("--input-fp8-hf-path", args.input_fp8_hf_path)
    start_server(args.max_workers, "tools.conversion.hugging_face")
    dequantise_checkpoint(args.input_fp8_hf_path, args.output_bf16_hf_path, args)


if __name__ == "__main__":
    run_tool(main)
