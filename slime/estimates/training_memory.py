"""The peak memory of one training rank, by part, from plain numbers: no model is built and nothing is allocated.

Some parts are always there: weights, gradient buffer, optimizer state. Others come and go within a step, never all at once.
The peak is the largest of the moments below, and `RankMemory` shows the parts as they are then.

- "loss": the last micro-batch has gone forward; there are its logits, their gradient, and every layer's activations.
- "backward": a layer is differentiated; with full recomputation its activations are there once more.
- "gradient reduction": the library that reduces gradients keeps a copy of them (Gloo only).
- "optimizer step": the update has buffers of its own.
- "weight push": tensors are gathered into transfer buckets.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from slime.estimates.activations import (
    ActivationModel,
    Kernels,
    Recompute,
    backward_working_set,
    kept_of_chunks,
    recomputed_units,
)
from slime.estimates.layout import ParallelLayout, PipelineStage, RankPlace, chunks_in_flight
from slime.estimates.parameters import ParameterCounts, RankParameters, count_parameters, layer_of_rank, rank_parameters
from slime.estimates.shape import ModelShape

# Log-probs are computed in chunks of so many bytes of float32 rows; the trainer uses these numbers, and the plan counts with
# them. On a CPU each thread works on a chunk of its own, and is fastest when that stays in its cache. On an accelerator each
# chunk costs a few kernel launches, so chunks are large.
ONE_THREAD_CHUNK_BYTES = 1 * 2**20
ACCELERATOR_CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter. Weight and gradient are on every rank; with `distributed` the rest is divided over replicas.

    main_parameter: the optimizer's own copy (0 when it updates the weights themselves).
    host_main_parameter: that copy, for parameters whose optimizer state lives in host memory.
    step: buffers that the update allocates for a while, for parameters whose state is on the device.
    vocabulary_moments: moments on top of `moments` for the parameters of embedding, output head and norms.
    offloaded: share of the optimizer's state that lives in host memory, from 0 to 1.
    saved: the optimizer's part of a checkpoint.
    """

    weight: int
    gradient: int
    main_parameter: int
    moments: int
    step: int = 0
    vocabulary_moments: int = 0
    distributed: bool = True
    offloaded: float = 0.0
    host_main_parameter: int = 0
    saved: int = 0

    @property
    def optimizer(self) -> int:
        return self.main_parameter + self.moments


