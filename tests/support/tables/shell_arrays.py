"""Runs bash once for many scripts and reads their arrays back, so that a test of fifty scripts costs one process."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from slime.utils.env import is_handed_on

ROOT = Path(__file__).parents[3]

# Variables that scripts read: they are unset unless a test sets them, whatever the caller's environment has.
READ_BY_SCRIPTS = (
    "HF_CHECKPOINT", "REF_LOAD", "LOAD", "SAVE", "MODEL_ARGS_NUM_LAYERS", "MODEL_ARGS_ROTARY_BASE", "BASE_DIR",
    "MODELS_DIR", "DATA_DIR", "CHECKPOINTS_DIR", "PROMPT_DATA", "EVAL_DATA", "SFT_DATA", "ACTOR_NUM_NODES",
    "CONTEXT_PARALLEL_SIZE", "EXPERT_PARALLEL_SIZE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_GROUP", "PYTHON", "RAY",
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "CLUSTER_DIR", "NUM_GPUS", "DRY_RUN",
    "PRINT_COMMAND", "RAY_PORT", "DASHBOARD_PORT", "DASHBOARD_HOST", "RAY_TEMP_DIR", "RAY_TMPDIR", "SLIME_HOST_IP",
    "SLIME_ACCELERATOR", "NCCL_NVLS_ENABLE", "TRAIN_SCRIPT", "CUDA_VISIBLE_DEVICES", "MODEL", "TOY_DIR",
    "RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S", "SLIME_START_COMMAND",
    "KEEP_MESSAGES", "EVAL_CONFIG", "OMP_NUM_THREADS",
)  # fmt: skip


def script_environment(**variables: str) -> dict[str, str]:
    """The caller's environment without the variables that scripts read or hand on, plus `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in READ_BY_SCRIPTS and not is_handed_on(name)}
    return {**kept, **variables}


def bash(program: str, *, cwd: Path = ROOT, timeout: float = 300, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a bash program that is given as text."""
    return subprocess.run(
        ["bash", "-c", program], cwd=cwd, capture_output=True, text=True, timeout=timeout,
        env=script_environment(**variables),
    )  # fmt: skip


def source_all(
    scripts: Mapping[str, Path], arrays: tuple[str, ...], *, cwd: Path = ROOT, **variables: str
) -> dict[str, dict[str, list[str]]]:
    """Source each script in a subshell of one strict bash and return its arrays.

    Returns:
        for each name of `scripts`: array name → words.
    """
    program = ["set -euo pipefail", 'show() { local -n a=$1; printf \'%s\\0\' "<$1>" ${a[@]+"${a[@]}"}; }']
    for name, script in scripts.items():
        shows = "; ".join(f"show {array}" for array in arrays)
        program.append(f"( source '{script}'; printf '%s\\0' '<<{name}>>'; {shows} )")
    result = bash("\n".join(program), cwd=cwd, **variables)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return _read(result.stdout.split("\0")[:-1])


def _read(words: list[str]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for word in words:
        if word.startswith("<<"):
            arrays = found[word[2:-2]] = {}
        elif word.startswith("<"):
            current = arrays[word[1:-1]] = []
        else:
            current.append(word)
    return found


def as_flags(words: list[str]) -> dict[str, tuple[str, ...]]:
    """Words `--flag value …` as a dictionary. A flag that occurs twice is an error."""
    flags: dict[str, tuple[str, ...]] = {}
    for word in words:
        if word.startswith("--"):
            assert word not in flags, f"{word} is given twice"
            flags[word] = ()
            latest = word
        else:
            flags[latest] += (word,)
    return flags
