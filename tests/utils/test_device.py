import ast
import functools
import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import TorchDynamoException

from slime.utils import device, env
from slime.utils.errors import UserError
from tools.bench.live_tensors import LiveTensors

ROOT = Path(__file__).parents[2]
# The one door, what stands in its place in a rehearsal, and the adapters that lift what wheels assume about CUDA.
MAY_NAME_CUDA = {
    "slime/utils/device.py",
    "slime/rehearsal/fake_device.py",
    "slime/backends/megatron_utils/cpu_runtime.py",
    "slime/backends/sglang_utils/cpu_runtime.py",
}


@pytest.fixture(autouse=True)
def forget_the_accelerator():
    device.get_accelerator.cache_clear()
    yield
    device.get_accelerator.cache_clear()


def test_forced_cpu(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    accelerator = device.get_accelerator()
    assert (accelerator.name, accelerator.process_group_backend) == ("cpu", "gloo")
    assert accelerator.device(3).type == "cpu" and accelerator.memory_allocated() > 0
    assert device.gpus_on_this_machine() == 0


_TEAMS_OF_GLOO = """
import os
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from slime.utils.device import Accelerator

def threads():
    return sum(1 for _ in Path("/proc/self/task").iterdir())

def teams(computes):
    torch.set_num_threads(2)
    if computes == "this thread":
        Accelerator().compute_in_this_thread()
    ones = torch.ones(2**20).add_(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    before = threads()
    dist.all_gather_into_tensor(ones, ones.clone())
    print(torch.get_num_threads(), threads() > before, flush=True)
    dist.destroy_process_group()

# Each in a copy of this process, which has imported torch and started no thread.
assert threads() == 1
for computes in sys.argv[1:]:
    copy = os.fork()
    if not copy:
        teams(computes)
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
"""


def test_one_thread_of_a_rank_has_all_cores():
    command = [sys.executable, "-W", "ignore", "-c", _TEAMS_OF_GLOO, "this thread", "every thread"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == ["2 False", "2 True"]


def test_later_threads_have_the_number_that_was_set_for_them():
    outside, of_later_threads = torch.get_num_threads(), None
    with ThreadPoolExecutor(1) as pool:
        of_later_threads = pool.submit(torch.get_num_threads).result()
    try:
        device.set_threads_of_later_threads(of_later_threads + 1)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == of_later_threads + 1
        assert torch.get_num_threads() == outside
    finally:
        device.set_threads_of_later_threads(of_later_threads)


_PAGES_TAKEN_AGAIN = """
import ctypes, resource, sys
from slime.utils.device import Accelerator
if sys.argv[1] == "keeps":
    Accelerator().keep_freed_memory()
libc = ctypes.CDLL(None)
libc.prctl(41, 1, 0, 0, 0)  # no huge pages, of which the same memory has far fewer
libc.malloc.restype = ctypes.c_void_p
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(2**26)))
    ctypes.memset(piece, 1, 2**26)
    libc.free(piece)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults < 2**10)
"""


@pytest.mark.parametrize(
    ("way", "environment", "kept"),
    [("keeps", {}, "True"), ("does not", {}, "False"), ("keeps", {"MALLOC_TRIM_THRESHOLD_": "131072"}, "False")],
)
def test_freed_memory_is_taken_again_unless_the_environment_says_otherwise(way, environment, kept):
    """64 MiB, taken and freed twice: the second time their pages are there, or the kernel has to give 16,384 of them."""
    command = [sys.executable, "-c", _PAGES_TAKEN_AGAIN, way]
    found = subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.strip() == kept


def test_unknown_backend_names_the_known_ones(monkeypatch):
    # Whatever other tests of this process have registered.
    monkeypatch.setattr(device, "_FACTORIES", {name: device._FACTORIES[name] for name in ("cpu", "cuda")})
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    with pytest.raises(UserError, match="SLIME_ACCELERATOR=abacus is not known; registered: cpu, cuda"):
        device.get_accelerator()


def test_own_backend_can_be_registered(monkeypatch):
    class Abacus(device.Accelerator):
        name = "abacus"

    monkeypatch.setattr(device, "_FACTORIES", dict(device._FACTORIES))
    device.register_accelerator("abacus", Abacus)
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    assert device.get_accelerator().name == "abacus"


def test_pinned_memory_is_as_large_as_asked_for_and_given_back(monkeypatch):
    calls = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *arguments: calls.append(("register", *arguments)) or 0,
        cudaHostUnregister=lambda *arguments: calls.append(("give back", *arguments)) or 0,
    )
    for name, lift in {
        "cudart": lambda: runtime,
        "check_error": lambda status: calls.append(status),
        "synchronize": lambda: calls.append("synchronize"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lift)
    buffer = device.CudaAccelerator().host_buffer(3 * 2**20 + 1)
    address = buffer.data_ptr()
    assert (buffer.dtype, tuple(buffer.shape)) == (torch.uint8, (3 * 2**20 + 1,))
    buffer[-1] = 7
    assert calls == [("register", address, 3 * 2**20 + 1, 0), 0]
    calls.clear()
    del buffer
    gc.collect()
    assert calls == ["synchronize", ("give back", address), 0]


@pytest.mark.parametrize(
    "value, expected", [(None, None), ("", []), ("-1", []), ("4,5", ["4", "5"]), (" GPU-a , GPU-b", ["GPU-a", "GPU-b"])]
)
def test_visible_devices(monkeypatch, value, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert env.visible_devices() == expected


@pytest.mark.parametrize("visible, expected", [(None, 4), ("", 0), ("2,3", 2)])
@pytest.mark.parametrize(
    "maker, variable",
    [
        ("NvidiaGPUAcceleratorManager", "CUDA_VISIBLE_DEVICES"),
        ("AMDGPUAcceleratorManager", "CUDA_VISIBLE_DEVICES"),
        ("AMDGPUAcceleratorManager", "HIP_VISIBLE_DEVICES"),
    ],
)
def test_hidden_gpus_do_not_count(monkeypatch, maker, variable, visible, expected):
    from ray._private import accelerators

    for name in ("SLIME_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_torch_is_a_cpu_build", lambda: False)
    for name in ("NvidiaGPUAcceleratorManager", "AMDGPUAcceleratorManager"):
        count = 4 if name == maker else 0
        manager = getattr(accelerators, name)
        monkeypatch.setattr(manager, "get_current_node_num_accelerators", staticmethod(lambda count=count: count))
    if visible is not None:
        monkeypatch.setenv(variable, visible)
    assert device.gpus_on_this_machine() == expected


def test_gpus_count_without_ray(monkeypatch):
    """A rank that is alone measures where Ray is not installed."""
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.setattr(device, "_torch_is_a_cpu_build", lambda: False)
    monkeypatch.setitem(sys.modules, "ray._private.accelerators", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert device.gpus_on_this_machine() == 3


def test_peak_of_the_memory(monkeypatch):
    assert device.Accelerator().peak_memory_allocated() is None
    device.Accelerator().reset_peak_memory()
    asked = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: asked.append("reset"))
    device.CudaAccelerator().reset_peak_memory()
    assert device.CudaAccelerator().peak_memory_allocated() == 7 and asked == ["reset"]


def test_actors_get_our_variables(monkeypatch):
    monkeypatch.setenv("SLIME_DEBUG", "1")
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    environment = env.actor_environment()
    assert environment["SLIME_DEBUG"] == "1" and "SLIME_ACCELERATOR" not in environment
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_ray_hides_no_gpu_of_any_maker():
    """Ray's modules say which variable they read; of those whose devices are counted as GPU, and of Ascend's."""
    import ray._private.accelerators as accelerators

    read = set()
    for manager in accelerators.get_all_accelerator_managers():
        module = sys.modules[manager.__module__]
        if manager.get_resource_name() in ("GPU", "NPU"):
            read |= {value for name, value in vars(module).items() if name.startswith("NOSET_")}
    assert len(read) >= 3
    assert {name: "1" for name in read}.items() <= env.actor_environment().items()


def names_of_cuda(source: str) -> list[str]:
    """What in `source` asks CUDA itself: the module, a tensor's move, or a backend of process groups in its place."""
    found = []
    # Most files have no such word, and need not be parsed.
    for node in ast.walk(ast.parse(source)) if "cuda" in source or "get_backend" in source else ():
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom | ast.Import) and "torch.cuda" in ast.unparse(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Compare) and "get_backend" in ast.unparse(node) and "nccl" in ast.unparse(node):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_what_asks_cuda_is_found():
    source = (
        "torch.cuda.synchronize()\nvalues.cuda()\nfrom torch.cuda import Event\ndist.get_backend(group) == 'nccl'\n"
    )
    assert sorted(line.split(":")[0] for line in names_of_cuda(source)) == [f"line {line}" for line in range(1, 5)]


def test_nobody_else_asks_cuda():
    files = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "slime").rglob("*.py"))}
    assert set(files) >= MAY_NAME_CUDA
    found = {name: names_of_cuda(path.read_text("utf-8")) for name, path in files.items() if name not in MAY_NAME_CUDA}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_cpu_keeps_everything_on_the_host():
    accelerator = device.Accelerator()
    assert accelerator.current_device() == accelerator.group_device(None) == torch.device("cpu")
    assert accelerator.generator_state() is None
    before = torch.get_rng_state()
    accelerator.set_generator_state(torch.zeros_like(before))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "backend, expected", [("gloo", "cpu"), ("nccl", "cuda:5"), ("fake", "cuda:5"), ("ucc", "cuda:5")]
)
def test_collectives_are_on_the_gpu_unless_their_group_is_of_the_host(monkeypatch, backend, expected):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
    accelerator = device.CudaAccelerator()
    assert accelerator.current_device() == torch.device("cuda:5")
    assert accelerator.group_device(None) == torch.device(expected)


