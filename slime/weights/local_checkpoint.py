"""The checkpoint that a host of engines keeps for them, and updates to each new version before they are paused.

Invariants:
- `.slime-state.json` says of which publication the files are. It is removed before a file changes, and written after all have.
- If the files are the base of the new publication they are patched. Otherwise they are built anew: from the last whole
  publication, or `--hf-checkpoint`, and the deltas since. Bytes are written only if their digest is right.
- The state names the boot of the machine. Until the machine stops, writes of processes that have died are not lost, so files
  need not be synced.
- The engines of a host share the directory, and the first one does the work. Two runs cannot share it, nor can anybody share it
  with an engine that has it `alone`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import free_room, write_json_atomically
from slime.utils.plugin_loader import call_plug_in
from slime.weights import delta_encoding
from slime.weights.buckets import split_into_buckets
from slime.weights.hf_reader import (
    Place,
    SafetensorsDirectory,
    fused_ending,
    places_of_checkpoint,
    places_of_tensors,
    read_bytes,
)
from slime.weights.hf_writer import copy_auxiliary_files, number_shards, write_shard
from slime.weights.publication import CHECKPOINT, Patch, Publication, patches_of_metadata, version_in

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FLAG = "--update-weight-local-checkpoint-dir"
_HOOK_FLAG = "--sglang-custom-pull-weights-pre-read-hook"
_STATE, _TURN, _RUN = ".slime-state.json", ".slime-turn", ".slime-run"
_POLL_SECONDS = 0.05
_SHARD_BYTES = 1024**3
_THREADS = 8
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Unusable(RunError):
    """The directory cannot be updated by the publication, which has to be published whole."""


class LocalCheckpoint:
    """The directory, as used by one engine's process.

    Args:
        hf_checkpoint: the base of the first delta of a chain.
        timeout: how long, in seconds, another engine of the host may take to do the work.
        before_read: path of the user's function `fn(source_dir, target_version)`, called before a published file is read, for
            a store that must be asked before it shows what others wrote.
        alone: nobody else may use the directory, not even engines of the same run, since they may load it while it changes.
    """

    def __init__(
        self,
        directory: str | Path,
        hf_checkpoint: str | Path,
        timeout: float,
        before_read: str | None = None,
        *,
        alone: bool = False,
    ) -> None:
        self._before_read, self._alone = before_read, alone
        self._directory, self._hf_checkpoint = Path(directory), Path(hf_checkpoint)
        self._timeout = timeout
        # Held until this process ends; by it engines of another run see that the directory is in use.
        self._run_lock: int | None = None

    def bring_to(self, published: Path) -> str | None:
        """Update the directory to the weights in `published`. Returns why these have to be published whole, if they have to.

        Raises:
            UserError: another run uses the directory, or an engine that has it alone; it holds files that no run has written;
                the user's function raised.
            RunError: it cannot be written (the disk is full), or another engine of the host takes too long.
        """
        from safetensors import SafetensorError

        try:
            with self._turn():
                self._call_before_read(published)
                wanted = _published(lambda: Publication.read(published))
                self._share_with(wanted.chain)
                if self._state() != _identity(wanted.chain, wanted.version):
                    self._make(wanted)
        except Unusable as error:
            return str(error)
        except (OSError, SafetensorError) as error:
            # What writes tensors tells the number of the system's error in its text alone.
            is_full = os.strerror(errno.ENOSPC) in str(error)
            free = f". {free_room(self._directory)}; make room there, or name a directory on another disk"
            advice = free if is_full else ""
            raise RunError(f"{_FLAG} {self._directory}: {error}{advice}") from error
        return None

    def _call_before_read(self, published: Path) -> None:
        if self._before_read is not None:
            version = version_in(published)
            call_plug_in(_HOOK_FLAG, self._before_read, f"weights {version}", str(published), version)

    def close(self) -> None:
        """Release the directory. Other runs can use it when all engines of the host have released it."""
        if self._run_lock is not None:
            os.close(self._run_lock)
            self._run_lock = None

    def _make(self, wanted: Publication) -> None:
        base = wanted.base_version
        if base is not None and self._state() == _identity(wanted.chain, base):
            try:
                self._patch([wanted])
                return
            except Unusable as error:
                logger.warning("%s %s is built anew: %s", _FLAG, self._directory, error)
        steps = _steps_to(wanted)
        if steps[0].base_version is None:
            source, steps = steps[0].directory, steps[1:]
            # This also checks that the publication is complete.
            _published(functools.partial(places_of_checkpoint, source))
        else:
            source = self._hf_checkpoint
        self._copy(source)
        self._patch(steps)
        self._write_state(wanted)

    def _copy(self, source: Path) -> None:
        """Replace all weights by those of `source`, with the files beside them. Experts that it stacks get a tensor each, as
        they have in pushes."""
        self._forget()
        for old in self._directory.iterdir():
            if old.is_file() and not old.name.startswith(".slime-"):
                old.unlink()
        places = places_of_checkpoint(source)
        copy_auxiliary_files(source, self._directory)
        if any(fused_ending(name) is not None for name in places):
            self._write_apart(SafetensorsDirectory(source))
            return
        for path in sorted({place.path for place in places.values()}):
            shutil.copyfile(path, self._directory / path.name)
        for index in source.glob("*.index.json"):
            shutil.copyfile(index, self._directory / index.name)

    def _write_apart(self, stored: SafetensorsDirectory) -> None:
        tensors, shards = ((name, stored.tensor(name)[...]) for name in sorted(stored.names())), []
        for bucket in split_into_buckets(tensors, _SHARD_BYTES):
            shards.append(f"shard-{len(shards):05d}")
            write_shard(self._directory / shards[-1], bucket)()
        number_shards(self._directory, shards)

    def _patch(self, steps: list[Publication]) -> None:
        """Apply deltas, the oldest first."""
        if not steps:
            return
        self._forget()
        places = places_of_checkpoint(self._directory)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            for step in steps:
                patched = [pool.submit(_patch_tensor, step, places.get(name), *of_tensor)
                           for name, *of_tensor in _changes(step)]  # fmt: skip
                for one in patched:
                    one.result()
        self._write_state(steps[-1])

    # -- state and locks --------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, str | int]:
        try:
            return json.loads((self._directory / _STATE).read_text())
        except (OSError, ValueError):
            return {}

    def _write_state(self, publication: Publication) -> None:
        write_json_atomically(self._directory / _STATE, _identity(publication.chain, publication.version))

    def _forget(self) -> None:
        (self._directory / _STATE).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """In the block, no other engine of the run works on the directory."""
        self._directory.mkdir(parents=True, exist_ok=True)
        turn = self._directory / _TURN
        # The order of these checks matters: another engine of the run may create its first file, `turn`, between them.
        if any(self._directory.iterdir()) and not turn.exists():
            raise UserError(f"{_FLAG} {self._directory} holds files that no run has written; name an empty directory")
        descriptor = os.open(turn, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + self._timeout
            while not _lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise RunError(
                        f"{_FLAG} {self._directory}: another engine of this host has not brought it to the new weights within "
                        f"{self._timeout:.0f} s (--engine-load-timeout)"
                    )
                # Polled, because the kernel's own wait for a lock has no time limit.
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _share_with(self, chain: str) -> None:
        """Share the directory with the other engines of the run whose trainer publishes `chain`.

        Raises:
            UserError: engines of another run, or one that has it alone, use it; their files would change under them.
        """
        if self._run_lock is None:
            self._run_lock = os.open(self._directory / _RUN, os.O_RDWR | os.O_CREAT, 0o666)
        is_new = os.pread(self._run_lock, len(chain) + 1, 0) != chain.encode()
        if not _lock(self._run_lock, fcntl.LOCK_EX if is_new or self._alone else fcntl.LOCK_SH):
            raise UserError(
                f"{_FLAG} {self._directory}: another run has its weights here; end that run, or name another directory"
            )
        if is_new:
            os.ftruncate(self._run_lock, 0)
            os.pwrite(self._run_lock, chain.encode(), 0)
        if not self._alone:
            _lock(self._run_lock, fcntl.LOCK_SH)


def _identity(chain: str, version: int) -> dict[str, str | int]:
    return {"chain": chain, "version": version, "boot": _BOOT.read_text().strip() if _BOOT.exists() else ""}


def _lock(descriptor: int, kind: int) -> bool:
    """Try to take a lock. Returns whether it is held; on a file system without locks always True."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _steps_to(wanted: Publication) -> list[Publication]:
    """The publications that lead to `wanted`, from a whole one, or from the first delta on `--hf-checkpoint`."""
    steps = [wanted]
    while steps[0].base_version not in (None, CHECKPOINT):
        steps.insert(0, _published(steps[0].base))
    return steps


