"""Process groups and random seeds of one training rank, and the housekeeping of its process around optimizer steps.

The caller sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment (as torch.distributed expects) and, on
a GPU, has chosen the device. `init` must run before anything else of megatron.core is imported in the process.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import warnings
from typing import Any

from slime.backends.megatron_utils import cpu_runtime
from slime.training.backend import RankGroups
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.utils.plugin_loader import call_plug_in
from slime.utils.process_groups import join_world

# Distance between the seeds of two stages. Megatron adds less to a seed: some thousand, and 100 for each expert-parallel rank.
_SEEDS_OF_A_STAGE = 2**20
# Distance between the seeds of two data ranks: room for 64 stages. A generator on CPU uses 32 bits of a seed, so there 64 data
# ranks draw different numbers.
_SEEDS_OF_A_DATA_RANK = 2**26


def prepare() -> None:
    """Make the process ready for imports of Megatron, including those by plug-ins. A second call does nothing."""
    cpu_runtime.install()
    # Every rank without these packages would log this six times.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")


def init(args: Any) -> None:
    """Join torch.distributed, lay out Megatron's parallel groups and seed the tensor-parallel generators. Collective.

    `args` needs `distributed_timeout_minutes`, `tensor_model_parallel_size` and `seed`; the other parallel sizes, the
    settings of communicators and the process-wide modes have defaults.

    At the end the function of `--custom-megatron-init-path` is called as `fn(args)`.

    Raises:
        UserError: the world size is no multiple of the model-parallel size; the function raised.
    """
    prepare()
    # Megatron's sequence parallelism relies on kernels being launched in the order in which they are issued.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    join_world(process_group_backend(args), timeout)
    _set_process_wide_modes(args)
    _init_model_parallel(args)
    _seed(args)
    call_plug_in("--custom-megatron-init-path", args.custom_megatron_init_path, "the start of a rank", args)


def destroy() -> None:
    """Leave all process groups; the process may call `init` again."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_groups(args: Any) -> RankGroups:
    """This rank's place in Megatron's groups."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    token_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    is_of_host = dist.get_backend(token_group) == get_accelerator().host_group_backend
    return RankGroups(
        data_rank=parallel_state.get_data_parallel_rank(),
        sample_group=parallel_state.get_data_parallel_group(),
        token_group=token_group,
        host_token_group=token_group if is_of_host else parallel_state.get_data_parallel_group_gloo(True),
        replica=_replica(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        cp=context_parallel(args),
        # With virtual stages logits come out of the last model chunk of the last rank.
        is_last_stage=parallel_state.is_pipeline_last_stage(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        place_group=parallel_state.get_pipeline_model_parallel_group(),
    )


def _replica() -> int:
    """The number of this rank's copy of its stage. The ranks of a copy form whole tensor-parallel groups, and whole groups over
    which all experts are spread and cut: those among which a gather takes place."""
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_world_size()
    of_replicas = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    place = of_replicas * tensor + parallel_state.get_tensor_model_parallel_rank()
    return place // math.lcm(tensor, parallel_state.get_expert_tensor_and_model_parallel_world_size())


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
    return args.context_parallel_size > 1 and args.allgather_cp


def process_group_backend(args: Any) -> str:
    """`--distributed-backend` on a GPU that has NCCL; elsewhere the backend of the device."""
    of_device = get_accelerator().process_group_backend
    return args.distributed_backend if of_device == "nccl" else of_device


def _set_process_wide_modes(args: Any) -> None:
    """Switches of torch and Megatron that hold for the whole process; each is only ever switched on."""
    if args.enable_experimental:
        from megatron.core.config import set_experimental_flag

        set_experimental_flag(True)
    if args.deterministic_mode:
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _init_model_parallel(args: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    tensor = args.tensor_model_parallel_size
    pipeline = args.pipeline_model_parallel_size
    context = args.context_parallel_size
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
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=context,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        high_priority_stream_groups=args.high_priority_stream_groups or None,
        use_sharp=args.use_sharp,
        sharp_enabled_group=args.sharp_enabled_group,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        create_gloo_process_groups=get_accelerator().host_group_backend == "gloo",
    )


def _seed(args: Any) -> None:
    """Seed the generators that draw random weights on a GPU, and dropout. The seeds differ between pipeline stages, which hold
    different layers, and with `--data-parallel-random-init` between data-parallel ranks, which have different samples."""
    from megatron.core import parallel_state, tensor_parallel

    seed = args.seed + parallel_state.get_pipeline_model_parallel_rank() * _SEEDS_OF_A_STAGE
    if args.data_parallel_random_init:
        seed += parallel_state.get_data_parallel_rank() * _SEEDS_OF_A_DATA_RANK
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


class Housekeeping:
    """The work that flags ask of a rank's process beside its optimizer steps. All ranks call the same methods.

    Without `--manual-gc` Python collects garbage at its own times, on every rank at another one, while the other ranks wait.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self._steps = 0

    def begin(self) -> None:
        """Called when the model is loaded."""
        if self.args.manual_gc:
            gc.disable()
            gc.collect()

    def before_update(self) -> None:
        """Called when the gradients of a step are complete, and the activations are freed."""
        if self.args.empty_unused_memory_level >= 1:
            get_accelerator().release_cached_memory()

    def after_step(self) -> int:
        """Called when a step has ended; returns how many steps have ended since this process began."""
        self._steps += 1
        if self.args.empty_unused_memory_level >= 2:
            get_accelerator().release_cached_memory()
        if is_due(self.args.train_sync_interval, self._steps):
            get_accelerator().synchronize()
        if self.args.manual_gc and is_due(self.args.manual_gc_interval, self._steps):
            gc.collect()
        seconds = self.args.distributed_timeout_seconds_after_init
        if seconds is not None and self._steps == 1:
            from megatron.core import parallel_state

            parallel_state.update_pg_timeout(datetime.timedelta(seconds=seconds))
        return self._steps

    def close(self) -> None:
        """Let Python collect garbage by itself again."""
        if self.args.manual_gc:
            gc.enable()


def is_due(interval: int | None, steps: int) -> bool:
    """Whether work that is due every `interval` steps (None or 0: never) is due after this many `steps`."""
    return bool(interval) and steps % interval == 0
