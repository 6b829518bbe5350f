"""Process groups and seeds of the training ranks."""

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils import initialize
from slime.utils.device import Accelerator, CudaAccelerator
from tests.support.distributed import run_distributed


def _arguments(**changes):
    values = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "distributed_timeout_minutes": 1,
        "seed": 7,
    }
    return SimpleNamespace(**{**values, **changes})


def _worker():
    import torch
    import torch.distributed as dist

    try:
        initialize.init(_arguments(tensor_model_parallel_size=3))
        refusal = None
    except ValueError as error:
        refusal = str(error)
    initialize.init(_arguments())
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        tensor_parallel_draw = torch.rand(()).item()
    sizes = (parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_data_parallel_world_size())
    found = (refusal, dist.get_backend(), sizes, tensor_parallel_draw, torch.rand(()).item())
    initialize.destroy()
    return found, dist.is_initialized()


def test_groups_seeds_and_the_way_out():
    (first, joined_0), (second, joined_1) = run_distributed(_worker, 2)
    for refusal, backend, sizes, *_ in (first, second):
        assert "--tensor-model-parallel-size 3" in refusal
        assert backend == "gloo"
        assert sizes == (2, 1)
    # Tensor-parallel ranks draw apart inside Megatron's tracker and together outside of it.
    assert first[3] != second[3]
    assert first[4] == second[4]
    assert not joined_0 and not joined_1


def _modes():
    import torch

    from slime.backends.megatron_utils import initialize

    before = torch.are_deterministic_algorithms_enabled()
    initialize.init(_arguments(tensor_model_parallel_size=1, deterministic_mode=True, enable_experimental=True))
    from megatron.core import config

    return before, torch.are_deterministic_algorithms_enabled(), config.ENABLE_EXPERIMENTAL


def test_process_wide_modes():
    ((before, deterministic, experimental),) = run_distributed(_modes, 1)
    assert (before, deterministic, experimental) == (False, True, True)


@pytest.mark.parametrize(
    "device, flag, expected",
    [
        (CudaAccelerator(), "nccl", "nccl"),
        (CudaAccelerator(), "gloo", "gloo"),
        (Accelerator(), "nccl", "gloo"),
    ],
)
def test_the_backend_is_the_typed_one_where_the_device_has_it(monkeypatch, device, flag, expected):
    monkeypatch.setattr(initialize, "get_accelerator", lambda: device)
    assert initialize.process_group_backend(SimpleNamespace(distributed_backend=flag)) == expected
