"""Writing a checkpoint, whole and synced, under its hidden name. A rank that cannot write its part fails the save on all.

Tensors are written by forked copies of the ranks' processes, which have the memory of the moment of the fork; tensors on a
device are copied to the host before. So a rank may train on while they write. Everything else is written by the rank itself.

A checkpoint holds each rank's share of model and optimizer, further sets of weights, and the layout.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing.connection
import queue
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from slime.backends.megatron_utils.checkpoint.gathered_state import PREFIXES, describe_copies, has_float32_copies
from slime.backends.megatron_utils.checkpoint.optimizer_state import (
    Memory,
    group_settings,
    is_stateless,
    loss_scales,
    memory_of,
    optimizer_state,
    put_step,
    trained_parts,
)
from slime.backends.megatron_utils.checkpoint.stored import (
    Stored,
    ask_by_stored_names,
    keeps_layers_apart,
    model_notes,
)
from slime.backends.megatron_utils.generator_states import save_generators
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.parameter_selection import selection_of
from slime.training.checkpoint_parts import (
    describe,
    directory_of_state,
    exchange,
    first_error,
    fresh_directory,
    run_on_rank_zero,
)
from slime.training.checkpoint_publication import unpublished
from slime.training.model_states import ModelStates
from slime.training.parameter_schedule import schedule_state
from slime.utils.checkpoint_directory import iteration_directory
from slime.utils.child_process import ForkedCall
from slime.utils.errors import RunError
from slime.utils.filesystem import free_room, fsync_tree

logger = logging.getLogger(__name__)


def begin_checkpoint(
    args: argparse.Namespace,
    iteration: int,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    states: ModelStates | None = None,
    stored: Sequence[str] = (),
    weight_version: int | None = None,
) -> UnfinishedCheckpoint:
    """Begin to write the checkpoint of rollout `iteration`. Collective over all ranks.

    On return model and optimizer may change, but their tensors may still be on the way to the disk. The result waits for them,
    and raises if anything failed. The checkpoint has a hidden name until `publish_checkpoint`, which is called when the data
    state is on disk as well.

    Args:
        stored: names out of `states` whose weights the checkpoint holds too, for `load_stored_state`.
        weight_version: the version that `read_weight_version` will find in the checkpoint; None: none.
    """
    unfinished = UnfinishedCheckpoint(iteration_directory(args.save, iteration), args.checkpoint_write_timeout)
    temporary = unfinished.directory
    unfinished.error = run_on_rank_zero(lambda: fresh_directory(temporary, stored, weight_version))
    begin_parts = [functools.partial(_begin, args, iteration, unfinished, model, optimizer, scheduler)]
    begin_parts += [functools.partial(_begin_state, args, unfinished, model, states, name) for name in stored]
    for begin_part in begin_parts:
        if unfinished.error is None:
            unfinished.error = begin_part()
        if unfinished.error is None and not args.async_save:
            # No training overlaps with the write, so the host need hold the copies of only one part at a time.
            unfinished.error = unfinished.finish_parts()
    return unfinished


class UnfinishedCheckpoint:
    """A checkpoint whose tensors are being written: one writer for each file of this rank.

    Args:
        final: the directory under which it will be published.
        limit: seconds that writing may take, from now on.

    Attributes:
        directory: the hidden directory of the writing.
        error: the first failure that is known on all ranks, else None.
    """

    def __init__(self, final: Path, limit: float) -> None:
        self._final, self._limit, self._begun = final, limit, time.monotonic()
        self._parts: list[tuple[AsyncRequest, list[ForkedCall]]] = []
        # Whether a writer of any rank ran out of time; its disk may hang.
        self._is_late = False
        self.directory = unpublished(final)
        self.error: str | None = None

    @property
    def bytes_on_host(self) -> int:
        """Bytes of host memory of the writers' tensors, part of which they share with this process until it changes them."""
        buckets = [bucket for request, _ in self._parts for bucket in _buckets(request)]
        return sum(tensor.nbytes for _, _, (_, tensors) in buckets for _, tensor in tensors)

    def add(self, state: dict[str, Any], directory: Path, strategy: Any) -> None:
        """Begin to write `state`, as Megatron describes it for torch_dist. Collective."""
        # Megatron would start a process for a queue through which its writers answer. Ours answer by pipes, and what takes
        # their answers out of the queue is this process.
        filesystem_async._results_queue = queue.Queue()
        request = dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)
        if request.async_fn is not None:
            request = _with_host_tensors(request)
        writers: list[ForkedCall] = []
        self._parts.append((request, writers))
        for index, bucket in enumerate(_buckets(request)):
            writers.append(ForkedCall(functools.partial(_write, request.async_fn.args[0], index, bucket)))

    def has_ended(self) -> bool:
        """Whether this rank's writers are done, have failed, or have no time left. Not collective."""
        writers = [writer for _, writers in self._parts for writer in writers]
        return self._left() <= 0 or all(writer.has_ended() for writer in writers)

    def finish(self) -> Path:
        """Wait until the checkpoint is whole and synced; returns the directory that it will have. Collective.

        Raises:
            RunError: writing failed on some rank; the message names the path and the cause, and nothing was published.
        """
        if self.error is None:
            self.error = self.finish_parts()
        if self.error is None:
            self.error = run_on_rank_zero(lambda: fsync_tree(self.directory))
        self._let_parts_go()
        if self.error is None:
            return self._final
        if self._is_late:
            # Nothing is deleted: whoever touches a disk that hangs would hang, too.
            there = f"What there is of it stays in {self.directory}"
        else:
            # A writer of another rank that has not ended yet would put files into what is being deleted.
            first_error(None)
            run_on_rank_zero(lambda: shutil.rmtree(self.directory, ignore_errors=True))
            there = free_room(self._final.parent)
        raise RunError(
            f"checkpoint {self._final} could not be written: {self.error}. {there}. Older checkpoints are untouched"
        )

    def finish_parts(self) -> str | None:
        """Wait until all that was added is on the disk, and let it go; the first error of any rank, or None. Collective."""
        error = self._take_answers()
        late, error = exchange(self._is_late, error)
        self._is_late = any(late)
        if error is None:
            error = first_error(self._write_metadata())
        self._let_parts_go()
        return error

    def _let_parts_go(self) -> None:
        for writer in (writer for _, writers in self._parts for writer in writers):
            writer.kill()
        # The requests hold host copies of the device's tensors, so forgetting them frees memory.
        self._parts = []

    def _left(self) -> float:
        return self._begun + self._limit - time.monotonic()

    def _take_answers(self) -> str | None:
        """Wait for this rank's writers, up to its first error, which is returned."""
        try:
            answers: list[dict[int, Any]] = [{} for _ in self._parts]
            waiting = {
                writer: (part, index)
                for part, (_, writers) in enumerate(self._parts)
                for index, writer in enumerate(writers)
            }
            while waiting:
                # As they end: one that was killed is told while others write.
                ended = multiprocessing.connection.wait(waiting, max(0.0, self._left()))
                if not ended:
                    raise TimeoutError
                for writer in ended:
                    part, index = waiting.pop(writer)
                    answers[part][index] = writer.result(max(0.0, self._left()))
            for (request, writers), of_part in zip(self._parts, answers, strict=True):
                if writers:
                    # Megatron takes the answers out of this queue when it finishes the save.
                    request.async_fn_args[2].put(of_part)
        except TimeoutError:
            self._is_late = True
            error = f"a writer needs more than {self._limit:g} s (--checkpoint-write-timeout)"
        except Exception as cause:
            error = describe(cause)
        else:
            return None
        return f"rank {dist.get_rank()}: {error}" if dist.get_world_size() > 1 else error

    def _write_metadata(self) -> str | None:
        """What Megatron does when all ranks have written; this rank's error, or None."""
        try:
            for request, _ in self._parts:
                for finalize in request.finalize_fns:
                    finalize()
        except (Exception, CheckpointException) as cause:
            logger.debug("finishing %s failed", self.directory, exc_info=True)
            return describe(cause)
        return None


