"""A conversion in units: several processes write them, finished units are not done twice, and the result appears whole.

A conversion writes into a hidden directory beside its target. Each unit, a share of the tensors, becomes a file there; when the
file is on the disk a note of it is written. If a conversion was killed, or met a full disk, the same command goes on from these
notes. A unit whose file is not as noted is done again, and another source or other options start from nothing. At the end the
directory gets the name of the target.

A process holds one tensor at a time, so memory does not depend on the size of the model.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from slime.utils.errors import RunError, UserError
from slime.utils.filesystem import (
    claim_directory,
    fsync_directory,
    fsync_tree,
    replace_directory,
    write_json_atomically,
)
from slime.weights.hf_reader import safetensors_dtype

if TYPE_CHECKING:
    import torch

# Hidden, so that nobody takes them for a part of the checkpoint.
_PLAN, _NOTES, _LOCK = ".plan.json", ".finished", ".lock"
# The keys of a unit's note; notes of another form are not read.
_NOTED = ("file", "bytes", "result")
# Fewer bytes are not worth a unit of their own.
LEAST_UNIT_BYTES = 256 * 1024**2
# Room in the header of a safetensors file: for itself, and for each tensor beside its name.
_HEADER_BYTES, _ENTRY_BYTES = 4096, 256
ALIGNMENT = 8
# The first tensor starts at a multiple of this, because copies to another offset within a page go at half the speed.
_PAGE = 4096


@dataclasses.dataclass(frozen=True)
class Unit:
    """The tensors that one process converts in one go: their `names`, and about how many bytes they have together."""

    index: int
    names: tuple[str, ...]
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of `source` to `target`. The result also depends on `options` and on the files of the directories
    `also_read`. `force`: an existing target is replaced."""

    source: Path
    target: Path
    options: dict[str, Any]
    workers: int = 1
    force: bool = False
    also_read: Sequence[Path] = ()

    @property
    def draft(self) -> Path:
        return self.target.with_name(f".{self.target.name}.converting")

    def run(
        self,
        units: Sequence[Unit],
        write: Callable[[Path, Unit], tuple[Path, Any]],
        finish: Callable[[Path, list[Any]], None],
        reopen: Callable[[Path], None] = lambda draft: None,
    ) -> list[Any]:
        """Write all units, call `finish`, and publish the target. Returns the results of `write` for the units, in their order.

        Args:
            units: the units; an attempt that resumes an earlier one uses the units of that, whatever its number of workers.
            write: writes a unit as a file of the directory, in a process that has nothing but this function and its arguments.
                Returns the file, which is synced here, and what `finish` needs to know of it, in JSON's types.
            finish: makes a checkpoint of the units; called again if it was interrupted.
            reopen: gives files of units that an interrupted `finish` has renamed the names that `write` gave them.

        Raises:
            UserError: the target is a directory that is read, lies inside it or contains it; it exists already, or cannot be
                made; or another process writes it.
            RunError: something could not be written; the message says what is left for the next attempt.
        """
        self._refuse()
        draft = self.draft
        try:
            is_claimed = claim_directory(draft)
        except OSError as error:
            raise UserError(f"{self.target} cannot be made: {error}; give another directory") from error
        if not is_claimed:
            raise UserError(f"another process is converting to {self.target}")
        draft.mkdir(exist_ok=True)
        try:
            reopen(draft)
            units, finished = self._resumed(units)
            with tqdm(total=sum(unit.nbytes for unit in units), unit="B", unit_scale=True, disable=None) as bar:
                bar.set_description(self.target.name)
                bar.update(sum(unit.nbytes for unit in units if unit.index in finished))
                for unit, file, result in self._write([unit for unit in units if unit.index not in finished], write):
                    noted = (str(file.relative_to(draft)), file.stat().st_size, result)
                    note = draft / _NOTES / f"{unit.index:05d}.json"
                    write_json_atomically(note, dict(zip(_NOTED, noted, strict=True)))
                    finished[unit.index] = result
                    bar.update(unit.nbytes)
            results = [finished[unit.index] for unit in units]
            finish(draft, results)
            fsync_tree(draft)
            replace_directory(draft, self.target)
            # The notes go last, so that the next attempt can go on with them whatever fails before.
            shutil.rmtree(self.target / _NOTES)
            for name in (_PLAN, _LOCK):
                (self.target / name).unlink(missing_ok=True)
            return results
        except UserError:
            raise
        except BrokenProcessPool as error:
            raise self._failure("a process was killed (out of memory?); give fewer --max-workers") from error
        except Exception as error:
            raise self._failure(str(error)) from error

    def _failure(self, what: str) -> RunError:
        free = shutil.disk_usage(self.target.parent).free / 1e6
        return RunError(
            f"{self.target} could not be written: {what}. {free:.0f} MB are free there. What is finished waits in "
            f"{self.draft}: the same command goes on with it"
        )

    def _refuse(self) -> None:
        target = self.target.resolve()
        for read in (self.source, *self.also_read):
            source = read.resolve()
            if target == source or source in target.parents or target in source.parents:
                raise UserError(f"{self.target} is the source {read}, or one lies in the other; give another directory")
        if self.target.exists() and not self.force:
            raise UserError(f"{self.target} exists already; give another directory, or --force to replace it")

    def _resumed(self, units: Sequence[Unit]) -> tuple[list[Unit], dict[int, Any]]:
        """(units, results by the number of each finished one) of an earlier attempt at the same conversion; if there is none,
        `units` and no results."""
        plan = {
            "source": _files(self.source),
            "also_read": [[str(directory.resolve()), _files(directory)] for directory in self.also_read],
            "options": self.options,
            "names": [name for unit in units for name in unit.names],
            "noted": _NOTED,
        }
        plan, file = json.loads(json.dumps(plan)), self.draft / _PLAN
        try:
            stored = json.loads(file.read_text())
        except (OSError, ValueError):
            stored = {}
        if {name: stored.get(name) for name in plan} != plan:
            for path in self.draft.iterdir():
                if path.name != _LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            (self.draft / _NOTES).mkdir()
            stored = {**plan, "units": [[len(unit.names), unit.nbytes] for unit in units]}
            write_json_atomically(file, stored)
        names, units = iter(plan["names"]), []
        for count, nbytes in stored["units"]:
            units.append(Unit(len(units), tuple(itertools.islice(names, count)), nbytes))
        finished = {}
        for note in (self.draft / _NOTES).glob("*.json"):
            name, nbytes, result = map(json.loads(note.read_text()).get, _NOTED)
            file = self.draft / name
            if file.is_file() and file.stat().st_size == nbytes:
                finished[int(note.stem)] = result
            else:
                # Removed now, because while the unit is done again its file may have the noted size before it is whole.
                note.unlink()
        fsync_directory(self.draft / _NOTES)
        return units, finished

    def _write(
        self, units: Sequence[Unit], write: Callable[[Path, Unit], tuple[Path, Any]]
    ) -> Iterator[tuple[Unit, Path, Any]]:
        """(unit, file, result) of each unit, as soon as its file is on the disk."""
        workers = min(self.workers, len(units))
        if workers <= 1:
            for unit in units:
                file, result = write(self.draft, unit)
                self._bring_to_disk(file)
                yield unit, file, result
            return
        pool = concurrent.futures.ProcessPoolExecutor(
            workers, multiprocessing.get_context("forkserver"), _start_worker, (write, self.draft)
        )

        def convert(unit: Unit) -> tuple[Path, Any]:
            file, result = pool.submit(_write_unit, unit).result()
            self._bring_to_disk(file)
            return file, result

        # While a file goes to the disk, its worker makes the next one.
        threads = concurrent.futures.ThreadPoolExecutor(2 * workers)
        try:
            waiting, failure = {threads.submit(convert, unit): unit for unit in units}, None
            while waiting:
                ended, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    unit = waiting.pop(future)
                    if future.exception() is None:
                        yield unit, *future.result()
                    elif failure is None:
                        # Units that are being written are finished; no others begin.
                        failure = future.exception()
                        waiting = {other: its for other, its in waiting.items() if not other.cancel()}
            if failure is not None:
                raise failure
        finally:
            # This also runs after Ctrl-C.
            threads.shutdown(wait=False, cancel_futures=True)
            pool.shutdown(wait=False, cancel_futures=True)

    def _bring_to_disk(self, file: Path) -> None:
        """Sync `file` of the draft and its name, so that no power loss after the note of it can take it away."""
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
        for directory in file.parents:
            fsync_directory(directory)
            if directory == self.draft:
                break


