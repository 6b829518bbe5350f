"""Process groups and random seeds of one training rank.

The caller sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment (as torch.distributed expects) and, on
a GPU, has chosen the device. `init` must run before anything else of megatron.core is imported in the process.
"""

from __future__ import annotations

import datetime
import os
import warnings
from typing import Any

from slime.backends.megatron_utils import cpu_runtime
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.process_groups import init_gloo_group

# What Megatron adds to a seed stays below it: some thousand, and 100 for each expert-parallel rank.
_SEEDS_OF_A_STAGE = 2**20


def init(args: Any) -> None:
    """Join torch.distributed, lay out Megatron's parallel groups and seed the tensor-parallel generators. Collective.

    `args` needs `distributed_timeout_minutes`, `tensor_model_parallel_size` and `seed`; the other parallel sizes, the
    settings of communicators and the process-wide modes have defaults.

    Raises:
        UserError: the world size is no multiple of the model-parallel size.
    """
    cpu_runtime.install()
    # Said six times on every rank without them, and no news there.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    # Megatron's sequence parallelism relies on kernels being launched in the order in which they are issued.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    _init_process_group(process_group_backend(args), timeout)
    _set_process_wide_modes(args)
    _init_model_parallel(args)
    _seed(args.seed)


def destroy() -> None:
    """Leave all process groups; the process may call `init` again."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def context_parallel(args: Any) -> ContextParallel:
    """This rank's place in its context-parallel group."""
    from megatron.core import parallel_state

    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return NO_CONTEXT_PARALLEL
    group, rank = parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank()
    return ContextParallel(size, rank, group, all_gather=has_contiguous_context(args))


def has_contiguous_context(args: Any) -> bool:
    """Whether context-parallel ranks hold contiguous pieces of the stream instead of zigzag chunks."""
    return getattr(args, "context_parallel_size", 1) > 1 and getattr(args, "allgather_cp", False)


def process_group_backend(args: Any) -> str:
    """`--distributed-backend` on a GPU that has NCCL; elsewhere what the device works with."""
    of_device = get_accelerator().process_group_backend
    return getattr(args, "distributed_backend", of_device) if of_device == "nccl" else of_device


def _init_process_group(backend: str, timeout: datetime.timedelta) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(backend=backend, timeout=timeout)
    init_gloo_group(timeout)


def _set_process_wide_modes(args: Any) -> None:
    """Switches of torch and Megatron that hold for the whole process; each is only ever switched on."""
    if getattr(args, "enable_experimental", False):
        from megatron.core.config import set_experimental_flag

        set_experimental_flag(True)
    if getattr(args, "deterministic_mode", False):
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _init_model_parallel(args: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor = args.tensor_model_parallel_size
    pipeline = getattr(args, "pipeline_model_parallel_size", 1)
    context = getattr(args, "context_parallel_size", 1)
    model_parallel_size = tensor * pipeline * context
    if dist.get_world_size() % model_parallel_size:
        raise UserError(
            f"{dist.get_world_size()} training ranks cannot be divided into model-parallel groups of "
            f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x "
            f"--context-parallel-size {context} = {model_parallel_size} ranks"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=getattr(args, "virtual_pipeline_model_parallel_size", None),
        context_parallel_size=context,
        expert_model_parallel_size=getattr(args, "expert_model_parallel_size", 1),
        expert_tensor_parallel_size=getattr(args, "expert_tensor_parallel_size", None),
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=getattr(args, "nccl_communicator_config_path", None),
        high_priority_stream_groups=getattr(args, "high_priority_stream_groups", None) or None,
        use_sharp=getattr(args, "use_sharp", False),
        sharp_enabled_group=getattr(args, "sharp_enabled_group", None),
    )


def _seed(seed: int) -> None:
    """Seed the generators that draw random weights on a GPU: apart on the stages of a pipeline, which hold other layers."""
    from megatron.core import parallel_state, tensor_parallel

    stage = parallel_state.get_pipeline_model_parallel_rank()
    tensor_parallel.model_parallel_cuda_manual_seed(seed + stage * _SEEDS_OF_A_STAGE)
