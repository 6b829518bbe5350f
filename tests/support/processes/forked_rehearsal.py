"""Rehearsed ranks as forks of one process that has already imported what all of them need.

    with prepared(stand_in.library) as module:
        rehearse_rank(args, rank, batches, stand_in, module)

The imports take most of the time of a rehearsal of a tiny model. `rehearse_rank` then starts this file, which hands its task to
that process and ends with the status of the fork that rehearses the rank.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from slime.rehearsal import rank
from slime.utils.child_process import ChildProcess, environment_for_python, exit_when_parent_dies
from tests.support.processes.waiting import wait_until

# The variable with the path of the socket on which the process listens.
_PLACE = "TEST_REHEARSALS_SOCKET"
_PATH_BYTES = 4096


@contextlib.contextmanager
def prepared(library: Path | None) -> Iterator[str]:
    """Yields the module that ranks run in the block. For fake CPU tensors it is the usual one, which imports by itself."""
    if library is None:
        yield rank.__name__
        return
    # The paths of Unix sockets must stay short.
    with tempfile.TemporaryDirectory(prefix="rehearsals-", dir="/tmp") as directory:
        place = Path(directory, "socket")
        command = [sys.executable, "-W", "ignore", "-m", __name__, "--listen", str(place), str(library)]
        environment = {**environment_for_python(), "CUDA_VISIBLE_DEVICES": ""}
        process = ChildProcess("the original of the ranks", command, Path(directory, "log"), environment)
        process.start()
        try:
            wait_until(lambda: place.exists() or process.poll() is not None, 120)
            assert process.poll() is None, process.describe_end()
            with mock.patch.dict(os.environ, {_PLACE: str(place)}):
                yield __name__
        finally:
            process.terminate(0)


def listen(place: Path, library: Path) -> None:
    """Import what ranks need, then fork for each task that arrives, one after the other."""
    exit_when_parent_dies()
    rank.prepare(library)
    gc.disable()
    import torch

    from slime.rehearsal import actor, fake_device, recorder  # noqa: F401
    from tests.support.processes.trainer_imports import import_trainer

    # A rank finds torch.cuda like this when it imports Megatron.
    with mock.patch.multiple(torch.cuda, **fake_device.torch_cuda_lifts(recorder.Recorder("cuda"))):
        import_trainer()
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        draft = place.with_suffix(".draft")
        listener.bind(str(draft))
        listener.listen()
        # The path appears only when the socket accepts connections.
        draft.rename(place)
        while True:
            asking, _ = listener.accept()
            with asking:
                copy = os.fork()
                if copy == 0:
                    _rehearse(asking)
            os.waitpid(copy, 0)


def _rehearse(asking: socket.socket) -> None:
    """Rehearse a rank in a fork. It writes to the output of the asking program and ends when that program ends."""
    file, streams, *_ = socket.recv_fds(asking, _PATH_BYTES, 2)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    threading.Thread(target=lambda: asking.recv(1) or os._exit(1), daemon=True).start()
    status = 1
    try:
        rank.answer(pickle.loads(Path(os.fsdecode(file)).read_bytes()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        asking.send(bytes([status]))
        os._exit(status)


def hand_on(file: str) -> int:
    """Hand on the task of `file`. Returns the exit status of the fork that rehearses it."""
    exit_when_parent_dies()
    with socket.socket(socket.AF_UNIX) as original:
        original.connect(os.environ[_PLACE])
        socket.send_fds(original, [os.fsencode(file)], [1, 2])
        return (original.recv(1) or b"\x01")[0]


if __name__ == "__main__":
    if sys.argv[1] == "--listen":
        listen(*map(Path, sys.argv[2:]))
    else:
        sys.exit(hand_on(sys.argv[1]))
