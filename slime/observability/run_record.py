"""What a run leaves beside its checkpoints so that it can be repeated: arguments, versions, revision. Secrets are left out."""

import argparse
import importlib.metadata
import re
import subprocess
from pathlib import Path
from typing import Any

from slime.utils.atomic_io import write_json_atomically

REDACTED = "<redacted>"
_SECRET_NAME = re.compile(r"(api_key|token|secret|password|wandb_key)$", re.IGNORECASE)
# Variables of the environment are not ours to name, and numbers of tokens are not among them.
_SECRET_VARIABLE = re.compile(
    r"secret|credential|passw|token(?!izer)|api_?key|access_?key|private_?key|wandb_key", re.IGNORECASE
)
_VARIABLES = "train_env_vars"
_PACKAGES = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers")


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with every entry replaced whose name says that it is a secret, also inside nested dictionaries.

    Names inside `train_env_vars` are secret where they contain such a word, others where they end with one: a run has
    many numbers of tokens.
    """
    return _redact_entries(values, _SECRET_NAME)


def write_run_record(args: argparse.Namespace, directory: str | Path) -> None:
    """Write `args.json` into `directory`: arguments, package versions and the revision of the code."""
    record = {
        "arguments": {name: _plain(value) for name, value in sorted(redacted(vars(args)).items())},
        "versions": {name: _version(name) for name in _PACKAGES},
        "revision": _revision(),
    }
    write_json_atomically(Path(directory) / "args.json", record)


def _redact_entries(values: dict[str, Any], secret_name: re.Pattern[str]) -> dict[str, Any]:
    return {name: _redact(str(name), value, secret_name) for name, value in values.items()}


def _redact(name: str, value: Any, secret_name: re.Pattern[str]) -> Any:
    if isinstance(value, dict):
        return _redact_entries(value, _SECRET_VARIABLE if name == _VARIABLES else secret_name)
    return REDACTED if value is not None and secret_name.search(name) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """Commit of the code, or None when it was not started from a git checkout."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
