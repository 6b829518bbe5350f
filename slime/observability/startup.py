"""Where the seconds of a start go: from the start of the process to the first generated sample."""

import os
import time

from slime.utils.misc import SingletonMeta


class StartupClock(metaclass=SingletonMeta):
    """Names the stretches between milestones; the first one begins with the process itself. One per process."""

    def __init__(self) -> None:
        self._started = self._last = _process_start()
        self._stretches: list[tuple[str, float]] = []
        self._closed = False

    def mark(self, name: str) -> None:
        """End the current stretch and call it `name`. Nothing after `close`."""
        if not self._closed:
            now = time.time()
            self._stretches.append((name, now - self._last))
            self._last = now

    def close(self, name: str) -> str | None:
        """End the last stretch. Returns the line to print, None when it was closed before."""
        if self._closed:
            return None
        self.mark(name)
        self._closed = True
        parts = ", ".join(f"{stretch} {seconds:.1f}" for stretch, seconds in self._stretches)
        return f"first sample {self._last - self._started:.1f} s after the start (seconds: {parts})"


def _process_start() -> float:
    """Start of this process, seconds since the epoch."""
    with open("/proc/self/stat") as stat:
        # The command in parentheses may hold spaces; field 22 counts from the start of the line.
        ticks = int(stat.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as uptime:
        since_boot = float(uptime.read().split()[0])
    return time.time() - since_boot + ticks / os.sysconf("SC_CLK_TCK")
