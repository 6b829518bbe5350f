#!/usr/bin/env python3
"""Make an INT4 checkpoint (compressed-tensors, pack-quantized) of a Hugging Face checkpoint by rounding to nearest.

    python tools/convert_hf_to_int4_direct.py --model-dir MODEL --save-dir MODEL-INT4 --group-size 32

Matrices of attention and of dense and expert layers are quantised, except those that --ignore-rules names and those of latent
attention that engines take apart or join with others; norms, embeddings, head and routers are copied. An interrupted conversion
goes on when the same command runs again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.weights.quantisers import NEVER_PACKED
from tools.command_line import require_checkpoint, run_tool
from tools.conversion.hugging_face import add_options, integer_recipe, quantise_checkpoint
from tools.conversion.units import start_server


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--save-dir", type=Path, required=True, help="where the new one goes")
    parser.add_argument(
        "--group-size",
        type=int,
        default=32,
        help="columns that share a scale; a matrix of other columns is copied (default: 32)",
    )
    parser.add_argument(
        "--is-symmetric", action=argparse.BooleanOptionalAction, default=True,
        help="no zero point (default); --no-is-symmetric: with one",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-rules", nargs="*", default=(), metavar="RULE",
        help="modules to leave alone: a name, its end after a dot, or a pattern after re:, such as re:.*self_attn",
    )  # fmt: skip
    add_options(parser)
    args = parser.parse_args(words)
    if args.group_size < 1:
        parser.error("--group-size takes a positive number")
    require_checkpoint("--model-dir", args.model_dir)
    start_server(args.max_workers, "tools.conversion.hugging_face")
    recipe = integer_recipe(4, args.group_size, args.is_symmetric)
    quantise_checkpoint(
        args.model_dir, args.save_dir, recipe, (*NEVER_PACKED, *args.ignore_rules), args.group_size, args
    )


if __name__ == "__main__":
    run_tool(main)
