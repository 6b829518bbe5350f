#!/usr/bin/env python3
"""Make a 16-bit checkpoint of one whose weights are packed to INT4, such as Kimi K2 Thinking.

    python tools/convert_k2_thinking_int4_to_bf16.py --model-dir MODEL --output-dir MODEL-bf16

The weights have the values with which engines compute. tools/fp8_cast_bf16.py does the same, also for FP8.
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
    parser.add_argument("--model-dir", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--output-dir", type=Path, help="where the new one goes (default: MODEL_DIR-bf16)")
    parser.add_argument(
        "--files", nargs="+", default=(), metavar="NAME",
        help="weight files of --model-dir, whose weights alone are converted (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--config-path", type=Path,
        help="config.json of the new checkpoint, less its quantization_config (default: that of --model-dir)",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="the same as --force")
    add_options(parser)
    args = parser.parse_args(words)
    args.force = args.force or args.overwrite
    source = args.model_dir
    target = args.output_dir or source.resolve().with_name(f"{source.resolve().name}-bf16")
    require_checkpoint("--model-dir", args.model_dir)
    start_server(args.max_workers, "tools.conversion.hugging_face")
    dequantise_checkpoint(source, target, args, args.files, args.config_path)


if __name__ == "__main__":
    run_tool(main)
