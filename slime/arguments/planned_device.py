"""Which device `--dry-run` plans for. A plan is often made on a laptop, for GPUs that are elsewhere.

It is for GPUs, unless `SLIME_ACCELERATOR=cpu` says that the run itself will use none; `--dry-run-gpu-memory-gib` says that it
will.
"""

import argparse
import subprocess

from slime.utils import env
from slime.utils.device import gpus_on_this_machine

DEFAULT_GPU_MEMORY_GIB = 80.0
_QUERY = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
_QUERY_SECONDS = 10.0


def plans_for_gpus(args: argparse.Namespace) -> bool:
    """Whether the run would train and serve on GPUs."""
    if getattr(args, "dry_run_gpu_memory_gib", None) is not None:
        return True
    return env.forced_accelerator() != "cpu"


def gpu_memory_gib(args: argparse.Namespace) -> tuple[float, str]:
    """Memory of one GPU in GiB, and where the number comes from."""
    if args.dry_run_gpu_memory_gib is not None:
        return args.dry_run_gpu_memory_gib, "--dry-run-gpu-memory-gib"
    found = _smallest_gpu_gib() if gpus_on_this_machine() > 0 else None
    if found is not None:
        return found, "this machine's GPU"
    return DEFAULT_GPU_MEMORY_GIB, "assumed: no GPU on this machine, and no --dry-run-gpu-memory-gib"


def _smallest_gpu_gib() -> float | None:
    try:
        output = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_QUERY_SECONDS, check=True).stdout
        return min(int(line) for line in output.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
