"""Process groups and seeds of the training ranks."""

import os
from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils import initialize
from slime.utils.device import Accelerator, CudaAccelerator
from tests.support.models.args import default_args
from tests.support.models.seen_batch import PROVIDER
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed


def _arguments(**changes):
    return default_args(**{"tensor_model_parallel_size": 2, "distributed_timeout_minutes": 1, "seed": 7, **changes})


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


EXPERTS = {
    "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_router_load_balancing_type": "none",
    "expert_tensor_parallel_size": 1,
}  # fmt: skip
SPLITS = {
    "pipeline": {"pipeline_model_parallel_size": 2},
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "data": {},
    "context": {"context_parallel_size": 2},
    "experts": {"expert_model_parallel_size": 2},
}


def _weights_drawn_as_on_a_gpu(cases) -> dict:
    """Per case this rank's random matrices, by their names in its chunk: drawn one after the other by Megatron's generators."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from megatron.core import parallel_state

    from slime.backends.megatron_utils import model_provider, transformer_config

    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    found = {}
    for name, args in cases.items():
        parallel_state.destroy_model_parallel()
        initialize.init(args)
        chunk = model_provider._build_chunk(args, None)
        assert not chunk.config.use_cpu_initialization
        found[name] = {n: p.detach().numpy().copy() for n, p in chunk.named_parameters() if p.ndim == 2}
    return found


def test_random_weights_of_a_gpu_differ_wherever_ranks_hold_other_parts(tmp_path):
    write_tiny_model(tmp_path, tied=False)
    cases = {name: tiny_args(tmp_path, padded_vocab_size=144, **EXPERTS, **split) for name, split in SPLITS.items()}
    ranks = run_distributed(_weights_drawn_as_on_a_gpu, 2, (cases,))

    def equal(split) -> dict[str, bool]:
        first, second = (rank[split] for rank in ranks)
        return {name: (first[name] == second[name]).all() for name in first.keys() & second.keys()}

    for replicas in ("data", "context"):
        assert len(equal(replicas)) > 15 and all(equal(replicas).values()), replicas
    # One layer each: under the same names other layers.
    stages = equal("pipeline")
    assert sum("experts" in name for name in stages) >= 8 and any("router" in name for name in stages)
    assert not any(stages.values()), stages
    # The router is whole on every rank; so are experts beside tensor parallelism, and all but the experts beside theirs.
    whole = {"tensor": (".experts.", "router"), "experts": ("embedding", "attention", "router", "output_layer")}
    for split, parts in whole.items():
        assert equal(split) == {name: any(part in name for part in parts) for name in equal(split)}, split


def _modes():
    import torch

    from slime.backends.megatron_utils import initialize

    before = torch.are_deterministic_algorithms_enabled()
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    initialize.init(_arguments(tensor_model_parallel_size=1, deterministic_mode=True, enable_experimental=True))
    from megatron.core import config

    workspace = os.environ["CUBLAS_WORKSPACE_CONFIG"]
    return before, torch.are_deterministic_algorithms_enabled(), workspace, config.ENABLE_EXPERIMENTAL


def _with_a_plug_in_first(hf_dir):
    from slime.training.backend import make_backend
    from slime.utils.plugin_loader import load_function

    args = tiny_args(hf_dir, custom_model_provider_path=PROVIDER)
    backend = make_backend(args)
    load_function(PROVIDER, flag="--custom-model-provider-path")
    backend.place()
    return type(backend.model[0].module).__name__


def test_plug_ins_that_import_megatron_may_come_before_the_rank_is_placed(tmp_path):
    write_tiny_model(tmp_path)
    # In a process that has imported nothing of Megatron.
    assert run_distributed(_with_a_plug_in_first, 1, (str(tmp_path),), start_method="spawn") == ["GPTModel"]


def test_process_wide_modes():
    # The workspace is one of the two with which cuBLAS is deterministic.
    assert run_distributed(_modes, 1) == [(False, True, ":4096:8", True)]


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
