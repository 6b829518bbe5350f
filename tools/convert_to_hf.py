#!/usr/bin/env python3
"""Write the model of a run as a Hugging Face directory, by the same code as --save-hf.

    python tools/convert_to_hf.py --hf-checkpoint MODEL --output-dir EXPORTED --check-same
    python tools/convert_to_hf.py --hf-checkpoint MODEL --load RUN/checkpoints --output-dir EXPORTED ${MODEL_ARGS[@]}

The tool builds the model, loads its weights as a run does, and exports it. The model must fit into memory;
tools/convert_torch_dist_to_hf.py builds no model. Without --bf16 or --fp16, weights have the dtype in the config.json of
--hf-checkpoint, and float32 if it names none. --check-same compares the result with --hf-checkpoint bit by bit, and shows so
before any training whether a model survives the way into the trainer and back. The exit status is 1 if something differs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.arguments.derivation import settle_precision
from slime.arguments.hf_config import read_hf_config
from slime.utils.errors import UserError
from slime.utils.filesystem import holding
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
    from tools.conversion.torch_dist import is_left_out

    of_model = arguments_of_model(args.hf_checkpoint, flags)
    for flag, path in (("--hf-checkpoint", args.hf_checkpoint), ("--load", of_model.load)):
        if holding(args.output_dir, path):
            raise UserError(f"--output-dir {args.output_dir} would overwrite {flag} {path}; give another directory")
    rank = ActorRank(of_model, 0, 1, 0)
    rank.init(rank.rendezvous_address())
    rank.export_hf(str(args.output_dir))
    rank.dispose()
    if args.check_same:
        wrong += differences(args.output_dir, args.hf_checkpoint, lambda name: is_left_out(args.hf_checkpoint, name))
        print("\n".join(wrong) or f"{args.output_dir} has the tensors of {args.hf_checkpoint}, bit by bit")
    sys.exit(1 if wrong else 0)


def arguments_of_model(hf_checkpoint: Path, flags: Sequence[str]) -> argparse.Namespace:
    """The arguments of the model, whose dtype is that of `flags`, or else of its config.json, or else float32; not that which
    runs on this machine would have."""
    from tools.conversion.torch_dist import parse_model_flags

    config, typed = read_hf_config(hf_checkpoint), {"--bf16", "--fp16"}
    flag = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(config.get("dtype") or config.get("torch_dtype"), [])
    args = parse_model_flags(hf_checkpoint, flags if typed & set(flags) else [*flags, *flag])
    on_gpus = args.on_gpus
    # No flag asks for float32, which is what runs without a GPU have.
    settle_precision(args, on_gpus=False)
    args.on_gpus = on_gpus
    return args


if __name__ == "__main__":
    run_tool(main)
