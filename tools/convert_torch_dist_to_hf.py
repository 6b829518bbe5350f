#!/usr/bin/env python3
"""Make a Hugging Face directory of a Megatron checkpoint (torch_dist), whatever layout saved it.

    python tools/convert_torch_dist_to_hf.py --input-dir RUN/checkpoints --output-dir MODEL-TRAINED --origin-hf-dir MODEL
    python tools/convert_torch_dist_to_hf.py --input-dir RUN/checkpoints/iter_0000099 --output-dir OUT --origin-hf-dir MODEL

Configuration and tokenizer come from --origin-hf-dir; if that is quantised, the result is too. The tool builds no model: each
process needs memory for the largest tensor. An interrupted conversion goes on when the same command runs again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.errors import UserError
from slime.utils.misc import no_garbage_collection
from tools.command_line import require_checkpoint, require_directory, run_tool
from tools.conversion.units import start_server


def main(words: list[str] | None = None) -> None:
    parser = parser_without_workers(__doc__)
    parser.add_argument("--max-workers", type=int, default=2, help="processes that convert (default: %(default)s)")
    args = parser.parse_args(words)
    convert(args, args.max_workers)


def parser_without_workers(description: str) -> argparse.ArgumentParser:
    """A parser with the options that this tool and `convert_torch_dist_to_hf_parallel.py` share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input-dir", type=Path, required=True, help="the checkpoint, or one of its iterations")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the Hugging Face directory goes")
    parser.add_argument(
        "--origin-hf-dir", type=Path, required=True, help="a directory of the same model; its weights are not needed"
    )
    parser.add_argument("--model-name", help="the family, such as qwen3 (default: that of --origin-hf-dir)")
    parser.add_argument(
        "-a", "--add-missing-from-origin-hf", action="store_true",
        help="copy tensors that only --origin-hf-dir has, such as those of layers that were not trained",
    )  # fmt: skip
    parser.add_argument("--vocab-size", type=int, help="rows of embedding and head (default: as config.json has it)")
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=5 * 1024**3,
        metavar="BYTES",
        help="largest size of a weight file (default: %(default)s)",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace the target if it exists")
    return parser


def convert(args: argparse.Namespace, workers: int) -> None:
    """Convert as `args` of `parser_without_workers` say, with `workers` processes."""
    if args.vocab_size is not None and args.vocab_size < 1:
        raise UserError(f"--vocab-size {args.vocab_size}: must be at least 1")
    require_directory("--input-dir", args.input_dir)
    require_checkpoint("--origin-hf-dir", args.origin_hf_dir)
    start_server(workers, "tools.conversion.torch_dist")
    with no_garbage_collection():
        from tools.conversion.torch_dist import convert_torch_dist_to_hf

    convert_torch_dist_to_hf(
        args.input_dir,
        args.output_dir,
        args.origin_hf_dir,
        model_name=args.model_name,
        vocab_size=args.vocab_size,
        adds_missing=args.add_missing_from_origin_hf,
        workers=workers,
        force=args.force,
        largest=args.chunk_size,
    )


if __name__ == "__main__":
    run_tool(main)
