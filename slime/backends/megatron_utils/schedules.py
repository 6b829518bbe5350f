"""Passes over packed micro-batches with Megatron's schedules.

A function of the logits runs on the last pipeline stage only, once per micro-batch, in the order of the micro-batches. So
losses, log-probs and everything that follows from them exist on that stage alone, while rank 0, which logs and talks to the
engines, is on the first one: what only one stage knows is broadcast to the others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers

from slime.backends.megatron_utils.attention import packed_seq_params
from slime.backends.megatron_utils.indexer_loss import learning_indexers
from slime.backends.megatron_utils.layer_spec import rotates_by_position
from slime.backends.megatron_utils.optimizer import parts_of
from slime.backends.megatron_utils.output_rows import logits_of
from slime.backends.megatron_utils.overlapped_experts import planning
from slime.backends.megatron_utils.parameter_names import unwrap_model
from slime.backends.megatron_utils.prediction_layers import messages_with_states
from slime.backends.megatron_utils.replaying_router import routing_replay_of
from slime.backends.megatron_utils.routers import SampleBalance, loads_of_step
from slime.training.backend import Collect
from slime.training.columns import IMAGES
from slime.training.loss import rows_of_logits
from slime.training.packed_stream import PackedStream, Rows
from slime.training.rollout_data import Metrics, MicroBatch
from slime.training.train_step import MicroBatches
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# Makes, for a micro-batch, the function that Megatron's schedule calls with its logits [1, rows, V / tensor-parallel size].
LogitsFunction = Callable[[MicroBatch], Callable[..., Any]]


def forward_only(
    args: argparse.Namespace, model: list[DistributedDataParallel], batches: MicroBatches, collect: Collect
) -> list[dict[str, list[torch.Tensor]]]:
    """A pass without gradient and without dropout. On the last pipeline stage, the results of `collect` for each
    micro-batch."""

    def make(batch: MicroBatch) -> Callable[..., dict[str, list[torch.Tensor]]]:
        return lambda logits, non_loss_data=True: collect(batch, logits.squeeze(0))

    with torch.no_grad(), _evaluating(model):
        outputs = _run_schedule(args, model, fill_last_group(model, batches), make, forward_only=True)
    return outputs[: len(batches)]


def forward_backward(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: MicroBatches,
    loss: Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Metrics]],
    denominator: float,
    *,
    before: Callable[[], None] = lambda: None,
    during: Callable[[MicroBatch], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[Metrics]:
    """Compute the gradients of the sum of `loss` over all ranks, divided by `denominator`.

    Args:
        before: called when gradients are zero.
        during: a context around each micro-batch's way through a chunk of the model.

    Returns:
        The metrics per micro-batch, on the last stage; elsewhere none.
    """
    # Megatron divides by the number of micro-batches, and averages gradients over data- and context-parallel ranks. The step's
    # denominator is all the normalisation there is, so these divisions are undone. Its schedule itself multiplies the loss by
    # the context-parallel size; the other two factors are here.
    scale = len(batches) * parallel_state.get_data_parallel_world_size() / denominator

    def make(batch: MicroBatch) -> Callable[..., tuple[torch.Tensor, Metrics]]:
        def scaled_loss(logits: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
            # An index in place of `squeeze` would copy the gradient into a second tensor of the logits' size.
            value, metrics = loss(batch, logits.squeeze(0))
            return value * scale, metrics

        return scaled_loss

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    before()
    set_schedule_functions(args, model, optimizer)
    loads = loads_of_step(model, len(batches), lambda: _count_loads(args, model, batches))
    with loads, learning_indexers(model, batches, optimizer.scale_loss):
        return _run_schedule(args, model, batches, make, forward_only=False, during=during)


def _count_loads(args: argparse.Namespace, model: list[DistributedDataParallel], batches: MicroBatches) -> None:
    """Go over the micro-batches of a step once before the step itself, only to let routers count their loads."""

    def first_row(stream: PackedStream) -> Rows:
        return Rows.at([range(1)], stream.tokens.device)

    def make(batch: MicroBatch) -> Callable[..., dict[str, list[torch.Tensor]]]:
        return lambda logits, non_loss_data=True: {}

    with torch.no_grad(), _evaluating(model), routing_replay_of(model).keeping_records():
        _run_schedule(args, model, batches, make, forward_only=True, rows=first_row)


def _run_schedule(
    args: argparse.Namespace,
    model: list[DistributedDataParallel],
    batches: MicroBatches,
    make_logits_function: LogitsFunction,
    *,
    forward_only: bool,
    rows: Callable[[PackedStream], Rows | None] | None = None,
    during: Callable[[MicroBatch], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> list[Any]:
    """One pass over all micro-batches.

    Args:
        rows: says which rows of a stream logits are made for; None: those that losses and log-probs need.

    Returns:
        On the last pipeline stage, per micro-batch, what the logits function returned (forward only) or the second part of
        that (the first is the loss). On other stages an empty list.
    """

    replay = routing_replay_of(model)
    # The load of experts is balanced by the loss of a step; passes without gradient balance nothing.
    balance = None if forward_only else SampleBalance(model, batches)

    bare = [unwrap_model(chunk) for chunk in model]

    def forward_step(
        iterator: Iterator[MicroBatch],
        chunk: torch.nn.Module,
        recomputes: bool = True,
        return_schedule_plan: bool = False,
    ) -> tuple[Any, Callable]:
        batch = next(iterator)
        model_of_stage = unwrap_model(chunk)
        number = bare.index(model_of_stage)
        told = balance.forward(number, batch.stream) if balance is not None else contextlib.nullcontext()
        kept = contextlib.nullcontext() if recomputes else _without_recomputation(chunk)
        selected = contextlib.nullcontext()
        if model_of_stage.post_process:
            made = rows_of_logits(args, batch.stream) if rows is None else rows(batch.stream)
            selected = logits_of(made, model_of_stage.output_layer)
        replayed = replay.forward(number, batch)
        if return_schedule_plan:
            # Where passes are made in parts, the schedule gives the bare model.
            with planning(model_of_stage, [lambda: replayed, lambda: told], lambda: selected):
                return _forward(model[number], batch), make_logits_function(batch)
        with replayed, told, kept, selected, during(batch):
            output = _forward(chunk, batch)
        return output, make_logits_function(batch)

    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        # One iterator per virtual stage, because they reach a micro-batch at different times.
        data_iterator=[iter(batches) for _ in model],
        model=model,
        num_microbatches=len(batches),
        # Streams differ in length; Megatron reads this only to size pipeline messages of fixed-length batches.
        seq_length=args.seq_length or 1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **_messages(model, batches.stream_rows, (0, 0) if forward_only else messages_with_states(args)),
    )
    if args.fp8:
        _forget_fp8_weights(model)
    return outputs


def _forget_fp8_weights(model: list[DistributedDataParallel]) -> None:
    """Free what Transformer Engine's layers keep of their weights in FP8 from the first micro-batch of a pass to its last. The
    next pass begins with other weights, and meanwhile others may have the device."""
    for chunk in model:
        for module in chunk.modules():
            vars(module).get("_fp8_workspaces", {}).clear()


@contextlib.contextmanager
def _without_recomputation(chunk: torch.nn.Module) -> Iterator[None]:
    """In the block layers keep all activations that their backward pass needs."""
    config = unwrap_model(chunk).decoder.config
    granularity, config.recompute_granularity = config.recompute_granularity, None
    try:
        yield
    finally:
        config.recompute_granularity = granularity


def _messages(
    model: list[DistributedDataParallel], stream_rows: Sequence[int], with_states: tuple[int, int]
) -> dict[str, Any]:
    """The arguments of a schedule that concern messages between stages; none if there is one stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return {}
    # A schedule that is given a communicator also wants these groups, which it would otherwise take by itself.
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp", "pp", "embd", "pos_embd", "dp_cp"])
    return {"p2p_communicator": KnownShapes(model, groups, stream_rows, with_states), "pg_collection": groups}