def test_nothing_is_fused_on_a_cpu():
    assert device.Accelerator().fused(torch.add) is None


def test_without_a_compiler_there_is_no_fused_function_and_it_is_said_once(monkeypatch, caplog):
    asked = []

    def compile_nothing(function, *, fullgraph):
        def fail(*arguments):
            asked.append(arguments)
            raise TorchDynamoException("Cannot find a working triton installation\nand much more")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    fused = device.CudaAccelerator().fused(twice)
    assert fused(1.0) is None and fused(2.0) is None and asked == [(1.0,)]
    (said,) = caplog.messages
    assert "twice is not compiled" in said and said.endswith(
        "TorchDynamoException: Cannot find a working triton installation"
    )


@pytest.fixture
def compiles_for_nothing(monkeypatch):
    """torch.compile without a code generator."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def test_under_a_dispatch_mode_there_is_no_fused_function(compiles_for_nothing, caplog):
    """Before it is compiled and afterwards."""
    fused, numbers = device.CompiledFunction(twice), torch.ones(3)
    for _ in range(2):
        with LiveTensors():
            assert fused(numbers) is None
        assert fused(numbers).tolist() == [2.0, 2.0, 2.0]
    assert not [record for record in caplog.records if record.name == device.__name__]


@pytest.mark.parametrize(
    ("shapes", "compiled"),
    [
        ([(3, 4), (5, 4), (7, 4), (7, 6), (2, 6), (9, 4)], [1, 1, 1, 2, 2, 2]),
        # As the norms of a layer come: of its rows, and of queries and keys, which are whole and cut out of wider rows.
        ([(3, 8), (5, 4), (5, 4, "part"), (6, 4), (6, 4, "part"), (7, 8)], [1, 2, 3, 3, 3, 3]),
        ([(1, 4), (5, 4), (6, 4)], [1, 2, 2]),
    ],
)
def test_a_fused_function_is_compiled_for_any_number_of_rows_and_for_each_width_and_layout(
    monkeypatch, shapes, compiled
):
    known = []

    def keep_sizes(module, inputs):
        values = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        known.append([value.shape[1] for value in values if isinstance(value, torch.Tensor)])
        return module.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=keep_sizes))
    fused, found = device.CompiledFunction(twice), []
    for rows, width, *is_part in shapes:
        numbers = torch.ones(rows, 3 * width)[:, width : 2 * width] if is_part else torch.ones(rows, width)
        assert fused(numbers).shape == (rows, width)
        found.append(len(known))
    assert found == compiled and all(type(width) is int for (width,) in known)


def test_more_kinds_than_torch_allows_are_compiled_in_every_thread(compiles_for_nothing, caplog):
    torch._dynamo.reset()
    fused = device.CompiledFunction(twice)
    widths = [width for width in range(2, 11) if fused(torch.ones(3, width)) is not None]
    assert len(widths) == 9
    results = []
    thread = threading.Thread(target=lambda: results.extend(fused(torch.ones(3, width)) for width in range(11, 15)))
    thread.start()
    thread.join(60)
    assert [result.shape[1] for result in results] == [11, 12, 13, 14] and fused.works


def test_with_deterministic_algorithms_there_is_no_fused_function(compiles_for_nothing):
    fused = device.CompiledFunction(twice)
    torch.use_deterministic_algorithms(True)
    try:
        assert not fused.works and fused(torch.ones(3)) is None
    finally:
        torch.use_deterministic_algorithms(False)
    assert fused.works and fused(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "config.disable"])
def test_where_the_compiler_is_switched_off_there_is_no_fused_function(
    compiles_for_nothing, monkeypatch, caplog, switch
):
    """As plain operations it would take more memory than what is computed in its place."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", str(int(switch == "TORCHDYNAMO_DISABLE")))
    fused = device.CompiledFunction(twice)
    with torch._dynamo.config.patch(disable=switch == "config.disable"):
        assert fused(torch.ones(3)) is None and fused(torch.ones(3)) is None
    (said,) = caplog.messages
    assert "twice is not compiled" in said and "TORCHDYNAMO_DISABLE" in said


