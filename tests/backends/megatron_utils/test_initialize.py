"""Process groups and seeds of the training ranks."""

from types import SimpleNamespace

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

    from slime.backends.megatron_utils import initialize

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