@dataclass(frozen=True)
class TrainingSetup:
    """Everything beside the model that determines the memory of a rank.

    stream_tokens: tokens of one micro-batch on one rank, padding included.
    rollout_tokens: tokens of a whole rollout step that one rank keeps as training data.
    microbatch_group: micro-batches that go through one chunk of an interleaved stage before the next; None: one per stage.
    kept_whole: how many of the passes in flight through a chunk are kept whole, without recomputation.
    delta_rule_kernels, residual_bytes: as in `ActivationModel`.
    predictions: how many layers of multi-token prediction are trained; each has logits of its own. Other such layers are never
        run, and have neither gradients nor optimizer state.
    log_probs_chunk: bytes of the float32 rows in which log-probs of 16-bit logits are computed at a time.
    push_bucket: bytes of one transfer bucket of the weight push; 0: nothing is pushed.
    push_lends: engines map the memory of a tensor that is larger than a bucket; one of the model's own is copied for them.
    push_snapshot: the ranks that send keep a copy of the engines' weights, so that they can push only what changed.
    gloo: collectives run on CPU, by Gloo.
    host_copies: how many sets of weights are kept in host memory (the reference, and the set that is swapped out for it).
    sleeps: weights and optimizer state move to host memory while engines work.
    saves: checkpoints are written.
    loads_float32: weights of 16 bits come out of a checkpoint in float32, by way of the host.
    fp8: layers multiply in FP8, with copies of their weights.
    rounded: part of a layer -> the share of its weights of which each pass has rounded copies, from forward to backward.
    trains: steps are taken; else the rank only pushes its weights, and `state` has no optimizer.
    saves_in_background: the rank trains, or sleeps, while its checkpoint is written.
    shares_saves: replicas each write a share of the weights that they all hold; else the first of them writes all.
    overhead: bytes of the process's context and libraries.
    """

    layout: ParallelLayout
    stages: tuple[PipelineStage, ...]
    state: StateBytes
    kernels: Kernels
    recompute: Recompute
    stream_tokens: int
    micro_batches: int
    delta_rule_kernels: bool = False
    residual_bytes: int = 0
    rollout_tokens: int = 0
    microbatch_group: int | None = None
    kept_whole: int = 0
    predictions: int = 0
    log_probs_chunk: int = ACCELERATOR_CHUNK_BYTES
    push_bucket: int = 0
    push_lends: bool = False
    push_snapshot: bool = False
    gloo: bool = False
    host_copies: int = 0
    sleeps: bool = False
    trains: bool = True
    saves: bool = False
    loads_float32: bool = False
    fp8: bool = False
    rounded: Mapping[str, float] = field(default_factory=dict)
    saves_in_background: bool = False
    shares_saves: bool = True
    overhead: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by part. `moment` names the peak.

    Some parts are in host memory, and not in `total`: host_offloaded (optimizer state and its gradients), host_asleep (weights
    and optimizer state while the trainer sleeps), host_copies (other sets of weights), host_snapshot (the weights of the whole
    stage as the engines have them; only the first rank of a stage, which sends them, has it). While a checkpoint is written
    there are also saving_optimizer (gathered from the ranks that share it) and saving_weights (copied). These two are of the
    first rank of the stage, which has most to write; `stage_savings` has their sum for every rank of the stage, in rank order.
    While weights are loaded, `loading` (their float32 values) takes the place of all host parts but host_offloaded.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    data: int
    overhead: int
    moment: str
    stage: int
    host_offloaded: int = 0
    host_asleep: int = 0
    host_copies: int = 0
    host_snapshot: int = 0
    saving_optimizer: int = 0
    saving_weights: int = 0
    stage_savings: tuple[int, ...] = (0,)
    saves_in_background: bool = False
    loading: int = 0

    @property
    def host(self) -> int:
        """Bytes of host memory of the stage's first rank."""
        return sum(getattr(self, name) for name in HOST_PARTS)

    def host_of_ranks(self, ranks: int, stages: int) -> int:
        """Bytes of host memory of `ranks` neighbouring ranks, among which are the first ranks of `stages` stages."""
        return ranks * (self.host - self.host_snapshot) + stages * self.host_snapshot

    @property
    def saving(self) -> int:
        return self.saving_optimizer + self.saving_weights

    def saving_beyond(self, *, one_memory: bool) -> int:
        """By how many bytes a save raises a rank's peak in host memory; a mean over the ranks of the stage.

        If host and device have `one_memory`, a rank that does not train on while it saves has no activations then, and a save
        may take their room. Otherwise nothing makes room: the host memory in which a rank sleeps is kept while it is awake.
        """
        room = self.total - self.persistent if one_memory and not self.saves_in_background else 0
        return -(-sum(max(0, saving - room) for saving in self.stage_savings) // len(self.stage_savings))

    def loading_beyond(self, *, one_memory: bool) -> int:
        """The same of the float32 values of weights that are loaded, which go before the first pass."""
        room = self.host - self.host_offloaded + (self.total - self.persistent if one_memory else 0)
        return max(0, self.loading - room)

    def saving_of_node(self, ranks: int, stages: int) -> int:
        """Bytes that a save takes on a node with `ranks` neighbouring ranks, which begin `stages` stages like this one: the
        first ranks of a stage write most."""
        first = self.stage_savings[: ranks // stages]
        return sum(first) * ranks // len(first)

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in MEMORY_PARTS)

    @property
    def persistent(self) -> int:
        """Bytes that stay between two steps."""
        return self.weights + self.gradients + self.optimizer + self.data + self.overhead


HOST_PARTS = ("host_offloaded", "host_asleep", "host_copies", "host_snapshot")
SAVING_PARTS = ("saving_optimizer", "saving_weights")
_OTHERS = ("moment", "stage", "stage_savings", "saves_in_background", "loading", *HOST_PARTS, *SAVING_PARTS)
MEMORY_PARTS = tuple(field.name for field in fields(RankMemory) if field.name not in _OTHERS)

# A sample that waits for its micro-batch has tokens, positions, masks, advantages, returns and up to four kinds of log-probs.
ROLLOUT_BYTES_PER_TOKEN = 40


def training_memory(shape: ModelShape, setup: TrainingSetup) -> tuple[RankMemory, ...]:
    """The peak of a rank, for every pipeline stage in order."""
    counts = count_parameters(shape, padded_vocabulary=True)
    return tuple(_stage_memory(shape, counts, setup, stage) for stage in setup.stages)


def worst_rank(memories: tuple[RankMemory, ...]) -> RankMemory:
    """The stage with the highest peak; the first of equals."""
    return max(memories, key=lambda memory: memory.total)


def push_buffers(shape: ModelShape, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes that a weight push takes on the rank of `stage` that sends.

    There are two transfer buckets (one in flight, one being filled), or one if it takes the whole model; the tensors that go
    into a bucket; and beside them the largest gather, whose result may be larger than a bucket and is then sent as it is.

    If nothing is gathered, the tensors are the model's own, except for attention that is not latent: its queries, keys and
    values are copied into another order; and for an embedding and an output head that are copied to be lent.
    """
    counts, weight = count_parameters(shape, padded_vocabulary=True), setup.state.weight
    model = counts.total_with_mtp * weight
    bucket, buckets = min(setup.push_bucket, model), min(2 * setup.push_bucket, model)
    if bucket == 0:
        return 0
    first, last = counts.embedding if stage.is_first else 0, counts.output_head if stage.is_last else 0
    if setup.layout.tensor == setup.layout.expert == 1:
        ordered = 0 if shape.mla is not None else sum(layer.attention for layer in counts.layers)
        tensors = round(bucket * ordered / counts.total)
        first, last = (size if setup.push_lends and size * weight > bucket else 0 for size in (first, last))
        beside = last
    else:
        tensors, beside = bucket, max(_mlp_gather(shape, counts, setup), last)
    # The embedding comes first, when there are no buckets yet; the output head last.
    return max(buckets + tensors + beside * weight, first * weight)


def received_buffers(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes that an engine takes on each of its GPUs while it receives a weight push: the tensors of a bucket and the flat
    copy in which they arrive, or a tensor larger than that, which arrives as it is."""
    counts = count_parameters(shape, padded_vocabulary=True)
    bucket = min(setup.push_bucket, counts.total_with_mtp * setup.state.weight)
    return max(2 * bucket, counts.embedding * setup.state.weight) if bucket else 0


def _mlp_gather(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup) -> int:
    """How many parameters are held at once to make the largest matrix of an MLP whole: the parts of all ranks, and the matrix
    that is put together from them. That is the input projection; without gates it is no larger than the output projection.

    One gather brings as many experts as there are expert-parallel ranks, or as fit into a bucket, and at least one. Experts
    that tensor-parallel ranks do not share arrive whole, and are not put together.
    """
    experts, layout = shape.moe.num_experts if shape.moe is not None else 1, setup.layout
    mlp = max(max(layer.dense_mlp, layer.shared_experts) for layer in counts.layers)
    expert = max(layer.routed_experts for layer in counts.layers) // experts
    mlp, expert = (2 * size // 3 if shape.gated_mlp else size // 2 for size in (mlp, expert))
    at_once = max(1, min(layout.expert, setup.push_bucket // max(1, expert * setup.state.weight)))
    return max(2 * mlp, at_once * expert * (2 if layout.expert_tensor > 1 else 1))


def _stage_memory(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> RankMemory:
    held = rank_parameters(shape, counts, setup.layout, stage)
    learning = counts.trained(predictions=setup.predictions > 0, indexers=shape.trains_indexers)
    trained = rank_parameters(shape, learning, setup.layout, stage)
    base = _persistent(held, trained, setup, stage, _sent(shape, counts, setup, stage) if setup.push_snapshot else 0)
    push = replace(base, moment="weight push", buffers=push_buffers(shape, setup, stage))
    if not setup.trains:
        return push
    # Experts have an optimizer of their own; the two step one after the other. State in host memory is updated there.
    update = round(max(_optimizer_shards(trained, setup)) * setup.state.step * (1 - setup.state.offloaded))
    borrowed = _borrowed_embedding(shape, counts, setup, stage)
    # Forward passes multiply with a copy of one byte per number, backward passes with its transpose.
    in_fp8 = 2 * (held.attention + held.dense_mlp + held.shared_experts + held.routed_experts) if setup.fp8 else 0
    moments = [
        *_computing(shape, counts, setup, stage, replace(base, buffers=borrowed + in_fp8)),
        replace(base, moment="optimizer step", buffers=update + borrowed),
        push,
    ]
    if setup.gloo:
        # Gradients are scattered, and so copied, only where the ranks divide the optimizer state among them.
        shares = zip((trained.dense, trained.routed_experts), _optimizer_shards(trained, setup), strict=True)
        copied = sum(own for own, share in shares if share < own) * setup.state.gradient
        moments.append(replace(base, moment="gradient reduction", buffers=round(copied) + borrowed))
    return max(moments, key=lambda memory: memory.total)


def _borrowed_embedding(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes of the copy of the embedding that the stage of multi-token prediction borrows from the first stage, for a step that
    trains its layers. It borrows none if it has the embedding: on the first stage, and with tied weights on the last."""
    has_one = stage.is_first or stage.is_last and shape.tied_embeddings
    if not setup.predictions or not stage.predicts or has_one:
        return 0
    return counts.embedding // setup.layout.tensor * setup.state.weight


def _sent(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes that a push sends from `stage`: its whole parameters. Only the first stage sends tied embeddings."""
    whole = rank_parameters(shape, counts, replace(setup.layout, tensor=1, expert=1, expert_tensor=1), stage)
    vocabulary = whole.embedding + whole.output_head
    # With tied embeddings the last stage holds a copy, which counts as its head but is not sent.
    if not stage.is_first:
        vocabulary = counts.output_head if stage.is_last else 0
    return (whole.total - whole.embedding - whole.output_head + vocabulary) * setup.state.weight


def _persistent(
    held: RankParameters, trained: RankParameters, setup: TrainingSetup, stage: PipelineStage, snapshot: int
) -> RankMemory:
    state = setup.state
    shard, optimizer = _optimizer_shard(trained, setup), _optimizer_bytes(trained, setup)
    on_device = optimizer * (1 - state.offloaded)
    weights = held.total * state.weight
    savings = _savings(held, trained, setup, stage) if setup.saves else [(0, 0)]
    return RankMemory(
        weights=weights,
        gradients=trained.total * state.gradient,
        optimizer=round(on_device),
        activations=0,
        logits=0,
        buffers=0,
        data=setup.rollout_tokens * ROLLOUT_BYTES_PER_TOKEN,
        overhead=setup.overhead,
        moment="",
        stage=stage.index,
        # For the offloaded share, gradients and float32 main parameters are in host memory too.
        host_offloaded=round(
            (optimizer + shard * (state.host_main_parameter - state.main_parameter + state.gradient)) * state.offloaded
        ),
        host_asleep=round(weights + on_device) if setup.sleeps else 0,
        host_copies=setup.host_copies * weights,
        host_snapshot=snapshot,
        saving_optimizer=savings[0][0],
        saving_weights=savings[0][1],
        stage_savings=tuple(map(sum, savings)),
        saves_in_background=setup.saves_in_background,
        loading=held.total * 4 if setup.loads_float32 else 0,
    )


def _savings(
    held: RankParameters, trained: RankParameters, setup: TrainingSetup, stage: PipelineStage
) -> list[tuple[int, int]]:
    """(optimizer, weights): the bytes that each rank of `stage` has of both in host memory while it saves."""
    layout, state = setup.layout, setup.state
    savings = []
    for place in map(layout.place, layout.ranks_of_stage(stage.index)):
        # Each rank writes its own shard of a distributed optimizer, whether replicas share the writing or not.
        optimizer = _optimizer_shard(trained, setup) if state.distributed else _written(trained, setup, place)
        savings.append((round(optimizer * state.saved), round(_written(held, setup, place) * state.weight)))
    return savings


def _written(parameters: RankParameters, setup: TrainingSetup, place: RankPlace) -> float:
    """How many of its `parameters` the rank at `place` writes, given that its replicas hold the same ones."""
    if setup.shares_saves:
        return sum(_shares_of_replica(parameters, setup))
    is_first, has_first_experts = place.context == place.data == 0, place.expert_data == 0
    return parameters.dense * is_first + parameters.routed_experts * has_first_experts


def _optimizer_shard(trained: RankParameters, setup: TrainingSetup) -> float:
    """For how many parameters this rank keeps the optimizer state."""
    return sum(_optimizer_shards(trained, setup))


def _optimizer_shards(trained: RankParameters, setup: TrainingSetup) -> tuple[float, float]:
    """`_optimizer_shard`, separately for (all but the experts, the experts)."""
    if not setup.state.distributed:
        return trained.dense, trained.routed_experts
    dense, routed_experts = _shares_of_replica(trained, setup)
    return dense * setup.layout.optimizers, routed_experts * setup.layout.optimizers


def _shares_of_replica(parameters: RankParameters, setup: TrainingSetup) -> tuple[float, float]:
    """The parameters of an even share if the ranks that hold the same ones divide them: (all but the experts, the experts)."""
    layout = setup.layout
    return parameters.dense / layout.dense_replicas, parameters.routed_experts / layout.expert_replicas


def _optimizer_bytes(trained: RankParameters, setup: TrainingSetup) -> float:
    """Bytes of the rank's optimizer state, on the device and in host memory together."""
    replicas = setup.layout.dense_replicas / setup.layout.optimizers if setup.state.distributed else 1
    vocabulary = (trained.embedding + trained.output_head + trained.norms) / replicas
    return _optimizer_shard(trained, setup) * setup.state.optimizer + vocabulary * setup.state.vocabulary_moments


def _computing(
    shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage, base: RankMemory
) -> tuple[RankMemory, RankMemory]:
    """The moments "loss" (on other stages than the last: the end of the forward pass) and "backward".

    Args:
        base: the parts that both moments have in common, buffers included.
    """
    model = ActivationModel(
        shape,
        setup.layout,
        setup.kernels,
        setup.state.weight,
        setup.recompute,
        delta_rule_kernels=setup.delta_rule_kernels,
        residual_bytes=setup.residual_bytes,
    )
    tokens = setup.stream_tokens
    chunks = [*stage.chunks, *([(-1,)] * setup.predictions if stage.predicts else [])]
    in_flight = chunks_in_flight(setup.layout, stage.index, setup.micro_batches, setup.microbatch_group)
    whole = min(setup.kept_whole / setup.layout.virtual_pipeline, in_flight)
    kept = kept_of_chunks(model, chunks) * (in_flight - whole)
    if whole:
        kept += sum(model.kept(chunk) for chunk in chunks) * whole
    copies, again = _rounded_copies(counts, setup, chunks, in_flight - whole, whole)
    head, width = 0.0, shape.hidden_size / (setup.layout.tensor if setup.layout.sequence_parallel else 1)
    if stage.is_last:
        # The final norm keeps its input, and its output for the head. A value head takes it in float32.
        head = (4 * width if shape.value_head else model.norm(width)) + model.hidden
    elif stage.predicts and shape.mtp_num_layers:
        # This stage has the final norm then, and keeps the hidden states that it sends on to the head, or their gradients.
        kept += (model.norm(width) + model.hidden) * in_flight + (1 + setup.predictions) * model.hidden
    if stage.passes_on:
        # The hidden states of each prediction layer come along, behind those of the model.
        kept += setup.predictions * model.hidden * in_flight
    # Sequence parallelism gathers into one buffer that stays.
    gathered = model.bytes * shape.hidden_size if setup.layout.sequence_parallel and setup.layout.tensor > 1 else 0
    base = replace(base, buffers=base.buffers + round(tokens * gathered))
    logits = _logits(shape, setup) if stage.is_last and not shape.value_head else 0
    loss = replace(base, moment="loss", activations=round(tokens * (kept + head) + copies), logits=logits)
    working = backward_working_set(model, chunks)
    backward = round(tokens * (kept + working) + copies + again)
    return loss, replace(base, moment="backward", activations=backward)


# The modules of `Recompute` that hold a part of a layer.
_HOLD = {"dense_mlp": ("mlp",), "shared_experts": ("shared_experts", "moe"), "routed_experts": ("moe",)}


def _rounded_copies(
    counts: ParameterCounts, setup: TrainingSetup, chunks: Sequence[Sequence[int]], passes: float, whole: float
) -> tuple[float, float]:
    """Bytes of rounded copies of weights: (that all passes in flight keep, that are made again at once in a backward pass).

    Args:
        whole: passes that are kept without recomputation, beside the other `passes`.
    """
    if not setup.rounded:
        return 0.0, 0.0
    layers = {index: counts.layers[index] if index >= 0 else counts.mtp[0].layer for chunk in chunks for index in chunk}
    of_rank = {index: layer_of_rank(layer, setup.layout) for index, layer in layers.items()}

    def size(indices: Sequence[int], parts: Iterable[str]) -> float:
        elements = sum(getattr(of_rank[index], part) * setup.rounded[part] for index in indices for part in parts)
        return elements * setup.state.weight

    dropped = [part for part in setup.rounded if any(map(setup.recompute.drops, _HOLD.get(part, ())))]
    kept_parts = [part for part in setup.rounded if part not in dropped]
    kept = of_whole = again = 0.0
    for chunk in chunks:
        units = recomputed_units(setup.recompute, chunk)
        kept_layers = [index for index in chunk if all(index not in unit for unit in units)]
        kept += size(kept_layers, kept_parts)
        of_whole += size(chunk, setup.rounded)
        made_again = [size(unit, setup.rounded) for unit in units] + [size([index], dropped) for index in kept_layers]
        again = max([again, *made_again])
    return kept * passes + of_whole * whole, again


def _logits(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes of the logits, those of prediction layers too, and of the largest of what comes beside them.

    Usually that is the gradient of one set of logits in their dtype, with a chunk of rows in that dtype once more, and in
    float32. For few tokens it may be the exponentials of the chunk, which entropy needs, or the gradient of the head's weight.
    """
    columns = shape.padded_vocab_size // setup.layout.tensor
    one = setup.stream_tokens * columns * setup.state.weight
    chunk = gathered = 0
    if setup.state.weight < 4:
        chunk = min(setup.log_probs_chunk, setup.stream_tokens * columns * 4)
        gathered = chunk * setup.state.weight // 4
    head_gradient = columns * shape.hidden_size * setup.state.weight
    return (1 + setup.predictions) * one + max(one + chunk + gathered, 2 * chunk + gathered, head_gradient)
