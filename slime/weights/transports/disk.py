"""Weights from training ranks to the engines as a Hugging Face checkpoint in `--update-weight-disk-dir`, which they share.

Every source writes its buckets as shards into a hidden directory, and a list of their names; the last one, which asks for all
of them by name, publishes it as `weight_v{version}`, whole.
Engines load it in one go, from there or from a copy on their host. One that cannot may have new tensors beside old ones; it is
left out of the push.

The first source holds a lock on the directory while the run lives: another run would publish under the same names. Where the
trainer ends between pushes (`--release-train`), a process beside it holds the lock.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.utils.errors import RunError
from slime.utils.filesystem import fsync_tree, replace_directory
from slime.weights.hf_writer import copy_auxiliary_files, number_shards, write_shard
from slime.weights.publication import PushDirectory, chain_of, directory_of, index_metadata
from slime.weights.transports.transport import Background, Order, Transport

if TYPE_CHECKING:
    from slime.weights.buckets import NamedTensors

_DISCARD_SECONDS = 30.0


class DiskTransport(Transport):
    """A shard per bucket; the next bucket is made while the last one is written."""

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._args = args
        self._source, self._num_sources, self._is_last = source, num_sources, source == num_sources - 1
        self._timeout = 60.0 * args.distributed_timeout_minutes
        # Tells the pushes of this trainer's life from those of others.
        self._chain = secrets.token_hex(8)
        self._directory = PushDirectory(args.update_weight_disk_dir)
        self._draft: Path | None = None  # until a push begins
        self._shards = 0
        self._written: list[str] = []
        self._writing: Background | None = None

    @classmethod
    def longest_wait(cls, args: Any) -> float:
        return 60.0 * args.distributed_timeout_minutes + 2 * _DISCARD_SECONDS

    @classmethod
    def opening_order(cls, args: Any, version: int) -> None:
        return None

    @classmethod
    def directory(cls, args: Any, version: int) -> Path:
        return directory_of(args.update_weight_disk_dir, version)

    @classmethod
    def fetching_order(cls, args: Any, version: int) -> Order | None:
        if args.update_weight_local_checkpoint_dir is None:
            return None
        return ("fetch_weights", str(cls.directory(args, version)))

    @classmethod
    def placing_order(cls, args: Any, version: int) -> Order:
        loaded = args.update_weight_local_checkpoint_dir or str(cls.directory(args, version))
        return ("update_weights_from_disk", loaded, str(version))

    def begin(self, version: int) -> None:
        """As of every transport.

        Raises:
            UserError: another run has the directory.
        """
        if self._source == 0 and not self._args.release_train:
            self._directory.claim()
        self._version, self._final = version, self.directory(self._args, version)
        self._draft, self._shards, self._writing = self._final.with_name(f".{self._final.name}"), 0, None
        self._written = []
        if self._source == 0:
            for left_by_a_failed_push in self._draft.parent.glob(".weight_v*"):
                shutil.rmtree(left_by_a_failed_push)
            self._draft.mkdir()

    def send(self, bucket: NamedTensors) -> None:
        path = self._draft / f"shard-{self._source:05d}-{self._shards:05d}"
        write = self._writer(path, bucket)
        self._wait()
        self._writing, self._shards = Background(write, f"writing {path}"), self._shards + 1

    def finish(self) -> None:
        """As of every transport.

        Raises:
            RunError: what another source has made cannot be seen from here.
        """
        self._wait()
        lists = [self._draft / f"shards-{source:05d}" for source in range(self._num_sources)]
        try:
            lists[self._source].write_text("".join(f"{name}\n" for name in self._written))
            if not self._is_last:
                return
            # A listing of a network disk may lack what another node has just written.
            shards = [name for path in lists for name in path.read_text().splitlines()]
            number_shards(self._draft, shards, self._index_metadata())
        except FileNotFoundError as error:
            raise RunError(
                f"{error.filename} is not there on every node: --update-weight-disk-dir has to be on a disk that all share"
            ) from error
        for path in lists:
            path.unlink()
        copy_auxiliary_files(self._args.hf_checkpoint, self._draft)
        fsync_tree(self._draft)
        replace_directory(self._draft, self._final)

    def discard(self) -> None:
        # Before a push has begun the draft may be another run's.
        if self._draft is None:
            return
        draft, writing, self._writing = self._draft, self._writing, None
        if writing is not None:
            writing.ended_within(_DISCARD_SECONDS)
        Background(lambda: shutil.rmtree(draft, ignore_errors=True), f"removing {draft}").ended_within(_DISCARD_SECONDS)

    def settle(self) -> None:
        if not self._is_last or self._args.update_weight_disk_keep_files:
            return
        # Also what engines were given a second time, and did not take.
        self._remove_others(chains={self._chain})
        # With `--release-train` who needs these weights later finds no trainer that could write them again.
        if not self._args.release_train:
            shutil.rmtree(self._final)

    def chain(self) -> str | None:
        return self._chain if self._is_last else None

    def continue_from(self, version: int, chain: str) -> None:
        # Engines of one host share their copy with those of the same chain only.
        self._directory.require(version, chain)
        self._chain = chain

    def _writer(self, path: Path, bucket: NamedTensors) -> Callable[[], Path | None]:
        """A function that writes a shard and returns its path, or None if it needs none; what it needs of the bucket
        lies on the CPU when it is made."""
        return write_shard(path, bucket)

    def _index_metadata(self) -> Mapping[str, Any]:
        return index_metadata(self._chain, self._version)

    def _remove_others(self, chains: Collection[str] | None = None) -> None:
        """Remove what other pushes have published, of these chains (None: of any); nothing else."""
        for other in self._final.parent.glob("weight_v*"):
            chain = chain_of(other)
            if other != self._final and chain is not None and (chains is None or chain in chains):
                shutil.rmtree(other)

    def _wait(self) -> None:
        """Return when the shard that is being written is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            limit = f"{self._timeout:.0f} s (--distributed-timeout-minutes)"
            writing.wait(self._timeout, f"a shard of weights is not written to {self._draft} within {limit}")
            if writing.result is not None:
                self._written.append(writing.result.name)
