"""The optimizer's states of every weight in a checkpoint: float32 copies of 16-bit weights, and Adam's moments.

A distributed optimizer has the states of a weight in pieces on its data-parallel ranks. In a checkpoint they are whole, so that
any layout can load them. Each weight has an owner among these ranks, which alone puts the pieces together in its memory and
writes them, and reads them for all. So a rank needs about as much memory as for its own pieces, whereas Megatron's two ways
need memory for everything on every rank, or on the first one. The files are the same.

An optimizer without moments, such as a stateless Adam, has float32 copies all the same: updates are smaller than what 16 bits
resolve, so a run that made its copies of the 16-bit weights at every resume would lose them. They stand under the names that
they have in a whole optimizer's state, and can be read out of one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from slime.backends.megatron_utils.adam import main_parameter, set_main_parameter
from slime.backends.megatron_utils.optimizer import parts_of

# What is kept of a weight, by name; whole, on the rank that owns it. Weights are numbered through the optimizer's buffers.
Described = dict[int, dict[str, ShardedTensor | ShardedTensorFactory | dict]]
Loaded = Mapping[int, Mapping[str, torch.Tensor]]

_COPY = "param"
# What Megatron's format holds of a weight that a distributed optimizer trains, and what the names there begin with.
STATES = {name: f"optimizer.state.{name}" for name in (_COPY, "exp_avg", "exp_avg_sq")}

# Megatron's distributed optimizer has its own word for them. The first one is used for writing.
PREFIXES = ("optimizer.state.fp32_param", "optimizer.state.param")


def has_float32_copies(optimizer: MegatronOptimizer) -> bool:
    """Whether the optimizer updates copies of the weights, which have 16 bits."""
    return bool(optimizer.config.bf16 or optimizer.config.fp16)


def prefix_in(stored: Iterable[str]) -> str | None:
    """The prefix of the copies' names in a checkpoint with the names `stored`; None if it holds no copies.

    A run in float32 may have saved its weights themselves under such names.
    """
    names = list(stored)
    return next((prefix for prefix in PREFIXES if any(name.startswith(f"{prefix}.") for name in names)), None)


def describe_states(part: DistributedOptimizer, model: dict[str, Any], *, is_loading: bool) -> Described:
    """Copies and moments of the weights that this rank owns, whole, for torch_dist. Collective over the data-parallel ranks.

    Args:
        model: the chunks' descriptions, by which the weights are found.
        is_loading: the tensors are to be filled, and hold nothing yet.
    """
    return _describe_gathered(part, _by_weight(model), STATES, is_loading=is_loading)


def put_states(part: DistributedOptimizer, loaded: Loaded) -> None:
    """Give the optimizer the states that were loaded by the description of `describe_states`. Collective like that."""
    _put_gathered(part, loaded, STATES, functools.partial(_put_states_of, part))
    _spread_weights(part)


def describe_copies(
    parts: list[MegatronOptimizer], model: dict[str, Any], prefix: str, *, is_loading: bool
) -> dict[int, Described]:
    """The copies of this rank's weights, whole, for torch_dist, by part; of a distributed optimizer those that it owns.
    Collective over the ranks that hold the same weights.

    Args:
        parts: the optimizers of dense and of expert parameters.
        model: the chunks' descriptions, by which the weights are found.
        is_loading: the tensors are to be filled, and hold nothing yet.
    """
    by_weight, described = _by_weight(model), {}
    for number, part in enumerate(parts):
        if isinstance(part, DistributedOptimizer):
            described[number] = _describe_gathered(part, by_weight, {_COPY: prefix}, is_loading=is_loading)
        else:
            own = dict(_own_copies(part))
            # Only host memory has room for the copies of a whole model.
            copies = [torch.empty(copy.shape) if is_loading else copy.detach() for copy in own.values()]
            described[number] = {
                index: {_COPY: make_sharded_optimizer_tensor(by_weight[id(weight)], copy, prefix)}
                for index, (weight, copy) in enumerate(zip(own, copies, strict=True))
            }
    return described


@torch.no_grad()
def put_copies(parts: list[MegatronOptimizer], loaded: Mapping[int, Loaded]) -> None:
    """Give the optimizers the copies that were loaded by the description of `describe_copies`. Collective like that."""
    # A part of which this rank owns nothing has nothing loaded.
    gathered = [loaded.get(number, {}) for number in range(len(parts))]
    require_owned(parts, gathered, (_COPY,))
    for part, of_part in zip(parts, gathered, strict=True):
        if isinstance(part, DistributedOptimizer):
            _make_states(part)
            _put_gathered(part, of_part, (_COPY,), functools.partial(_put_states_of, part))
            _spread_weights(part)
        else:
            for index, (_, copy) in enumerate(_own_copies(part)):
                copy.copy_(of_part[index][_COPY])


@contextlib.contextmanager
def putting_copies(optimizer: MegatronOptimizer) -> Iterator[Callable[[torch.Tensor, torch.Tensor], None]]:
    """In the block the optimizer's copies are set one by one, by the function that is yielded. Its arguments are a weight, and
    the values of all of it that this rank has, in more bits. Weights without a copy are ignored. The end of the block is
    collective over the data-parallel ranks."""
    parts = [part for part in parts_of(optimizer) if part.optimizer is not None]
    puts: dict[torch.Tensor, Callable[[torch.Tensor], Any]] = {}
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            _make_states(part)
            puts |= {weight: functools.partial(_put_piece, part, weight, first) for weight, first in _own_starts(part)}
        else:
            puts |= {weight: copy.copy_ for weight, copy in _own_copies(part)}

    @torch.no_grad()
    def put(weight: torch.Tensor, values: torch.Tensor) -> None:
        if weight in puts:
            puts[weight](values)

    yield put
    for part in parts:
        if isinstance(part, DistributedOptimizer):
            _spread_weights(part)


def _put_piece(part: DistributedOptimizer, weight: torch.Tensor, first: int, values: torch.Tensor) -> None:
    own = values.reshape(-1)[first : first + _updated(part, weight).numel()]
    _put_states_of(part, weight, {_COPY: own.to(weight.device, torch.float32)})


def _make_states(part: DistributedOptimizer) -> None:
    """Create main parameters and moments (0) in an optimizer whose main parameters are states."""
    for param in part.get_parameters() if _is_precision_aware(part) else ():
        part.optimizer.initialize_state(param)


def _own_copies(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(weight, copy) for all weights of which a non-distributed optimizer has copies."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, copies, strict=True)


def _is_precision_aware(part: DistributedOptimizer) -> bool:
    """Whether `part` updates the weights themselves, and holds the rest of their values as one of its states."""
    return part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8


def _updated(part: DistributedOptimizer, weight: torch.Tensor) -> torch.Tensor:
    """The parameter by which the optimizer updates this rank's piece of `weight`."""
    group, position = part.model_param_group_index_map[weight]
    return part.optimizer.param_groups[group]["params"][position]


