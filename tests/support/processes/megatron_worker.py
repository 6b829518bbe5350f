"""Steps of several tests with a tiny Megatron model, inside the child processes of `run_distributed`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from slime.utils.device import get_accelerator

# The number of layouts whose groups are kept at a time.
_MOST_LAYOUTS = 4


def start(args: SimpleNamespace) -> None:
    """Initialise Megatron, perhaps again: the process group stays; parallel layout and seeds come from `args`."""
    from slime.backends.megatron_utils import initialize

    _may_start_again()
    initialize.init(args)


def _may_start_again() -> None:
    """Let Megatron keep the groups of a layout for the next start with the same layout."""
    from slime.backends.megatron_utils import initialize

    initialize.cpu_runtime.install()
    from megatron.core import parallel_state

    if not isinstance(parallel_state.initialize_model_parallel, _LaysOut):
        parallel_state.initialize_model_parallel = _LaysOut(parallel_state.initialize_model_parallel)


class _LaysOut:
    """A replacement for `initialize_model_parallel` that may run many times. It keeps the groups of a layout, some thirty,
    because leaving them takes longer than a step of a tiny model."""

    def __init__(self, lay_out: Callable[..., None]) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        self._lay_out, self._nothing = lay_out, _state_of_layout()
        # Layout -> the variables of Megatron's module.
        self._states: dict[tuple, dict[str, Any]] = {}

    def __call__(self, **layout: Any) -> None:
        from megatron.core import parallel_state

        key = tuple(map(str, layout.items()))
        if not _is_there(self._states.get(key)):
            if len(self._states) == _MOST_LAYOUTS or not all(map(_is_there, self._states.values())):
                _leave_layouts()
                self._states.clear()
            vars(parallel_state).update(self._nothing)
            self._lay_out(**layout)
            self._states[key] = _state_of_layout()
            return
        vars(parallel_state).update(self._states[key])
        # The buffer may still hold data of the run before.
        parallel_state.destroy_global_memory_buffer()
        parallel_state._set_global_memory_buffer()


def _state_of_layout() -> dict[str, Any]:
    """The variables of Megatron's module that hold groups, their ranks and sizes."""
    from megatron.core import parallel_state

    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _is_there(state: dict[str, Any] | None) -> bool:
    """Whether the groups of a layout still exist."""
    import torch.distributed as dist

    groups = [] if state is None else [value for value in state.values() if isinstance(value, dist.ProcessGroup)]
    return state is not None and all(group in dist.distributed_c10d._world.pg_map for group in groups)


def _leave_layouts() -> None:
    """Leave all groups but the one of all ranks: every group has threads that watch its connections."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from slime.utils.process_groups import get_gloo_group

    parallel_state.destroy_model_parallel()
    dist.barrier()  # nobody leaves while another rank still works in a group
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (dist.group.WORLD, get_gloo_group()):
            dist.destroy_process_group(group)


def load_backend(args: SimpleNamespace, *, loads: bool = True) -> Any:
    """This rank's backend in a new layout, with its optimizer. Weights come from `args.hf_checkpoint` or are random."""
    from slime.arguments.checkpoints import WeightSource
    from slime.training.backend import make_backend

    if args.train_backend == "megatron":
        _may_start_again()
    backend = make_backend(args)
    backend.place()
    backend.load(WeightSource("hf", args.hf_checkpoint) if loads else WeightSource("random"))
    return backend


def load_model(args: SimpleNamespace) -> list[Any]:
    """`start`, then the model of `args.hf_checkpoint`, wrapped, with its weights."""
    start(args)
    from slime.backends.megatron_utils.hf_conversion import load_hf_weights
    from slime.backends.megatron_utils.model_provider import setup_model

    chunks = setup_model(args)
    load_hf_weights(args, chunks, args.hf_checkpoint)
    return chunks


