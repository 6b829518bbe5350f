"""A server that lost one of its processes ends, and says which one and why; and whether its processes do anything.

SGLang's server is several processes: HTTP and tokenizer, scheduler (one per GPU), detokenizer. Without one of them it goes
on answering its health endpoint and every request with an error, or never.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from slime.utils.child_process import describe_exit_status

_POLL_SECONDS = 0.2
# In which all processes of the machine are looked through for those that a server has started meanwhile.
_SEARCH_SECONDS = 1.0
_EXIT_STATUS = 1
# A word of the command line by which `multiprocessing` starts the processes that it spawns.
_SPAWNED = "--multiprocessing-fork"


class WorkerWatch:
    """Watches the processes of a server. Stands in for `SubprocessWatchdog` of sglang 0.5.21, which knows only its direct
    children and ends the server by a signal of its own, so that nobody hears how the child had ended.

    Args:
        cause_path: file that takes the cause, for whoever started the server.
        processes, process_names: the children; an exit status of 0 is no death.
        end: called with the cause after it was written; by default it ends this process at once.
    """

    def __init__(
        self,
        cause_path: Path,
        processes: Sequence[BaseProcess],
        process_names: Sequence[str],
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._cause_path = cause_path
        self._children = list(zip(processes, process_names, strict=True))
        self._end = end or _end_this_process
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch: the children, and what they have started so far (a data-parallel controller its schedulers)."""
        helpers = {
            helper: f"{name} of {parent}"
            for child, parent in self._children
            for helper in _children_of(child.pid)
            if (name := _sglang_name(helper)) is not None
        }
        self._begin(helpers, searches=False)

    def start_early(self) -> None:
        """Begin to watch a server that is starting: the children, and schedulers of a data-parallel controller as they come."""
        self._begin({}, searches=True)

    def stop(self) -> None:
        """Watch no longer: the server is ending by itself."""
        self._stopped.set()

    def _begin(self, helpers: dict[psutil.Process, str], searches: bool) -> None:
        threading.Thread(target=self._watch, args=(helpers, searches), daemon=True, name="worker watch").start()

    def _watch(self, helpers: dict[psutil.Process, str], searches: bool) -> None:
        while not self._stopped.wait(_SEARCH_SECONDS if searches else _POLL_SECONDS):
            if searches:
                # Who was found stays: one that has ended has no name any more.
                helpers |= self._schedulers_of_controllers()
            for child, name in self._children:
                if not child.is_alive() and child.exitcode != 0:
                    return self._report(f"its {name} (process {child.pid}): {describe_exit_status(child.exitcode)}")
            for helper, name in helpers.items():
                if not _runs(helper):
                    status = _exit_status(helper)
                    end = " is gone" if status is None else f": {describe_exit_status(status)}"
                    return self._report(f"its {name} (process {helper.pid}){end}")

    def _schedulers_of_controllers(self) -> dict[psutil.Process, str]:
        """Not what schedulers start: that has their name for a moment too, until it is another program."""
        found = {}
        for child, parent in self._children:
            try:
                process = psutil.Process(child.pid)
                helpers = process.children() if _sglang_name(process) == "data_parallel_controller" else []
            except psutil.NoSuchProcess:
                continue
            names = {helper: _scheduler_name(helper) for helper in helpers}
            found |= {helper: f"{name} of {parent}" for helper, name in names.items() if name is not None}
        return found

    def _report(self, cause: str) -> None:
        if self._stopped.is_set():
            return
        # The disk may be full, which may be what the process died of: then the log alone tells.
        with contextlib.suppress(OSError):
            # Renamed when it is whole: the reader looks as soon as this process has ended, or while it ends.
            draft = self._cause_path.with_suffix(".draft")
            draft.write_text(cause)
            draft.rename(self._cause_path)
        self._end(cause)


def computing_seconds(server_pid: int) -> float:
    """Processor seconds that the server's schedulers have used so far, and whatever they have started: compilers, loaders.

    0 while one of its processes is stopped: whatever the others compute, nothing comes of it.
    """
    seconds = 0.0
    for process in _children_of(server_pid):
        try:
            if process.status() == psutil.STATUS_STOPPED:
                return 0.0
            times, name = process.cpu_times(), _sglang_name(process)
        except psutil.Error:
            continue
        if name is None or name.startswith("scheduler"):
            # What children computed that have ended counts, too.
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def host_memory_gib(server_pid: int) -> float:
    """GiB of the host's memory that the server has, and all that it has started. Pages that they share count for each."""
    total = 0
    for pid in (server_pid, *(process.pid for process in _children_of(server_pid))):
        with contextlib.suppress(psutil.Error):
            total += psutil.Process(pid).memory_info().rss
    return total / 2**30


def _end_this_process(cause: str) -> None:
    try:
        print(f"the server ends: {cause}", file=sys.stderr, flush=True)
    finally:
        os._exit(_EXIT_STATUS)


def _children_of(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _sglang_name(process: psutil.Process) -> str | None:
    """The name that sglang gives a process of a server; None for compilers and other helpers that come and go."""
    try:
        title = process.cmdline()[:1]
    except psutil.Error:
        return None
    return title[0].removeprefix("sglang::") if title and title[0].startswith("sglang::") else None


def _scheduler_name(process: psutil.Process) -> str | None:
    """The name of a scheduler, by which what else a data-parallel controller starts has none. One that is spawned, as where
    there are GPUs, imports for many seconds before sglang gives it its name."""
    name = _sglang_name(process)
    if name is not None:
        return name if name.startswith("scheduler") else None
    with contextlib.suppress(psutil.Error):
        return "scheduler" if _SPAWNED in process.cmdline() else None
    return None


def _exit_status(process: psutil.Process) -> int | None:
    """The exit status of an ended process that somebody else has started, negative for a signal; None once that one has asked
    for it: then the kernel tells it nobody else. A data-parallel controller of sglang 0.5.21 does not ask while it serves."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # State and status as `waitpid` gives it are the first and the last field behind the name; see proc_pid_stat(5).
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