def start_server(workers: int, module: str) -> None:
    """Start the process from which workers are forked, if there will be several. It imports what they use while the caller
    plans.

    Args:
        module: the module of `tools` that the workers run.
    """
    if workers < 2:
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tools.conversion.worker_imports", module])
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # It must not look for modules first in the user's directory, which may have another `tools`. Large pages save most of the
    # cost of new memory; torch asks for them at its first allocation.
    given = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _files(directory: Path) -> list[tuple[str, int, int]]:
    """(path, size, time of the last change) of all files below `directory`."""
    found = [(path, path.stat()) for path in sorted(directory.rglob("*")) if path.is_file()]
    return [(str(path.relative_to(directory)), state.st_size, state.st_mtime_ns) for path, state in found]


# In a worker: (the function that writes a unit, the directory to which it writes).
_work: list[Any] = []


def _start_worker(write: Callable[[Path, Unit], tuple[Path, Any]], draft: Path) -> None:
    import torch

    # Ctrl-C ends a worker too; otherwise it would hand on the interrupt and take the next unit.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # One thread each, because the number of processes already is that of the work to be done at once.
    torch.set_num_threads(1)
    # Given once, because it is large for a large model, and with each unit it would be sent again.
    _work[:] = write, draft
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        while not multiprocessing.connection.wait([parent.sentinel], timeout=60):
            pass
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _write_unit(unit: Unit) -> tuple[Path, Any]:
    write, draft = _work
    return write(draft, unit)


