import torch

from slime.utils.device import Accelerator
from tools.bench import bench_log_probs


def test_extra_memory_on_a_gpu_is_that_of_its_allocator(monkeypatch):
    """What is counted is a second run, in which nothing is compiled, and no dispatch mode keeps it from what is compiled."""
    state = {"now": 100, "peak": 900, "runs": 0}

    class Counting(Accelerator):
        def memory_allocated(self):
            return state["now"]

        def peak_memory_allocated(self):
            return state["peak"]

        def reset_peak_memory(self):
            state["peak"] = state["now"]

    def contender(logits, tokens):
        assert torch._C._len_torch_dispatch_stack() == 0 and logits.grad is None
        state["runs"] += 1
        # The first one compiles.
        state["peak"] = max(state["peak"], 700 if state["runs"] == 1 else 130)
        logits.grad = torch.ones_like(logits)

    monkeypatch.setattr(bench_log_probs, "get_accelerator", Counting)
    logits = torch.zeros(2, 3, requires_grad=True)
    assert bench_log_probs.extra_bytes(contender, logits, torch.zeros(2, dtype=torch.int64)) == 30
    assert state["runs"] == 2


def test_extra_memory_on_a_cpu_is_that_of_live_tensors(monkeypatch):
    monkeypatch.setattr(bench_log_probs, "get_accelerator", Accelerator)

    def contender(logits, tokens):
        (logits.view(6) + 1).sum()

    logits = torch.zeros(2, 3, requires_grad=True)
    # Six float32, and their sum.
    assert bench_log_probs.extra_bytes(contender, logits, torch.zeros(2, dtype=torch.int64)) == 28
