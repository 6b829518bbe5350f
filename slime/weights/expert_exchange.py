"""Sends experts of a push directly from the training ranks that have them to those on whose devices an engine hosts them.

If every engine rank hosts whole experts, and shares the device of a training rank, that training rank needs only the experts
that its engine rank hosts. Experts are sent in rounds. A round is a bucket of which each rank has different tensors: those that
its engine rank hosts. The plan is made once, and is the same on every rank. Tensors are packed first-fit, in the order of the
ranks that have them, so that on no rank a round is larger than a bucket: what it receives, what it sends, and its own. Ranks
that need the same tensors from one rank are sent the same memory. A tensor that is too large even alone begins a round: ranks
that it fills have nothing else in that round, and others may.

SGLang 0.5.21 gives each rank of an engine the tensors that are meant for it (`deserialize_own_rank` of its workers), and a rank
ignores experts that it does not host. In an engine of tensor-parallel size n with n expert-parallel ranks, rank r hosts the
experts from r/n to (r+1)/n of all.
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
# Flags with which an engine rank may host other experts than those of its place, or more; and their values if it does not.
_OTHER_PLACES = {
    "sglang_enable_eplb": False,
    "sglang_ep_num_redundant_experts": 0,
    "sglang_moe_dp_size": 1,
    "sglang_init_expert_location": "trivial",
}


def experts_go_directly(args: argparse.Namespace, shares_host_memory: bool) -> bool:
    """Whether experts of this run need not be gathered. For that all engines must be alike, on devices of training ranks, each
    with memory of its own, and host whole experts in their places; and a training rank must have whole experts, of all layers.

    `shares_host_memory`: that of the devices' accelerator.
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
    """The experts that the engine rank on a device of the run hosts, if experts go directly."""
    size = args.rollout_num_gpus_per_engine
    each, place = args.num_experts // size, device % size
    return range(place * each, (place + 1) * each)


@dataclasses.dataclass(frozen=True)
class Round:
    """Tensors that are sent together. `sources`: by name and receiving rank, the rank that gives the tensor; it may be the same
    rank."""

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
        max_bytes: the most bytes of a round of several tensors on one rank.
        largest: `--update-weight-buffer-size`, of which `max_bytes` may be a part.

    Raises:
        UserError: a tensor is larger than `largest`.
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
            # If several ranks have it, they share the work of sending.
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
    """A round in the making: its bytes on each rank, and which groups of ranks are sent one memory, by which sender."""

    sources: dict[str, dict[int, int]] = dataclasses.field(default_factory=dict)
    filled: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    packed: dict[int, set[frozenset[int]]] = dataclasses.field(default_factory=lambda: collections.defaultdict(set))

    def has_room(
        self, of_ranks: Mapping[int, int], size: int, receivers: Mapping[int, set[int]], max_bytes: int
    ) -> bool:
        """Whether a tensor fits. It does not if it goes to only some of the ranks that are sent one memory, which would have to
        be split."""
        return all(self.filled[rank] + count * size <= max_bytes for rank, count in of_ranks.items()) and all(
            others == ranks or others.isdisjoint(ranks)
            for sender, ranks in receivers.items()
            for others in self.packed[sender]
        )


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A tensor as it is sent; a quantised expert has several."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ExpertExchange:
    """Exchanges experts among all training ranks, of which rank r has device r of the run. All methods are collective.

    Args:
        own: returns the tensors of this rank's experts, by their names in `--hf-checkpoint`; they may be those of the model.
        prepare: converts tensors before they are sent, for example quantises them.
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

        # NCCL needs all ranks at the first use of a group, to connect them; in a round some may have nothing to do.
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
        """The tensors that this rank's engine rank hosts, round by round; collective."""
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
    """The devices of engine ranks that need a tensor: those that host its expert, or all if it is not of a single expert."""
    devices, found = range(layout_of(args).rollout_gpus), _EXPERT.search(name)
    return [device for device in devices if found is None or int(found[1]) in hosted_experts(args, device)]


def _empty(size: int) -> torch.Tensor:
    import torch

    return torch.empty(size, dtype=torch.uint8, device=get_accelerator().current_device())


def _packed(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """The bytes of all tensors, those with larger elements first, so that each begins at a multiple of its element size."""
    import torch

    ordered = sorted((tensor for _, tensor in named_tensors), key=lambda tensor: -tensor.element_size())
    return torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in ordered])


def _unpacked(pieces: Sequence[_Piece], buffer: torch.Tensor) -> NamedTensors:
    found, start = [], 0
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        found.append((piece.name, buffer[start : start + piece.nbytes].view(piece.dtype).view(piece.shape)))
        start += piece.nbytes
    return found
