"""The flags of every model script, read from the scripts, and the numbers of parameters of the published checkpoints."""

import functools
from pathlib import Path

from tests.support.tables.shell_arrays import ROOT, as_flags, source_all

SCRIPTS = {path.stem: path for path in sorted((ROOT / "scripts" / "models").glob("*.sh"))}

# The numbers exclude layers for multi-token prediction and include the routers' expert bias.
PARAMETER_COUNTS = {
    "qwen2.5-0.5B": 494_032_768,
    "qwen3-0.6B": 596_049_920,
    "qwen3-4B": 4_022_468_096,
    "qwen3-8B": 8_190_735_360,
    "llama3-8B": 8_030_261_248,
    "llama3-70B": 70_553_706_496,
    "qwen3-30B-A3B": 30_532_122_624,
    "qwen3-235B-A22B": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
}


@functools.cache
def script_arrays() -> dict[str, dict[str, list[str]]]:
    """The arrays `MODEL_ARGS` and `CKPT_ARGS` of all scripts, sourced from another directory without variables."""
    return source_all(SCRIPTS, ("MODEL_ARGS", "CKPT_ARGS"), cwd=Path("/"))


def script_flags() -> dict[str, dict[str, tuple[str, ...]]]:
    """Name of each model script → its flags with their values."""
    return {name: as_flags(arrays["MODEL_ARGS"]) for name, arrays in script_arrays().items()}
