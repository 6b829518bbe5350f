"""Progress of the one long task that a process works on, readable from another thread.

A generation loop calls `start_progress`, `advance` and `close`; the driver asks the rollout manager for
`progress_snapshot()` and draws the bar, so that nothing is drawn by a process whose terminal nobody sees.
"""

import threading

_lock = threading.Lock()
_current: "Progress | None" = None


class Progress:
    """A counter from 0 to `total`. Usable as a context manager that closes itself."""

    def __init__(self, description: str, total: int) -> None:
        self.description = description
        self.total = total
        self.done = 0

    def advance(self, n: int = 1) -> None:
        with _lock:
            self.done += n

    def close(self) -> None:
        global _current
        with _lock:
            if _current is self:
                _current = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def start_progress(description: str, total: int) -> Progress:
    """Announce a task of `total` units; it replaces the one announced before."""
    global _current
    progress = Progress(description, total)
    with _lock:
        _current = progress
    return progress


def progress_snapshot() -> tuple[str, int, int] | None:
    """(description, done, total) of the current task, or None when nothing is in progress."""
    with _lock:
        return None if _current is None else (_current.description, _current.done, _current.total)