def _buckets(request: AsyncRequest) -> list[Any]:
    """A rank's files: (path, name, (byte items, tensor items)); an item is what it is and its data."""
    return request.async_fn_args[1] if request.async_fn is not None else []


def _with_host_tensors(request: AsyncRequest) -> AsyncRequest:
    """`request` with all tensors in host memory of which a copy of this process has a copy.

    They are held until the writers are done: a device's tensors are copied to pinned memory, which is used again when nobody
    holds it.
    """
    before = request.async_fn_args[1]
    buckets = request.preload_fn()
    for (_, _, (_, old)), (_, _, (_, new)) in zip(before, buckets, strict=True):
        for place, ((_, original), (item, tensor)) in enumerate(zip(old, new, strict=True)):
            if tensor is original and (tensor.is_shared() or tensor.is_pinned()):
                new[place] = item, tensor.clone()
    rank, _, answers = request.async_fn_args
    return request._replace(async_fn_args=(rank, buckets, answers))


def _write(transforms: list[Any], index: int, bucket: Any) -> list[Any]:
    """Write and sync one file of this rank, in a process of its own. Returns where in it what lies."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    nothing_to_count: queue.Queue = queue.Queue()
    nothing_to_count.put(index)
    filesystem_async.FileSystemWriterAsync.write_preloaded_data(
        transforms, index, bucket, answers, nothing_to_count, use_fsync=True
    )
    _, answer = answers.get()
    if isinstance(answer, Exception):
        raise RunError(describe(answer))
    return answer


def _begin(
    args: argparse.Namespace,
    iteration: int,
    unfinished: UnfinishedCheckpoint,
    model: list[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
) -> str | None:
    """Begin with all parts but the further sets of weights; the first error of any rank, or None."""
    common, memory, error = {}, Memory(exists=False, step=None), None
    try:
        memory, common = memory_of(optimizer), _common_state(args, iteration, optimizer, scheduler)
    except Exception as cause:
        logger.debug("the state of the run could not be read", exc_info=True)
        error = describe(cause)
    memories, error = exchange(memory, error)
    if error is not None:
        return error
    memory = Memory.of_all(memories)
    # An optimizer that remembers nothing has no state to save, and nothing is lost: one that starts fresh is the same. Only
    # its float32 copies of the weights are not.
    has_optimizer = memory.exists and not args.no_save_optim
    has_copies = has_float32_copies(optimizer) and (is_stateless(optimizer) or not args.no_save_optim)
    try:
        state = sharded_state(
            args,
            model,
            optimizer if has_optimizer or has_copies else None,
            float32_prefix=None if has_optimizer else PREFIXES[0],
        )
        if has_optimizer:
            put_step(state["optimizer"], memory.step)
        state.update(common, has_optimizer=has_optimizer)
        unfinished.add(state, unfinished.directory, _save_strategy(args))
        if not args.no_save_rng:
            save_generators(unfinished.directory)
    except (Exception, CheckpointException) as cause:
        # Above all a full disk. The others hear of it here. Who fails between two collectives of Megatron's leaves them to
        # the limit of their wait (--checkpoint-write-timeout).
        logger.debug("writing %s failed", unfinished.directory, exc_info=True)
        error = describe(cause)
    return first_error(error)


def _begin_state(
    args: argparse.Namespace,
    unfinished: UnfinishedCheckpoint,
    model: list[torch.nn.Module],
    states: ModelStates,
    name: str,
) -> str | None:
    """Begin with the weights of the state `name`; the first error of any rank, or None."""
    directory, error = directory_of_state(unfinished.directory, name), None
    try:
        with states(name):
            state = sharded_state(args, model, None)
            unfinished.add(state, directory, _save_strategy(args))
    except (Exception, CheckpointException) as cause:
        logger.debug("writing %s failed", directory, exc_info=True)
        error = describe(cause)
    return first_error(error)


def _save_strategy(args: argparse.Namespace) -> Any:
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=args.dist_ckpt_workers)
    if args.ckpt_fully_parallel_save:
        # What data-parallel ranks hold alike is written by all of them, a share each.
        return FullyParallelSaveStrategyWrapper(strategy, replicas())
    return strategy


def _common_state(args: argparse.Namespace, iteration: int, optimizer: Any, scheduler: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "iteration": iteration,
        "scheduler": schedule_state(args, scheduler),
        "parameter_groups": group_settings(optimizer),
        "loss_scales": loss_scales(optimizer),
        "layout": layout_of(args),
        **model_notes(args),
        "parameter_selection": selection_of(args),
    }


_LAYOUT = (
    "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "use_tp_pp_dp_mapping",
)  # fmt: skip


def sharded_state(
    args: argparse.Namespace,
    model: list[torch.nn.Module],
    optimizer: Any | None,
    *,
    stored: Stored | None = None,
    float32_prefix: str | None = None,
) -> dict[str, Any]:
    """This rank's share, as Megatron describes it for torch_dist: its chunks of the model, and the optimizer if it is given.
    Collective over the ranks that hold the same weights.

    Weights stay where they are until they are written; what is gathered of a distributed optimizer is in host memory already.

    Args:
        stored: what the checkpoint holds that is to be read, and is asked for by the names there; None: one is to be written.
        float32_prefix: what the names of the optimizer's float32 copies begin with, if they are all that is wanted of it.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": replicas(),
    }
    is_loading = stored is not None
    stored = stored or Stored({})

    def described(names: Collection[str]) -> dict[str, Any]:
        chunks = {
            key: unwrap_model(chunk).sharded_state_dict(metadata=metadata)
            for key, chunk in chunks_by_key(model).items()
        }
        for chunk in chunks.values() if is_loading else ():
            ask_by_stored_names(chunk, names, stored.objects)
        return chunks

    # Layers are stored one by one where a stack of all layers would have gaps: some have an indexer, or some are trained.
    has_gaps = 0 in (args.dsa_indexer_layers or ())
    if has_gaps or keeps_layers_apart(stored.weights):
        metadata["non_homogeneous_layers"] = True
    state = described(stored.weights)
    if optimizer is not None:
        has_gaps = has_gaps or bool(selection_of(args))
        metadata["non_homogeneous_layers"] = has_gaps or keeps_layers_apart(stored.optimized)
        of_optimizer = described(stored.optimized)
        if float32_prefix is None:
            state["optimizer"] = optimizer_state(optimizer, of_optimizer, is_loading=is_loading, metadata=metadata)
        else:
            parts = trained_parts(optimizer)
            state["float32_copies"] = describe_copies(parts, of_optimizer, float32_prefix, is_loading=is_loading)
    return state


def chunks_by_key(model: list[torch.nn.Module]) -> dict[str, torch.nn.Module]:
    """Where a rank's chunks stand in its state. On disk tensors go by their place in the model, whichever chunk has them."""
    return {"model" if len(model) == 1 else f"model{index}": chunk for index, chunk in enumerate(model)}


def replicas() -> dist.ProcessGroup:
    """The ranks that hold the same weights."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def layout_of(args: argparse.Namespace) -> dict[str, int]:
    """The parallel sizes with which the states of generators can be used again."""
    sizes = {name: getattr(args, name) for name in _LAYOUT}
    # Unset, experts are cut as all else is.
    return {**sizes, "expert_tensor_parallel_size": args.expert_tensor_parallel_size or args.tensor_model_parallel_size}


def has_layout(args: argparse.Namespace, noted: Mapping[str, Any] | None) -> bool:
    """Whether a checkpoint that notes this layout was saved by that of `args`. Older ones do not tell how experts are cut."""
    own = layout_of(args)
    return noted is not None and {**own, **noted} == own
