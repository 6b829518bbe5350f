#!/usr/bin/env python3
"""Make a Megatron checkpoint (torch_dist), which any parallel layout can load, of a Hugging Face directory.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save MODEL_torch_dist
    python tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save MODEL_torch_dist ${MODEL_ARGS[@]}

The model's flags come from its config.json; flags on the command line win. A run takes the result as --ref-load, but does not
need it: --hf-checkpoint, --ref-load and --load also take Hugging Face directories. Quantised weights become 16-bit numbers. An
interrupted conversion goes on when the same command runs again.

The tool needs no launcher. If torchrun starts it, the first process converts, with as many processes as torchrun was to start
on its machine.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from slime.utils.misc import no_garbage_collection
from tools.command_line import require_checkpoint, run_tool
from tools.conversion.units import start_server


def main(words: list[str] | None = None, *, source: str = "--hf-checkpoint", target: str = "--save") -> None:
    # A cluster may set RANK for its own use, so the variable only counts if torchrun has started the tool.
    of_torchrun = os.environ if "TORCHELASTIC_RUN_ID" in os.environ else {}
    rank, processes = (int(of_torchrun.get(name, 0)) for name in ("RANK", "LOCAL_WORLD_SIZE"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(source, dest="source", type=Path, required=True, help="the directory to convert")
    parser.add_argument(target, dest="target", type=Path, required=True, help="where the checkpoint goes")
    parser.add_argument(
        "--max-workers",
        type=int,
        default=max(2, processes),
        help="processes that convert (default: 2, or those of torchrun)",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=5 * 1024**3,
        metavar="BYTES",
        help="largest size of a file (default: %(default)s)",
    )
    parser.add_argument("-f", "--force", action="store_true", help="replace the target if it exists")
    args, flags = parser.parse_known_args(words)
    require_checkpoint(source, args.source)
    if rank:
        return
    start_server(args.max_workers, "tools.conversion.torch_dist")
    with no_garbage_collection():
        from tools.conversion.torch_dist import convert_hf_to_torch_dist

    convert_hf_to_torch_dist(
        args.source, args.target, flags, workers=args.max_workers, force=args.force, largest=args.chunk_size
    )


if __name__ == "__main__":
    run_tool(main)