def test_what_a_fused_function_raises_itself_comes_out(monkeypatch):
    def out_of_memory(*arguments):
        raise torch.OutOfMemoryError("no bytes left")

    monkeypatch.setattr(torch, "compile", lambda function, **options: out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        device.CompiledFunction(twice)(1.0)


def twice(number):
    return 2 * number


def test_memory_of_the_device_is_told_in_gib_and_logged(monkeypatch, caplog):
    class Measured(device.Accelerator):
        def memory_of_device(self):
            return 3 * 2**30, 8 * 2**30

        def memory_allocated(self):
            return 2**29

    monkeypatch.setattr(device, "get_accelerator", Measured)
    found = {"device": "cpu", "total_GB": 8.0, "free_GB": 3.0, "used_GB": 5.0, "allocated_GB": 0.5}
    assert device.available_memory() == found
    with caplog.at_level("INFO"):
        assert device.print_memory("before") == found
    assert "before" in caplog.text and "'free_GB': 3.0" in caplog.text


def test_the_host_has_more_memory_than_is_free():
    free, total = device.Accelerator().memory_of_device()
    assert 0 < free < total


def test_clearing_collects_garbage_and_gives_memory_back(monkeypatch):
    released = []

    class Released(device.Accelerator):
        def release_cached_memory(self):
            released.append(True)

    class Cycle:
        pass

    monkeypatch.setattr(device, "get_accelerator", Released)
    cycle = Cycle()
    cycle.itself, gone = cycle, weakref.ref(cycle)
    del cycle
    device.clear_memory()
    assert released == [True] and gone() is None


def test_torch_records_the_memory_of_gpus_alone(monkeypatch, tmp_path):
    """Calls that no machine without one makes: torch's own functions take them, so far as their signatures tell."""
    with pytest.raises(UserError, match="--memory-recorder torch .* this rank computes on a CPU; give"):
        device.Accelerator().record_memory(list)
    record = inspect.signature(torch.cuda.memory._record_memory_history)
    asked, observers, failed = [], [], []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda *a, **k: asked.append(record.bind(*a, **k).arguments)
    )
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", observers.append, raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda *arguments, **options: {"segments": []})
    accelerator = device.CudaAccelerator()
    accelerator.record_memory(lambda: failed.append(True))
    accelerator.write_recorded_memory(tmp_path / "a.pickle")
    assert pickle.loads((tmp_path / "a.pickle").read_bytes()) == {"segments": []}
    accelerator.stop_recording_memory()
    assert [call.get("enabled", "all") for call in asked] == ["all", None]
    # Torch tells its observers the device, what was asked for, and how much of what there is is left.
    (observer,) = observers
    observer(0, 2**30, 2**33, 2**20)
    assert failed == [True]


def test_a_profiler_looks_at_the_device_where_there_is_one():
    names = [
        [activity.name for activity in kind().profiled_activities()]
        for kind in (device.Accelerator, device.CudaAccelerator)
    ]
    assert names == [["CPU"], ["CPU", "CUDA"]]
