"""The flags of the installed Megatron-Core, SGLang and router, read from the packages themselves and cached.

Importing those packages takes seconds and would bring torch into the driver. So a child process imports them once per
version, describes their options as JSON, and the answer is kept in the user's cache directory; parsing reads only that.
A description is used again only while the package (version, place, the files that define its options) and the code that
describes it stay the same.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slime.arguments.value_types import human_int, integers, json_object, json_value, layer_pattern
from slime.utils import env
from slime.utils.child_process import describe_exit_status, environment_for_python
from slime.utils.errors import UserError
from slime.utils.filesystem import write_text_atomically

logger = logging.getLogger(__name__)

# The value types that a description may name.
VALUE_TYPES = {
    "str": str, "int": int, "float": float, "json": json_object, "layer_pattern": layer_pattern, "integers": integers,
    "json_any": json_value, "human_int": human_int,
}  # fmt: skip

# A cold import of SGLang from a network disk takes minutes.
_TIMEOUT_SECONDS = 600.0
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class FlagSpec:
    """One option as a package describes it; it survives a round trip through JSON.

    Attributes:
        flags: spellings with leading dashes, the usual one first.
        dest: attribute of `args`.
        action: `store` (takes a value), `store_true`, `store_false`, or `bool` (`--x` and `--no-x`).
        type: key of `VALUE_TYPES`; for `store` only.
        nargs, const, choices, default, help: as in argparse.
    """

    flags: tuple[str, ...]
    dest: str
    action: str = "store"
    type: str = "str"
    nargs: str | int | None = None
    const: Any = None
    choices: tuple[Any, ...] | None = None
    default: Any = None
    help: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Package:
    """An installed package whose options are flags.

    Attributes:
        module: what is imported; `distribution`: what is installed (its version names the cache file).
        describer: module of ours that prints the descriptions when it is run.
        watched: files of the package, relative to the directory of `module`, that define the options. A source checkout
            changes them under one version.
        beside: modules whose presence adds options.
    """

    module: str
    distribution: str
    describer: str
    watched: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


PACKAGES = {
    "megatron": Package(
        "megatron.core",
        "megatron-core",
        "slime.backends.megatron_utils.flag_surface",
        watched=(
            "model_parallel_config.py", "transformer/transformer_config.py", "optimizer/optimizer_config.py",
            "distributed/distributed_data_parallel_config.py",
        ),
        beside=("megatron.training",),
    ),
    "sglang": Package("sglang", "sglang", "slime.backends.sglang_utils.server_arguments", watched=("srt/server_args.py",)),
    "router": Package("sglang_router", "sglang-router", "slime.serving.router_process", watched=("router_args.py",)),
}  # fmt: skip


class Taken(NamedTuple):
    """Option strings and attributes that a parser has already."""

    flags: frozenset[str]
    dests: frozenset[str]


def taken(parser: argparse._ActionsContainer) -> Taken:
    """What the groups added so far define; `parser` may be one of its groups."""
    return Taken(frozenset(parser._option_string_actions), frozenset(action.dest for action in parser._actions))


def add_flag(group: argparse._ArgumentGroup, spec: FlagSpec) -> None:
    """Put the option that `spec` describes into the parser group."""
    common = {"dest": spec.dest, "default": spec.default, "help": spec.help.replace("%", "%%")}
    if spec.action == "bool":
        group.add_argument(*spec.flags, action=argparse.BooleanOptionalAction, **common)
    elif spec.action != "store":
        group.add_argument(*spec.flags, action=spec.action, **common)
    else:
        if spec.nargs == "?":
            common["const"] = spec.const
        choices = list(spec.choices) if spec.choices else None
        group.add_argument(*spec.flags, type=VALUE_TYPES[spec.type], nargs=spec.nargs, choices=choices, **common)


@functools.cache
def load_surface(package: str) -> tuple[FlagSpec, ...] | None:
    """The options of an installed package, a key of `PACKAGES`; None where it is not installed.

    Raises:
        UserError: the package is installed and cannot be read.
    """
    home = env.cache_home()
    return read_or_describe(PACKAGES[package], None if home is None else home / "slime")


def warm_surfaces(packages: Iterable[str] = tuple(PACKAGES)) -> None:
    """Load several packages at the same time: each that is not in the cache costs a child process of some seconds.

    Raises:
        UserError: as `load_surface`.
    """
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(max_workers=len(PACKAGES)) as pool:
        list(pool.map(load_surface, packages))


def read_or_describe(package: Package, directory: Path | None) -> tuple[FlagSpec, ...] | None:
    """The options of `package`, from `directory` if they are there, else from a child process (and then kept there).

    Raises:
        UserError: the child failed; the message ends with its last lines.
    """
    place = _place_of(package.module)
    if place is None:
        return None
    version = version_of(package.distribution)
    name = f"flags-{package.distribution}-{version}-{_fingerprint(package, place)}.json"
    path = None if directory is None else directory / name
    specs = None if path is None else _read(path)
    if specs is None:
        text = _describe(package, version)
        specs = _specs_from(text)
        _keep(path, text)
    return specs


def _place_of(module: str) -> Path | None:
    """Directory of an importable package, without importing it (its parent is)."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def version_of(distribution: str) -> str:
    """The installed version; `source` for a checkout that was never installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _fingerprint(package: Package, place: Path) -> str:
    digest = hashlib.sha256(sys.version.encode())
    for source in (_ROOT / (package.describer.replace(".", "/") + ".py"), Path(__file__)):
        digest.update(source.read_bytes())
    for file in package.watched:
        stat = (place / file).stat() if (place / file).exists() else None
        digest.update(f"{place / file} {stat and (stat.st_size, stat.st_mtime_ns)}\n".encode())
    digest.update("\n".join(f"{module} {_place_of(module)}" for module in package.beside).encode())
    return digest.hexdigest()[:16]


def _read(path: Path) -> tuple[FlagSpec, ...] | None:
    try:
        return _specs_from(path.read_text())
    except (OSError, ValueError, TypeError):
        return None  # absent, or damaged: it is written anew


def _keep(path: Path | None, text: str) -> None:
    if path is None:
        return _say_uncached("the user has no home directory; XDG_CACHE_HOME may name another")
    try:
        write_text_atomically(path, text)
    except OSError as error:
        _say_uncached(f"{path.parent} cannot be written ({error.strerror}); XDG_CACHE_HOME may name another directory")


@functools.cache
def _say_uncached(reason: str) -> None:
    """One line, not one for every package."""
    logger.info("the flags of Megatron and SGLang are read anew at every start, which takes seconds: %s", reason)


def _describe(package: Package, version: str) -> str:
    """The last line that the describing module prints."""
    logger.info("reading the flags of %s %s (once per version, takes seconds)", package.distribution, version)
    command = [sys.executable, "-W", "ignore", "-m", package.describer]
    problem = f"the flags of {package.distribution} {version} cannot be read: `{' '.join(command[-2:])}`"
    try:
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS,
            env=environment_for_python(),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(f"{problem} did not end within {_TIMEOUT_SECONDS:.0f} s; is the disk slow? Try again") from None
    lines = child.stdout.splitlines()
    if child.returncode != 0 or not lines:
        last = "\n".join(child.stderr.splitlines()[-10:]) or "(it wrote nothing)"
        raise UserError(f"{problem}: {describe_exit_status(child.returncode)}; its last lines:\n{last}")
    return lines[-1]


def _specs_from(text: str) -> tuple[FlagSpec, ...]:
    # JSON has lists where a description has tuples.
    return tuple(
        FlagSpec(**row | {name: row[name] and tuple(row[name]) for name in ("flags", "choices") if name in row})
        for row in json.loads(text)
    )
