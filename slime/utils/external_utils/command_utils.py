"""Runs and conversions from Python, for launchers of one's own: the same programs as on the command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.utils.errors import RunError, UserError

_REPOSITORY = Path(__file__).resolve().parents[3]


def exec_command(
    command: str | Sequence[str],
    capture_output: bool = False,
    *,
    env: Mapping[str, str] | None = None,
    directory: Path | None = _REPOSITORY,
) -> str | None:
    """Run a command from the repository's root, a text by bash, words as they are; its output where it is captured.

    Args:
        env: what is put beside our environment, or in place of it.
        directory: another one that it runs from; None: that of the caller.

    Raises:
        RunError: it did not end with status 0; with the end of what was captured.
    """
    words = ["bash", "-c", command] if isinstance(command, str) else list(command)
    done = subprocess.run(
        words,
        cwd=directory,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE if capture_output else None,
        stderr=subprocess.STDOUT if capture_output else None,
        text=True,
        check=False,
    )
    if done.returncode:
        # The message leaves the words of the command out, because they may hold secrets.
        raise RunError(
            f"{Path(words[0]).name} ended with status {done.returncode}\n{(done.stdout or '')[-2000:]}".rstrip()
        )
    return done.stdout if capture_output else None


def execute_train(
    train_args: str | Sequence[str],
    num_gpus_per_node: int,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    extra_env_vars: Mapping[str, str] | None = None,
) -> None:
    """Run `train_script` to its end, on the Ray cluster of RAY_ADDRESS, or on this machine alone.

    Args:
        train_args: flags, as words or as they are typed; their relative paths begin in the caller's directory.
        num_gpus_per_node: devices of the nodes; becomes `--num-gpus-per-node`, which `train_args` may name again.
        megatron_model_type: the model's flags are those of `scripts/models/{megatron_model_type}.sh`; None: they are among
            `train_args`, or `--model-args-from-hf` is.

    Raises:
        UserError: there is no such script of a model.
        RunError: the run failed.
    """
    of_model = [] if megatron_model_type is None else model_args(megatron_model_type)
    words = [sys.executable, str(_REPOSITORY / train_script), "--num-gpus-per-node", str(num_gpus_per_node)]
    exec_command([*words, *of_model, *_words(train_args)], env=extra_env_vars, directory=None)


def convert_checkpoint(
    hf_checkpoint: str,
    save: str,
    megatron_model_type: str | None = None,
    num_gpus_per_node: int = 1,
    extra_args: str | Sequence[str] = (),
) -> str:
    """Write the Hugging Face directory as a Megatron checkpoint, unless `save` is there; returns `save`.

    Args:
        num_gpus_per_node: processes that convert, on this machine alone; `--max-workers` among `extra_args` says otherwise.
        extra_args: further flags, as words or as they are typed.

    Raises:
        UserError: there is no such script of a model.
        RunError: the converter failed.
    """
    if Path(save).exists():
        return save
    program = str(_REPOSITORY / "tools/convert_hf_to_torch_dist.py")
    words = [sys.executable, program, "--hf-checkpoint", hf_checkpoint, "--save", save]
    words += ["--max-workers", str(num_gpus_per_node)]
    of_model = [] if megatron_model_type is None else model_args(megatron_model_type)
    exec_command([*words, *of_model, *_words(extra_args)], directory=None)
    return save


def _words(flags: str | Sequence[str]) -> list[str]:
    return shlex.split(flags) if isinstance(flags, str) else list(flags)


def model_args(megatron_model_type: str) -> list[str]:
    """The flags of `scripts/models/{megatron_model_type}.sh`.

    Raises:
        UserError: there is no such script.
    """
    scripts = {path.stem: path for path in (_REPOSITORY / "scripts/models").glob("*.sh")}
    script = scripts.get(megatron_model_type)
    if script is None:
        known = ", ".join(sorted(scripts))
        raise UserError(f"there is no scripts/models/{megatron_model_type}.sh; those there are: {known}")
    printed = exec_command(["bash", "-c", 'source "$0" && printf "%s\\0" "${MODEL_ARGS[@]}"', str(script)], True)
    return (printed or "").split("\0")[:-1]