def _state_of(part: DistributedOptimizer, weight: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's piece of the state `name` of `weight`, in float32."""
    param = _updated(part, weight)
    if not _is_precision_aware(part):
        return param if name == _COPY else part.optimizer.state[param][name]
    # Megatron would save a main parameter as the remainder that the weight lacks, which is useless for another dtype.
    return main_parameter(part.optimizer, param) if name == _COPY else part.optimizer.get_unscaled_state(param, name)


def _put_states_of(part: DistributedOptimizer, weight: torch.Tensor, pieces: Mapping[str, torch.Tensor]) -> None:
    param = _updated(part, weight)
    if not _is_precision_aware(part):
        for name, values in pieces.items():
            (param if name == _COPY else part.optimizer.state[param][name]).view(-1).copy_(values)
        return
    for name, values in pieces.items():
        if name == _COPY:
            set_main_parameter(part.optimizer, param, values)
        else:
            part.optimizer.set_scaled_state(param, name, values)


def _spread_weights(part: DistributedOptimizer) -> None:
    """Gather weights that are part of their main parameter, or the same memory, since those of the checkpoint may have been
    rounded in another way, or have been of 16 bits. Collective over the data-parallel ranks."""
    if _is_precision_aware(part) or any(weight.dtype == torch.float32 for weight in part.model_param_group_index_map):
        for chunk in part.model_chunks:
            chunk.start_param_sync(force_sync=True)


def _owned(part: DistributedOptimizer) -> Iterator[tuple[int, torch.Tensor, int]]:
    """(number, weight, the data-parallel rank that owns it) of all weights that `part` trains, the same on these ranks.

    Weights are assigned from the largest on, each to the rank that has least so far: so no rank has more than an even share and
    one weight.
    """
    weights = [weight for buffer in part.buffers for weight in buffer.param_index_map]
    loads, owners = [0] * part.data_parallel_group.size(), [0] * len(weights)
    for number in sorted(range(len(weights)), key=lambda number: -weights[number].numel()):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += weights[number].numel()
    return zip(range(len(weights)), weights, owners, strict=True)


@torch.no_grad()
def _describe_gathered(
    part: DistributedOptimizer,
    by_weight: Mapping[int, ShardedTensor | ShardedTensorFactory],
    prefixes: Mapping[str, str],
    *,
    is_loading: bool,
) -> Described:
    """The states that this rank owns, float32 on the host: gathered, or to be filled. Collective over the data-parallel ranks.

    Args:
        prefixes: by name of a state, the prefix of its names on disk.
    """
    group, described, starts = part.data_parallel_group, {}, dict(_own_starts(part))
    for number, weight, owner in _owned(part):
        for name, prefix in prefixes.items():
            if is_loading:
                whole = torch.empty(weight.shape, dtype=torch.float32) if group.rank() == owner else None
            else:
                own = (starts[weight], _state_of(part, weight, name)) if weight in starts else None
                whole = _gathered(group, weight, owner, own)
            if whole is not None:
                sharded = make_sharded_optimizer_tensor(by_weight[id(weight)], whole, prefix)
                # In each instance of the optimizer, the first rank that holds this part of the weight writes.
                replica = (*sharded.replica_id[:2], part.distributed_optimizer_instance_id)
                sharded = dataclasses.replace(sharded, replica_id=replica)
                described.setdefault(number, {})[name] = sharded if is_loading else _in_memory_of_their_own(sharded)
    return described


def _gathered(
    group: dist.ProcessGroup, weight: torch.Tensor, owner: int, piece: tuple[int, torch.Tensor] | None
) -> torch.Tensor | None:
    """On the rank `owner` of `group` the whole tensor of which each rank has a piece, float32 on the host; elsewhere None."""
    whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
    if piece is not None:
        first, own = piece
        whole[first : first + own.numel()] = own.detach().view(-1)
    # Each entry is that of one rank, and 0 on all others. Summed as integers all bits are kept, even that of a negative zero.
    dist.reduce(whole.view(torch.int32), group_dst=owner, group=group)
    return whole.view(weight.shape).cpu() if group.rank() == owner else None


def _in_memory_of_their_own(sharded: ShardedTensor | ShardedTensorFactory) -> ShardedTensor | dict:
    """`sharded`, whose parts have memory of their own. The writer would copy parts that are views, and the whole tensor would
    stay in memory beside the copies."""
    if isinstance(sharded, ShardedTensor):
        return sharded
    parts = sharded.build()
    for part in nested_values(parts):
        part.data = part.data.clone()
    return parts


@torch.no_grad()
def _put_gathered(
    part: DistributedOptimizer,
    loaded: Loaded,
    names: Iterable[str],
    put: Callable[[torch.Tensor, dict[str, torch.Tensor]], Any],
) -> None:
    """Call `put` with (weight, this rank's pieces by name) of the states that the owners loaded, for each weight that this rank
    updates. Collective over the data-parallel ranks."""
    group, starts = part.data_parallel_group, dict(_own_starts(part))
    for number, weight, owner in _owned(part):
        pieces = {}
        for name in names:
            whole = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
            if group.rank() == owner:
                whole.copy_(loaded[number][name].reshape(-1))
            dist.broadcast(whole, group_src=owner, group=group)
            if weight in starts:
                first, size = starts[weight], _updated(part, weight).numel()
                pieces[name] = whole[first : first + size].clone()
        if pieces:
            put(weight, pieces)


def require_owned(parts: list[MegatronOptimizer], loaded: Sequence[Loaded], names: Iterable[str]) -> None:
    """`refuse_lacking` what a rank owns."""
    lacking = [
        (number, name)
        for part, of_part in zip(parts, loaded, strict=True)
        if isinstance(part, DistributedOptimizer)
        for number, _, owner in _owned(part)
        for name in names
        if owner == part.data_parallel_group.rank() and name not in of_part.get(number, {})
    ]
    refuse_lacking(lacking)


def refuse_lacking(lacking: Sequence[Any]) -> None:
    """Raise KeyError on all ranks where one of them lacks something, and the others would wait for it in vain. Collective.

    Only some values of `--dist-ckpt-strictness` go on where a checkpoint lacks something.
    """
    gathered: list[Sequence[Any]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, lacking)
    if any(gathered):
        raise KeyError(f"it lacks optimizer state of {sum(map(len, gathered))} tensors")


def _own_starts(part: DistributedOptimizer) -> Iterator[tuple[torch.Tensor, int]]:
    """For each weight of which this rank updates a piece, the first entry that it updates."""
    for buckets in (of_type for ranges in part.gbuf_ranges for of_type in ranges.values()):
        for bucket in buckets:
            yield from ((weight, ranges["param"].start) for weight, ranges in bucket["param_map"].items())


def _by_weight(model: dict[str, Any]) -> dict[int, ShardedTensor | ShardedTensorFactory]:
    """The descriptions of weights, by the identity of these."""
    described, _ = extract_sharded_tensors_and_factories(model)
    return {id(sharded.data): sharded for sharded in nested_values(described)}
