#!/usr/bin/env python3
"""Make an INT4 or INT8 checkpoint (compressed-tensors, pack-quantized) of a Hugging Face checkpoint by GPTQ.

    python tools/convert_hf_to_int4.py --input-dir MODEL --output-dir MODEL-INT4 --data-dir SAMPLES

--data-dir has .jsonl or .parquet files. Their first rows, in the order of file names, are the samples: a row has `text`, or
`messages` for the chat template. Matrices of attention and of dense and expert layers are quantised, except those that
--ignore-rules names and those of latent attention that engines take apart or join with others; norms, embeddings, head and
routers are copied. An expert that very few tokens reach is rounded to nearest.

The tool needs memory for one decoder layer, the hidden states of all samples, and up to 4 GiB more. An interrupted conversion
goes on with the layer at which it stopped when the same command runs again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.command_line import require_checkpoint, run_tool

BITS = {"W4A16": 4, "W8A16": 8}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="the checkpoint to convert")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the new one goes")
    parser.add_argument("--data-dir", type=Path, required=True, help="samples of what the model will see")
    parser.add_argument("--quant-type", choices=BITS, default="W4A16", help="bits of a weight (default: %(default)s)")
    parser.add_argument("--num-calibration-samples", type=int, default=256, help="at most (default: %(default)s)")
    parser.add_argument("--max-sequence-length", type=int, default=2048, help="of a sample (default: %(default)s)")
    parser.add_argument(
        "--dampening-frac", type=float, default=0.01,
        help="what the mean of a diagonal, times this, adds to it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--quant-group-size", type=int, default=32,
        help="columns that share a scale; a matrix of other columns is copied (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-rules", nargs="*", default=(), metavar="RULE",
        help="modules to leave alone: a name, its end after a dot, or a pattern after re:, such as re:.*self_attn",
    )  # fmt: skip
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that lies in --input-dir")
    parser.add_argument("-f", "--force", action="store_true", help="replace the target if it exists")
    args = parser.parse_args(words)
    for flag in ("num_calibration_samples", "max_sequence_length", "dampening_frac", "quant_group_size"):
        if vars(args)[flag] <= 0:
            parser.error(f"--{flag.replace('_', '-')} takes a positive number")
    args.bits = BITS[args.quant_type]
    from tools.conversion.gptq import calibrate_checkpoint

    require_checkpoint("--input-dir", args.input_dir)
    calibrate_checkpoint(args.input_dir, args.output_dir, args.data_dir, args)


if __name__ == "__main__":
    run_tool(main)