def _published(read: Callable[[], _T]) -> _T:
    """The result of `read`, which reads published files; raises Unusable if they are missing or damaged."""
    try:
        return read()
    except (OSError, RunError, UserError) as error:
        raise Unusable(str(error)) from error


def _changes(step: Publication) -> Iterator[tuple[str, Place, Patch | None]]:
    """Every tensor of a publication: its name, its place there, and its patch if it is published as one."""
    for file in step.files:
        places, metadata = _published(functools.partial(places_of_tensors, step.directory / file))
        patches = patches_of_metadata(metadata)
        for name, place in places.items():
            yield name, place, patches.get(name)


def _patch_tensor(step: Publication, target: Place | None, source: Place, patch: Patch | None) -> None:
    if target is None:
        raise Unusable(f"{source.path} changes a tensor that is not there")
    published = _published(functools.partial(read_bytes, source))
    if patch is None:
        if (target.dtype, target.shape) != (source.dtype, source.shape):
            raise Unusable(f"{source.path} has another dtype or shape of a tensor than {target.path}")
        new = published
    else:
        try:
            new = delta_encoding.apply(patch.encoding, published.tobytes(), read_bytes(target))
        except ValueError as error:
            raise Unusable(f"{source.path} cannot be applied to {target.path}: {error}") from error
        if delta_encoding.digest(step.digest_kind, new) != patch.digest:
            raise Unusable(f"{source.path} makes other bytes of {target.path} than the trainer has")
    # Written, not mapped: with a full disk a write raises an error, whereas a mapped file ends the process by a signal.
    with open(target.path, "r+b", buffering=0) as file:
        view = memoryview(new)
        while len(view):
            written = os.pwrite(file.fileno(), view, target.stop - len(view))
            view = view[written:]
