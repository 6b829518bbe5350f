"""Experts of a push from the training ranks that have them to those on whose devices an engine wants them, and to no others.

Where every engine rank hosts whole experts, and has the device of a training rank, that one needs no more than its engine rank
hosts. Experts travel in rounds. A round is a bucket of which each rank has other tensors: what its engine rank hosts. The plan
is made once, and is the same on every rank. Tensors are packed first-fit, in the order of the ranks that have them, so that no
rank has more of a round than a bucket may be large: what arrives, what it sends and its own. Ranks that want the same tensors
of one that has them are sent the same memory. A tensor that is too large for that in itself begins a round: ranks that it
fills have nothing else there, and others may.

SGLang 0.5.21 gives each rank of an engine the tensors that are meant for it (`deserialize_own_rank` of its workers), and a rank
leaves alone the experts that it does not host. What an engine of tensor-parallel size n with n expert-parallel ranks hosts on
rank r are the experts from r/n to (r+1)/n of all.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from slime.arguments.sizes import layout_of
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.weights.buckets import RankBucket
from slime.weights.transports import ColocatedTransport, transport_of
from slime.weights.transports.shared_handles import reads_own_device

if TYPE_CHECKING:
    import torch

    from slime.weights.buckets import NamedTensors

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Flags by which an engine rank hosts other experts than those of its place, or more, and what they say where it does not.
_OTHER_PLACES = {
    "sglang_enable_eplb": False,
    "sglang_ep_num_redundant_experts": 0,
    "sglang_moe_dp_size": 1,
    "sglang_init_expert_location": "trivial",
}


def experts_go_directly(args: argparse.Namespace, shares_host_memory: bool) -> bool:
    """Whether experts of this run need not be gathered: all engines are alike, on devices of training ranks that each share
    memory of their own, and host whole experts in their places; and a training rank has whole ones, of all layers.

    `shares_host_memory`: of the devices, as an accelerator says.
    """
    if (
        not args.colocate
        or transport_of(args) is not ColocatedTransport
        or not reads_own_device(args, shares_host_memory)
    ):
        return False
    size, layout = args.rollout_num_gpus_per_engine, layout_of(args)
    cut = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    values = vars(args)
    return (
        args.expert_model_parallel_size > 1
        and args.pipeline_model_parallel_size == cut == 1
        and args.sglang_config is None
        and values.get("sglang_ep_size") == size > 1
        and layout.rollout_gpus <= layout.actor_gpus
        and args.num_experts % size == 0
        and all(values.get(name) in (None, plain) for name, plain in _OTHER_PLACES.items())
    )


def hosted_experts(args: argparse.Namespace, device: int) -> range:
    """The experts that the engine rank on a device of the run hosts, where experts go directly."""
    size = args.rollout_num_gpus_per_engine
    each, place = args.num_experts // size, device % size
    return range(place * each, (place + 1) * each)


@dataclasses.dataclass(frozen=True)
class Round:
    """Tensors that travel together. `sources`: by name and rank that needs it, the rank that gives it, which may be itself."""

    sources: Mapping[str, Mapping[int, int]]


def plan_rounds(
    sizes: Mapping[str, int],
    holders: Mapping[str, Sequence[int]],
    hosts: Mapping[str, Sequence[int]],
    max_bytes: int,
    largest: int,
) -> list[Round]:
    """Pack tensors of `sizes` bytes, in their order, into rounds.

    Args:
        holders, hosts: by name, the ranks that have a tensor, and those that need it.
        max_bytes: the most that a rank has of a round of several tensors.
        largest: `--update-weight-buffer-size`, of which `max_bytes` may be a part.

    Raises:
        UserError: a tensor is larger than that.
    """
    rounds: list[_Draft] = []
    sent: collections.Counter[int] = collections.Counter()
    for name, size in sizes.items():
        if size > largest:
            raise UserError(
                f"weight push: {name} has {size} bytes, which exceeds update_weight_buffer_size: experts that go to the ranks "
                f"that host them travel in buckets of {largest}; give --update-weight-buffer-size {size}, or more"
            )
        sources: dict[int, int] = {}
        receivers: dict[int, set[int]] = collections.defaultdict(set)
        for host in hosts[name]:
            # Of several that have it, each gives as much as the others.
            sources[host] = host if host in holders[name] else min(holders[name], key=lambda rank: (sent[rank], rank))
            if sources[host] != host:
                sent[sources[host]] += size
                receivers[sources[host]].add(host)
        of_ranks = collections.Counter([*sources, *receivers])
        fitting = (draft for draft in rounds if draft.has_room(of_ranks, size, receivers, max_bytes))
        draft = next(fitting, None)
        if draft is None:
            rounds.append(draft := _Draft())
        draft.sources[name] = sources
        for rank, count in of_ranks.items():
            draft.filled[rank] += count * size
        for sender, ranks in receivers.items():
            draft.packed[sender].add(frozenset(ranks))
    return [Round(draft.sources) for draft in rounds]


@dataclasses.dataclass
class _Draft:
    """A round in the making: the bytes that each rank has of it, and who is sent one memory by whom."""

    sources: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    filled: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    packed: dict[int, set[frozenset[int]]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))

    def has_room(
        self, of_ranks: Mapping[int, int], size: int, receivers: Mapping[int, set[int]], max_bytes: int
    ) -> bool:
        """Whether a tensor fits. One that goes to some of the ranks that are sent one memory would make two of it."""
        return all(self.filled[rank] + count * size <= max_bytes for rank, count in of_ranks.items()) and all(
            others == ranks or others.isdisjoint(ranks)
            for sender, ranks in receivers.items()
            for others in self.packed[sender]
        )


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor as it travels: of a quantised expert there are several."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExpertExchange:
    """Collective over all training ranks, of which rank r has device r of the run.

    Args:
        own: gives the tensors of the experts that this rank has, under their names in `--hf-checkpoint`; they may be those of
            the model.
        prepare: what becomes of a tensor before it travels, such as its quantisation.
        max_bytes: see `plan_rounds`.

    Raises:
        UserError: on all ranks, see `plan_rounds`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        own: Callable[[], Mapping[str, torch.Tensor]],
        prepare: Callable[[NamedTensors], Iterable[tuple[str, torch.Tensor]]],
        max_bytes: int,
    ) -> None:
        import torch.distributed as dist

        from slime.utils.process_groups import get_gloo_group

        # NCCL connects all ranks at the first use of their group. In a round there may be some that have nothing to do.
        dist.all_reduce(_empty(1).zero_())
        self._own, self._prepare = own, prepare
        self._rank = dist.get_rank()
        described = {
            name: [_Piece(piece, made.dtype, tuple(made.shape)) for piece, made in prepare([(name, tensor)])]
            for name, tensor in own().items()
        }
        of_ranks: list[dict[str, list[_Piece]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, described, group=get_gloo_group())
        holders: dict[str, list[int]] = collections.defaultdict(list)
        for rank, held in enumerate(of_ranks):
            for name in held:
                holders[name].append(rank)
        self._pieces = {name: of_ranks[ranks[0]][name] for name, ranks in holders.items()}
        sizes = {name: sum(piece.nbytes for piece in pieces) for name, pieces in self._pieces.items()}
        hosts = {name: _hosts(name, args) for name in holders}
        self._rounds = plan_rounds(sizes, holders, hosts, max_bytes, args.update_weight_buffer_size)

    def buckets(self) -> Iterator[RankBucket]:
        """What this rank's engine rank hosts, round by round; collective."""
        own = self._own()
        for of_round in self._rounds:
            yield self._exchange(of_round, own)

    def _exchange(self, of_round: Round, own: Mapping[str, torch.Tensor]) -> RankBucket:
        import torch.distributed as dist

        names_from: dict[int, list[str]] = collections.defaultdict(list)
        names_to: dict[int, list[str]] = collections.defaultdict(list)
        for name, sources in of_round.sources.items():
            for host, source in sources.items():
                if host == self._rank:
                    names_from[source].append(name)
                elif source == self._rank:
                    names_to[host].append(name)
        made = {
            name: list(self._prepare([(name, own[name])]))
            for name in dict.fromkeys(name for names in (names_from[self._rank], *names_to.values()) for name in names)
        }
        operations, arriving, packed = [], {}, {}
        for host, names in sorted(names_to.items()):
            if tuple(names) not in packed:
                packed[tuple(names)] = _packed(piece for name in names for piece in made[name])
            operations.append(dist.P2POp(dist.isend, packed[tuple(names)], host))
        for source, names in sorted(names_from.items()):
            if source != self._rank:
                pieces = [piece for name in names for piece in self._pieces[name]]
                arriving[source] = pieces, _empty(sum(piece.nbytes for piece in pieces))
                operations.append(dist.P2POp(dist.irecv, arriving[source][1], source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        tensors = [piece for name in names_from[self._rank] for piece in made[name]]
        for pieces, buffer in arriving.values():
            tensors += _unpacked(pieces, buffer)
        of_all = [piece for name in of_round.sources for piece in self._pieces[name]]
        return RankBucket(tensors, [piece.name for piece in of_all], sum(piece.nbytes for piece in of_all))


def _hosts(name: str, args: argparse.Namespace) -> list[int]:
    """The devices of engine ranks that want a tensor: those that host its expert, or all where it is of no single one."""
    devices, found = range(layout_of(args).rollout_gpus), _EXPERT.search(name)
    return [device for device in devices if found is None or int(found[1]) in hosted_experts(args, device)]


def _empty(size: int) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device())


def _packed(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The bytes of all, those of larger elements first: each begins at a multiple of the size of its own."""
    import torch

    ordered = sorted((tensor for _, tensor in named_tensors), key=lambda tensor: -tensor.element_size())
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in ordered])


def _unpacked(pieces: Sequence[_Piece], buffer: torch.Tensor) -> NamedTensors:
    found, start = [], 0
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        found.append((piece.name, buffer[start : start + piece.nbytes].view(piece.dtype).view(piece.shape)))
        start += piece.nbytes
    return found
