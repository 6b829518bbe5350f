"""Memory that another process maps: what it sees there, and that nothing of it stays."""

import base64
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.multiprocessing

from slime.utils.errors import RunError
from slime.weights.buckets import BucketFlattener
from slime.weights.transports.shared_handles import SharedMemory, handle_of
from tests.support.processes.waiting import runs, wait_until

READ = """
import base64, pickle, sys
import torch

for line in sys.stdin:
    found = pickle.loads(base64.b64decode(line))
    buffer = found["flattened_tensor"]
    sums = {}
    for entry in found["metadata"]:
        tensor = buffer[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape)
        # In pieces: torch sums a copy in the wider dtype, which the C library keeps for the next one, or does not.
        pieces = [piece.sum(dtype=torch.float64).item() for piece in tensor.flatten().split(2**14)]
        sums[entry.name] = (str(tensor.dtype), tuple(tensor.shape), sum(pieces))
        del tensor
    del found, buffer
    print(sums, flush=True)
"""


class Reader:
    """A process of its own that opens handles, and lets go of the memory before it answers."""

    def __init__(self, program=READ):
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def give(self, handle):
        self.process.stdin.write(handle + "\n")
        self.process.stdin.flush()

    def read(self, handle):
        self.give(handle)
        return eval(self.process.stdout.readline())

    def end(self):
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(scope="module")
def reader():
    reader = Reader()
    yield reader
    reader.end()


@pytest.fixture
def memory():
    return SharedMemory()


def files():
    """Shared memory of this process, in bytes by name."""
    found = Path("/dev/shm").glob(f"torch_{os.getpid()}_*")
    return {path.name: path.stat().st_blocks * 512 for path in found}


def test_a_reader_sees_every_tensor_of_a_bucket_in_its_dtype(memory, reader):
    strategy = torch.multiprocessing.get_sharing_strategy()
    bucket = [
        ("a", torch.full((3,), 2, dtype=torch.uint8)), ("b", torch.full((2, 5), 0.5)),
        ("c", torch.full((7,), 1.5, dtype=torch.bfloat16)), ("d", torch.tensor(9, dtype=torch.int64)),
    ]  # fmt: skip
    flattener = BucketFlattener(memory=memory)
    assert reader.read(handle_of(flattener.flatten(bucket))) == {
        "d": ("torch.int64", (), 9.0), "b": ("torch.float32", (2, 5), 5.0), "c": ("torch.bfloat16", (7,), 10.5),
        "a": ("torch.uint8", (3,), 6.0),
    }  # fmt: skip
    assert torch.multiprocessing.get_sharing_strategy() == strategy, "what others share keeps its way"
    flattener.release()


def test_a_handle_is_not_one_of_much_more_memory_than_its_bucket_has(memory):
    """An engine that dies with it keeps that memory from being freed, which for a parameter is the memory of all parameters."""
    flattener, parameters, gathered = (
        BucketFlattener(max_bytes=31, memory=memory),
        torch.arange(17.0),
        torch.arange(9.0),
    )
    for tensor, size in ((parameters[4:12], 32), (gathered[:8], 36)):
        flat = flattener.flatten([("large", tensor)])
        assert flat.single().equal(tensor) and not flat.is_copy
        assert flat.buffer.untyped_storage().nbytes() == size
    assert flat.buffer.data_ptr() == gathered.data_ptr(), "padding is not worth a copy"
    flattener.release()


def test_nothing_but_containers_and_tensors_stands_in_a_handle(memory):
    """SGLang refuses to unpickle anything else."""
    flattener = BucketFlattener(memory=memory)
    data = base64.b64decode(handle_of(flattener.flatten([("a", torch.ones(3)), ("b", torch.ones(3).bfloat16())])))

    class Names(pickle.Unpickler):
        found = set()

        def find_class(self, module, name):
            self.found.add(f"{module}.{name}")
            return super().find_class(module, name)

    Names(io.BytesIO(data)).load()
    assert Names.found <= {
        "types.SimpleNamespace", "torch.float32", "torch.bfloat16", "torch.Tensor", "torch.storage.UntypedStorage",
        "torch.multiprocessing.reductions.rebuild_tensor", "torch.multiprocessing.reductions.rebuild_storage_filename",
        "torch.multiprocessing.reductions.rebuild_typed_storage", "torch.storage.TypedStorage",
        "torch.Size", "torch.uint8",
    }  # fmt: skip
    flattener.release()


def test_s1_a_hundred_buckets_need_no_more_memory_than_two(memory, reader):
    flattener = BucketFlattener(memory=memory)
    process, seen = psutil.Process(reader.process.pid), []
    for number in range(100):
        bucket = flattener.flatten([("a", torch.full((2**20,), float(number)))])
        assert reader.read(handle_of(bucket)) == {"a": ("torch.float32", (2**20,), float(number * 2**20))}
        seen.append((len(files()), sum(files().values()), process.memory_info().rss, len(process.memory_maps())))
    assert {count for count, *_ in seen[1:]} == {2} and {size for _, size, *_ in seen[1:]} == {seen[-1][1]}
    assert seen[-1][1] < 2.1 * 2**22
    resident, maps = [[of_one[index] for of_one in seen[10:]] for index in (2, 3)]
    assert resident[-1] - resident[0] < 2**22, "less than one bucket"
    assert max(maps) == min(maps)
    del bucket
    flattener.release()
    assert files() == {}


def test_a_reader_that_dies_keeps_no_memory(memory):
    flattener, reader = BucketFlattener(memory=memory), Reader("import time; time.sleep(600)")
    bucket = flattener.flatten([("a", torch.ones(2**20))])
    reader.give(handle_of(bucket))
    reader.end()
    flattener.release()
    assert files() == {}
    assert bucket.single()[0] == 1.0, "here it is still mapped"


def test_too_little_shared_memory_is_told_with_a_way_out(memory):
    size = 10 * psutil.disk_usage("/dev/shm").total
    with pytest.raises(RunError, match=r"shared memory.*(--shm-size).*--update-weight-buffer-size"):
        memory.allocate(size, torch.device("cpu"))
    assert sum(files().values()) == 0


SHARE = """
import sys, time
import torch
from slime.weights.buckets import BucketFlattener
from slime.weights.transports.shared_handles import SharedMemory, handle_of

flattener = BucketFlattener(memory=SharedMemory())
print(handle_of(flattener.flatten([("a", torch.ones(1000))])), flush=True)
time.sleep(600)
"""


def test_of_a_process_that_is_killed_nothing_stays_when_its_readers_end(reader):
    """The last test that has a reader: it ends."""
    sharing = Reader(SHARE)
    try:
        assert reader.read(sharing.process.stdout.readline().strip()) == {"a": ("torch.float32", (1000,), 1000.0)}
        left = psutil.Process(sharing.process.pid).children(recursive=True)
        assert len(left) == 1
    finally:
        sharing.end()
        reader.end()
    wait_until(lambda: not runs(left[0]))
    assert not list(Path("/dev/shm").glob(f"torch_{sharing.process.pid}_*"))
