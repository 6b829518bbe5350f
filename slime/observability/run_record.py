"""The configuration of a run: in a file beside its checkpoints, so that the run can be repeated, and as lines of its log.

The file has arguments, versions and revision. The log has the flags that the user set, and the values derived from them that
are worth a check. Secrets are redacted in both.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import re
import subprocess
import types
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from slime.utils.filesystem import write_json_atomically

REDACTED = "<redacted>"
# The address of a database holds a password.
_SECRET_NAME = re.compile(
    r"(api_keys?|token|secret|password|wandb_key|postgres_db_url|redis_url|authorization|cookie)$", re.IGNORECASE
)
# Users name environment variables and values of their own as they like, so a secret word anywhere in the name counts. (Many
# flags end in `_key` or speak of tokens; there only the end of a name counts.)
_SECRET_VARIABLE = re.compile(
    r"secret|credential|passw|token(?!izer)|api_?key|(?<![a-z])key(?![a-z])|authorization", re.IGNORECASE
)
# Parts of a text that are secret under any name: the user of an address, values of its query, and headers that log in.
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/\s?#]*(?=@)")
_QUERY_VALUE = re.compile(r"([?&;])([^=&;#\s]+)=([^&;#\s]+)")
_HEADER = re.compile(r"\b((?:authorization|x-api-key|cookie)\s*:\s*|bearer\s+)[^\r\n'\"]+", re.IGNORECASE)
# Arguments, and a key of their files, below which stands what users named.
_NAMED_BY_USERS = frozenset({"train_env_vars", "custom_config", "custom"})
# Attributes of `args` that are records about the arguments, and no arguments.
BOOKS = frozenset({"origins", "typed_flags"})
_PACKAGES = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers")


def is_secret(name: str) -> bool:
    """Whether the value of the argument or flag `name` must never be printed, dumped or sent to a tracker."""
    return _SECRET_NAME.search(name.replace("-", "_")) is not None


def mentions_secret(text: str) -> bool:
    """Whether a text that could not be parsed, say broken JSON, seems to hold a secret, so that no message may repeat it."""
    return _SECRET_VARIABLE.search(text) is not None


def redacted_text(text: str) -> str:
    """`text` without the secrets that addresses and headers in it hold: `https://me:pass@host/?api_key=x` and the like."""
    text = _USER_OF_ADDRESS.sub(REDACTED, text)
    text = _QUERY_VALUE.sub(
        lambda match: f"{match[1]}{match[2]}={REDACTED}" if mentions_secret(match[2]) else match[0], text
    )
    return _HEADER.sub(rf"\1{REDACTED}", text)


def shown(name: str, value: Any) -> str:
    """The text by which a message may show `value`, that of the argument or key `name`."""
    inner = redacted({name: value})[name]
    return inner if inner == REDACTED else repr(inner)


def redacted(values: dict[str, Any]) -> dict[str, Any]:
    """`values` in JSON's types, without secrets: at any depth, entries whose name marks a secret are replaced, and texts lose
    what `redacted_text` finds.

    A name inside `train_env_vars` or `custom_config` marks a secret if it contains such a word, any other name if it ends with
    one.
    """
    return _redacted_entries(values, _NAMED_BY_USERS)


def plain_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """All arguments by name, redacted, in JSON's types; names that are no flag's count like those inside `custom_config`."""
    values = {name: value for name, value in vars(args).items() if name not in BOOKS}
    roles = (values.get("role_overrides") or {}).values()
    own = {name for overrides in roles for name in overrides if name not in values} | {*values.get("custom_config", ())}
    return dict(sorted(_redacted_entries(values, _NAMED_BY_USERS | own).items()))


def write_run_record(args: argparse.Namespace, directory: str | Path) -> Path:
    """Write `args.json` into `directory`: arguments with their origins, package versions, the revision of the code. Returns
    its path.

    `arguments[name]` is `{"value": …, "origin": "command line" | "YAML" | "HF config" | "derived" | "default"}`. The origin is
    null for a value that the run itself found out.
    """
    origins = args.origins
    record = {
        "arguments": {
            name: {"value": value, "origin": origins.get(name)} for name, value in plain_arguments(args).items()
        },
        "versions": {name: _version(name) for name in _PACKAGES},
        "revision": _revision(),
    }
    path = Path(directory) / "args.json"
    write_json_atomically(path, record)
    return path


def _redacted_entries(values: Mapping[str, Any], users: Set[str]) -> dict[str, Any]:
    return {name: _redact(str(name), _plain(value), users) for name, value in values.items()}


def _redact(name: str, value: Any, users: Set[str], *, own: bool = False) -> Any:
    """`value`, as `_plain` returns it, without its secrets.

    Args:
        users: names that users gave, or below which they name what they like. own: whether `name` stands below such a name.
    """
    own = own or name in users
    # A number of tokens, or a switch, is none of the secrets that are called so.
    harmless = isinstance(value, bool) or (isinstance(value, int | float) and "tokens" in name.lower())
    pattern = _SECRET_VARIABLE if own and not harmless else _SECRET_NAME
    if value is not None and pattern.search(name.replace("-", "_")):
        return REDACTED
    if isinstance(value, dict):
        return {key: _redact(key, item, users, own=own) for key, item in value.items()}
    if isinstance(value, str):
        return redacted_text(value)
    return [_redact("", item, users, own=own) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """`value` as dictionaries, lists and scalars. Everything with named entries becomes a dictionary, so that `_redact` finds
    the secrets in it; only the rest becomes text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {spec.name: getattr(value, spec.name) for spec in dataclasses.fields(value)}
    elif isinstance(value, argparse.Namespace | types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=json.dumps)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _revision() -> str | None:
    """The commit of the code; None if it does not run from a git checkout."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


# Origins of values that the user set. Those of config.json and the derivation fill a screen, and are in args.json.
_SAID = ("command line", "YAML")
_FOLLOWS = ("HF config", "derived")
# Derived values that decide what a run computes. They are shown unless they were typed.
_CHECKED = (
    ("params_dtype_name", "parameters in {}"),
    ("data_parallel_size", "data-parallel size {}"),
    ("rollout_num_engines", "{} engines"),
    ("global_batch_size", "global batch size {}"),
    ("num_steps_per_rollout", "optimizer steps per rollout {}"),
)
_LONGEST_VALUE = 100
# Attributes that are shown under other names, or are no settings.
_LEFT_OUT = frozenset({"custom_config", "critic_values", "plan_notes"})


def effective_configuration(args: argparse.Namespace) -> str:
    """A few lines: `command line: lr 1e-05, …`, `YAML: …`, and what was derived from them. Secrets are redacted."""
    origins, values = _told(args)
    derived = [
        text.format(values[name]) for name, text in _CHECKED if origins.get(name) == "derived" and name in values
    ]
    lines = [*_lines(_SAID, origins, values), *([f"  so: {', '.join(derived)}"] if derived else [])]
    return "\n".join(["configuration (what differs from the defaults):", *lines])


def derived_configuration(args: argparse.Namespace) -> str:
    """All values that the model's config.json and the derivation gave: `derived: world_size 8, …`. Secrets are redacted."""
    return "\n".join(["configuration (what follows):", *_lines(_FOLLOWS, *_told(args))])


def _told(args: argparse.Namespace) -> tuple[dict[str, str], dict[str, Any]]:
    values = plain_arguments(args).items()
    shown = {name: value for name, value in values if name not in _LEFT_OUT and value not in ([], {})}
    return args.origins, shown


def _lines(chosen: tuple[str, ...], origins: dict[str, str], values: dict[str, Any]) -> list[str]:
    told = {
        origin: [f"{name} {_short(value)}" for name, value in values.items() if origins.get(name) == origin]
        for origin in chosen
    }
    return [f"  {origin}: {', '.join(settings)}" for origin, settings in told.items() if settings]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
