"""Waits are read from traces: one by hand, and one of the profiler, in which the CPU's reading of a value becomes a wait."""

import torch

from slime.training.loss_guard import LossGuard
from tools.bench.gpu.waits import BACKWARD, _profiled, beside, by_function, counts_agree, place_of_frame, waits_of


def event(name, category, start, duration, thread=1):
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": duration}


def frame(name, start, duration, thread=1):
    return event(name, "python_function", start, duration, thread)


def runtime(name, start, thread=1, category="cuda_runtime"):
    return event(name, category, start, 1.0, thread)


TRACE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 7},
        event("measured phase", "user_annotation", 100.0, 900.0),
        # The same span on the device, as the profiler has it too.
        event("measured phase", "gpu_user_annotation", 5000.0, 10.0),
        frame("/home/me/slime/slime/training/train_step.py(40): train_one_step", 110.0, 800.0),
        frame("/venv/lib/python3.12/site-packages/megatron/core/optimizer/clip_grads.py(51): get_grad_norm_fp32", 300.0, 100.0),
        frame("/venv/lib/python3.12/site-packages/torch/_tensor.py(90): item", 350.0, 40.0),
        frame("slime/training/metric_reduction.py(60): <listcomp>", 500.0, 100.0),
        # In the innermost function that is none of torch's.
        runtime("cudaStreamSynchronize", 360.0),
        # In the function that was returned to.
        runtime("cudaStreamSynchronize_v3020", 450.0),
        runtime("cudaMemcpy", 510.0),
        runtime("cuEventSynchronize", 520.0, category="cuda_driver"),
        runtime("cudaMalloc", 530.0),
        # No waits: an asynchronous copy, a launch, an operation of that name, what other phases and the profiler do.
        runtime("cudaMemcpyAsync", 540.0),
        runtime("cudaLaunchKernel", 541.0),
        event("cudaStreamSynchronize", "cpu_op", 542.0, 1.0),
        runtime("cudaDeviceSynchronize", 1000.0),
        runtime("cudaDeviceSynchronize", 20.0),
        # Another thread, in which no function runs while one does in the first.
        runtime("cudaEventSynchronize", 600.0, thread=2),
    ]
}  # fmt: skip


def test_a_trace_by_hand():
    assert waits_of(TRACE) == {
        "cudaStreamSynchronize in megatron/core/optimizer/clip_grads.py: get_grad_norm_fp32": 1,
        "cudaStreamSynchronize in slime/training/train_step.py: train_one_step": 1,
        "cudaMemcpy in slime/training/train_step.py: train_one_step": 1,
        "cuEventSynchronize in slime/training/train_step.py: train_one_step": 1,
        "cudaMalloc in slime/training/train_step.py: train_one_step": 1,
        f"cudaEventSynchronize in {BACKWARD}": 1,
    }


def test_a_planted_read_of_a_value_is_found(monkeypatch):
    """On a GPU the operation that reads a value waits for the stream: the wait is planted into what the CPU's profiler saw."""
    guard = LossGuard("here", True)
    monkeypatch.setattr("slime.training.loss_guard.all_reduce_sum", lambda flags, group: flags)

    def step():
        guard.watch(torch.ones((), requires_grad=True) * 2, torch.ones(1), [0])
        assert guard.accepts(1.0)

    trace = _profiled(step)
    reads = [e for e in trace["traceEvents"] if e["name"] == "aten::_local_scalar_dense"]
    # Whether losses are finite; and the two numbers, which `tolist` reads without an operation on the CPU.
    assert len(reads) == 1
    planted = [{**e, "cat": "cuda_runtime", "name": "cudaStreamSynchronize"} for e in reads]
    assert waits_of({"traceEvents": [*trace["traceEvents"], *planted]}) == {
        "cudaStreamSynchronize in slime/training/loss_guard.py: accepts": 1
    }


def test_a_rehearsals_lines_become_functions():
    source = LossGuard.accepts.__code__
    line = source.co_firstlineno + 9
    waits = {
        f"a value at slime/training/loss_guard.py:{line}": 2,
        f"a value at slime/training/loss_guard.py:{line + 1}": 1,
        f"values at slime/training/loss_guard.py:{line}": 1,
        "a copy to the host at megatron/core/no_such_file.py:7": 3,
        "a value at the backward pass": 4,
    }
    assert by_function(waits) == {
        "a value in slime/training/loss_guard.py: accepts": 3,
        "values in slime/training/loss_guard.py: accepts": 1,
        "a copy to the host in megatron/core/no_such_file.py:7": 3,
        f"a value in {BACKWARD}": 4,
    }


def test_a_function_of_megatron_has_the_name_that_the_profiler_has():
    import ast
    import importlib.util
    from pathlib import Path

    path = Path(importlib.util.find_spec("megatron.core").origin).parent / "optimizer" / "clip_grads.py"
    function = next(
        node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == "get_grad_norm_fp32"
    )
    place = place_of_frame(f"{path}({function.lineno}): get_grad_norm_fp32")
    rehearsed = by_function({f"a value at megatron/core/optimizer/clip_grads.py:{function.end_lineno}": 1})
    assert list(rehearsed) == [f"a value in {place}"]


def test_frames_of_others_and_of_comprehensions_have_no_place():
    assert place_of_frame("torch/nn/modules/module.py(1750): _call_impl") is None
    assert place_of_frame("tools/bench/gpu/waits.py(10): main") is None
    assert place_of_frame("slime/training/loss.py(9): <genexpr>") is None
    assert place_of_frame("/home/me/slime/slime/training/loss.py(9): loss") == "slime/training/loss.py: loss"


def test_both_counts_stand_side_by_side():
    measured = {"cudaStreamSynchronize in a.py: f": 3, "cudaMalloc in a.py: f": 5, "cudaMemcpy in b.py: g": 1}
    expected = {"a value in a.py: f": 2, "a copy to the host in c.py: h": 4}
    rows = list(beside("a shape", "step", measured, expected))
    assert [(row["function"], row["measured"], row["rehearsed"]) for row in rows] == [
        ("c.py: h", 0, 4),
        ("a.py: f", 3, 2),
        ("b.py: g", 1, 0),
        # Without what the allocator asks for.
        ("all", 4, 6),
    ]
    assert rows[1]["calls"] == "3 cudaStreamSynchronize, 5 cudaMalloc" and rows[1]["rehearsed as"] == "2 a value"
    (unknown,) = beside("a shape", "step", None, None)
    assert (unknown["measured"], unknown["rehearsed"]) == (None, None)
    assert counts_agree(rows) is False and counts_agree([*rows, unknown]) is None and counts_agree([]) is None
    # The same number in another place is the same number.
    moved = list(beside("a shape", "push", {"cudaMemcpy in a.py: f": 1}, {"a value in b.py: g": 1}))
    assert counts_agree(moved) is True