def packed_forward(chunk: torch.nn.Module, sequences: Sequence[Sequence[int]], padding: int = 0) -> torch.Tensor:
    """Logits [tokens, local part of the vocabulary] of the sequences, packed into one stream, with rows of `padding` behind
    them, of which the model is told."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_model_config

    from slime.backends.megatron_utils.attention import StreamParams
    from slime.training.packed_stream import pack_stream

    device = get_accelerator().current_device()
    options = {}
    if padding:
        is_padding = [False] * sum(map(len, sequences)) + [True] * padding
        options["padding_mask"] = torch.tensor(is_padding, device=device)[None]
        sequences = [*sequences, [0] * padding]
    lengths = [len(sequence) for sequence in sequences]
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    describe = PackedSeqParams
    has_sinks = any(name.endswith("softmax_offset") for name, _ in chunk.named_parameters())
    if get_model_config(chunk).dsa_indexer_topk is not None or has_sinks:
        # Sparse attention and sinks need the trainer's description of a stream; for all others Megatron's own is enough.
        samples = [torch.tensor(sequence, device=device) for sequence in sequences]
        stream = pack_stream(samples, [0] * len(lengths), pad_multiple=1)
        describe = functools.partial(StreamParams, stream=stream)
    packed = describe(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    tokens = torch.tensor([token for sequence in sequences for token in sequence], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    return chunk(tokens[None], positions[None], None, packed_seq_params=packed, **options)[0]


@contextlib.contextmanager
def routing_maps(chunk: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Yields a list. In the block, every call of a router adds its choice: bool [tokens of this rank, experts]."""
    from megatron.core.transformer.moe.router import TopKRouter

    maps: list[torch.Tensor] = []
    hooks = [
        module.register_forward_hook(lambda router, inputs, output: maps.append(output[1].bool()))
        for module in chunk.modules()
        if isinstance(module, TopKRouter)
    ]
    try:
        yield maps
    finally:
        for hook in hooks:
            hook.remove()


def gather_tokens(args: SimpleNamespace, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each of `rows` ([tokens of this rank, …]) for all tokens of the stream, if tensor-parallel ranks split it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not args.sequence_parallel:
        return list(rows)
    group = parallel_state.get_tensor_model_parallel_group()
    gathered = []
    for row in rows:
        parts = [torch.empty_like(row) for _ in range(group.size())]
        dist.all_gather(parts, row.contiguous(), group=group)
        gathered.append(torch.cat(parts))
    return gathered


def gather_vocabulary(logits: torch.Tensor) -> torch.Tensor:
    """Whole logits from the parts of the tensor-parallel ranks."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    parts = [torch.empty_like(logits) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, logits.detach().contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)


def next_token_loss(logits: torch.Tensor, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """The sum of the negative log-likelihoods of every token but the first of each sequence."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    labels = torch.cat([torch.tensor(sequence).roll(-1) for sequence in sequences])
    mask = torch.cat([(torch.arange(len(sequence)) < len(sequence) - 1).float() for sequence in sequences])
    losses = vocab_parallel_cross_entropy(logits[:, None].float(), labels[:, None].to(logits.device))[:, 0]
    return (losses * mask.to(losses.device)).sum()


def hf_gradients(args: SimpleNamespace, chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The reduced gradients under HF names. They are written over the weights and exported like them.

    Parameters that are not trained have zeros.
    """
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.copy_(parameter.main_grad if parameter.requires_grad else torch.zeros_like(parameter))
    return whole_weights(args, chunks)


def whole_weights(args: SimpleNamespace, chunks: list[Any]) -> dict[str, torch.Tensor]:
    """Copies of all weights by HF name, on every rank: pipeline stages exchange theirs, each name once."""
    from slime.backends.megatron_utils.hf_conversion import iter_stage_named_tensors, names_of_stage
    from slime.backends.megatron_utils.schedules import gather_from_stages

    of_stage = iter_stage_named_tensors(args, chunks, names_of_stage(args, chunks))
    stages = gather_from_stages({name: tensor.clone() for name, tensor in of_stage})
    names = [name for weights in stages for name in weights]
    assert len(set(names)) == len(names), "two stages have a weight of one name"
    return dict(sorted((name, tensor) for weights in stages for name, tensor in weights.items()))


def sharded_state(chunks: list[Any], optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """The state of model and optimizer as `dist_checkpointing` saves and loads it, for any later layout."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.parameter_names import unwrap_model

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap_model(chunks[0]).sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)}
