"""Weights as directories that trainer and engines share: `weight_v{version:06d}`, one per push, and what the index in it says.

Some directories hold a whole Hugging Face checkpoint. Others hold what changed since the directory before: in their files a
tensor is a stream that makes the new bytes out of the old ones. The metadata of a file say how, and which digest must come out;
a tensor that they do not name is there as it is.

The directories of one trainer's life form a chain, whose version 0 is `--hf-checkpoint`. A trainer that ends between pushes
(`--release-train`) leaves its chain to the one that follows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import claim_directory
from slime.utils.hf_files import INDEX_FILE
from slime.weights.delta_encoding import COMPRESSION

CHECKPOINT = 0
_PATCHES = "patches"


def directory_of(root: str | Path, version: int) -> Path:
    """The directory below `--update-weight-disk-dir` in which weights `version` are published."""
    return Path(root) / f"weight_v{version:06d}"


def version_in(directory: Path) -> int:
    """The version of the weights that are published in a directory of `directory_of`."""
    return int(directory.name.removeprefix("weight_v"))


@dataclasses.dataclass(frozen=True)
class Patch:
    """How a stream makes a tensor: the `encoding` of the difference, and the `digest` of the resulting bytes."""

    encoding: str
    digest: str


def patches_to_metadata(patches: Mapping[str, Patch]) -> dict[str, str]:
    """The metadata of a safetensors file whose tensors `patches` are streams."""
    return {_PATCHES: json.dumps({name: dataclasses.asdict(patch) for name, patch in patches.items()})}


def patches_of_metadata(metadata: Mapping[str, str]) -> dict[str, Patch]:
    """The inverse of `patches_to_metadata`."""
    return {name: Patch(**patch) for name, patch in json.loads(metadata.get(_PATCHES, "{}")).items()}


@dataclasses.dataclass(frozen=True)
class Publication:
    """A published directory.

    base_version: the version of the same chain that it changes; None: it is whole.
    digest_kind: the kind of digest of its patches.
    files: the files with tensors, named here because a listing of a network disk may lack one.
    """

    directory: Path
    chain: str
    version: int
    base_version: int | None
    digest_kind: str | None
    files: tuple[str, ...]

    @classmethod
    def read(cls, directory: Path) -> Publication:
        """Read the index of `directory`.

        Raises:
            RunError: there is none, or it is not that of a weight push.
        """
        try:
            index = json.loads((directory / INDEX_FILE).read_text())
            metadata = index["metadata"]
            return cls(
                directory,
                metadata["chain"],
                metadata["version"],
                metadata["base_version"],
                metadata.get("checksum_format"),
                tuple(sorted(set(index["weight_map"].values()))),
            )
        except (OSError, ValueError, KeyError) as error:
            raise RunError(f"{directory} holds no weights of a push: {type(error).__name__}: {error}") from error

    def base(self) -> Publication | None:
        """The publication that this one changes; None: it is `--hf-checkpoint`.

        Raises:
            RunError: it is no longer there, or another one took its place.
        """
        if self.base_version == CHECKPOINT:
            return None
        found = Publication.read(directory_of(self.directory.parent, self.base_version))
        if (found.chain, found.version) != (self.chain, self.base_version):
            raise RunError(f"{found.directory}, which {self.directory.name} changes, was replaced by another run's")
        return found


def index_metadata(
    chain: str, version: int, base_version: int | None = None, delta: tuple[str, str] | None = None
) -> dict[str, Any]:
    """The metadata that `Publication.read` expects in an index. `delta`: the encoding of its streams, and the kind of
    digest."""
    metadata = {"chain": chain, "version": version, "base_version": base_version}
    if delta is not None:
        names = ("delta_encoding", "checksum_format", "compression_format")
        metadata |= dict(zip(names, (*delta, COMPRESSION), strict=True))
    return metadata


class PushDirectory:
    """`--update-weight-disk-dir`, which one run at a time may use: this process holds it as long as it lives."""

    def __init__(self, root: str) -> None:
        self._root = root

    def claim(self) -> None:
        """Take the directory.

        Raises:
            UserError: another run has it.
        """
        if not claim_directory(Path(self._root)):
            raise UserError(
                f"--update-weight-disk-dir {self._root}: another run pushes its weights through this directory; end that run, "
                "or name another directory"
            )

    def require(self, version: int, chain: str) -> None:
        """Raise RunError unless weights `version` of that chain are there."""
        found = Publication.read(directory_of(self._root, version))
        if (found.chain, found.version) != (chain, version):
            raise RunError(
                f"--update-weight-disk-dir {self._root}: {found.directory.name} is not what this run has pushed as version "
                f"{version}: another run has replaced it; end that run, or name another directory, and start this one again: "
                "it goes on from its last checkpoint"
            )


def chain_of(directory: Path) -> str | None:
    """The chain of the publication in `directory`; None if that is not one."""
    try:
        return Publication.read(directory).chain
    except RunError:
        return None
