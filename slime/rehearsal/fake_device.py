"""A fake device: fake tensors, process groups that send nothing, and lifts of assumptions that do not hold for them.

`enter` changes the process for the rest of its life, so every rehearsed rank has a process of its own. Each lift names the
assumption that it removes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from slime.rehearsal.recorder import Recorder, placeholders
from slime.utils.device import Accelerator, CudaAccelerator, register_accelerator

BACKEND = "fake"


class FakeCuda(CudaAccelerator):
    """CUDA for fake tensors: one device, and nothing to wait for."""

    process_group_backend = host_group_backend = BACKEND

    def current_device(self) -> torch.device:
        return self.device(0)

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cuda", 0)

    def group_device(self, group: dist.ProcessGroup | None) -> torch.device:
        return self.current_device()

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # Fake tensors cannot be compiled; the operations of the other implementation are counted instead.
        return Accelerator().fused(function)

    def host_buffer(self, size: int) -> torch.Tensor:
        return Accelerator.host_buffer(self, size)

    # As on the CPU: no work is queued on this device.
    aside, join_aside, mark = Accelerator.aside, Accelerator.join_aside, Accelerator.mark
    # The recorder counts what is live, and no device does.
    peak_memory_allocated, reset_peak_memory = Accelerator.peak_memory_allocated, Accelerator.reset_peak_memory


class FakeCpu(Accelerator):
    """The CPU, used if the stand-in that lets fake tensors be on CUDA cannot be built."""

    process_group_backend = host_group_backend = BACKEND


class _Stream:
    """A CUDA stream on which nothing is queued."""

    cuda_stream = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event

    def synchronize(self) -> None:
        pass


# Operations that are one kernel on CUDA. A build without CUDA would decompose them, and keep more for the backward pass.
_KERNELS = ("_fused_rms_norm", "silu_backward")
_OPERATORS = torch.library.Library("aten", "IMPL")


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def torch_cuda_lifts(recorder: Recorder) -> dict[str, Any]:
    """Assumption: there is a driver."""

    def synchronize(device: Any = None) -> None:
        recorder.wait("the device")

    return {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device_count": lambda: 1,
        # An H100's. A broadcast asks for it.
        "get_device_capability": lambda device=None: (9, 0),
        "is_available": lambda: True,
        "synchronize": synchronize,
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": None,
        "memory_allocated": lambda device=None: 0,
        "Stream": _Stream,
        "current_stream": lambda device=None: _Stream(),
        "stream": _on_stream,
    }


def enter(device_type: str, rank: int, world_size: int) -> tuple[Recorder, FakeTensorMode]:
    """Make `device_type`, "cuda" or "cpu", the fake device of this process, which becomes rank `rank` of a world of fakes.

    Returns:
        The modes to enter: that of the fake tensors first, in it the recorder.
    """
    recorder = Recorder(device_type)
    register_accelerator("rehearsal", FakeCuda if device_type == "cuda" else FakeCpu)
    dist.init_process_group(BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    # Assumption: a fake tensor on CUDA makes sure that the driver is there.
    FakeTensorMode.avoid_device_init = property(lambda mode: True)
    if device_type == "cuda":
        for name, lift in torch_cuda_lifts(recorder).items():
            setattr(torch.cuda, name, lift)
        for name in _KERNELS:
            # Assumption: the kernels of CUDA are there. Fake tensors know the shapes and never come here.
            _OPERATORS.impl(name, _no_kernel, "CUDA")
    for (owner, name), lift in {**placeholders(recorder), **_lifts_of_torch()}.items():
        setattr(owner, name, lift)
    lift_segments(_OPERATORS)
    # Tensors that were made before the modes were entered, as constants of modules are, count as fake ones.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    # The recorder has a cache of its own.
    fake.cache_enabled = False
    return recorder, fake


def _no_kernel(*args: Any) -> Any:
    raise NotImplementedError("a real tensor on a device that is not there")


def lift_segments(library: torch.library.Library) -> None:
    """Assumption: reductions over segments, along the first dimension, are asked for where tensors have values."""

    def segment_reduce(data: torch.Tensor, reduce: str, *, lengths: torch.Tensor, **options: Any) -> torch.Tensor:
        return data.new_empty(*lengths.shape, *data.shape[1:])

    library.impl("segment_reduce", segment_reduce, "Meta")


def _lifts_of_torch() -> dict[tuple[Any, str], Callable[..., Any]]:
    def apply(module: torch.nn.Module, function: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        # Assumption: a parameter that is moved can be swapped with a new one, which a fake tensor refuses.
        for child in module.children() if recurse else ():
            child._apply(function)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved = torch.nn.Parameter(function(parameter.detach()), requires_grad=parameter.requires_grad)
                # Megatron's marks, but not what makes the new one a fake tensor, its device above all.
                moved.__dict__.update({**parameter.__dict__, **moved.__dict__})
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
        return module

    def all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
        # Assumption: peers answer. Here all of them say what this rank says.
        objects[:] = [own] * len(objects)

    def broadcast_object_list(objects: list[Any], src: Any = None, group: Any = None, **options: Any) -> None:
        # The same assumption: here every rank has what the sender would send.
        return None

    return {
        (torch.nn.Module, "_apply"): apply,
        (dist, "all_gather_object"): all_gather_object,
        (dist, "broadcast_object_list"): broadcast_object_list,
    }


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    return _as_it_is if function is None else function


def lift_megatron() -> None:
    """What Megatron-Core assumes about values; called when it may be imported.

    Megatron-Core 0.16.1.
    """
    # Assumption: a compiler is worth its import. Under modes torch calls what is compiled as it is.
    torch.compile = _as_it_is
    import megatron.core.models.common.embeddings.rope_utils as rope_utils
    import megatron.core.tensor_parallel.random as random

    @contextlib.contextmanager
    def fork(tracker: Any, name: str | None = None) -> Iterator[None]:
        # Assumption: states of generators can be compared.
        yield

    def rotate(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        # Assumption: lengths of sequences are known on the host, so the stream can be cut by them.
        cu_seqlens.tolist()
        own = freqs.index_select(0, torch.zeros(t.shape[0], dtype=torch.int64, device=t.device))
        return rope_utils._apply_rotary_pos_emb_bshd(t.unsqueeze(1), own).squeeze(1)

    random.CudaRNGStatesTracker.fork = fork
    random._get_cuda_rng_state = lambda *args, **options: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **options: None
    rope_utils._apply_rotary_pos_emb_thd = rotate


def lift_experts(recorder: Recorder) -> None:
    """What is assumed about the choice of experts; called where there are some, after `lift_megatron`.

    Assumption: experts get equally many tokens, on this rank and on all others.
    """
    from megatron.core.transformer.moe import token_dispatcher

    permute = token_dispatcher.permute

    def permute_chosen(tokens: torch.Tensor, routing_map: torch.Tensor, *, num_out_tokens: int, **options: Any) -> Any:
        with recorder.selecting(num_out_tokens):
            return permute(tokens, routing_map, num_out_tokens=num_out_tokens, **options)

    def counts_on_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        """In place of the method that brings all counts to the host, and at its `point` waits for them."""
        if point != dispatcher.cuda_sync_point:
            return tokens_per_expert
        recorder.wait("the counts of tokens")
        experts, own = dispatcher.num_experts, dispatcher.local_expert_indices
        of_each, rest = divmod(dispatcher.num_out_tokens, experts)
        sizes = np.full(experts, of_each)
        sizes[:rest] += 1
        ranks = dispatcher.tp_size * dispatcher.ep_size
        if dispatcher.input_splits is not None:
            dispatcher.input_splits = sizes.reshape(dispatcher.ep_size, -1).sum(axis=1).tolist()
            dispatcher.output_splits = [int(sizes[own].sum())] * dispatcher.ep_size
            dispatcher.output_splits_tp = np.full(dispatcher.tp_size, sizes[own].sum() * dispatcher.ep_size)
        dispatcher.num_global_tokens_per_local_expert = np.tile(sizes[own], (ranks, 1))
        # These are on the host in any case, and stand here because fake tensors have no values there either.
        chunks = np.arange(experts * dispatcher.tp_size)
        dispatcher.sort_input_by_local_experts = chunks.reshape(-1, len(own)).T.ravel()
        dispatcher.restore_output_by_local_experts = chunks.reshape(len(own), -1).T.ravel()
        return sizes[own] * ranks

    token_dispatcher.permute = permute_chosen
    token_dispatcher.MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_on_host


def lift_selection() -> None:
    """What is assumed about the parameters of other ranks, where some are frozen."""
    from slime.backends.megatron_utils import parameter_selection

    # Assumption: ranks tell how many of theirs match. What none of this rank's do, one of another rank does.
    parameter_selection.of_all_ranks = lambda counts: [max(count, 1) for count in counts]


def lift_stages() -> None:
    """What is assumed about the other stages of a pipeline; called where there are some, after `lift_megatron`."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils import schedules
    from slime.backends.megatron_utils.parameter_names import EMBEDDING

    def gather_from_stages(value: Any) -> list[Any]:
        # Assumption: stages answer. Here all that the others say is whose copy an embedding is: the first one's.
        chunks = value if isinstance(value, list) else []
        nothing = [{} for _ in chunks] if chunks else None
        gathered = [nothing] * parallel_state.get_pipeline_model_parallel_world_size()
        if chunks:
            gathered[0] = [{name: like for name, like in chunk.items() if name == EMBEDDING} for chunk in chunks]
        gathered[parallel_state.get_pipeline_model_parallel_rank()] = value
        return gathered

    def broadcast_from_last_stage(value: Any) -> Any:
        # Assumption: the last stage tells its metrics.
        return {} if value is None else value

    schedules.gather_from_stages = gather_from_stages
    schedules.broadcast_from_last_stage = broadcast_from_last_stage


def lift_parts() -> None:
    """What is assumed of ranks that hold other parts of the model, layers or experts, where a checkpoint is loaded."""
    from slime.backends.megatron_utils import hf_conversion

    check_names = hf_conversion._check_names

    def check_names_of_part(needed: set[str], source: Any, *others: Any) -> None:
        # Assumption: every part says which tensors it needs, and what is left is surplus.
        check_names(needed, SimpleNamespace(names=lambda: source.names() & needed), *others)

    hf_conversion._gather_from_parts = lambda value: [value]
    hf_conversion._check_names = check_names_of_part
