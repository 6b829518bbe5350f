"""Weights from training ranks to the engines as a Hugging Face checkpoint in `--update-weight-disk-dir`, which they share.

Every source writes its buckets as shards into a hidden directory, and a list of their names. The last source, which opens all
of them by name, publishes the directory as `weight_v{version}`, whole. Engines load it at once, from there or from a copy on
their host. An engine that fails may have a mixture of new and old tensors; it is left out of the push.

The first source holds a lock on `--update-weight-disk-dir` as long as the run lives, since another run would publish under the
same names. If the trainer ends between pushes (`--release-train`), a process beside it holds the lock.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger(__name__)

_DISCARD_SECONDS = 30.0


def _remove(directory: Path) -> None:
    """Remove what is published no more. Where an engine still has files open they may stay: no reason for a push to fail."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning(
            "%s could not be removed: %s; remove it when the run has ended, if it is still there", directory, error
        )


class DiskTransport(Transport):
    """A shard per bucket; the next bucket is made while the last one is written."""

    def __init__(self, args: Any, source: int, num_sources: int) -> None:
        self._args = args
        self._source, self._num_sources, self._is_last = source, num_sources, source == num_sources - 1
        self._timeout = 60.0 * args.distributed_timeout_minutes
        # Distinguishes the pushes of this trainer's life from those of others.
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
        """See `Transport.begin`.

        Raises:
            UserError: another run uses the directory.
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
        """See `Transport.finish`.

        Raises:
            RunError: shards of another source cannot be seen from this machine.
        """
        self._wait()
        lists = [self._draft / f"shards-{source:05d}" for source in range(self._num_sources)]
        try:
            lists[self._source].write_text("".join(f"{name}\n" for name in self._written))
            if not self._is_last:
                return
            # Files are opened by name, because a listing of a network disk may lack those that another node has just written.
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
        # Without a draft no push has begun, and files that are there may be another run's.
        if self._draft is None:
            return
        draft, writing, self._writing = self._draft, self._writing, None
        if writing is not None:
            writing.ended_within(_DISCARD_SECONDS)
        Background(lambda: shutil.rmtree(draft, ignore_errors=True), f"removing {draft}").ended_within(_DISCARD_SECONDS)

    def settle(self) -> None:
        if not self._is_last or self._args.update_weight_disk_keep_files:
            return
        # These include files that were published a second time for engines that could not use them.
        self._remove_others(chains={self._chain})
        # With `--release-train` the files stay, since later there may be no trainer that could write these weights again.
        if not self._args.release_train:
            _remove(self._final)

    def chain(self) -> str | None:
        return self._chain if self._is_last else None

    def continue_from(self, version: int, chain: str) -> None:
        # The chain must stay the same, since the engines of a host share their copy only within one chain.
        self._directory.require(version, chain)
        self._chain = chain

    def _writer(self, path: Path, bucket: NamedTensors) -> Callable[[], Path | None]:
        """A function that writes a shard and returns its path, or None if there is nothing to write. When it is made, all that
        it needs of the bucket is on the CPU."""
        return write_shard(path, bucket)

    def _index_metadata(self) -> Mapping[str, Any]:
        return index_metadata(self._chain, self._version)

    def _remove_others(self, chains: Collection[str] | None = None) -> None:
        """Remove the publications of other pushes of these chains (None: of any chain), and nothing else."""
        for other in self._final.parent.glob("weight_v*"):
            chain = chain_of(other)
            if other != self._final and chain is not None and (chains is None or chain in chains):
                _remove(other)

    def _wait(self) -> None:
        """Return when the shard that is being written is on disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            limit = f"{self._timeout:.0f} s (--distributed-timeout-minutes)"
            writing.wait(self._timeout, f"a shard of weights is not written to {self._draft} within {limit}")
            if writing.result is not None:
                self._written.append(writing.result.name)