class KnownShapes(P2PCommunicator):
    """The messages between stages in one pass. All stages have the same micro-batches, so a receiver knows the size of each
    message.

    Megatron's own way, for streams that differ in length, is that stages tell each other the shape of every tensor. For that
    they would wait until the device has done all that it was asked for before.

    Args:
        stream_rows: rows of every micro-batch on this rank, before they are divided by sequence parallelism.
        with_states: (stage, number) of `messages_with_states`: messages of the last chunks of this stage and of those behind it
            have so many further hidden states.
    """

    def __init__(
        self,
        model: list[DistributedDataParallel],
        groups: ProcessGroupCollection,
        stream_rows: Sequence[int],
        with_states: tuple[int, int] = (0, 0),
    ) -> None:
        config = model[0].config
        super().__init__(groups.pp, config)
        parts = groups.tp.size() if config.sequence_parallel else 1
        group_size = config.microbatch_group_size_per_vp_stage if len(model) > 1 else len(stream_rows)
        order = get_schedule_table(len(stream_rows), len(model), group_size)

        (stage, states), own, last = with_states, groups.pp.rank(), groups.pp.size() - 1

        def shapes(*, goes_round: bool, longer: int | None) -> Iterator[list[int]]:
            received = received_micro_batches(order, len(model), goes_round=goes_round)
            times = {longer: 1 + states}
            return iter(
                [
                    [stream_rows[number] // parts * times.get(chunk, 1), 1, config.hidden_size]
                    for number, chunk in received
                ]
            )

        # From the other end of the pipeline come only outputs of chunks before the last one.
        self._from_previous = shapes(goes_round=own == 0, longer=len(model) - 1 if own > stage else None)
        self._from_next = shapes(goes_round=own == last, longer=0 if stage <= own < last else None)

    def _communicate_shapes(
        self, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Replaces Megatron's exchange: the shapes of the next tensors from the previous stage and from the next one."""
        nothing = [0, 0, 0]
        return next(self._from_previous) if recv_prev else nothing, next(self._from_next) if recv_next else nothing


def received_micro_batches(order: Sequence[tuple[int, int]], chunks: int, *, goes_round: bool) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the tensors that a stage gets from a neighbour, in their order; the chunk is the neighbour's.

    Gradients come in the same order as activations, with the chunks counted from the last to the first.

    Args:
        order: (micro-batch, chunk) of a stage's passes, going forward.
        goes_round: the neighbour is at the other end of the pipeline, and does not send the output of its last chunk.
    """
    return [(number, chunk) for number, chunk in order if not (goes_round and chunk == chunks - 1)]


def fill_last_group(model: list[DistributedDataParallel], batches: MicroBatches) -> MicroBatches:
    """`batches`, with the last one repeated until their number suits the interleaved schedule."""
    if len(model) == 1:
        return batches
    missing = -len(batches) % model[0].config.microbatch_group_size_per_vp_stage
    return dataclasses.replace(batches, indices=[*batches.indices, *[batches.indices[-1]] * missing])


def set_schedule_functions(
    args: argparse.Namespace, model: list[DistributedDataParallel], optimizer: MegatronOptimizer
) -> None:
    """Tell Megatron's schedules how losses are scaled and gradients reduced."""
    config = model[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        # Within these contexts no backward pass starts to reduce gradients; only that of the last micro-batch runs outside.
        functions = [chunk.no_sync for chunk in model]
        config.no_sync_func = functions if len(model) > 1 else functions[0]
        if args.align_grad_reduce and args.num_distributed_optimizer_instances == 1:
            # Only the schedules of pipelines read this: all stages then start their reductions at the same time. With several
            # instances of the optimizer, Megatron would forget that it has begun, and reduce the same gradients again.
            functions = [chunk.start_grad_sync for chunk in model]
            config.grad_sync_func = functions if len(model) > 1 else functions[0]
    if model[0].ddp_config.overlap_param_gather and args.align_param_gather and len(model) > 1:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]


@contextlib.contextmanager
def timed(
    args: argparse.Namespace, model: list[DistributedDataParallel], optimizer: MegatronOptimizer, place: tuple[int, int]
) -> Iterator[None]:
    """In the block, which is the optimizer step `place` (rollout, step), Megatron's timers of `--timing-log-level` run.
    After it
    rank 0 logs what they have measured on all ranks. Collective over all ranks."""
    if not args.timing_log_level:
        yield
        return
    timers = Timers(args.timing_log_level, args.timing_log_option)
    configs = [part.config for part in (*model, *parts_of(optimizer))]
    for config in configs:
        config.timers = timers
    try:
        yield
    finally:
        for config in configs:
            config.timers = None
    # Megatron gathers one timer after the other from all ranks. Stages have different timers, so first they agree on the names.
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, list(timers._timers))
    measured = timers.get_all_timers_string(list(dict.fromkeys(name for names in of_ranks for name in names)))
    if dist.get_rank() == 0:
        logger.info("rollout %d, step %d: %s", *place, measured)


@contextlib.contextmanager
def _evaluating(model: list[DistributedDataParallel]) -> Iterator[None]:
    for chunk in model:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in model:
            chunk.train()


def _forward(chunk: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Logits [1, rows, V / tensor-parallel size] of the stream; before the last stage hidden states [T, 1, hidden]."""
    stream = batch.stream
    if any(batch.get(IMAGES, ())) and not hasattr(unwrap_model(chunk), "sight"):
        seeing = [index for index, one in zip(batch["sample_indices"], batch[IMAGES], strict=True) if one]
        raise UserError(
            f"samples {seeing} have images, and the model that --custom-model-provider-path builds takes none; start from "
            "slime_plugins.models.sight.seeing_model, or train on texts"
        )
    # In 16 bits Megatron's wrapper would copy all logits to float32; the loss does that chunk by chunk.
    options: dict[str, Any] = {"fp32_output": False} if chunk.config.bf16 or chunk.config.fp16 else {}
    if chunk.config.num_moe_experts:
        options["padding_mask"] = _padding_mask(chunk, stream)
    return chunk(
        input_ids=stream.tokens[None],
        position_ids=stream.position_ids[None],
        attention_mask=None,
        packed_seq_params=packed_seq_params(batch, by_position=rotates_by_position(unwrap_model(chunk))),
        **options,
    )


def _padding_mask(chunk: torch.nn.Module, stream: PackedStream) -> torch.Tensor:
    """The rows that routers leave out of their counts, bool [1, T]. With sequence parallelism it is a rank's part of them,
    except on the first stage, where Megatron takes the part itself."""
    mask = stream.is_padding[None]
    if not chunk.config.sequence_parallel or unwrap_model(chunk).pre_process:
        return mask
    group = parallel_state.get_tensor_model_parallel_group()
    return mask.chunk(group.size(), dim=1)[group.rank()]


def broadcast_from_last_stage(value: Any) -> Any:
    """`value` of the last stage, on all stages. Collective over the pipeline group; small picklable things only."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    group = parallel_state.get_pipeline_model_parallel_group()
    box = [value]
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def gather_from_stages(value: Any) -> list[Any]:
    """`value` of every stage, first to last, on all of them. Collective over the pipeline group; small things only."""
    size = parallel_state.get_pipeline_model_parallel_world_size()
    if size == 1:
        return [value]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, value, group=parallel_state.get_pipeline_model_parallel_group())
    return gathered