def split_into_units(sizes: Iterable[tuple[str, int]], workers: int, largest: int) -> list[Unit]:
    """Consecutive tensors (name, bytes) in units of at most `largest` bytes, and in enough units to keep `workers` busy. A
    larger tensor is a unit of its own.

    Raises:
        UserError: `workers` or `largest` is below 1.
    """
    if workers < 1:
        raise UserError(f"--max-workers {workers}: at least one process has to convert")
    if largest < 1:
        raise UserError(f"--chunk-size {largest}: a file has a size above 0, in bytes")
    sizes = list(sizes)
    limit = min(largest, max(-(-sum(size for _, size in sizes) // (2 * workers)), LEAST_UNIT_BYTES))
    units: list[Unit] = []
    names: list[str] = []
    total = 0
    for name, size in sizes:
        if names and total + size > limit:
            units.append(Unit(len(units), tuple(names), total))
            names, total = [], 0
        names.append(name)
        total += size
    return [*units, Unit(len(units), tuple(names), total)]


def write_streamed_shard(
    path: Path, named_tensors: Iterable[tuple[str, torch.Tensor | Iterable[torch.Tensor]]], count: int
) -> None:
    """Write a safetensors file tensor by tensor.

    The header, which comes first, is written last, into room that is kept for it. Tensors lie at multiples of 8 bytes, except
    those whose size is not such a multiple, which are kept until the end.

    Args:
        named_tensors: a tensor may be given as parts with consecutive rows: as a list or, if together they fill a multiple of
            8 bytes, as an iterator, of which one part at a time is in memory.
        count: the largest number of names, none of them longer than 256 bytes.
    """
    import torch

    room = -(-(_HEADER_BYTES + 2 * _ENTRY_BYTES * count) // _PAGE) * _PAGE - 8
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    uneven: list[tuple[str, list[torch.Tensor]]] = []

    def put(name: str, parts: Iterable[torch.Tensor]) -> None:
        if name in header:
            raise RunError(f"tensor {name} occurs twice")
        start, rows = file.tell() - 8 - room, 0
        for part in parts:
            rows += len(part) if part.ndim else 0
            # Written as bytes, since numpy knows neither bfloat16 nor float8; with stride 1, because a single entry counts as
            # contiguous with any stride, but its bytes do not.
            whole = part.detach().cpu().contiguous().as_strided((part.numel(),), (1,))
            file.write(memoryview(whole.view(torch.uint8).numpy()))
        offsets = [start, file.tell() - 8 - room]
        header[name] = {
            "dtype": safetensors_dtype(part.dtype), "shape": [rows, *part.shape[1:]][: part.ndim], "data_offsets": offsets,
        }  # fmt: skip

    with open(path, "wb") as file:
        file.seek(8 + room)
        for name, given in named_tensors:
            parts = [given] if isinstance(given, torch.Tensor) else given
            if isinstance(parts, list) and sum(part.nbytes for part in parts) % ALIGNMENT:
                uneven.append((name, [part.clone() for part in parts]))
            else:
                put(name, parts)
        for name, parts in sorted(uneven, key=lambda item: -item[1][0].element_size()):
            put(name, parts)
        text = json.dumps(header).encode()
        if len(text) > room:
            raise RunError(f"{path}: names of {count} tensors do not fit its header")
        file.seek(0)
        file.write(room.to_bytes(8, "little") + text.ljust(room))
