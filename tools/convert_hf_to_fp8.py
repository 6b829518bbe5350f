#!/usr/bin/env python3
"""Make an FP8 checkpoint (e4m3, dynamic activations) of a Hugging Face checkpoint, for engines that serve it.

    python tools/convert_hf_to_fp8.py --model-dir MODEL --save-dir MODEL-FP8
    python tools/convert_hf_to_fp8.py --model-dir MODEL --save-dir MODEL-FP8 --strategy tensor --max-workers 8

Matrices of attention and of dense and expert layers are quantised; norms, embeddings, head and routers are copied. Weight
pushes quantise to the same numbers. An interrupted conversion goes on when the same command runs again.

A checkpoint of --strategy channel is for engines only: a run refuses it as --hf-checkpoint, and fp8_cast_bf16.py cannot read
it.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import require_checkpoint, run_tool
from tools.conversion.hugging_face import add_options, fp8_recipe, quantise_checkpoint
from tools.conversion.units import start_server


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--save-dir", type=Path, required=True, help="where the new one goes")
    parser.add_argument(
        "--strategy", choices=("block", "channel", "tensor"), default="block",
        help="what has a scale of its own: a block, a row (for engines alone), or a whole matrix (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--block-size",
        type=int,
        nargs=2,
        default=(128, 128),
        metavar=("ROWS", "COLUMNS"),
        help="of a block (default: 128 128)",
    )
    parser.add_argument(
        "--scale-fmt", choices=("float", "ue8m0"), default="float",
        help="ue8m0: scales are powers of two, as float32 (default: %(default)s)",
    )  # fmt: skip
    add_options(parser)
    args = parser.parse_args(words)
    if args.scale_fmt == "ue8m0" and args.strategy != "block":
        parser.error("--scale-fmt ue8m0 needs --strategy block")
    if min(args.block_size) < 1:
        parser.error("--block-size takes positive numbers")
    require_checkpoint("--model-dir", args.model_dir)
    start_server(args.max_workers, "tools.conversion.hugging_face")
    recipe = fp8_recipe(args.strategy, args.block_size, args.scale_fmt)
    quantise_checkpoint(args.model_dir, args.save_dir, recipe, (), 1, args)
    if args.strategy == "channel":
        print(f"{args.save_dir} is for engines alone: runs and fp8_cast_bf16.py read --strategy block and tensor")


if __name__ == "__main__":
    run_tool(main)
