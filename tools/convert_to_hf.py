#!/usr/bin/env python3
"""Write the model of a run as a Hugging Face directory, by the same code as --save-hf.

    python tools/convert_to_hf.py --hf-checkpoint MODEL --output-dir EXPORTED --check-same
    python tools/convert_to_hf.py --hf-checkpoint MODEL --load RUN/checkpoints --output-dir EXPORTED ${MODEL_ARGS[@]}

The tool builds the model, loads its weights as a run does, and exports it. The model must fit into memory;
tools/convert_torch_dist_to_hf.py builds no model. Without --bf16 or --fp16, weights have the dtype in the config.json of
--hf-checkpoint. --check-same compares the result with --hf-checkpoint bit by bit: it shows, before any training, whether a
model survives the way into the trainer and back. The exit status is 1 if something differs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.arguments.hf_config import read_hf_config
from slime.utils.errors import UserError
from tools.command_line import require_checkpoint, run_tool


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="the model, as of a run")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the Hugging Face directory goes")
    parser.add_argument("--check-same", action="store_true", help="compare it with --hf-checkpoint, bit by bit")
    parser.add_argument("-f", "--force", action="store_true", help="replace the weights of a directory that exists")
    args, flags = parser.parse_known_args(words)
    wrong: list[str] = []
    require_checkpoint("--hf-checkpoint", args.hf_checkpoint)
    if args.output_dir.exists() and not args.force:
        raise UserError(f"{args.output_dir} exists already; give another directory, or --force")
    from slime.training.actor_rank import ActorRank
    from tools.conversion.hugging_face import differences
    from tools.conversion.torch_dist import is_left_out, parse_model_flags

    flags += flag_of_dtype(args.hf_checkpoint, flags)
    rank = ActorRank(parse_model_flags(args.hf_checkpoint, flags), 0, 1, 0)
    rank.init(rank.rendezvous_address())
    rank.export_hf(str(args.output_dir))
    rank.dispose()
    if args.check_same:
        wrong += differences(args.output_dir, args.hf_checkpoint, lambda name: is_left_out(args.hf_checkpoint, name))
        print("\n".join(wrong) or f"{args.output_dir} has the tensors of {args.hf_checkpoint}, bit by bit")
    sys.exit(1 if wrong else 0)


_FLAGS_OF_DTYPES = {"bfloat16": "--bf16", "float16": "--fp16"}


def flag_of_dtype(hf_checkpoint: Path, flags: Sequence[str]) -> list[str]:
    """The flag for the dtype in a checkpoint's config.json, unless `flags` have one. Without it the machine would choose."""
    config = read_hf_config(hf_checkpoint)
    name = config.get("dtype") or config.get("torch_dtype")
    typed = not set(flags).isdisjoint(_FLAGS_OF_DTYPES.values())
    return [] if typed or name not in _FLAGS_OF_DTYPES else [_FLAGS_OF_DTYPES[name]]


if __name__ == "__main__":
    run_tool(main)
